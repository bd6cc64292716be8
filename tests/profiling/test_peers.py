"""The four libraries compute the same function from the same weights, with nothing left at its initial value."""

import pytest
import torch

from swin_lessons.profiling.peers import SwinSpec, build, reference_model

for library in ("timm", "torchvision", "transformers"):
    pytest.importorskip(library)


def small(version):
    return SwinSpec("small", version, 32, 4, 24, (2, 2), 2, 1, 10)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("library", ["ours", "timm", "torchvision", "transformers"])
def test_equal_logits_in_float64(version, library):
    spec = small(version)
    reference = reference_model(spec).double().eval()
    model = build(library, spec, reference.state_dict()).double().eval()
    x = torch.randn(2, 1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(x)
        assert torch.allclose(getattr(output, "logits", output), reference(x), atol=1e-10)


@pytest.mark.parametrize("version", [1, 2])
def test_no_parameter_of_the_reference_is_trivial(version):
    """A gain of 0 makes a V2 block the identity; a bias of 0 hides a bias that is lost on the way."""
    for name, param in reference_model(small(version)).named_parameters():
        assert param.std() > 0.01 or param.numel() < 3, name
        assert param.abs().min() > 0, name


def test_the_reference_depends_on_its_seed_alone():
    first, again, other = (reference_model(small(2), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize("name", ["swin_base_patch4_window12_384", "swinv2_small_window16_256"])
def test_names_mean_what_timm_means(name):
    timm = pytest.importorskip("timm")
    spec = SwinSpec.from_name(name)
    with torch.device("meta"):
        named = timm.create_model(name)
        built = reference_module(spec)
    shapes = {n: p.shape for n, p in named.named_parameters()}
    assert {n: p.shape for n, p in built.named_parameters()} == shapes
    assert named.default_cfg["input_size"] == (3, spec.img_size, spec.img_size)


def reference_module(spec):
    from swin_lessons.profiling.peers import LIBRARIES

    return LIBRARIES["timm"][0](spec)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="'resnet50' is not a model that all libraries share"):
        SwinSpec.from_name("resnet50")
    weights = reference_model(small(1)).state_dict()
    with pytest.raises(ValueError, match="library='keras' is unknown: use ours, timm"):
        build("keras", small(1), weights)
    weights.pop("norm.weight")
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\]"):
        build("timm", small(1), weights)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"swin-lessons\[peers\]"):
        build("transformers", small(1), {})
