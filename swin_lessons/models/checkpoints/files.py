"""Weight files, read without running any code from them and written in one step."""

import os
import pickle
import re
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *PICKLES)
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # as transformers' save_pretrained writes them


class Settings:
    """An inert stand-in for argparse.Namespace: its attributes and nothing else."""


# Training scripts store their settings beside the weights: Microsoft's a yacs config (a kind of dict), timm's an
# argparse.Namespace. Both are read as plain data: no code of theirs runs, and yacs need not be installed.
STAND_INS: list[Any] = [(OrderedDict, "yacs.config.CfgNode"), (Settings, "argparse.Namespace")]


def read_file(path: str | os.PathLike) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Everything in a weight file, and its metadata: those of safetensors, and a config.json in its folder.

    `path` is a .safetensors file, a file of torch.save, or a folder of transformers' save_pretrained.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of an unknown kind, or a pickle with code in it.
    """
    file = _find(Path(path))
    beside = _config_of(Path(path))
    if file.suffix == ".safetensors":
        tensors, metadata = _read_safetensors(file)
        return tensors, metadata | beside
    if file.suffix in PICKLES:
        return _read_pickle(file), beside
    raise ValueError(f"{file}: unknown kind {file.suffix!r}; weights come as {', '.join(SUFFIXES)}")


def _find(path: Path) -> Path:
    candidates = [path / name for name in FOLDER_FILES] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    wanted = " or ".join(str(file) for file in candidates)
    raise FileNotFoundError(f"no weights at {wanted}: check the path, or pass a state dict")


def _config_of(path: Path) -> dict[str, str]:
    config = path / "config.json"
    return {"config.json": config.read_text(encoding="utf-8")} if config.is_file() else {}


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is no readable safetensors file ({error}): fetch it again") from error


def _read_pickle(file: Path) -> Mapping[str, Any]:
    try:
        with torch.serialization.safe_globals(STAND_INS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise  # the file system's own words are clear
    except Exception as error:  # torch's unpickler meets damage with errors of many types
        raise ValueError(_explain(file, error)) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a state dict of named tensors")
    return content


def _explain(file: Path, error: Exception) -> str:
    """Tell code in a pickle (refused) from a damaged file."""
    reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    reason = reason.strip().partition(". ")[0].partition("\n")[0] or "no content"
    code = re.search(r"(?:GLOBAL|global|function|class) `?([\w.]+\.\w+|<[^>]+>)", str(error))
    if isinstance(error, pickle.UnpicklingError) and code:
        return (
            f"{file} holds code ({code[1]}), not only weights, and was not run. "
            "Ask its author for a .safetensors file or a plain state dict: "
            "torch.save(model.state_dict(), 'weights.pth')"
        )
    return f"{file} is no readable PyTorch weight file ({type(error).__name__}: {reason}): fetch it again"


def write_safetensors(
    tensors: Mapping[str, Tensor], path: str | os.PathLike, metadata: Mapping[str, str]
) -> None:
    """Write to a temporary file beside `path`, then rename it: a reader never sees half a file."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: weights are saved as safetensors; name the file {path.stem}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
