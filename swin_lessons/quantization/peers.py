"""What other libraries' models need before their layers can be quantised.

Most peers call their linear layers as layers, and need nothing. Two do not.

* timm's Swin V2 hands the weight of `qkv` to a function, unless told to add its bias separately.
* torchvision's Swin hands both weights of its attention to a function. That attention takes and gives a map
  `(B, H, W, C)`, as ours does, so ours takes its place, with its parameters.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn

from swin_lessons.models.attention import WindowAttention, WindowAttentionV2


def imported(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a library that is imported already; a model of a library that is not cannot be at hand."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def gelu_types() -> tuple[type, ...]:
    """Every class that is a GELU."""
    return (
        nn.GELU,
        *imported("timm.layers.activations", "GELU", "GELUTanh", "QuickGELU"),
        *imported(
            "transformers.activations",
            "GELUActivation",
            "NewGELUActivation",
            "FastGELUActivation",
            "GELUTanh",
        ),
    )


def adapt(model: nn.Module) -> nn.Module:
    """Make every linear layer of a model one that is called. Changes the model in place and returns it."""
    windows = imported("torchvision.models.swin_transformer", "ShiftedWindowAttention")
    for name, module in list(model.named_modules()):
        if hasattr(module, "qkv_bias_separate"):
            module.qkv_bias_separate = True
        if isinstance(module, windows):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, from_torchvision(module))
    return model


@torch.no_grad()
def from_torchvision(attn: Any) -> WindowAttention:
    """torchvision's window attention as ours, with the same layers and parameters; equal numbers on maps that are no
    smaller than the window."""
    second = hasattr(attn, "logit_scale")
    kind = WindowAttentionV2 if second else WindowAttention
    with torch.device("meta"):
        ours = kind(
            attn.qkv.in_features,
            attn.num_heads,
            cast(tuple[int, int], tuple(attn.window_size)),
            cast(tuple[int, int], tuple(attn.shift_size)),
            qkv_bias=attn.qkv.bias is not None,
            attn_drop=attn.attention_dropout,
            proj_drop=attn.dropout,
        )
    ours.qkv, ours.proj = attn.qkv, attn.proj
    if isinstance(ours, WindowAttentionV2):
        ours.logit_scale, ours.cpb_mlp = attn.logit_scale, attn.cpb_mlp
        if attn.qkv.bias is not None:
            q, _, v = attn.qkv.bias.chunk(3)  # keys have no bias
            ours.q_bias, ours.v_bias = nn.Parameter(q.clone()), nn.Parameter(v.clone())
            ours.qkv.register_parameter("bias", None)
    else:
        ours.relative_position_bias_table = attn.relative_position_bias_table
    return ours.train(attn.training)
