"""Window attention of Swin V1 and V2, with the shift inside: a map goes in, a map comes out.

This is the textbook path: pad, roll, cut, attend, put back. `rows.attention_rows` gives the same numbers on rows that
already lie in window order.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import fused
from .fast import (
    in_transform,
    is_eager,
    is_plain,
    is_symbolic,
    no_autocast,
    unit_vectors,
)
from .windows import (
    Size,
    cyclic_shift,
    fit_window,
    pad_to_windows,
    relative_coords_table,
    relative_position_index,
    shift_mask,
    window_partition,
    window_reverse,
    windows_along,
)


@torch.fx.wrap
def at_least_fp32(x: Tensor) -> Tensor:
    """Half precisions become fp32; fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def constant(like: Tensor, build: Callable[..., Tensor], *args) -> Tensor:
    """`build(*args)`, which depends on sizes alone: kept in ordinary execution, afresh for compilers and tracers."""
    return _built_once(build, *args) if is_eager(like) else build(*args)


@lru_cache(maxsize=32)
def _built_once(build: Callable[..., Tensor], *args) -> Tensor:
    with torch.inference_mode(False):  # training cannot use an inference tensor
        return build(*args)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, drop: float = 0.0) -> Tensor:
    """Explicit attention in n windows: three `(n, num_heads, N, head_dim)` -> the same shape. q carries its scale.

    `bias` is `(num_heads, N, N)`; `mask` is `(n, N, N)`, True where a query may see a key: itself at least.
    """
    scores = q @ k.transpose(-2, -1) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return F.dropout(scores.softmax(-1), drop, training=drop > 0) @ v


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, drop: float = 0.0
) -> Tensor:
    """`attend` by PyTorch's fused operation, which takes bias and mask as one tensor."""
    bias = bias.to(q.dtype)[None]
    if mask is not None:
        bias = bias.masked_fill(~mask[:, None], -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=drop, scale=1.0)


