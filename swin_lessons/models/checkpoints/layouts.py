"""Parameter names of every layout that Swin and DeiT weights come in, turned into ours (timm's).

Each layout is one pure function from state dict to state dict. What a layout means is in its docstring.
"""

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]

# The patch convolution is in every checkpoint. Its name tells the layout, what stands before it the prefix.
ANCHORS = {
    "patch_embed.proj.weight": ("timm", "official", "timm_old", "simmim"),
    "patch_embed.projection.weight": ("openmmlab",),
    "features.0.0.weight": ("torchvision",),
    "embeddings.patch_embeddings.projection.weight": ("transformers",),
}
# What may stand beside the backbone and yet belong to it: classifiers, and transformers' output norms.
BESIDE = (
    r"(head|head_dist|classifier|cls_classifier|distillation_classifier|hidden_states_norms)\.(fc\.|stage\d+\.)?"
    r"(weight|bias)"
)
WRAPPERS = ("state_dict", "model", "module", "model_ema", "state_dict_ema")


def unwrap(content: Mapping) -> tuple[State, str]:
    """The state dict inside {"model": ...}, {"state_dict": ...} and the like, and the path of keys to it.

    Raises:
        ValueError: there is no tensor anywhere.
    """
    path = ""
    while not any(isinstance(value, Tensor) for value in content.values()):
        key = next((k for k in WRAPPERS if isinstance(content.get(k), Mapping)), None)
        if key is None:
            raise ValueError(
                f"no tensors in the checkpoint, which holds {sorted(map(str, content))[:10]}: "
                f"pass the state dict itself, or wrap it as one of {WRAPPERS}"
            )
        content, path = content[key], f"{path}[{key!r}]"
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}, path


def find_anchor(names: Iterable[str]) -> tuple[str, str]:
    """The prefix of the backbone ("" or "module.", "backbone.", "encoder.", ...) and the anchor itself.

    Raises:
        ValueError: no anchor (no Swin or DeiT), or more than one (say a student and a teacher).
    """
    names = list(names)
    found = [
        (name.removesuffix(anchor), anchor)
        for name in names
        for anchor in ANCHORS
        if name == anchor or name.endswith("." + anchor)
    ]
    if not found:
        raise ValueError(
            f"no Swin or DeiT weights: none of {list(ANCHORS)} among {len(names)} names, {names[:3]}..."
        )
    if len(found) > 1:
        raise ValueError(
            f"several networks in one checkpoint, under {[prefix for prefix, _ in found]}: "
            "pass a state dict with the names of one"
        )
    return found[0]


def split_prefix(state: Mapping[str, Tensor], prefix: str) -> tuple[State, list[str]]:
    """Cut `prefix` off; return the backbone with its classifier, and the names of what lies outside.

    A classifier may stand beside the backbone: "swin.embeddings..." and "classifier.weight".
    """
    inside = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    outside = []
    for name in (name for name in state if not name.startswith(prefix)):
        beside = re.fullmatch(rf"({_parents(prefix)}){BESIDE}", name)
        if beside is None:
            outside.append(name)
        else:
            inside[name[len(beside[1]) :]] = state[name]
    return inside, outside


def _parents(prefix: str) -> str:
    """A pattern for the places above the backbone: "module.swin." has "" and "module."."""
    parts = prefix.split(".")[:-1]
    return "|".join(re.escape("".join(f"{part}." for part in parts[:n])) for n in range(len(parts)))


def detect(state: Mapping[str, Tensor], anchor: str) -> str:
    """Name the layout of a state dict whose prefix is cut off: a key of `TRANSLATIONS`."""
    if len(ANCHORS[anchor]) == 1:
        return ANCHORS[anchor][0]
    if "layers.0.downsample.reduction.weight" not in state:
        return "timm"
    return "simmim" if "mask_token" in state else "official"


# --- translations -------------------------------------------------------------------------------------------


