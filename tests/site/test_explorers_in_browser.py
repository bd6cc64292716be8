"""The explorers in Chromium: what a click shows is what the package computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

import numpy as np

from swin_lessons.models import create_model
from swin_lessons.models.attention_maps import attention_maps
from swin_lessons.models.windows import cyclic_shift, relative_position_index, shift_mask, window_partition
from swin_lessons.plots.bias import bias_explorer
from swin_lessons.plots.explorers import attention_explorer, position_explorer, shift_explorer
from swin_lessons.plots.reach_explorer import reach_explorer
from swin_lessons.plots.scaling_explorer import LINKS, MODELS, Links, cluster_of, scaling_explorer
from swin_lessons.plots.sliders import frame_slider, png_of
from swin_lessons.training import scaling

IMAGE = np.random.default_rng(0).random((64, 64, 3))


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens HTML and returns its page; an error in a script fails the test."""
    pages: list[Any] = []
    errors: list[str] = []

    def open_page(html: str, **options: Any) -> Any:
        page = browser.new_page(**options)
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(f"<!doctype html><title>x</title><body>{html}")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []


def state(page: Any) -> dict[str, Any]:
    return json.loads(page.locator("figure").get_attribute("data-state"))


def slide(page: Any, name: str, value: int) -> None:
    page.get_by_label(name, exact=True).evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", value
    )


def pick(page: Any, board: int, row: int, column: int, rows: int, columns: int) -> None:
    box = page.locator("canvas").nth(board).bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows
    )


def keys_of(token: tuple[int, int], window: int, shift: int, side: int = 8) -> list[int]:
    """Raster positions that a token attends to, from the package's partition and mask."""
    raster = torch.arange(side * side).reshape(1, side, side, 1)
    order = window_partition(cyclic_shift(raster, (shift, shift)), (window, window)).squeeze(-1)
    mask = shift_mask(side, side, (window, window), (shift, shift))
    which, place = (order == token[0] * side + token[1]).nonzero()[0]
    return sorted(order[which][mask[which, place]].tolist())


@pytest.mark.parametrize(("window", "shift"), [(4, 0), (4, 1), (4, 2), (4, 3), (2, 0), (2, 1)])
def test_the_shift_explorer_shows_the_packages_mask(show, window, shift):
    page = show(shift_explorer(IMAGE).data)
    slide(page, "Window", (2, 4).index(window))
    slide(page, "Shift", shift)
    for token in [(0, 0), (1, 5), (7, 7), (3, 2), (6, 0)]:
        pick(page, 0, *token, 8, 8)
        found = state(page)
        assert (found["window"], found["shift"], found["token"]) == (window, shift, list(token))
        assert found["seen"] == keys_of(token, window, shift)
        assert (
            f"attends to {len(found['seen'])} of the {window**2}"
            in page.locator("output[aria-live]").inner_text()
        )


def test_the_rolled_map_picks_the_same_token(show):
    page = show(shift_explorer(IMAGE).data)
    pick(page, 1, 0, 0, 8, 8)  # first in the rolled map with shift 2
    assert state(page)["token"] == [2, 2]


def test_without_the_mask_a_token_sees_its_whole_window(show):
    page = show(shift_explorer(IMAGE).data)
    assert len(state(page)["seen"]) == 8
    page.get_by_label("mask", exact=True).uncheck()
    assert len(state(page)["seen"]) == 16


def test_arrow_keys_move_the_token_and_not_the_page(show):
    page = show(shift_explorer(IMAGE).data)
    page.locator("canvas").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert state(page)["token"] == [3, 4]
    for _ in range(9):
        page.keyboard.press("ArrowUp")
    assert state(page)["token"] == [0, 4]
    assert page.evaluate("() => scrollY") == 0


@pytest.mark.parametrize("side", [2, 4, 7])
def test_the_position_explorer_shows_the_packages_index(show, side):
    page = show(position_explorer().data)
    slide(page, "Window", (2, 3, 4, 5, 6, 7).index(side))
    pick(page, 0, side - 1, 0, side, side)
    found = state(page)
    assert found["query"] == [side - 1, 0]
    assert found["index"] == relative_position_index((side, side))[(side - 1) * side].tolist()
    page.get_by_label("The click moves the", exact=True).select_option("key")
    pick(page, 0, 0, side - 1, side, side)
    assert state(page)["key"] == [0, side - 1]
    assert (
        f"= {found['index'][side - 1]} of {(2 * side - 1) ** 2}"
        in page.locator("output[aria-live]").inner_text()
    )


