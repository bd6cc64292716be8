"""The live model in Chromium: the numbers of PyTorch, and words where it cannot run."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import live  # noqa: E402
from swin_lessons.models import create_model  # noqa: E402
from swin_lessons.models.attention_maps import attention_maps  # noqa: E402

PAGE = "book/live.html"


@pytest.fixture
def page(browser: Any, base_url: str) -> Any:
    page = browser.new_page()
    page.goto(f"{base_url}/{PAGE}")
    yield page
    page.close()


def state(page: Any) -> dict[str, Any]:
    return json.loads(page.locator("#live-swin").get_attribute("data-state"))


def load(page: Any) -> None:
    page.get_by_role("button", name="Load the model").click()
    page.wait_for_function(
        "() => JSON.parse(document.getElementById('live-swin').dataset.state).logits", timeout=60_000
    )


SET = """(e, [event, value]) => {
    if (e.options) e.selectedIndex = value; else e.value = value;
    e.dispatchEvent(new Event(event));
}"""


def choose(page: Any, name: str, value: int) -> list[float]:
    """Change a control and wait for new logits."""
    before = state(page)["logits"]
    control = page.get_by_label(name, exact=True)
    event = "change" if control.evaluate("e => e.tagName") == "SELECT" else "input"
    control.evaluate(SET, [event, value])
    wait_for_other(page, before)
    return state(page)["logits"]


def wait_for_other(page: Any, before: list[float]) -> None:
    """Until the page shows other logits than `before`."""
    read = "before => JSON.stringify(JSON.parse(document.getElementById('live-swin').dataset.state).logits) !== before"
    page.wait_for_function(read, arg=json.dumps(before, separators=(",", ":")), timeout=30_000)


KEPT = json.loads(live.SAMPLES.read_text(encoding="utf-8"))


def sample(number: int) -> torch.Tensor:
    raw = bytearray(base64.b64decode(KEPT["samples"][number]["pixels"]))
    return torch.frombuffer(raw, dtype=torch.uint8).reshape(1, 1, 32, 32).float()


@torch.no_grad()
def logits(pixels: torch.Tensor) -> list[float]:
    model = create_model(live.NAME, pretrained=True).eval()
    return model((pixels / 255 - KEPT["mean"]) / KEPT["std"])[0].tolist()


def test_logits_and_attention_are_pytorchs(page: Any) -> None:
    load(page)
    found = state(page)
    assert found["logits"] == pytest.approx(logits(sample(0)), abs=1e-3)
    maps = attention_maps(
        create_model(live.NAME, pretrained=True).eval(), (sample(0) / 255 - KEPT["mean"]) / KEPT["std"]
    )
    row, column = found["token"]
    expected = maps[0].weights[0].mean(0)[8 * row + column].tolist()
    assert found["attention"] == pytest.approx(expected, abs=1e-4)
    for number in (3, 8):
        assert choose(page, "Garment", number) == pytest.approx(logits(sample(number)), abs=1e-3)


def test_moving_and_covering_change_what_the_network_sees(page: Any) -> None:
    load(page)
    moved = torch.nn.functional.pad(sample(0), (1, 0))[..., :32]
    assert choose(page, "Right", 5) == pytest.approx(logits(moved), abs=1e-3)
    choose(page, "Right", 4)
    page.get_by_label("A click", exact=True).select_option("covers a window")
    before = state(page)["logits"]
    box = page.locator("#live-swin canvas").first.bounding_box()
    page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
    wait_for_other(page, before)
    assert state(page)["hidden"] == 1
    covered = sample(0)
    covered[..., :16, 16:] = 0
    assert state(page)["logits"] == pytest.approx(logits(covered), abs=1e-3)


def test_without_webassembly_the_page_says_so(browser: Any, base_url: str) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.WebAssembly")
    page.goto(f"{base_url}/{PAGE}")
    page.get_by_role("button", name="Load the model").click()
    page.get_by_text("This browser has no WebAssembly").wait_for(timeout=10_000)
    page.close()


def test_a_page_from_disk_says_how_to_serve_it(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / PAGE).as_uri())
    told = "python3 -m http.server -d _build/html`, then open http://localhost:8000/book/live.html"
    page.get_by_text(told).wait_for(timeout=10_000)
    assert page.get_by_role("button", name="Load the model").count() == 0
    page.close()


def test_before_the_model_is_loaded_there_are_no_scores(page: Any) -> None:
    page.get_by_role("button", name="Load the model").wait_for(timeout=10_000)
    table = page.locator("#live-swin table")
    assert KEPT["samples"][0]["name"] in table.inner_text()
    assert "%" not in table.inner_text()
    load(page)
    assert "%" in table.inner_text()
