"""`make lesson N=7 TITLE="Towards 3 B"`: a notebook with the anatomy of a lesson, to be filled in.

python book/_ext/new_lesson.py 7 "Towards 3 B" [--folder notebooks]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

from notebooks import write
from stamps import ROOT, Notebook

OPENING = """# {title}

What the lesson is about, in three short sentences. Which question does it answer?

:::{{admonition}} Before you start
:class: tip

**You will be able to**
- ...

**You need** lesson {before}.

**Time** About 45 minutes to read.
The code took {{run-time}}`this page` for this page, on two CPU cores.

**Hardware** Any computer.
The outputs on this page come from a CPU.
:::"""
COLAB = """import sys

if "google.colab" in sys.modules:  # Colab lacks this book's package
    from IPython import get_ipython

    home = "git+https://github.com/swin-lessons/swin-lessons"
    what = f"swin-lessons[vision,plots] @ {home}"
    get_ipython().run_line_magic("pip", f'install -q "{what}"')"""
IMPORTS = """import torch

from swin_lessons.plots.glue import glue
from swin_lessons.plots.style import use_style

use_style()
_ = torch.manual_seed(0)"""
SECTION = """## 1. First section

**Say it.** One idea.

**Predict it.** Bytes, operations or accuracy, from a formula.

**Code it.**"""
CODE = """def double(x: torch.Tensor) -> torch.Tensor:
    \"\"\"`(N,)` -> `(N,)`.\"\"\"
    return 2 * x"""
CHECK = """**Check it.** What must hold, and for which odd shape?"""
ASSERT = """x = torch.arange(3.0)
assert torch.equal(double(x), x + x)
glue("lesson_{number}_first", double(x).sum().item())"""
MEASURE = """**Measure it.** {{glue:text}}`lesson_{number}_first:.0f`, as predicted.

## Summary

- ...

## Three questions

**1. ...?**

<details style="margin-bottom: 1.5em">
<summary>Answer</summary>

...
</details>

**2. ...?**

<details style="margin-bottom: 1.5em">
<summary>Answer</summary>

...
</details>

**3. ...?**

<details style="margin-bottom: 1.5em">
<summary>Answer</summary>

...
</details>

## Exercises"""
EXERCISE = """```{{exercise}} Title
:label: ex-{number}-first

...
```"""
SOLUTION = """```{{solution-start}} ex-{number}-first
:class: dropdown
```

..."""
CLOSING = """```{solution-end}
```

## Further reading

- ..."""


def skeleton(number: int, title: str) -> Notebook:
    """All parts of a lesson, with dots where something has to be written; it runs as it is."""
    v4 = nbformat.v4
    words = {"number": number, "title": title, "before": number - 1}
    hidden = {"tags": ["remove-cell"]}
    cells = [
        v4.new_markdown_cell(OPENING.format(**words)),
        v4.new_code_cell(COLAB, metadata=hidden),
        v4.new_code_cell(IMPORTS),
        v4.new_markdown_cell(SECTION),
        v4.new_code_cell(CODE),
        v4.new_markdown_cell(CHECK),
        v4.new_code_cell(ASSERT.format(**words)),
        v4.new_markdown_cell(MEASURE.format(**words)),
        v4.new_markdown_cell(EXERCISE.format(**words)),
        v4.new_markdown_cell(SOLUTION.format(**words)),
        v4.new_code_cell("assert torch.equal(double(torch.zeros(0)), torch.zeros(0))"),
        v4.new_markdown_cell(CLOSING),
    ]
    for i, cell in enumerate(cells):
        cell["id"] = f"lesson-{number}-{i:03d}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def file_name(number: int, title: str) -> str:
    """7, "Towards 3 B" -> "07_towards_3_b.ipynb"."""
    return f"{number:02d}_{re.sub('[^a-z0-9]+', '_', title.lower()).strip('_')}.ipynb"


def create(number: int, title: str, folder: Path) -> Path:
    """Write the skeleton.

    Raises:
        ValueError: a number or title that makes no file name.
        FileExistsError: the lesson is there already.
    """
    if not 0 < number < 100 or not re.search("[A-Za-z]", title):
        raise ValueError(f"number {number}, title {title!r}: use 1 to 99, and words")
    if there := sorted(folder.glob(f"{number:02d}_*.ipynb")):
        raise FileExistsError(f"lesson {number} is {there[0]}: edit it, or take another number")
    path = folder / file_name(number, title)
    write(skeleton(number, title), path)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("title")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    args = parser.parse_args(arguments)
    try:
        path = create(args.number, args.title, args.folder)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{path}: fill it in, add it to _toc.yml, then `make run N={args.number}`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
