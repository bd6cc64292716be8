"""count_macs against the authors' published figures, PyTorch's own counter, and hand arithmetic."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from swin_lessons.models import create_model
from swin_lessons.profiling import count_macs

timm = pytest.importorskip("timm")

TINY, DEEP = (2, 2, 6, 2), (2, 2, 18, 2)
# version, embed_dim, depths, heads of stage 1, image, window -> parameters, GMACs of the authors' formula
PUBLISHED = {
    "v1-t": (1, 96, TINY, 3, 224, 7, 28_288_354, 4.494),
    "v1-s": (1, 96, DEEP, 3, 224, 7, 49_606_258, 8.747),
    "v1-b": (1, 128, DEEP, 4, 224, 7, 87_768_224, 15.438),
    "v1-b-384": (1, 128, DEEP, 4, 384, 12, 87_903_584, 47.105),
    "v1-l": (1, 192, DEEP, 6, 224, 7, 196_532_476, 34.487),
    "v1-l-384": (1, 192, DEEP, 6, 384, 12, 196_735_516, 103.952),
    "v2-t-w8": (2, 96, TINY, 3, 256, 8, 28_347_154, 5.926),
    "v2-t-w16": (2, 96, TINY, 3, 256, 16, 28_347_154, 6.605),
    "v2-s-w8": (2, 96, DEEP, 3, 256, 8, 49_728_418, 11.515),
    "v2-s-w16": (2, 96, DEEP, 3, 256, 16, 49_728_418, 12.647),
    "v2-b-w8": (2, 128, DEEP, 4, 256, 8, 87_918_816, 20.286),
    "v2-b-w16": (2, 128, DEEP, 4, 256, 16, 87_918_816, 21.796),
    "v2-b-w12": (2, 128, DEEP, 4, 192, 12, 87_918_816, 11.761),
    "v2-b-w24": (2, 128, DEEP, 4, 384, 24, 87_918_816, 54.748),
    "v2-l-w16": (2, 192, DEEP, 6, 256, 16, 196_739_932, 47.491),
    "v2-l-w12": (2, 192, DEEP, 6, 192, 12, 196_739_932, 25.965),
    "v2-l-w24": (2, 192, DEEP, 6, 384, 24, 196_739_932, 115.417),
    "v2-h": (2, 352, DEEP, 11, 192, 12, 658_027_922, 85.752),
    "v2-giant": (2, 448, DEEP, 14, 192, 12, 1_064_561_996, 138.272),
}


def swin(version, embed_dim, depths, heads, img_size, window_size, **kwargs):
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    cls = SwinTransformer if version == 1 else SwinTransformerV2
    num_heads = [heads * 2**i for i in range(len(depths))]
    return cls(
        img_size=img_size,
        window_size=window_size,
        embed_dim=embed_dim,
        depths=depths,
        num_heads=num_heads,
        **kwargs,
    )


def small(version, img_size=32):
    return swin(version, 48, (2, 2), 3, img_size, 4, num_classes=10)


def flop_counter_macs(model, *size):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *size, device=next(model.parameters()).device))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_macs_and_parameters_on_the_meta_device(name):
    *config, params, gmacs = PUBLISHED[name]
    with torch.device("meta"):
        model = swin(*config)
    report = count_macs(model, (3, config[4], config[4]))
    assert round(report.total / 1e9, 3) == gmacs
    assert report.params == params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "gmacs"), [("v1-t", 4.4906), ("v2-t-w8", 5.9397)])
def test_products_agree_with_flop_counter(name, gmacs):
    with torch.device("meta"):
        model = swin(*PUBLISHED[name][:-2])
    size = (3, PUBLISHED[name][4], PUBLISHED[name][4])
    assert count_macs(model, size).matmul == flop_counter_macs(model, *size)
    assert round(flop_counter_macs(model, *size) / 1e9, 4) == gmacs


OURS = {
    "swin_tiny_patch4_window7_224": "v1-t",
    "swin_small_patch4_window7_224": "v1-s",
    "swin_base_patch4_window7_224": "v1-b",
    "swin_base_patch4_window12_384": "v1-b-384",
    "swin_large_patch4_window7_224": "v1-l",
    "swin_large_patch4_window12_384": "v1-l-384",
    "swinv2_tiny_window8_256": "v2-t-w8",
    "swinv2_tiny_window16_256": "v2-t-w16",
    "swinv2_small_window8_256": "v2-s-w8",
    "swinv2_small_window16_256": "v2-s-w16",
    "swinv2_base_window8_256": "v2-b-w8",
    "swinv2_base_window16_256": "v2-b-w16",
    "swinv2_base_window12_192": "v2-b-w12",
    "swinv2_base_window12to16_192to256": "v2-b-w16",
    "swinv2_base_window12to24_192to384": "v2-b-w24",
    "swinv2_large_window12_192": "v2-l-w12",
    "swinv2_large_window12to16_192to256": "v2-l-w16",
    "swinv2_large_window12to24_192to384": "v2-l-w24",
    "swinv2_huge_window12_192": "v2-h",
}


@pytest.mark.parametrize("name", OURS)
def test_our_models_match_the_published_figures(name):
    *config, params, gmacs = PUBLISHED[OURS[name]]
    plain = {"extra_norm_every": 0} if "huge" in name else {}  # the published count has no extra norms
    with torch.device("meta"):
        model = create_model(name, **plain)
    report = count_macs(model, (3, config[4], config[4]))
    assert round(report.total / 1e9, 3) == gmacs
    assert report.params == params
    assert report.matmul == flop_counter_macs(model, 3, config[4], config[4])


@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_the_fast_path_of_our_models_does_the_work_of_the_reference(name):
    """Packed linears and fused attention on the CPU, against explicit softmax and against the meta device."""
    fast = count_macs(create_model(name), (1, 32, 32))
    reference = count_macs(create_model(name, attention="reference"), (1, 32, 32))
    with torch.device("meta"):
        meta = count_macs(create_model(name), (1, 32, 32))
    assert fast.total == reference.total == meta.total
    assert fast.by_kind["attention"] == reference.by_kind["attention"] > 0


def test_swin_tiny_by_kind():
    with torch.device("meta"):
        report = count_macs(swin(1, 96, TINY, 3, 224, 7), (3, 224, 224))
    assert report.by_kind["conv"] == 56 * 56 * 96 * 3 * 4 * 4
    tokens_heads = [(56 * 56, 3, 2), (28 * 28, 6, 2), (14 * 14, 12, 6), (7 * 7, 24, 2)]
    assert report.by_kind["attention"] == sum(
        2 * n * 49 * 32 * heads * depth for n, heads, depth in tokens_heads
    )
    assert round(report.matmul / 1e9, 4) == 4.4906
    assert report.total - report.counted == report.by_kind["authors_norm"] == 3 * 768 * 49
    assert report.folded == 0


def test_log_cpb_is_apart_and_does_not_grow_with_the_batch():
    model = small(2)
    one, four = count_macs(model, (3, 32, 32)), count_macs(model, (4, 3, 32, 32))
    table = (
        7 * 7 * (2 * 512 * 4 + 512 * (3 + 3 + 6 + 6))
    )  # (2w-1)² offsets through Linear(2, 512), Linear(512, heads)
    assert one.folded == four.folded == table
    assert one.total == four.total
    assert one.matmul == flop_counter_macs(model, 3, 32, 32)


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.fused = nn.Linear(64, 192), fused

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(x.shape[0], -1, 3, 2, 32).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_counts_as_the_explicit_one(device):
    macs = {fused: count_macs(Attention(fused).to(device), (1, 16, 64)) for fused in (False, True)}
    assert macs[True].total == macs[False].total
    assert macs[True].by_kind["attention"] == 2 * 2 * 16 * 16 * 32


def test_flop_counter_misses_what_we_count():
    """Why the dispatcher is watched here: PyTorch's counter loses fused attention on a CPU."""
    model = Attention(fused=True)
    report = count_macs(model, (1, 16, 64))
    assert flop_counter_macs(model, 1, 16, 64) == report.matmul - report.by_kind["attention"]


