"""Run the lessons and keep their outputs honest.

    python book/_ext/notebooks.py run [--stale] [NOTEBOOK ...]   execute in place, normalise, stamp
    python book/_ext/notebooks.py check [NOTEBOOK ...]           execute, write nothing, compare
    python book/_ext/notebooks.py stamp --verify [NOTEBOOK ...]  are the stored outputs those of today's code?

Each notebook runs in a fresh kernel with one thread (`--threads`), a fixed hash seed, no progress bars and the
fast profile, unless SWIN_LESSONS_PROFILE names another.
`run` writes only when every cell has run, with a stamp (see stamps.py). `check` compares texts exactly, after
removal of what never repeats (addresses, random ids), and pictures by their mean difference per pixel.
Tags are nbval's: `nbval-ignore-output` (run, not compared), `nbval-skip` (not run), `raises-exception`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

from stamps import PACKAGE, ROOT, Notebook, stale_parts, stamp

PICTURE_TOLERANCE = 2.0  # mean difference on the scale 0..255
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
NOT_COMPARED = {"nbval-ignore-output", "nbval-skip"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# every quantifier is bounded: outputs hold lines of 100 kB
RANDOM = (
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"), "ID"),
    (re.compile(r"\b0x[0-9a-f]{6,16}\b"), "0xADDRESS"),
    (re.compile(r"[\w./-]{0,200}ipykernel_\d{1,9}/\d{1,12}\.py"), "CELL"),
)


# --- running


def read(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def write(notebook: Notebook, path: Path) -> None:
    """Whole or not at all: a temporary file takes the name at the end."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            nbformat.write(notebook, file)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def execute(path: Path, threads: int, timeout: int) -> tuple[Notebook, float]:
    """A fresh run of the notebook, in a kernel of its own, and its seconds.

    Where other programs keep the processor busy, a run takes longer than it works: the seconds are then those of the
    processor.
    """
    from nbclient import NotebookClient

    os.environ.update(ENVIRONMENT, **dict.fromkeys(THREADS, str(threads)))
    os.environ.setdefault("SWIN_LESSONS_PROFILE", "ci")
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # how prints fall into messages differs from run to run
        skip_cells_with_tag="nbval-skip",
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    started, worked = time.perf_counter(), _processor_seconds()
    client.execute()
    return notebook, min(time.perf_counter() - started, (_processor_seconds() - worked) or math.inf)


def _processor_seconds() -> float:
    """What processes that this one started and that have ended took of the processor; 0 where nobody counts."""
    times = os.times()
    return times.children_user + times.children_system


def normalise(notebook: Notebook) -> None:
    """Remove what differs between runs without meaning: random ids, timings, Python's patch version."""
    names: dict[str, str] = {}

    def stable(match: re.Match[str]) -> str:
        return names.setdefault(match.group(0), hashlib.sha256(str(len(names)).encode()).hexdigest()[:32])

    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = RANDOM[0][0].sub(stable, output.text)
            for mime, data in output.get("data", {}).items():
                if isinstance(data, str) and not mime.startswith("image/"):
                    output.data[mime] = RANDOM[0][0].sub(stable, data)
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata.language_info = {"name": "python"}


def run(path: Path, threads: int, timeout: int) -> list[str]:
    notebook, seconds = execute(path, threads, timeout)
    normalise(notebook)
    notebook.metadata[PACKAGE] = {**notebook.metadata.get(PACKAGE, {}), **stamp(notebook, seconds)}
    write(notebook, path)
    return []


# --- comparing


def clean(text: Any) -> str:
    text = "".join(text) if isinstance(text, list) else str(text)
    for pattern, name in RANDOM:
        text = pattern.sub(name, text)
    return text


def picture_difference(a: str, b: str) -> float:
    """Mean absolute difference per channel, 0..255, of two base64 PNGs; 255 when their sizes differ."""
    import numpy as np
    from PIL import Image

    first, second = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), dtype=float)
        for png in (a, b)
    )
    return 255.0 if first.shape != second.shape else float(np.abs(first - second).mean())


def data_differences(old: Any, new: Any) -> Iterator[str]:
    for mime in sorted(set(old) | set(new)):
        a, b = old.get(mime), new.get(mime)
        if a is None or b is None:
            yield f"{mime} is only in the {'new' if a is None else 'stored'} output"
        elif mime.startswith("image/png"):
            if (difference := picture_difference(a, b)) > PICTURE_TOLERANCE:
                yield f"the picture differs by {difference:.2f} of 255 a pixel (allowed: {PICTURE_TOLERANCE})"
        elif clean(a) != clean(b):
            yield f"{mime}: stored {clean(a)[:200]!r}, now {clean(b)[:200]!r}"


def output_differences(old: Any, new: Any) -> Iterator[str]:
    if old.output_type != new.output_type:
        yield f"stored {old.output_type}, now {new.output_type}"
    elif old.output_type == "stream" and clean(old.text) != clean(new.text):
        yield f"{old.name}: stored {clean(old.text)[-200:]!r}, now {clean(new.text)[-200:]!r}"
    elif old.output_type == "error" and old.ename != new.ename:
        yield f"stored {old.ename}, now {new.ename}"
    yield from data_differences(old.get("data", {}), new.get("data", {}))


def differences(stored: Notebook, fresh: Notebook) -> list[str]:
    """One line for each output that is no longer what the page shows."""
    found = []
    for number, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if old.cell_type != "code" or {"nbval-ignore-output", "nbval-skip"} & set(
            old.metadata.get("tags", [])
        ):
            continue
        if len(old.outputs) != len(new.outputs):
            found.append(f"cell {number}: {len(old.outputs)} outputs stored, now {len(new.outputs)}")
            continue
        for a, b in zip(old.outputs, new.outputs, strict=True):
            found += [f"cell {number}: {text}" for text in output_differences(a, b)]
    return found


def check(path: Path, threads: int, timeout: int) -> list[str]:
    fresh, _ = execute(path, threads, timeout)
    return differences(read(path), fresh)


def verify_stamp(path: Path, threads: int, timeout: int) -> list[str]:
    return [f"changed since it was run: {part}" for part in stale_parts(read(path))]


# --- the command

ACTIONS = {"run": run, "check": check, "stamp": verify_stamp}


def attempt(action: str, path: Path, threads: int, timeout: int) -> tuple[Path, float, list[str]]:
    started = time.perf_counter()
    try:
        problems = ACTIONS[action](path, threads, timeout)
    except Exception as error:  # a failed cell: its traceback is the message
        problems = [f"{type(error).__name__}: {str(error)[-2000:]}"]
    return path, time.perf_counter() - started, problems


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--stale", action="store_true", help="only those whose stamp is not fresh")
    parser.add_argument("--verify", action="store_true", help="what `stamp` does anyway")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads for each kernel (default: 1)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one cell (default: 600)")
    return parser.parse_intermixed_args(arguments)  # options may stand before the notebooks


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    paths = options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    if options.stale:
        paths = [path for path in paths if stale_parts(read(path))]
    failed = 0
    with ProcessPoolExecutor(max(1, min(options.jobs, len(paths)))) as pool:
        jobs = [
            pool.submit(attempt, options.action, p.resolve(), options.threads, options.timeout) for p in paths
        ]
        for path, seconds, problems in (job.result() for job in jobs):
            print(f"{'FAIL' if problems else 'ok  '} {seconds:6.1f} s  {path.name}", flush=True)
            print("".join(f"     {problem}\n" for problem in problems), end="")
            failed += bool(problems)
    print(f"{options.action}: {len(paths) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
