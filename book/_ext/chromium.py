"""Which Chromium prints the book and runs the tests of the site."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
REMEDY = "no Chromium or Chrome: `sudo apt install chromium`, or `.venv/bin/playwright install chromium`"


def executable(playwright: Any) -> str | None:
    """The browser on PATH, else Chrome on a Mac, else Playwright's own; None where there is none."""
    found = [shutil.which(name) for name in BROWSERS]
    candidates = [*filter(None, found), MAC_CHROME, playwright.chromium.executable_path]
    return next((path for path in candidates if Path(path).is_file()), None)
