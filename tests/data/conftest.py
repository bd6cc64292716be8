"""Tiny data sets in their real on-disk formats, and a web server for the one machine."""

import functools
import gzip
import hashlib
import http.server
import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_sets import idx

from swin_lessons.data import fashion_mnist


@pytest.fixture(autouse=True)
def _nothing_outside(monkeypatch, tmp_path):
    """No test sees the user's folders, cache or system-wide data."""
    monkeypatch.delenv("SWIN_LESSONS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", Path("/nowhere/usr/share/datasets/fashion-mnist"))


@pytest.fixture
def write_fashion(monkeypatch):
    """Write a small set of Fashion-MNIST's four files, whose digests then count as the published ones."""

    def write(folder: Path, fill: int = 0, packed: bool = True) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        digests = {}
        for stem, count in (("train", 30), ("t10k", 20)):
            images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
            images[0, 0, 0] = fill
            labels = np.arange(count, dtype=np.uint8) % 10
            for name, array in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
                digests[name] = hashlib.sha256(idx(array)).hexdigest()
                path = folder / (f"{name}.gz" if packed else name)
                path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
        monkeypatch.setattr(fashion_mnist, "SHA256", digests)
        return folder

    return write


@pytest.fixture
def serve():
    """Serve a folder over http on this machine: serve(folder) -> address."""
    servers = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    def start(folder: Path) -> str:
        handler = functools.partial(Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
