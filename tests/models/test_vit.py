"""DeiT equals timm's, takes the shapes it promises, and refuses the others."""

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from swin_lessons.models.vit import VIT_VARIANTS, VisionTransformer, ViTConfig, resample_pos_embed

timm = pytest.importorskip("timm")

PARAMETERS = {
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "deit_base_patch16_384": 86_859_496,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit_base_distilled_patch16_384": 87_630_032,
}
SMALL = ViTConfig(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=7)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(0.2 * noise + (1.0 if param.ndim == 1 else 0.0))
    return model


def small(**changes) -> VisionTransformer:
    return randomise(VisionTransformer(replace(SMALL, **changes))).double().eval()


def timm_small(distilled: bool = False, **changes) -> nn.Module:
    kinds = timm.models.deit.VisionTransformerDistilled, timm.models.vision_transformer.VisionTransformer
    kwargs = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=7, **changes)
    return (kinds[0] if distilled else kinds[1])(**kwargs).double().eval()


def images(B: int = 2, size: int = 32, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(B, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_shapes_and_count_equal_timm(name):
    with torch.device("meta"):
        ours, theirs = VisionTransformer(VIT_VARIANTS[name]), timm.create_model(name)
    shapes = {k: v.shape for k, v in ours.state_dict().items()}
    assert shapes == {k: v.shape for k, v in theirs.state_dict().items()}
    assert sum(p.numel() for p in ours.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa"])
def test_equals_timm_and_loads_both_ways(distilled, attention):
    ours, theirs = small(distilled=distilled, attention=attention), timm_small(distilled)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours(images()), theirs(images()), atol=1e-10, rtol=0)
    randomise(theirs, seed=5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(images()), theirs(images()), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_published_size_equals_timm_in_fp32_and_fp64(name):
    ours, theirs = randomise(VisionTransformer(VIT_VARIANTS[name])).eval(), timm.create_model(name).eval()
    theirs.load_state_dict(ours.state_dict())
    x = images(1, 224)
    with torch.no_grad():
        scale = ours(x.float()).abs().max()  # random weights give large logits
        assert (ours(x.float()) - theirs(x.float())).abs().max() <= 1e-5 * max(scale, 1)
        assert (ours.double()(x) - theirs.double()(x)).abs().max() <= 1e-10


def test_gradients_equal_timm_with_and_without_checkpointing():
    theirs = timm_small().train()
    for checkpointing in (False, True):
        ours = small(checkpointing=checkpointing).train()
        theirs.load_state_dict(ours.state_dict())
        theirs.zero_grad()
        for model in (ours, theirs):
            model(images()).square().sum().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-9, rtol=1e-9, msg=name)


def test_distilled_heads_split_only_in_distilled_training():
    model = small(distilled=True)
    logits = model(images())
    model.distilled_training = True
    torch.testing.assert_close(model(images()), logits)  # evaluation still averages
    both = model.train()(images())
    assert len(both) == 2
    assert (both[0] - both[1]).abs().max() > 1e-3
    torch.testing.assert_close(sum(both) / 2, logits)


@pytest.mark.parametrize("distilled", [False, True])
def test_set_input_size_equals_timm(distilled):
    ours, theirs = small(distilled=distilled), timm_small(distilled)
    theirs.load_state_dict(ours.state_dict())
    ours.pos_embed.requires_grad_(False)
    for model in (ours, theirs):
        model.set_input_size((48, 40))
    assert not ours.pos_embed.requires_grad
    x = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    # timm resamples in fp32, we in the parameters' precision
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)
    assert ours.forward_features(x).shape == (2, 6, 5, 48)


def test_set_input_size_is_a_no_op_at_the_current_size():
    model = small()
    before = model.pos_embed
    model.set_input_size(32)
    assert model.pos_embed is before


def test_resampling_keeps_a_constant_and_the_prefix():
    embed = torch.cat([torch.full((1, 2, 3), 9.0), torch.full((1, 16, 3), 0.5)], dim=1)
    resized = resample_pos_embed(embed, (4, 4), (6, 3), num_prefix_tokens=2)
    assert resized.shape == (1, 2 + 18, 3)
    torch.testing.assert_close(resized[:, :2], embed[:, :2])
    torch.testing.assert_close(resized[:, 2:], torch.full((1, 18, 3), 0.5))


@pytest.mark.parametrize("out_indices", [(0, 2), (-1,), None])
def test_features_only_equals_timm(out_indices):
    ours = small(features_only=True, out_indices=out_indices)
    theirs = timm_small()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    expected = theirs.forward_intermediates(
        images(), indices=out_indices or ours.out_indices, intermediates_only=True
    )
    features = ours(images())
    for a, b, info in zip(features, expected, ours.feature_info, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
        assert a.shape == (2, info["num_chs"], 32 // info["reduction"], 32 // info["reduction"])


def test_every_parameter_of_a_features_only_model_gets_a_gradient():
    model = small(features_only=True, out_indices=(0, 1))
    sum(f.square().sum() for f in model(images())).backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # the class token only reaches a patch through a later block, so it does get one here
    assert unused == []


def test_drop_path_rates_rise_linearly_and_vanish_in_evaluation():
    model = small(drop_path_rate=0.4)
    assert [b.drop_path.rate for b in model.blocks] == pytest.approx([0.0, 0.2, 0.4])
    torch.testing.assert_close(model(images()), small()(images()))
    nearly_all = small(drop_path_rate=0.999999).train()
    block, x = nearly_all.blocks[-1], torch.randn(4, 17, 48, dtype=torch.float64)
    torch.testing.assert_close(block(x), x)  # both branches are dropped


def test_groups_for_the_optimiser():
    model = small(distilled=True)
    assert model.no_weight_decay() == {"cls_token", "dist_token", "pos_embed"}
    ids = {name: model.layer_id(name) for name, _ in model.named_parameters()}
    assert ids["pos_embed"] == ids["patch_embed.proj.weight"] == ids["dist_token"] == 0
    assert ids["blocks.2.mlp.fc1.bias"] == 3
    assert ids["norm.weight"] == ids["head_dist.bias"] == model.num_layers + 1
    assert set(ids.values()) == set(range(model.num_layers + 2))


def test_reset_classifier():
    model = small(distilled=True)
    model.reset_classifier(4)
    assert model(images()).shape == (2, 4)
    assert model.head_dist.weight.dtype == torch.float64
    model.reset_classifier(0)
    assert model(images()).shape == (2, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    model, x = VisionTransformer(SMALL).eval(), images(dtype=torch.float32)
    expected = model(x)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(model(x).float(), expected, atol=0.05, rtol=0.05)
    half = model.to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)


def test_fx_trace_is_exact():
    model = small(distilled=True)
    traced = fx.symbolic_trace(model)
    torch.testing.assert_close(traced(images(3)), model(images(3)), atol=0, rtol=0)


def test_export_with_dynamic_batch():
    model = small(distilled=True)
    program = torch.export.export(model, (images(2),), dynamic_shapes=({0: torch.export.Dim("B")},))
    torch.testing.assert_close(program.module()(images(5)), model(images(5)), atol=1e-12, rtol=0)


def test_compiles_as_one_graph():
    model = small()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()), atol=0, rtol=0)


def test_micro_variant_fits_the_zoo():
    model = VisionTransformer(VIT_VARIANTS["deit_micro_fmnist"])
    assert sum(p.numel() for p in model.parameters()) < 375_000  # 1.5 MB in fp32
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 3, 40, 32), r"40x32 px.*set to 32x32.*set_input_size\(\(40, 32\)\)"),
        (torch.zeros(1, 1, 32, 32), r"\(1, 1, 32, 32\).*expected \(B, 3, H, W\).*in_chans"),
        (torch.zeros(3, 32, 32), r"expected \(B, 3, H, W\)"),
    ],
)
def test_wrong_images_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(SMALL)(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": 30}, "img_size=30 does not split into patches of 8"),
        ({"embed_dim": 50}, "embed_dim=50 .* num_heads=3"),
        ({"attention": "triton"}, "'triton' is unknown to DeiT"),
        ({"init": "zeros"}, "'zeros' is unknown"),
        ({"features_only": True, "out_indices": (3,)}, r"out_indices=\(3,\).*-3 to 2"),
        ({"features_only": True, "distilled": True}, "features_only has no use for distilled"),
    ],
)
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(replace(SMALL, **changes))


def test_wrong_calls_are_refused():
    model = small()
    with pytest.raises(ValueError, match="window_size=7: DeiT has no windows"):
        model.set_input_size(32, window_size=7)
    with pytest.raises(ValueError, match="img_size=33 does not split"):
        model.set_input_size(33)
    with pytest.raises(ValueError, match="features_only model has no classifier"):
        small(features_only=True).reset_classifier(3)
