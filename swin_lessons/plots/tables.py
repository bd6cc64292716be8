"""A table that is HTML on a page and aligned text in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Rows under headers; cells are shown as `str` gives them."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def __post_init__(self) -> None:
        wrong = [tuple(row) for row in self.rows if len(row) != len(self.headers)]
        if wrong:
            raise ValueError(f"{len(self.headers)} headers, but row {wrong[0]} has {len(wrong[0])} cells")

    def __repr__(self) -> str:
        lines = [[str(cell) for cell in row] for row in (self.headers, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in self.headers)
        body = "".join(
            f'<tr><th scope="row" style="white-space: nowrap">{escape(str(first))}</th>'
            + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        caption = (
            f'<caption style="text-align: left">{escape(self.caption)}</caption>' if self.caption else ""
        )
        return f'<table class="table results">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
