"""Checkpoints of a sharded run: a folder to which each process writes its own part of every tensor.

`torch.distributed.checkpoint` writes them as safetensors, so nothing in them can run code, and reads them on any
number of processes. A folder holds a file a process and state.json, which is written last: the numbers of the run
and a checksum of each file.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from swin_lessons.training.files import PART, make_folder, write_text
from swin_lessons.training.processes import Processes

STATE = "state.json"
BLOCK = 1 << 22  # bytes read at a time for a checksum

# from a name and a meta tensor of the whole shape to the tensor to read into; a `DTensor` gets its part
Target = Callable[[str, Tensor], Tensor]


def write_shards(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the folder `path`, whole or not at all; every process calls it. Raises OSError."""
    import torch.distributed.checkpoint as dcp

    processes, part = Processes.current(), path.with_name(path.name + PART)
    if processes.first:
        make_folder(part)
    processes.wait()
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    with _quietly():
        dcp.save(detached, storage_writer=dcp.HuggingFaceStorageWriter(str(part), save_distributed=True))
    checksums = _checksums(part, processes)
    if processes.first:
        write_text(part / STATE, json.dumps({**metadata, "files": checksums}))
        os.replace(part, path)
    processes.wait()


def _checksums(folder: Path, processes: Processes) -> dict[str, str]:
    """Of each file that was written; each process reads its part of them."""
    mine = {path.name: crc32(path) for path in _files(folder)[processes.rank :: processes.count]}
    return {name: value for part in processes.gather(mine) for name, value in part.items()}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def crc32(path: Path) -> str:
    """Checksum of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def read_shards(path: Path, target: Target) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a folder that `write_shards` wrote; every process of a group calls it.

    Args:
        path: the folder.
        target: from a name and a tensor of the whole shape, on the meta device, to the tensor to read into.

    Raises:
        ValueError: a file is damaged or gone.
    """
    import torch.distributed.checkpoint as dcp

    metadata = json.loads((path / STATE).read_text(encoding="utf-8"))
    processes = Processes.current()
    _check_files(path, metadata.pop("files"), processes)
    reader = dcp.HuggingFaceStorageReader(str(path))
    tensors = {name: target(name, whole) for name, whole in _contents(reader).items()}
    with _quietly():
        dcp.load(tensors, storage_reader=reader, no_dist=processes.count == 1)
    return tensors, metadata


def _contents(reader) -> dict[str, Tensor]:
    """Each tensor's name, and its whole shape and dtype as a tensor on the meta device."""
    return {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in reader.read_metadata().state_dict_metadata.items()
    }


def _check_files(folder: Path, checksums: dict[str, str], processes: Processes) -> None:
    """All processes raise, or none: one that went on alone would wait for the others."""
    if missing := sorted(checksums.keys() - {path.name for path in _files(folder)}):
        raise ValueError(f"{folder / missing[0]} is gone")
    found = _checksums(folder, processes)
    if damaged := sorted(name for name, value in checksums.items() if found[name] != value):
        raise ValueError(f"{folder / damaged[0]} is damaged: its checksum does not fit its bytes")


def _quietly() -> warnings.catch_warnings:
    """PyTorch warns of reading in a single process, which is what we want."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