def rename(state: Mapping[str, Tensor], rules: Iterable[tuple[str, str]]) -> State:
    """Apply regular expressions to every name, in order."""
    rules = list(rules)

    def new_name(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return name

    return {new_name(name): value for name, value in state.items()}


def shift_downsample(state: Mapping[str, Tensor]) -> State:
    """Merging at the END of stage i becomes merging at the START of stage i + 1."""

    def shifted(match: re.Match) -> str:
        return f"layers.{int(match[1]) + 1}.downsample."

    return {re.sub(r"^layers\.(\d+)\.downsample\.", shifted, name): value for name, value in state.items()}


def from_timm(state: Mapping[str, Tensor]) -> State:
    """timm >= 0.9: our own names. Those of features-only models, ours and old timm's, are brought in line."""
    return rename(state, [(r"^layers_(\d+)\.", r"layers.\1."), (r"^out_norms\.", "")])


def from_official(state: Mapping[str, Tensor]) -> State:
    """Microsoft's Swin and SimMIM, and timm <= 0.6: merging ends a stage, `head` is a bare linear layer."""
    if "cls_token" in state:  # DeiT, whose names never changed
        return dict(state)
    rules = [(r"^head\.(weight|bias)$", r"head.fc.\1"), (r"\.rpe_mlp\.", ".cpb_mlp.")]
    return shift_downsample(rename(state, rules))


def from_torchvision(state: Mapping[str, Tensor]) -> State:
    """torchvision: one `features` list (stem, stage, merge, ...); V2 keeps a dead k bias inside qkv."""

    def numbered(name: str) -> str:
        match = re.match(r"features\.(\d+)\.(.*)", name)
        if match is None or match[1] == "0":
            return name
        entry, rest = int(match[1]), match[2]
        if entry % 2:
            return f"layers.{entry // 2}.blocks.{rest}"
        return f"layers.{entry // 2}.downsample.{rest}"

    rules = [
        (r"^features\.0\.0\.", "patch_embed.proj."),
        (r"^features\.0\.2\.", "patch_embed.norm."),
        (r"\.mlp\.0\.", ".mlp.fc1."),
        (r"\.mlp\.3\.", ".mlp.fc2."),
        (r"^head\.", "head.fc."),
    ]
    return split_v2_bias(rename({numbered(name): value for name, value in state.items()}, rules))


def split_v2_bias(state: Mapping[str, Tensor]) -> State:
    """In V2 attention (it has a `logit_scale`) qkv.bias (3C) becomes q_bias and v_bias; k has none."""
    result: State = {}
    for name, value in state.items():
        attn = name.removesuffix("qkv.bias")
        if attn != name and attn + "logit_scale" in state:
            result[attn + "q_bias"], _, result[attn + "v_bias"] = value.chunk(3)
        else:
            result[name] = value
    return result


def from_transformers(state: Mapping[str, Tensor]) -> State:
    """transformers' Swin, Swinv2 and DeiT, as stored (all versions) and as in memory (version 5)."""
    rules = [
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^encoder\.layers\.", "layers."),
        (r"^(encoder\.layer|layers)\.(\d+)\.(attention|layernorm|mlp|intermediate|output)", r"blocks.\2.\3"),
        (r"\.attention\.output\.dense\.|\.attention\.o_proj\.", ".attn.proj."),
        (r"\.attention\.(self\.|attention\.)?", ".attn."),
        (r"\.attn\.relative_position_bias\.", ".attn."),
        (r"\.continuous_position_bias_mlp\.", ".cpb_mlp."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
        (r"^layernorm\.", "norm."),
    ]
    state = join_qkv(shift_downsample(rename(state, rules)))
    if "cls_token" in state:
        heads = [(r"^(cls_)?classifier\.", "head."), (r"^distillation_classifier\.", "head_dist.")]
        return rename(state, [*heads, (r"^embeddings\.position_embeddings$", "pos_embed")])
    swin = [(r"^classifier\.", "head.fc."), (r"^embeddings\.position_embeddings$", "absolute_pos_embed")]
    return {_dense_norm(name): value for name, value in rename(state, swin).items()}


def _dense_norm(name: str) -> str:
    """Output norms of transformers' backbones count stages from 1, ours (as the authors') from 0."""
    return re.sub(r"^hidden_states_norms\.stage(\d+)\.", lambda m: f"norm{int(m[1]) - 1}.", name)


def join_qkv(state: Mapping[str, Tensor]) -> State:
    """Join query, key and value into qkv. With a bias on q and v alone (V2) they stay q_bias and v_bias."""
    result: State = {}
    for name, value in state.items():
        match = re.match(r"(.*\.attn\.)(?:query|key|value|[qkv]_proj)\.(weight|bias)$", name)
        if match is None:
            result[name] = value
    for attn in _attentions(state):
        q, k, v = (_one_of(state, attn, role) for role in ("query", "key", "value"))
        result[attn + "qkv.weight"] = torch.cat([part["weight"] for part in (q, k, v)])
        if "bias" in k:
            result[attn + "qkv.bias"] = torch.cat([part["bias"] for part in (q, k, v)])
        elif "bias" in q:
            result[attn + "q_bias"], result[attn + "v_bias"] = q["bias"], v["bias"]
    return result


def _attentions(state: Mapping[str, Tensor]) -> list[str]:
    found = (re.match(r"(.*\.attn\.)(?:query|q_proj)\.weight$", name) for name in state)
    return [match[1] for match in found if match]


def _one_of(state: Mapping[str, Tensor], attn: str, role: str) -> dict[str, Tensor]:
    """Weight and bias (where there is one) of `query` or `q_proj`, of `key` or `k_proj`, ..."""
    names = {kind: (f"{attn}{role}.{kind}", f"{attn}{role[0]}_proj.{kind}") for kind in ("weight", "bias")}
    return {kind: state[n] for kind, both in names.items() for n in both if n in state}


def from_openmmlab(state: Mapping[str, Tensor]) -> State:
    """mmdet, mmseg, mmpretrain: other names, and merging weights in the channel order of nn.Unfold."""
    rules = [
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^stages\.", "layers."),
        (r"\.attn\.w_msa\.", ".attn."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    ]
    state = rename(state, rules)
    widths = {name: value.shape[-1] for name, value in state.items() if name.endswith("reduction.weight")}
    for name, width in widths.items():
        norm = name.removesuffix("reduction.weight") + "norm."
        for part in (name, norm + "weight", norm + "bias"):
            if part in state and state[part].shape[-1] == width:  # V2 normalises after: nothing to reorder
                state[part] = unfold_to_blocks(state[part])
    return shift_downsample(state)


def unfold_to_blocks(value: Tensor) -> Tensor:
    """Reorder (..., 4C): nn.Unfold's 4 * channel + 2 * row + column to (2 * column + row) * C + channel."""
    blocks = value.unflatten(-1, (-1, 2, 2))  # (..., C, row, column)
    return blocks.movedim(-3, -1).transpose(-3, -2).flatten(-3)


BUFFERS = re.compile(r"(relative_position_index|relative_coords_table|attn_mask)$")


def drop_buffers(state: Mapping[str, Tensor]) -> tuple[State, list[str]]:
    """Leave out what depends on the image size alone: the model works it out. Returns the names left out."""
    dropped = [name for name in state if BUFFERS.search(name)]
    return {name: value for name, value in state.items() if name not in set(dropped)}, dropped


TRANSLATIONS: dict[str, Callable[[Mapping[str, Tensor]], State]] = {
    "timm": from_timm,
    "timm_old": from_official,
    "official": from_official,
    "simmim": from_official,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
    "openmmlab": from_openmmlab,
}


def translate(content: Mapping, source: str = "auto") -> tuple[State, str, list[tuple[str, str]]]:
    """Whatever a checkpoint holds, as (state dict with our names, its layout, [(name left out, reason)]).

    Raises:
        ValueError: the layout is not recognised, or is not the one that `source` names.
    """
    if source not in ("auto", *TRANSLATIONS):
        raise ValueError(f"source={source!r}: choose 'auto' or one of {list(TRANSLATIONS)}")
    state, _ = unwrap(content)
    prefix, anchor = find_anchor(state)
    state, outside = split_prefix(state, prefix)
    state, buffers = drop_buffers(state)
    layout = detect(state, anchor) if source == "auto" else source
    if layout not in ANCHORS[anchor]:
        raise ValueError(
            f"source={source!r}, but {prefix + anchor!r} is {detect(state, anchor)}'s name: use source='auto'"
        )
    skipped = [(name, f"outside the backbone {prefix!r}") for name in outside]
    skipped += [(name, "depends on sizes alone: the model works it out") for name in buffers]
    return TRANSLATIONS[layout](state), layout, skipped