class Packed(nn.Module):
    """Uses its child's weight without calling it: as it is, and packed by oneDNN."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.fc.weight.detach(), 10)

    def forward(self, x):
        y = F.linear(x, self.fc.weight)
        return y + torch.ops.mkldnn._linear_pointwise(x, self.packed, self.fc.bias, "none", [], "")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_functional_and_packed_linears_belong_to_the_weights_owner():
    report = count_macs(Packed(), (2, 5, 16))
    assert [(r.name, r.kind, r.macs, r.params) for r in report.rows] == [
        ("fc", "linear", 2 * 5 * 8 * 16 * 2, 136)
    ]


@pytest.mark.parametrize("inference", [False, True])
def test_inference_mode_of_the_caller_changes_nothing(inference):
    with torch.inference_mode(inference):
        assert count_macs(Attention(False), (1, 16, 64)).total == 16 * 64 * 192 + 2 * 2 * 16 * 16 * 32


def test_convolutions_grouped_and_transposed():
    grouped = nn.Conv2d(8, 16, 3, groups=4, padding=1)
    transposed = nn.ConvTranspose2d(16, 4, 2, stride=2)
    model = nn.Sequential(grouped, nn.BatchNorm2d(16), transposed)
    report = count_macs(model, (8, 6, 10))
    assert [(r.name, r.macs) for r in report.rows] == [
        ("0", 60 * 16 * (8 // 4) * 9),
        ("1", 60 * 16),
        ("2", 60 * 16 * 4 * 4),
    ]
    assert report.matmul == flop_counter_macs(model, 8, 6, 10)


def test_nothing_of_the_model_changes():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    count_macs(model, (3, 4, 4))
    assert [m.training for m in model] == [True, True, False]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_failing_forward_restores_modes():
    model = nn.Sequential(nn.Linear(4, 4)).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_macs(model, (1, 2, 5))
    assert model.training
    assert model[0].training
    assert torch.backends.mha.get_fastpath_enabled()


class Shy(nn.Module):
    """Takes another path when somebody watches its child."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if self.fc._forward_hooks else x


