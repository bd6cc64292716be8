"""The curves of a run: two CSV files that grow by whole lines and are cut back when a run is resumed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from swin_lessons.training.files import naming_remedy, write_text

STEP_COLUMNS = ("step", "epoch", "lr", "loss", "grad_norm", "seconds")
EVAL_COLUMNS = ("step", "epoch", "loss", "top1", "top5", "seconds")
Row = dict[str, float]
NEW_FOLDER = "put back what was there, or start again in a new folder (--out)"


class CsvLog:
    """Append rows to a CSV file; `flush` writes them, `truncate` drops those after a step.

    With `writes` off it reads alone: of several processes, one keeps the logs.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], writes: bool = True) -> None:
        self.path, self.columns, self.writes = path, columns, writes
        self.waiting: list[str] = []

    def append(self, row: Row) -> None:
        """Keep one row until the next `flush`. Numbers are written so that they read back bit for bit."""
        self.waiting.append(",".join(repr(row[name]) for name in self.columns) + "\n")

    def flush(self) -> None:
        """Write the waiting rows and force them to disk. Raises OSError with the remedy."""
        if not self.writes:
            return
        with naming_remedy(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            file.writelines(self.waiting)
            file.flush()
            os.fsync(file.fileno())
        self.waiting.clear()

    def truncate(self, step: int) -> None:
        """Keep the header and the rows up to `step`; a new file gets its header."""
        rows = self.rows()
        self.waiting = []
        for row in rows:
            if row["step"] <= step:
                self.append(row)
        write_text(self.path, ",".join(self.columns) + "\n" + "".join(self.waiting))
        self.waiting.clear()

    def last(self, name: str) -> float:
        """A column's value in the last row on disk; 0 where there is no row."""
        rows = self.rows()
        return rows[-1][name] if rows else 0

    def rows(self) -> list[Row]:
        """What is on disk; nothing where there is no file. Raises ValueError for a damaged one."""
        return read_rows(self.path, self.columns) if self.path.exists() else []


def read_rows(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """Rows of a log; a last line that a killed process left unfinished is dropped.

    Raises:
        ValueError: a line does not hold a number for each column.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    if lines and lines[0] != ",".join(columns):
        raise _damaged(path, 1, lines[0])
    return [_row(path, number, line, columns) for number, line in enumerate(lines[1:], 2)]


def _row(path: Path, number: int, line: str, columns: tuple[str, ...]) -> Row:
    try:
        return dict(zip(columns, map(_number, line.split(",")), strict=True))
    except ValueError as error:
        raise _damaged(path, number, line) from error


def _damaged(path: Path, number: int, line: str) -> ValueError:
    return ValueError(f"line {number} of {path} is damaged ({line[:40]!r}): {NEW_FOLDER}")


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


@dataclass
class History:
    """Curves of a run: one row a step, one row an evaluation. Accuracies are fractions of 1."""

    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> History:
        """Read metrics.csv and evals.csv of a run folder."""
        steps = read_rows(Path(folder) / "metrics.csv", STEP_COLUMNS)
        return cls(steps, read_rows(Path(folder) / "evals.csv", EVAL_COLUMNS))

    def column(self, name: str, of: str = "steps") -> list[float]:
        """One column of `steps` or `evals`, ready to plot."""
        return [row[name] for row in getattr(self, of)]

    @property
    def best(self) -> Row:
        """The evaluation with the highest top-1 accuracy; the first of equals."""
        if not self.evals:
            raise ValueError("this run has no evaluation yet: train with a validation set")
        return max(self.evals, key=lambda row: row["top1"])
