"""Figures with a kernel: what a control says is what the package computes, and the lessons' lines run."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
pytest.importorskip("ipywidgets", reason='figures need `pip install "swin-lessons[plots]"`')
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import nbformat  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from swin_lessons.data.imagefolder import MEAN, STD  # noqa: E402
from swin_lessons.models import create_model  # noqa: E402
from swin_lessons.models.attention import WindowAttention  # noqa: E402
from swin_lessons.models.attention_maps import attention_maps  # noqa: E402
from swin_lessons.models.windows import relative_position_index  # noqa: E402
from swin_lessons.plots import play  # noqa: E402
from swin_lessons.plots.bias import by_offset  # noqa: E402

ROOT = Path(__file__).parents[1]
IMAGE = np.random.default_rng(0).random((40, 50, 3))


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Nothing is left open: else the notebook would show it a second time."""
    yield
    assert plt.get_fignums() == []


@pytest.fixture
def model() -> Any:
    """A small Swin with every parameter random."""
    torch.manual_seed(0)
    model = create_model("swin_micro_fmnist").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model


def put(shown: play.Play, **values: Any) -> None:
    for name, value in values.items():
        shown.controls[name].value = value


def png(shown: play.Play) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(shown._shown.value)).convert("RGB"))


# --- controls


def test_a_change_draws_once_and_within_limits() -> None:
    drawn = []

    def draw(window: int, shift: int) -> tuple[Any, str]:
        drawn.append((window, shift))
        return plt.figure(figsize=(1, 1)), f"{window} < {shift}"

    shown = play.Play(
        draw,
        lambda window, shift: {"shift": window - 1},
        window=play.slider("window", 2, 9, 9),
        shift=play.slider("shift", 0, 8, 8),
    )
    put(shown, window=3)
    put(shown, shift=1)
    assert drawn == [(9, 8), (3, 2), (3, 1)]
    assert shown.controls["shift"].max == 2
    assert shown.words == "3 < 1"
    assert shown._said.value == "3 &lt; 1"


def test_the_picture_is_that_of_the_figure() -> None:
    shown = play.play_position()
    before = png(shown)
    put(shown, window=5)
    assert (png(shown) != 255).any()
    assert before.tobytes() != png(shown).tobytes()


def test_without_ipywidgets_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "swin_lessons.plots.play")
    with pytest.raises(ImportError, match=r"ipywidgets.*swin-lessons\[plots\]"):
        importlib.import_module("swin_lessons.plots.play")


# --- windows, shift and mask


def keys_by_definition(token: tuple[int, int], tokens: int, window: int, shift: int) -> np.ndarray:
    """Tokens of the same window where it truly lies: cut at shift, shift + window, ..."""
    number = (np.arange(tokens) - shift) // window
    return (number == number[token[0]])[:, None] & (number == number[token[1]])[None, :]


@pytest.mark.parametrize(("window", "shift"), [(4, 0), (4, 1), (4, 3), (2, 1), (6, 3)])
def test_the_shift_figure_shows_the_mask(window: int, shift: int) -> None:
    shown = play.play_shift(IMAGE, tokens=12)
    put(shown, window=window, shift=shift)
    for row, column in [(0, 0), (1, 5), (11, 11), (3, 2), (11, 0)]:
        put(shown, row=row, column=column)
        _, middle, right = shown.figure.axes
        clear = middle.images[-1].get_array()[..., 3] == 0
        expected = keys_by_definition((row, column), 12, window, shift)
        assert np.array_equal(clear, expected)
        assert np.array_equal(
            right.images[-1].get_array()[..., 3] == 0, np.roll(expected, (-shift, -shift), (0, 1))
        )
        hidden = f"hides {window**2 - expected.sum()}" if expected.sum() < window**2 else "of its window."
        assert f"attends to {expected.sum()} of the {window**2}" in shown.words
        assert hidden in shown.words


def test_without_the_mask_a_token_sees_its_whole_window() -> None:
    shown = play.play_shift(IMAGE)
    put(shown, row=0, column=0, mask=False)
    assert shown.words == "Token (0, 0) attends to 16 of the 16 tokens of its window."
    clear = shown.figure.axes[1].images[-1].get_array()[..., 3] == 0
    assert sorted(zip(*np.nonzero(clear), strict=True))[-1] == (7, 7)


def test_tokens_that_no_window_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no window tiles tokens=7: take a number with divisors"):
        play.play_shift(IMAGE, tokens=7)


# --- the relative position index


