"""A forward pass changes nothing, may run in several threads, and gives the same numbers in micro-batches."""

import threading

import pytest
import torch
from swin_cases import assert_near, images, readable, swin

from swin_lessons.models import attention, layout
from swin_lessons.models import swin as swin_module

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@VERSIONS
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_micro_batches_give_the_same_numbers(version, size, monkeypatch):
    model, x = swin(version).eval(), images(7, 3, 36, 36)
    calls = []
    run = model._features
    monkeypatch.setattr(model, "_features", lambda part: calls.append(len(part)) or run(part))
    with torch.no_grad():
        expected = model.forward_head(run(x))
        monkeypatch.setattr(type(model), "micro_batch_size", lambda self, x: size)
        assert_near(model(x), expected)
    assert calls == [min(size, 7 - i) for i in range(0, 7, size)]


def test_a_micro_batch_fits_the_cache_and_holds_an_image_at_least(monkeypatch):
    model = swin(1, dtype=torch.float32)
    x = images(64, 3, 32, 32, dtype=torch.float32)
    one_image = 8 * 8 * 24 * 4 * 4  # tokens x channels x ratio x bytes of the hidden layer
    for limit, expected in ((10 * one_image, 10), (one_image, 1), (1, 1)):
        monkeypatch.setattr(swin_module, "MICRO_BATCH_BYTES", limit)
        assert model.micro_batch_size(x) == expected


@pytest.mark.parametrize("mode", ["training", "gradients"])
def test_training_sees_the_whole_batch(mode, monkeypatch):
    monkeypatch.setattr(swin_module, "MICRO_BATCH_BYTES", 1)
    model = swin(1).train(mode == "training")
    calls = []
    run = model._features
    monkeypatch.setattr(model, "_features", lambda part: calls.append(len(part)) or run(part))
    with torch.set_grad_enabled(mode == "gradients"):
        model(images(4, 3, 32, 32))
    assert calls == [4]


def test_a_hook_sees_the_whole_batch(monkeypatch):
    monkeypatch.setattr(swin_module, "MICRO_BATCH_BYTES", 1)
    model, seen = swin(1).eval(), []
    model.layers[1].register_forward_hook(lambda m, inputs, output: seen.append(len(output)))
    with torch.no_grad():
        model(images(4, 3, 32, 32))
    assert seen == [4]


def snapshot(model: torch.nn.Module) -> list:
    """All that hangs on any module: names, identities, and a copy of each tensor."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            items = value.items() if isinstance(value, dict) else [(None, value)]
            for inner, item in items:
                copy = item.detach().clone() if isinstance(item, torch.Tensor) else None
                found.append((name, key, inner, id(item), copy))
    return found


@VERSIONS
@pytest.mark.parametrize("path", ["rows", "readable"])
@pytest.mark.parametrize("training", [True, False])
def test_forward_changes_nothing_in_the_module(version, path, training):
    model = swin(version, absolute_pos_embed=True, drop_path_rate=0.1).train(training)
    model = readable(model) if path == "readable" else model
    before = snapshot(model)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for size in ((32, 32), (20, 44), (4, 4)):
                model(images(2, 3, *size))
    after = snapshot(model)
    assert [entry[:4] for entry in after] == [entry[:4] for entry in before]
    for (*_, now), (*_, then) in zip(after, before, strict=True):
        assert now is None or torch.equal(now, then)


@VERSIONS
@pytest.mark.parametrize("training", [True, False])  # in training the bias is worked out at every step
def test_a_known_size_builds_nothing_and_few_sizes_are_kept(version, training):
    model = swin(version).train(training)
    caches = layout.row_layout, layout._change, layout.kind_masks, attention._built_once
    model(images(2, 3, 44, 28))
    misses = [cache.cache_info().misses for cache in caches]
    model(images(2, 3, 44, 28, seed=2))
    assert [cache.cache_info().misses for cache in caches] == misses
    assert all(cache.cache_info().maxsize is not None for cache in caches)


@VERSIONS
def test_two_threads_share_a_model(version):
    model = swin(version).eval()
    jobs = [images(1 + i % 3, 3, 12 + 8 * i, 60 - 8 * i) for i in range(6)]
    with torch.no_grad():
        expected = [readable(model)(x) for x in jobs]
    failures: list = []

    def work(order):
        try:
            with torch.no_grad():
                for i in order:
                    assert_near(model(jobs[i]), expected[i])
        except BaseException as error:  # an assertion in a thread would be lost
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(order * 3,)) for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
