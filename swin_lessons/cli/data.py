"""`swin-lessons data`: fetch, check and describe a data set."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from swin_lessons.cli._page import add_command, table

if TYPE_CHECKING:
    from swin_lessons.data.folders import FolderReport

TEXT = """\
Find a data set, fetch it if it is missing, check it, and say what is in it.

NAME is fashion-mnist, cifar10, cifar100, digits, scenes, or imagefolder:PATH for your own images.
Your folder holds one folder of images for each class, or train/ and val/ with such folders inside.
Sets are looked for in --root, in $SWIN_LESSONS_DATA, then in the cache; Fashion-MNIST also where
Debian's package puts it.
"""
EXAMPLES = """\
  swin-lessons data fashion-mnist
  swin-lessons data fashion-mnist --root ~/datasets      a folder of your choice
  swin-lessons data imagefolder:~/photos                 check your own images before training
  swin-lessons data imagefolder:~/photos --skip-bad      leave damaged images out
"""


def add_parser(subparsers) -> None:
    """Add this subcommand."""
    parser = add_command(subparsers, "data", run, "fetch, check and describe a data set", TEXT, EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="data set, or imagefolder:PATH")
    parser.add_argument("--root", metavar="FOLDER", help="where to look first and to put what is fetched")
    parser.add_argument("--no-download", action="store_true", help="use only what is on this machine")
    parser.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read")


def run(args: argparse.Namespace) -> int:
    """Load every split and print its size and, of folders, what was found and checked."""
    from swin_lessons.cli._runs import load_splits

    splits = load_splits(args.name, root=args.root, download=not args.no_download, skip_bad=args.skip_bad)
    print(args.name)
    print(table([(name, _describe(dataset)) for name, dataset in splits.items()]))
    print(table([("classes", ", ".join(splits["train"].classes)), *_found(splits)]))
    return 0


def _found(splits: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found in the folder, or in the folder of each split."""
    reports = {name: dataset.report for name, dataset in splits.items() if hasattr(dataset, "report")}
    if reports and reports["train"].images > len(splits["train"]):  # its other images are those of "val"
        reports = {"whole": reports["train"]}
    return [(f"{name} folder", f"{report}; {_checked(report)}") for name, report in reports.items()]


def _checked(report: FolderReport) -> str:
    from swin_lessons.data.folders import CHECK_BYTES

    if report.checked:
        return "every image was read"
    return f"no image was read, being more than {CHECK_BYTES >> 20} MB: --skip-bad reads all, leaves bad ones out"


def _describe(dataset) -> str:
    return f"{len(dataset):,} images, {dataset.num_classes} classes, {dataset.in_chans} channel(s)"