@pytest.mark.parametrize("window", [2, 4, 7])
def test_the_position_figure_shows_the_index(window: int) -> None:
    shown = play.play_position()
    query, key = (window - 1, 0), (0, window - 1)
    put(shown, window=window, query_row=query[0], query_column=0, key_row=0, key_column=key[1])
    index = relative_position_index((window, window))[query[0] * window]
    keys, table = shown.figure.axes
    assert [int(t.get_text()) for t in keys.texts] == index.tolist()
    assert sorted(index.tolist()) == np.flatnonzero(table.images[0].get_array()).tolist()
    entry = int(index[window - 1])
    assert shown.words == f"Query {query} and key {key} use entry {entry} of {(2 * window - 1) ** 2}."
    (framed,) = table.patches
    assert framed.get_xy() == (entry % (2 * window - 1) - 0.5, entry // (2 * window - 1) - 0.5)


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="largest=1"):
        play.play_position(1)


# --- attention


def test_the_attention_figure_shows_the_weights(model: Any) -> None:
    images = torch.randn(2, 1, 32, 32)
    shown = play.play_attention(model, images, ["first", "second"])
    maps = attention_maps(model, images)
    put(shown, image=1, block=2, head=2, row=5, column=2)
    share = maps[1].weights[1, 1, 5 * 8 + 2].reshape(8, 8).numpy()
    (ax,) = shown.figure.axes
    assert ax.get_title() == "block 2, head 2"
    np.testing.assert_allclose(ax.images[1].get_array().filled(0), share, rtol=0, atol=1e-6)
    best = tuple(int(i) for i in np.unravel_index(share.argmax(), share.shape))
    assert shown.words == (
        f"Token (5, 2) takes from {(share > 0).sum()} tokens; most, {share.max():.0%}, from {best}."
    )
    put(shown, block=3, head=0)  # a map of 4 x 4, and the same place in the image
    mean = maps[2].weights[1].mean(0)[2 * 4 + 1].reshape(4, 4).numpy()
    np.testing.assert_allclose(ax_of(shown).images[1].get_array().filled(0), mean, rtol=0, atol=1e-6)
    assert shown.controls["head"].max == maps[2].weights.shape[1]


def ax_of(shown: play.Play) -> Any:
    return shown.figure.axes[0]


def test_images_without_names_and_networks_without_windows_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"1 names for images \(2, 1, 32, 32\)"):
        play.play_attention(model, torch.zeros(2, 1, 32, 32), ["one"])
    with pytest.raises(ValueError, match="no window attention"):
        play.play_attention(create_model("deit_micro_fmnist"), torch.zeros(1, 1, 32, 32), ["one"])


# --- the bias of V2


@pytest.mark.parametrize("window", [3, 4, 8, 16])
def test_the_bias_figure_shows_the_networks_bias(window: int) -> None:
    model = create_model("swinv2_micro_fmnist", pretrained=True)
    shown = play.play_bias(model)
    put(shown, block=2, head=2, window=window)
    attn = [m for m in model.modules() if isinstance(m, WindowAttention)][1]
    trained, now = (by_offset(attn.relative_position_bias((w, w)).detach(), w)[1] for w in (4, window))
    (line,) = shown.figure.axes[1].lines
    assert line.get_xdata().tolist() == list(range(1 - window, window))
    np.testing.assert_allclose(line.get_ydata(), (now - trained.mean())[window - 1], rtol=0, atol=1e-5)
    rise = now[window - 1, -1] - now[window - 1, window - 1]
    assert f"the offset (0, {window - 1}) has {rise:+.2f} against (0, 0)" in shown.words


def test_a_bias_needs_a_v2(model: Any) -> None:
    with pytest.raises(ValueError, match=r"no continuous position bias.*swinv2"):
        play.play_bias(model)


# --- reach


def field_by_windows(depth: int, place: int, grid: int, window: int, shift: int) -> tuple[int, int]:
    """First and last token of an axis that token `place` depends on, behind blocks of one stage."""
    low = high = place
    for i in reversed(range(depth)):
        s = shift if i % 2 else 0
        low, high = (low - s) // window * window + s, (high - s) // window * window + s + window - 1
    return max(low, 0), min(high, grid - 1)