def test_the_attention_explorer_shows_the_networks_weights(show):
    torch.manual_seed(0)
    model = create_model("swin_micro_fmnist").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    maps = attention_maps(model, torch.randn(2, 1, 32, 32))
    page = show(attention_explorer([IMAGE, IMAGE], ["first", "second"], maps).data)
    page.get_by_label("Image", exact=True).select_option("second")
    slide(page, "Block", 1)
    slide(page, "Head", 2)
    pick(page, 0, 5, 2, 8, 8)
    found = state(page)
    assert (found["block"], found["head"], found["token"]) == (1, 2, [5, 2])
    expected = maps[1].weights[1, 1, 5 * 8 + 2]
    assert np.abs(np.array(found["share"]) - expected.numpy()).max() <= 1 / 255
    slide(page, "Block", 2)  # a map of 4 x 4, and the same place in the image
    assert state(page)["token"] == [2, 1]
    slide(page, "Head", 0)
    expected = maps[2].weights[1, :, 2 * 4 + 1].mean(0)
    assert np.abs(np.array(state(page)["share"]) - expected.numpy()).max() <= 1 / 255


@pytest.mark.parametrize("shift", [True, False])
def test_the_reach_explorer_shows_the_fields(show, shift):
    names = ["square", "wide"]
    models = [create_model("swin_micro_fmnist", img_size=size) for size in (64, (64, 96))]
    page = show(reach_explorer(models, names).data)
    page.get_by_label("Network", exact=True).select_option("wide")
    if not shift:
        page.get_by_label("shift", exact=True).uncheck()
    slide(page, "Behind block", 1)  # the second block, a map of 16 x 24
    pick(page, 0, 2, 20, 16, 24)
    found = state(page)
    assert (found["network"], found["block"], found["shift"], found["token"]) == (1, 1, shift, [2, 20])
    assert found["field"] == ([0, 7, 16, 23] if shift else [0, 3, 20, 23])
    page.keyboard.press("ArrowLeft")
    assert state(page)["token"] == [2, 19]
    assert state(page)["field"] == ([0, 7, 16, 23] if shift else [0, 3, 16, 19])
    slide(page, "Behind block", 3)  # a map of 8 x 12: the same place
    assert state(page)["token"] == [1, 9]
    assert state(page)["field"] == ([0, 11, 4, 23] if shift else [0, 7, 16, 23])
    size, share = ("12 × 20", 63) if shift else ("8 × 8", 17)
    said = page.locator("output[aria-live]").inner_text()
    assert said.endswith(f"depends on {size} of the 16 × 24 patches: {share} % of the image.")


def test_the_bias_explorer_shows_the_tables(show):
    """Two kinds, two heads, windows of 2 and 4: every number is another one."""
    rng = torch.Generator().manual_seed(0)
    windows, kinds = (2, 4), ("table", "log CPB")
    tables = {k: [torch.rand(2, 2 * w - 1, 2 * w - 1, generator=rng) for w in windows] for k in kinds}
    page = show(bias_explorer(tables, windows).data)
    page.get_by_label("Bias", exact=True).select_option("log CPB")
    page.get_by_label("Head", exact=True).select_option("2")
    means = tables["log CPB"][0].mean(dim=(1, 2))
    for window, (dy, dx), seen in [
        (2, (1, -1), True),
        (4, (1, -1), True),
        (4, (-2, 1), False),
        (4, (0, 3), False),
    ]:
        slide(page, "Window", windows.index(window))
        wide = 2 * window - 1
        pick(page, 0, dy + window - 1, dx + window - 1, wide, wide)
        found = state(page)
        expected = tables["log CPB"][windows.index(window)][1, dy + window - 1, dx + window - 1] - means[1]
        assert (found["offset"], found["seen"]) == ([dy, dx], seen)
        assert abs(found["value"] - expected.item()) < 0.006
        words = page.locator("output[aria-live]").inner_text()
        assert ("never saw" in words) is not seen
    slide(page, "Window", 0)  # an offset that the smaller window lacks is brought inside
    assert state(page)["offset"] == [0, 1]


def test_print_and_pages_without_scripts_show_the_picture(show):
    html = shift_explorer(IMAGE).data
    page = show(html)
    assert not page.locator("figure > img").is_visible()
    page.emulate_media(media="print")
    assert page.locator("figure > img").is_visible()
    assert not page.locator("canvas").first.is_visible()
    still = show(html, java_script_enabled=False)
    assert still.locator("figure > img").is_visible()
    assert not still.locator(".explorer").is_visible()


def test_a_slider_plays_and_stops_at_the_end(show):
    frames = [png_of(np.full((4, 4, 3), level)) for level in (0.0, 0.5, 1.0)]
    page = show(
        frame_slider(frames, ["one", "two", "three"], ["a", "b", "c"], id="x", name="Frame", caption="c").data
    )
    page.get_by_role("button", name="Play").click()
    page.get_by_text("three").wait_for(timeout=10_000)
    page.get_by_role("button", name="Play").wait_for(timeout=10_000)
    assert page.locator("img").get_attribute("alt") == "c"


def test_two_explorers_of_one_kind_do_not_disturb_each_other(show):
    page = show(position_explorer(id="a").data + position_explorer(id="b", start=2).data)
    read = "id => JSON.parse(document.getElementById(id).dataset.state).window"
    assert [page.evaluate(read, id) for id in "ab"] == [3, 4]
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


