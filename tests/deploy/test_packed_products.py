"""Packed products against plain arithmetic in fp64 and in integers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_lessons.deploy import products
from swin_lessons.deploy.products import FloatProduct, Int8Product, quantize

sizes = st.integers(1, 70)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["packed", "plain"])
def way(request, monkeypatch):
    """oneDNN where this machine has it, and the fallback that others get."""
    if request.param == "plain":
        monkeypatch.setattr(products, "has_packed_products", lambda: False)
        monkeypatch.setattr(products, "has_int8_products", lambda: False)
    else:
        monkeypatch.setattr(products, "PACK_FROM", 1)
    return request.param


@pytest.mark.parametrize(("M", "K", "O"), [(1, 1, 1), (49, 96, 288), (7, 33, 129), (300, 384, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_float(way, M, K, O, bias):  # noqa: E741
    x, weight, b = random(M, K), random(O, K, seed=1), random(O, seed=2) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    rows = random(M, O, seed=3)
    product = FloatProduct(weight, b, torch.float32)
    for found, expected in (
        (product(product.take(x)), exact),
        (product(x, gelu=True), F.gelu(exact)),
        (product.add_to(rows.clone(), x), rows + exact),
    ):
        torch.testing.assert_close(found.double(), expected, atol=1e-5 * K**0.5, rtol=1e-5)
    low = FloatProduct(weight, b, torch.bfloat16)
    y = low(low.take(x))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, atol=0.04 * K**0.5, rtol=0.02)


def integers(M, K, O, seed):  # noqa: E741
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (M, K), generator=generator).to(torch.uint8)
    weight = torch.randint(-127, 128, (O, K), generator=generator).to(torch.int8)
    scale = 0.001 + 0.01 * torch.rand(O, generator=generator)
    return x, weight, scale, torch.randn(O, generator=generator)


@pytest.mark.parametrize("path", ["packed", "plain"])
@settings(deadline=None, max_examples=25)
@given(M=sizes, K=sizes, O=sizes, zero=st.integers(0, 255), seed=st.integers(0, 99))
def test_int8(path, M, K, O, zero, seed):  # noqa: E741
    x, weight, scale, bias = integers(M, K, O, seed)
    product = Int8Product(weight, scale, bias, 0.03, zero)
    if path == "plain":
        product.packed, product.weight = False, weight
    exact = ((x.long() - zero) @ weight.long().T).double() * 0.03 * scale.double() + bias.double()
    torch.testing.assert_close(product(x).double(), exact, rtol=1e-6, atol=1e-5)
    rows = random(M, O, seed=seed)
    torch.testing.assert_close(product.add_to(rows.clone(), x).double(), rows + exact, rtol=1e-6, atol=1e-5)
    after = Int8Product(weight, scale, None, 0.05, 9)
    codes = product(x, gelu=True, then=after)
    assert codes.dtype == torch.uint8
    expected = (F.gelu(exact) / 0.05 + 9).round().clamp(0, 255)
    assert (codes.double() - expected).abs().max() <= 1  # a value between two codes may go either way


def test_the_largest_sums_are_exact(way):
    K = 3072
    x = torch.full((2, K), 255, dtype=torch.uint8)
    product = Int8Product(torch.full((3, K), -127, dtype=torch.int8), torch.ones(3), None, 1.0, 0)
    assert product(x).tolist() == [[-255 * 127 * K] * 3] * 2


def test_quantize(monkeypatch):
    x = torch.tensor([-1e9, -0.75, -0.25, 0.0, 0.25, 0.75, 1.25, 1e9])
    expected = [0, 8, 10, 10, 10, 12, 12, 255]  # halves round to even
    assert quantize(x, 0.5, 10).tolist() == expected
    assert quantize(x.bfloat16(), 0.5, 10).tolist() == expected
    assert quantize(x.view(2, 4).t(), 0.5, 10).tolist() == torch.tensor(expected).view(2, 4).t().tolist()
    monkeypatch.setattr(products, "_has_quantized_tensors", lambda: False)
    assert quantize(x, 0.5, 10).tolist() == expected


def test_int8_where_sums_would_saturate(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert not products.has_int8_products()
    assert not Int8Product(torch.ones(2, 2, dtype=torch.int8), torch.ones(2), None, 1.0, 128).packed