@pytest.mark.parametrize(
    ("block", "place", "window"), [(1, 7, 4), (2, 8, 4), (2, 0, 4), (2, 9, 2), (2, 5, 8)]
)
def test_the_reach_figure_shows_what_windows_allow(block: int, place: int, window: int) -> None:
    model = create_model("swin_micro_fmnist", img_size=64)  # 16 x 16 tokens
    before = {name: p.clone() for name, p in model.state_dict().items()}
    shown = play.play_reach(model)
    put(shown, block=block, place=place, window=window)
    for ax, shift in zip(shown.figure.axes, (window // 2, 0), strict=False):
        low, high = field_by_windows(block, place, 16, window, shift)
        expected = np.zeros((16, 16), bool)
        expected[low : high + 1, low : high + 1] = True
        assert np.array_equal(~np.ma.getmaskarray(ax.images[0].get_array()), expected)
        assert f"on {4 * (high - low + 1)} × {4 * (high - low + 1)} px" in shown.words
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_later_stages_see_the_same_place() -> None:
    shown = play.play_reach(create_model("swin_micro_fmnist", img_size=64))
    put(shown, block=4, place=15)
    (line,) = ax_of(shown).lines
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (15, 15)
    assert (~np.ma.getmaskarray(ax_of(shown).images[0].get_array()))[15, 15]


def test_only_a_swin_has_a_reach() -> None:
    with pytest.raises(ValueError, match="Linear is no SwinTransformer"):
        play.play_reach(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


# --- pictures


def test_pictures_of_every_kind_are_fitted(tmp_path: Path) -> None:
    grey = (255 * IMAGE[..., 0]).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    for image in (IMAGE, grey, grey[..., None], np.dstack([IMAGE, np.ones((40, 50))]), tmp_path / "grey.png"):
        found = play.fitted(image, (16, 24))
        assert (found.shape, found.dtype) == ((16, 24, 3), np.uint8)
    assert np.array_equal(play.fitted(grey[:, 5:45], (40, 40), 1)[..., 0], grey[:, 5:45])
    assert np.array_equal(play.fitted(grey, (40, 40), 1)[..., 0], grey[:, 5:45])


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4, 2)), 300 * np.ones((4, 4, 3)), np.zeros((0, 4, 3)), np.zeros(4)]
)
def test_what_is_no_image_is_refused(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"is no image: give \(H, W, 3\)"):
        play.play_shift(image)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jpg: cannot be read"):
        play.play_shift("nowhere.jpg")


def test_a_batch_is_normalised_as_the_data_set() -> None:
    swin = create_model("swin_tiny_patch4_window7_224", embed_dim=24, img_size=64)
    batch = play.batch_of([np.full((64, 64, 3), 51, np.uint8)], swin)
    expected = (0.2 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(batch, expected.reshape(1, 3, 1, 1).expand(1, 3, 64, 64))
    data = type("Data", (), {"mean": torch.tensor([0.1]), "std": torch.tensor([0.5])})
    grey = play.batch_of([IMAGE, IMAGE], create_model("swin_micro_fmnist"), data)
    assert grey.shape == (2, 1, 32, 32)
    assert -0.2 <= grey.min() < grey.max() <= 1.8
    with pytest.raises(ValueError, match="no pictures"):
        play.batch_of([], swin)


# --- the lines in the lessons

DROPDOWN = re.compile(r"^:::\{admonition\} With a kernel.*?^```python\n(.+?)^```", re.MULTILINE | re.DOTALL)
OFFERED = {
    "01": {"play_shift"},
    "02": {"play_position", "play_attention"},
    "03": {"play_reach"},
    "05": {"play_bias"},
}


def offered(path: Path) -> list[str]:
    """The lines to run of each drop-down of a lesson."""
    cells = nbformat.read(path, as_version=4).cells
    return [code for c in cells if c.cell_type == "markdown" for code in DROPDOWN.findall(c.source)]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda path: path.stem
)
def test_the_lines_of_the_lessons_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the names that the lesson has by then, and with a picture of the reader's."""
    codes = offered(path)
    assert set(re.findall(r"\bplay_\w+(?=\()", "\n".join(codes))) >= OFFERED.get(path.stem[:2], set())
    monkeypatch.chdir(tmp_path)
    Image.fromarray((255 * IMAGE).astype(np.uint8)).save("my_picture.jpg")
    data = type("Data", (), {"mean": torch.tensor([0.286]), "std": torch.tensor([0.353])})
    for code in codes:
        known = {"create_model": create_model, "model": create_model("swin_micro_fmnist"), "test_set": data}
        *before, last = code.strip().splitlines()
        exec("\n".join(before), known)
        assert isinstance(eval(last, known), play.Play)
