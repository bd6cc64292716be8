"""The built site, a server for it, and a browser that can reach nothing else."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "_ext"))
from chromium import REMEDY, executable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the site, built now if anything has changed."""
    pytest.importorskip("jupyter_book", reason='the site needs `pip install "swin-lessons[book]"`')
    command = [sys.executable, str(ROOT / "book" / "_ext" / "build_site.py")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, f"the site does not build:\n{run.stderr[-4000:]}"
    return ROOT / "_build" / "html"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Keep the test output free of one line for each request."""


@pytest.fixture(scope="session")
def base_url(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium with every name but this machine's unresolvable. In CI its absence is an error, not a skip."""
    api = pytest.importorskip("playwright.sync_api", reason='needs `pip install "swin-lessons[test]"`')
    with api.sync_playwright() as playwright:
        path = executable(playwright)
        if path is None and os.environ.get("CI"):
            pytest.fail(REMEDY)
        if path is None:
            pytest.skip(REMEDY)
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