class WindowAttention(nn.Module):
    """Multi-head self-attention in shifted windows with a relative position bias (Swin V1).

    Source: arXiv:2103.14030, equation 4. Parameters are named as in timm.

    Args:
        dim: channels C; `num_heads` must divide it.
        window_size: (h, w) of a window, in tokens.
        shift_size: how far windows are rolled, in tokens; (0, 0) for regular windows.
        window_chunk: attend to so many windows at a time on the readable path (0: all at once).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: Size,
        shift_size: Size = (0, 0),
        *,
        pretrained_window_size: Size = (0, 0),
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        attention: str = "auto",
        window_chunk: int = 0,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.window_size, self.shift_size = window_size, shift_size
        self.pretrained_window_size = pretrained_window_size
        self.input_size: Size = window_size  # the map's size, which FX tracing needs; the model sets it
        self.attention, self.window_chunk, self.attn_drop = attention, window_chunk, attn_drop
        self._make_parameters(dim, qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_buffer("folded_bias", None, persistent=False)
        self._folded_from: tuple = ()
        self.register_load_state_dict_post_hook(_fold_after_loading)

    # --- what V1 and V2 do differently ---

    def _make_parameters(self, dim: int, qkv_bias: bool) -> None:
        rows = (2 * self.window_size[0] - 1) * (2 * self.window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, self.num_heads))
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)

    def reset_position(self) -> None:
        """Initialise what places tokens: the bias table."""
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def relative_position_bias(self, window: Size) -> Tensor:
        """`(num_heads, N, N)` for this window, which may be smaller than the one of the table."""
        (table,) = self._bias_parameters()
        index = constant(table, relative_position_index, window, self.window_size, table.device)
        return self.relative_position_bias_table[index].permute(2, 0, 1)

    def _bias_parameters(self) -> list[Tensor]:
        return _own_parameters(self, "relative_position_bias_table")

    def joint_qkv_bias(self) -> Tensor | None:
        """The bias of queries, keys and values, `(3C,)`."""
        return self.qkv.bias

    def scale_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare queries and keys so that their dot product is the attention logit."""
        return q * self.scale, k

    def logit_factor(self) -> Tensor | float:
        """What multiplies the dot products of this version's queries and keys."""
        return self.scale

    def kernel_scale(self) -> dict[str, Any]:
        """How the fused kernel scales dot products: an option of `kernels.window_attention`."""
        return {"scale": self.scale}

    # --- the readable path ---

    def forward(self, x: Tensor) -> Tensor:
        """`(B, H, W, C)` -> `(B, H, W, C)` for any H and W: pad, roll, cut into windows, attend, undo."""
        if self.attention == "triton" and not is_symbolic(x):
            return fused.attention_map(self, x)
        H, W = self.input_size if is_symbolic(x) else x.shape[1:3]
        window, shift = fit_window((H, W), self.window_size, self.shift_size)
        Hp, Wp = (windows_along(size, w) * w for size, w in zip((H, W), window, strict=True))  # padded
        mask = None
        if shift != (0, 0):
            mask = shift_mask(Hp, Wp, window, shift, x.device).repeat(x.shape[0], 1, 1)
        windows = window_partition(cyclic_shift(pad_to_windows(x, window), shift), window)
        windows = self.attend_windows(windows, window, mask)
        x = window_reverse(windows, window, Hp, Wp)
        return cyclic_shift(x, (-shift[0], -shift[1]))[:, :H, :W]

    def attend_windows(self, x: Tensor, window: Size, mask: Tensor | None = None) -> Tensor:
        """Attention within each of n windows: `(n, N, C)` -> `(n, N, C)`; `mask` as in `attend`."""
        n, N, C = x.shape
        qkv = self.project_qkv(x).reshape(n, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, num_heads, N, head_dim)
        q, k = self.scale_qk(q, k)
        bias = self.current_bias(window).to(q.dtype)
        x = self._attend_chunks(q, k, v, bias, mask).transpose(1, 2).reshape(n, N, C)
        return self.proj_drop(self.proj(x))

    def project_qkv(self, x: Tensor) -> Tensor:
        """`(..., C)` -> `(..., 3C)`: queries, keys and values, each head by head."""
        return self.qkv(x)

    def _attend_chunks(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        core = attend_sdpa if self.attention == "sdpa" else attend
        drop = self.attn_drop if self.training else 0.0
        step = self.window_chunk
        if not step or is_symbolic(q) or len(q) <= step:
            return core(q, k, v, bias, mask, drop)
        parts = []
        for i in range(0, len(q), step):  # sequential attention, Swin V2 section 3.5
            part = slice(i, i + step)
            args = (q[part], k[part], v[part], bias, None if mask is None else mask[part], drop)
            keep = torch.is_grad_enabled()
            parts.append(checkpoint(core, *args, use_reentrant=False) if keep else core(*args))
        return torch.cat(parts)

    # --- a constant bias for inference ---

    def current_bias(self, window: Size) -> Tensor:
        """The folded bias where it is valid, else the bias worked out from the parameters."""
        folded = self.folded_bias
        if folded is None or window != self.window_size or not self._fold_is_valid():
            return self.relative_position_bias(window)
        return folded

    def _fold_is_valid(self) -> bool:
        """False in training, and after any change of the parameters that the bias comes from.

        A compiled or traced model outlives such changes, so it works the bias out; an exported one is frozen.
        """
        if self.training or torch.jit.is_tracing():
            return False
        parameters = self._bias_parameters()
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return False
        if torch.compiler.is_compiling():
            return torch.compiler.is_exporting()
        if in_transform() or len(parameters) != len(self._folded_from):
            return False
        return all(_is_same(p, stamp) for p, stamp in zip(parameters, self._folded_from, strict=True))

    def fold(self) -> None:
        """Work out the bias once for inference. `eval()`, `load_state_dict` and `to` do this by themselves."""
        parameters = self._bias_parameters()
        self.folded_bias, self._folded_from = None, ()
        if not self.training and all(map(_is_whole, parameters)):
            with torch.inference_mode(False), torch.no_grad():  # training cannot use an inference tensor
                self.folded_bias = self.relative_position_bias(self.window_size).contiguous()
            self._folded_from = tuple(_stamp(p) for p in parameters)

    def train(self, mode: bool = True):
        super().train(mode)
        self.fold()
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.fold()
        return self

    def extra_repr(self) -> str:
        return f"window_size={self.window_size}, shift_size={self.shift_size}, num_heads={self.num_heads}"


def _is_whole(p: Tensor) -> bool:
    """Are all its values here? Not on the meta device, nor where FSDP spread them over processes (`DTensor`)."""
    return not (p.is_meta or p.is_inference() or hasattr(p, "full_tensor"))


def _fold_after_loading(module: WindowAttention, _) -> None:
    module.fold()


def _own_parameters(module: nn.Module, *names: str) -> list[Tensor]:
    """Parameters themselves, also while `torch.fx` puts stand-ins where attributes are read.

    A parameter that pruning or a parametrization computes is no longer registered: then its present value.
    """
    found = (module._parameters.get(name) for name in names)
    return [
        getattr(module, name) if value is None else value for name, value in zip(names, found, strict=True)
    ]


Stamp = tuple[Tensor, int, int]  # contents, address and version of a parameter


def _stamp(p: Tensor) -> Stamp:
    """What tells later whether a parameter has changed: on a CPU its contents, since `.data` hides writes."""
    contents = p.detach().clone() if p.device.type == "cpu" else p.detach()
    return contents, p.data_ptr(), p._version


def _is_same(p: Tensor, stamp: Stamp) -> bool:
    """Does a parameter still hold what it held? Off the CPU, comparing contents would wait for the device."""
    contents, address, version = stamp
    if p.dtype != contents.dtype or p.device != contents.device:
        return False
    if p.device.type == "cpu":
        return torch.equal(p, contents)
    return not p.is_inference() and (p.data_ptr(), p._version) == (address, version)


class WindowAttentionV2(WindowAttention):
    """Scaled cosine attention with a log-spaced continuous position bias (Swin V2).

    Source: arXiv:2111.09883, equations 2 to 4. Cosines and the bias are worked out in fp32 at least.

    Args (beside those of `WindowAttention`):
        pretrained_window_size: the window that normalises coordinates; 0 for `window_size` itself.
    """

    def _make_parameters(self, dim: int, qkv_bias: bool) -> None:
        self.logit_scale = nn.Parameter(torch.full((self.num_heads, 1, 1), math.log(10)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, self.num_heads, bias=False))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None

    def reset_position(self) -> None:
        """Initialise what places tokens: nothing, since `cpb_mlp` is made of linear layers."""

    def relative_position_bias(self, window: Size) -> Tensor:
        (scale,) = _own_parameters(self, "logit_scale")
        trained, own = self.pretrained_window_size, self.window_size
        reference = (trained[0] or own[0], trained[1] or own[1])
        high = torch.promote_types(scale.dtype, torch.float32)
        with no_autocast(scale.device):
            coords = constant(scale, relative_coords_table, window, reference, scale.device, high)
            table = 16 * self._cpb(coords, scale.dtype).sigmoid()
        index = constant(scale, relative_position_index, window, None, scale.device)
        return table[index].permute(2, 0, 1)

    def _cpb(self, coords: Tensor, dtype: torch.dtype) -> Tensor:
        """The small network from coordinates to biases, in the precision of the coordinates where it can be."""
        first, last = cast(nn.Linear, self.cpb_mlp[0]), cast(nn.Linear, self.cpb_mlp[2])
        if dtype == coords.dtype or not self._cpb_is_plain():
            return self.cpb_mlp(coords.to(dtype)).to(coords.dtype)
        hidden = F.relu(F.linear(coords, first.weight.to(coords.dtype), first.bias.to(coords.dtype)))
        return F.linear(hidden, last.weight.to(coords.dtype))

    def _cpb_is_plain(self) -> bool:
        first, last = self.cpb_mlp[0], self.cpb_mlp[2]
        return type(first) is type(last) is nn.Linear and is_plain(first, last)

    def _bias_parameters(self) -> list[Tensor]:
        if self._cpb_is_plain():
            return _own_parameters(self.cpb_mlp[0], "weight", "bias") + _own_parameters(
                self.cpb_mlp[2], "weight"
            )
        return [*self.cpb_mlp.parameters(), *self.cpb_mlp.buffers()]  # pruned, quantised or replaced

    def joint_qkv_bias(self) -> Tensor | None:
        if self.q_bias is None or self.v_bias is None:
            return None
        return torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))  # keys have no bias

    def project_qkv(self, x: Tensor) -> Tensor:
        bias = self.joint_qkv_bias()
        if type(self.qkv) is nn.Linear and is_plain(self.qkv):
            return F.linear(x, self.qkv.weight, bias)
        qkv = self.qkv(x)  # a hook, an adapter or a quantised layer must see its input
        return qkv if bias is None else qkv + bias.to(qkv.dtype)

    def logit_factor(self) -> Tensor:
        return self.logit_scale.clamp(max=math.log(100)).exp()

    def kernel_scale(self) -> dict[str, Any]:
        return {"logit_factor": self.logit_factor()}

    def scale_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        unit_q, unit_k = (unit_vectors(at_least_fp32(t)) for t in (q, k))
        return (unit_q * self.logit_factor()).to(q.dtype), unit_k.to(k.dtype)