# --- the scaling calculator

NUMBERS = {  # label -> name here
    "Parameters (millions)": "millions",
    "A pass on one GPU (ms)": "ms",
    "Passes a step": "passes",
    "GPUs a node": "gpus",
    "Nodes": "nodes",
    "Within a node (GB/s a GPU)": "within",
    "Between nodes (GB/s a node)": "between",
    "Overlap (% of a pass)": "overlap",
    "Images a GPU and pass": "images",
}
ONE = {"millions": 28, "ms": 100, "passes": 1, "gpus": 8, "nodes": 1, "within": 300, "between": 200}
ONE |= {"overlap": 50, "images": 128}
CLUSTERS = [
    ("DDP", 4, ONE),
    ("DDP", 4, ONE | {"gpus": 1}),
    ("DDP", 2, ONE | {"millions": 3001.9, "nodes": 16, "within": 31.5, "between": 1.25, "overlap": 12.5}),
    ("DDP", 4, ONE | {"passes": 4, "nodes": 3, "between": 0.1, "ms": 71.3}),
    ("FSDP2", 2, ONE | {"millions": 196.5, "nodes": 64, "between": 1.25, "overlap": 0}),
    ("FSDP2", 4, ONE | {"passes": 2, "gpus": 4, "nodes": 2, "within": 2, "between": 9}),
]


@pytest.mark.parametrize(("method", "nbytes", "numbers"), CLUSTERS)
def test_the_calculator_is_the_package(show, method, nbytes, numbers):
    page = show(scaling_explorer().data)
    page.get_by_label("Method", exact=True).select_option(method)
    page.get_by_label("Numbers travel in", exact=True).select_option(index=[4, 2].index(nbytes))
    for label, name in NUMBERS.items():
        page.get_by_label(label, exact=True).fill(str(numbers[name]))
    links = Links(numbers["within"] * 1e9, numbers["between"] * 1e9)
    cluster = cluster_of(numbers["gpus"], numbers["nodes"], links)
    compute = numbers["passes"] * numbers["ms"] / 1000
    work = scaling.Work(
        round(numbers["millions"] * 1e6),
        compute,
        overlap=numbers["overlap"] / 100,
        passes=numbers["passes"],
        param_bytes=nbytes,
        gradient_bytes=nbytes,
    )
    step = (scaling.ddp_step if method == "DDP" else scaling.fsdp_step)(work, cluster)
    found = state(page)
    expected = {
        "bytes": step.bytes_sent,
        "communication": step.communication,
        "exposed": step.exposed,
        "total": step.total,
        "efficiency": step.efficiency,
        "images": cluster.devices * numbers["passes"] * numbers["images"] / step.total,
        "state": 16 * work.params / (1 if method == "DDP" else cluster.devices),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found["bad"] == []
    assert found["chosen"][:2] == [len(MODELS), len(LINKS)]  # "my own", since numbers were typed
    words = page.locator("output[aria-live]").inner_text()
    assert words.endswith(f"efficiency {100 * step.efficiency:.1f} %.")


def test_a_list_of_the_calculator_fills_the_numbers(show):
    page = show(scaling_explorer().data)
    for name, params in MODELS.items():
        page.get_by_label("Model", exact=True).select_option(name)
        assert page.get_by_label("Parameters (millions)").input_value() == f"{params / 1e6:.6f}".rstrip("0")
    for name, links in LINKS.items():
        page.get_by_label("Links", exact=True).select_option(name)
        for label, value in (("Within a node", links.within), ("Between nodes", links.between)):
            assert float(page.get_by_label(label).input_value()) == value / 1e9
    before = state(page)
    page.get_by_role("button", name="Start again").click()
    assert state(page)["chosen"] == [0, 3, 0, 0]
    assert state(page)["bytes"] < before["bytes"]


@pytest.mark.parametrize(
    ("label", "typed"),
    [("Nodes", "0"), ("GPUs a node", "2.5"), ("Nodes", ""), ("Overlap (% of a pass)", "101")],
)
def test_a_number_that_cannot_be_is_named_and_does_not_count(show, label, typed):
    page = show(scaling_explorer().data)
    before = state(page)
    page.get_by_label(label, exact=True).fill(typed)
    found = state(page)
    assert found.pop("bad") == [label]
    assert found.items() <= before.items()
    assert page.get_by_label(label, exact=True).get_attribute("aria-invalid") == "true"
    assert "this number cannot be" in page.locator("output[aria-live]").inner_text()


def test_the_calculator_needs_no_mouse_and_fits_a_telephone(show):
    page = show(scaling_explorer().data, viewport={"width": 360, "height": 740})
    page.get_by_label("Nodes", exact=True).focus()
    page.keyboard.press("ArrowUp")
    assert state(page)["devices"] == 24
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
