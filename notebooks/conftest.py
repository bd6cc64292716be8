"""Lessons whose data is not here are skipped, visibly; in CI they run and fail.

A notebook names its data in its metadata:
`{"swin_lessons": {"requires": ["fashion-mnist"]}}`.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from swin_lessons.data import DataError, load_dataset


@functools.cache
def missing_data(notebook: Path) -> str | None:
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    for name in metadata.get("swin_lessons", {}).get("requires", []):
        try:
            load_dataset(name, split="test", download=False)
        except DataError:
            return f"{notebook.name} needs {name}: `make data` fetches it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("CI"):
        return
    for item in items:
        if item.path.suffix == ".ipynb" and (reason := missing_data(item.path)):
            item.add_marker(pytest.mark.skip(reason=reason))