def test_the_model_is_not_watched_by_hooks():
    assert count_macs(Shy(), (1, 2, 4)).total == 0


def test_torchvision_vit_and_swin():
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        vit, tv_swin = models.vit_b_16(), models.swin_v2_t()
    assert round(count_macs(vit, (3, 224, 224)).matmul / 1e9, 2) == 17.56  # torchvision prints 17.56 GFLOPS
    report = count_macs(tv_swin, (3, 256, 256))
    assert round(report.total / 1e9, 3) == 5.926
    assert report.folded == 18_662_400


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")
    size, window, gmacs = (224, 7, 4.494) if name == "Swin" else (256, 8, 5.926)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForImageClassification")(
            config(image_size=size, window_size=window, num_labels=1000)
        )
    assert round(count_macs(model, (3, size, size)).total / 1e9, 3) == gmacs


def test_deit_small():
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=1000)
    report = count_macs(model, (3, 224, 224))
    assert report.params == 22_050_664
    assert round(report.total / 1e9, 1) == 4.6  # DeiT paper, table 5
    assert report.total == report.counted


@pytest.mark.parametrize(
    "fused",
    [{"kernels": "norm"}, {"kernels": "triton"}, {"kernels": "triton", "attention": "triton"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["swin_micro_fmnist", "swinv2_micro_fmnist"])
def test_fused_kernels_do_the_work_of_the_layers(name, fused):
    """On a map that windows do not tile, `attention="triton"` spares the projection of padding."""
    pytest.importorskip("triton")
    options = [{"attention": "reference"}, {"attention": "reference"} | fused]
    plain, ours = (count_macs(create_model(name, **o), (1, 32, 32)) for o in options)
    assert ours.total == plain.total
    assert ours.by_kind == plain.by_kind
    plain, ours = (count_macs(create_model(name, **o), (1, 36, 52)) for o in options)
    assert [ours.by_kind[k] for k in ("attention", "norm")] == [
        plain.by_kind[k] for k in ("attention", "norm")
    ]
    assert (ours.by_kind["linear"] < plain.by_kind["linear"]) == ("attention" in fused)


def test_custom_operation():
    report = count_macs(nn.ReLU(), (2, 3, 4), extra={torch.ops.aten.relu: ("relu", lambda out, x: x.numel())})
    assert report.by_kind == {"relu": 24}


def test_table_and_dict_agree():
    report = count_macs(small(2), (3, 32, 32))
    values = report.to_dict()
    assert values["total"] == sum(r["macs"] for r in values["rows"] if r["kind"] != "log_cpb")
    lines = report.table().splitlines()
    assert len(lines) == len(report.rows) + 2
    assert lines[-1].split() == ["total", f"{report.total / 1e6:,.3f}", f"{report.params:,}"]
    assert len(report.table(by="kind").splitlines()) == len(report.by_kind) + 2


@pytest.mark.parametrize("size", [(3, 224), (3, 0, 224), (3, 224.0, 224), ()])
def test_bad_input_size_is_named(size):
    with pytest.raises(ValueError, match="give positive integers"):
        count_macs(nn.ReLU(), size)


def test_bad_table_is_named():
    with pytest.raises(ValueError, match='"layer" or "kind"'):
        count_macs(nn.ReLU(), (3, 4, 4)).table(by="stage")
