"""How the kernels of window attention are launched: tiles for every size, and the arguments of one call.

Tiles are data. Compile reports chose them: nothing spills on sm_80, 86, 89 and 90, and among those that do not, the one
that leaves room for more warps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.windows import Size
from . import window_attention_blocks as blocks
from . import window_attention_whole as whole
from .launch import ceil_div, power_of_2
from .spec import Spec

STATISTICS = ("bias_ptr", "factor_ptr", "lse_ptr", "mean_ptr", "dbias_ptr", "dfactor_ptr")  # fp32 in any case


class Tiles(NamedTuple):
    """How many queries and keys a tile holds, and the warps and stages of its program."""

    query: int
    key: int
    warps: int
    stages: int = 1


# For a window in one tile: by kind of arithmetic and side of the tile, what runs it (forward, backward).
WHOLE = {
    "half": {
        16: (Tiles(16, 16, 1), Tiles(16, 16, 1)),
        32: (Tiles(32, 32, 2), Tiles(32, 32, 2)),
        64: (Tiles(64, 64, 4, 3), Tiles(64, 64, 4)),
    },
    "fp32": {
        16: (Tiles(16, 16, 1), Tiles(16, 16, 4)),
        32: (Tiles(32, 32, 4), Tiles(32, 32, 4)),
        64: (Tiles(64, 64, 8), Tiles(64, 64, 16)),
    },
}
WHOLE_HEAD_DIM = 32  # more channels do not fit the registers beside 64 x 64 scores
# For windows in blocks: by kind of arithmetic and padded channels of a head, a tile for each kernel.
BLOCKS = {
    ("half", 32): {
        "forward": Tiles(64, 32, 4, 2),
        "query": Tiles(64, 32, 4, 2),
        "key": Tiles(32, 64, 4, 2),
        "bias": Tiles(64, 32, 4, 2),
    },
    ("half", 64): {
        "forward": Tiles(64, 32, 4, 2),
        "query": Tiles(64, 32, 4, 2),
        "key": Tiles(32, 64, 4),
        "bias": Tiles(64, 32, 4, 2),
    },
    ("tf32", 32): {
        "forward": Tiles(64, 32, 4),
        "query": Tiles(64, 32, 4),
        "key": Tiles(32, 64, 4),
        "bias": Tiles(64, 32, 4),
    },
    ("tf32", 64): {
        "forward": Tiles(64, 32, 4),
        "query": Tiles(32, 32, 4),
        "key": Tiles(32, 32, 4),
        "bias": Tiles(64, 32, 4),
    },
    ("fp32", 32): {
        "forward": Tiles(64, 32, 8),
        "query": Tiles(64, 32, 8),
        "key": Tiles(32, 64, 8),
        "bias": Tiles(16, 64, 4),
    },
    ("fp32", 64): {
        "forward": Tiles(64, 32, 8),
        "query": Tiles(32, 32, 8),
        "key": Tiles(32, 64, 8),
        "bias": Tiles(16, 64, 4),
    },
}


def arithmetic(x: Tensor) -> str:
    """What products are made of: "half", "fp32", or "tf32" where PyTorch may use it for matrix products."""
    if x.dtype != torch.float32:
        return "half"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def whole_tiles(kind: str, N: int, head_dim: int) -> tuple[Tiles, Tiles] | None:
    """Tiles (forward, backward) that hold a window of N tokens; None where it goes in blocks."""
    return WHOLE.get(kind, {}).get(side(N)) if head_dim <= WHOLE_HEAD_DIM else None


def side(n: int) -> int:
    """The side of a tile for `n` tokens or channels: matrix instructions need 16 at least."""
    return max(16, power_of_2(n))


def walkers(tasks: int, programs: int) -> int:
    """How many programs share `tasks` evenly, when about `programs` run side by side."""
    rounds = ceil_div(tasks, max(programs, 1))
    return ceil_div(tasks, rounds) if tasks else 0


class Job(NamedTuple):
    """The sizes of one call, as all kernels take them."""

    windows: int
    C: int
    H: int
    W: int
    window: Size
    shift: Size
    num_heads: int
    scale: float
    dropout: float
    seed: int
    cosine: bool
    kind: str
    wide: bool

    @property
    def N(self) -> int:
        """Tokens of a window."""
        return self.window[0] * self.window[1]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.C // self.num_heads

    def scalars(self, kernel: Any) -> dict[str, float]:
        """Arguments of a kernel that are numbers."""
        sizes = {"H": self.H, "W": self.W, "dy": self.shift[0], "dx": self.shift[1]}
        numbers = {**sizes, "scale": self.scale, "seed": self.seed}
        return {**numbers, "windows": self.windows} if "windows" in kernel.arg_names else numbers

    def constants(self, kernel: Any, tile: Tiles) -> dict[str, Any]:
        """Constants of a kernel with this tile."""
        blocks = {"BLOCK_N": tile.query, "BLOCK_Q": tile.query, "BLOCK_K": tile.key}
        return {name: size for name, size in blocks.items() if name in kernel.arg_names} | {
            "HEADS": self.num_heads,
            "HEIGHT": self.window[0],
            "WIDTH": self.window[1],
            "DIM": self.head_dim,
            "BLOCK_D": side(self.head_dim),
            "COSINE": self.cosine,
            "SHIFTED": any(self.shift),
            "RATE": self.dropout,
            "WIDE": self.wide,
            "PRECISION": "tf32" if self.kind == "tf32" else "ieee",
        }

    def tiles(self, kernel: str) -> Tiles:
        """The tile of a kernel that goes in blocks, no larger than the window needs."""
        tile = BLOCKS[self.kind, max(32, side(self.head_dim))][kernel]
        return tile._replace(query=min(tile.query, side(self.N)), key=min(tile.key, side(self.N)))


def launch(kernel: Any, programs: int, tensors: tuple, job: Job, tile: Tiles) -> None:
    """Start `programs` programs of a kernel of this job on `tensors`."""
    if programs:
        named = {**job.scalars(kernel), **job.constants(kernel, tile)}
        kernel[(programs,)](*tensors, **named, num_warps=tile.warps, num_stages=tile.stages)


def job_specs(name: str, job: Job, dtypes: tuple[str, ...]) -> list[Spec]:
    """The launches of a call, forward and backward, as a compiler sees them."""
    tiles = whole_tiles(job.kind, job.N, job.head_dim)
    if tiles is not None:
        launches = [
            ("forward", whole.forward_kernel, tiles[0]),
            ("backward", whole.backward_kernel, tiles[1]),
        ]
    else:
        kernels = ("forward", "query", "key", "bias")
        launches = [(k, getattr(blocks, f"{k}_kernel"), job.tiles(k)) for k in kernels]
    return [_spec(f"{name} {label}", kernel, tile, job, dtypes) for label, kernel, tile in launches]


def _spec(name: str, kernel: Any, tile: Tiles, job: Job, dtypes: tuple[str, ...]) -> Spec:
    pointers, scalars = dict.fromkeys(STATISTICS, "fp32"), job.scalars(kernel)
    return Spec(name, kernel, pointers, scalars, job.constants(kernel, tile), tile.warps, tile.stages, dtypes)
