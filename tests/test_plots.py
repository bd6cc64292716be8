"""Figures: that they draw what they are given, and that the HTML ones stand alone and have words."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
pytest.importorskip("IPython", reason='HTML figures need `pip install "swin-lessons[book]"`')
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from PIL import Image  # noqa: E402

import swin_lessons.plots  # noqa: E402
from swin_lessons.models.windows import shift_mask  # noqa: E402
from swin_lessons.plots import growth, ledger, reach, windows  # noqa: E402
from swin_lessons.plots.glue import glue  # noqa: E402
from swin_lessons.plots.sliders import frame_slider, picture  # noqa: E402
from swin_lessons.plots.style import use_style  # noqa: E402
from swin_lessons.plots.tables import Table  # noqa: E402


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    with matplotlib.rc_context():
        use_style()
        yield
    plt.close("all")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"swin-lessons\[plots\]"):
        importlib.reload(swin_lessons.plots)


# --- tables and numbers


def test_a_table_is_text_and_html() -> None:
    table = Table(["model", "MACs"], [["T", "4.5"], ["S & B", "15.4"]], caption="a < b")
    assert repr(table).splitlines() == ["model  MACs", "T       4.5", "S & B  15.4"]
    html = table._repr_html_()
    assert ">S &amp; B</th><td>15.4</td>" in html
    assert ">a &lt; b</caption>" in html


def test_a_table_refuses_a_short_row() -> None:
    with pytest.raises(ValueError, match="2 headers"):
        Table(["a", "b"], [["only one"]])


def test_glue_does_nothing_where_there_is_no_page(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "myst_nb", None)
    glue("macs", 4.5)
    assert capsys.readouterr().out == ""


def test_glue_hands_name_and_value_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, object] = {}
    stand_in = type(sys)("myst_nb")
    stand_in.glue = lambda name, value, display: stored.update({name: value})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "myst_nb", stand_in)
    glue("macs", 4.5)
    assert stored == {"macs": 4.5}


# --- windows


@pytest.mark.parametrize("size", [(14, 14), (28, 14), (21, 35)])
@pytest.mark.parametrize("shift", [(3, 3), (0, 3), (2, 0)])
def test_the_kind_of_a_window_says_how_many_regions_its_mask_has(
    size: tuple[int, int], shift: tuple[int, int]
) -> None:
    kinds = windows.window_kinds(size, (7, 7), shift)[::7, ::7].reshape(-1)
    masks = shift_mask(*size, (7, 7), shift).numpy()
    regions = [len(np.unique(mask, axis=0)) for mask in masks]  # tokens of one region see the same keys
    assert regions == [{0: 1, 1: 2, 2: 2, 3: 4}[int(kind)] for kind in kinds]


@pytest.mark.parametrize(("shift", "first"), [((0, 0), (4, 4)), ((2, 1), (2, 1))])
def test_cuts_start_at_the_shift(shift: tuple[int, int], first: tuple[int, int]) -> None:
    _, ax = plt.subplots()
    windows.draw_cuts(ax, (12, 8), (4, 4), shift)
    rows, columns = (lines.get_segments() for lines in ax.collections)
    assert [line[0][1] for line in rows] == [y - 0.5 for y in range(first[0], 12, 4)]
    assert [line[0][0] for line in columns] == [x - 0.5 for x in range(first[1], 8, 4)]


def test_the_rolled_picture_is_the_image_rolled() -> None:
    image = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
    figure = windows.show_shift(image, (8, 8), (4, 2))
    shown = figure.axes[2].images[0].get_array()
    assert (shown[0, 0] == image[4, 2]).all()
    assert (shown[-1, -1] == image[3, 1]).all()


def test_the_padded_picture_has_whole_windows() -> None:
    figure = windows.show_padding(np.zeros((10, 17, 3), np.uint8), (4, 4), (2, 2))
    before, padded, rolled = (ax.images[0].get_array().shape[:2] for ax in figure.axes)
    assert before == (10, 17)
    assert padded == rolled == (12, 20)


def test_masks_are_drawn_white_where_attention_is_allowed() -> None:
    masks = shift_mask(14, 14, (7, 7), (3, 3)).numpy()
    figure = windows.show_kinds([np.zeros((7, 7))] * 4, masks)
    shown = figure.axes[7].images[0]  # the corner's mask
    colours = shown.to_rgba(shown.get_array())[..., 0]
    assert ((colours == 1) == masks[3]).all()


# --- reach, shapes, shares


def test_tokens_out_of_reach_stay_blank_and_weak_ones_do_not() -> None:
    strength = np.zeros((8, 8))
    strength[2, 2], strength[2, 3] = 1.0, 1e-20
    _, ax = plt.subplots()
    drawn = reach.draw_reach(ax, strength, window=4)
    assert (np.ma.getmaskarray(drawn.get_array()) == (strength == 0)).all()


def test_reach_has_one_map_for_each_network_and_depth() -> None:
    maps = [np.eye(8)] * 3
    figure = reach.show_reach([maps, maps], ["with", "without"], window=4, centre=4)
    assert [len(ax.images) for ax in figure.axes[:6]] == [1] * 6
    assert [ax.get_title() for ax in figure.axes[:3]] == ["1 block", "2 blocks", "3 blocks"]
    assert len(reach.show_pair([np.eye(8), np.eye(8)], ["a", "b"], 4).axes) == 3  # and the scale


def test_boxes_of_the_pyramid_keep_their_proportions() -> None:
    figure = ledger.show_pyramid([(56, 56, 96), (28, 14, 192)], ["1", "2"], ["", ""])
    fronts = [patch.get_xy() for patch in figure.axes[0].patches[::3]]
    widths, heights = zip(*((np.ptp(xy[:, 0]), np.ptp(xy[:, 1])) for xy in fronts), strict=True)
    assert heights[0] == pytest.approx(2 * heights[1])
    assert widths[0] == pytest.approx(4 * widths[1])


def test_shares_are_drawn_in_percent() -> None:
    figure = ledger.show_shares(["a", "b"], {"parameters": [0.25, 0.75], "MACs": [0.5, 0.5]}, "share, %")
    assert [patch.get_height() for patch in figure.axes[0].patches] == [25, 75, 50, 50]


def test_figures_are_white_so_that_dark_pages_can_show_them() -> None:
    png = picture(ledger.show_shares(["a"], {"MACs": [1.0]}, "share, %"))
    assert Image.open(io.BytesIO(png)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


# --- sliders


class Page(HTMLParser):
    """Attributes of each element by tag, and the text of the script elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, list[dict[str, str | None]]] = {}
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, []).append(dict(attributes))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
            self.inside = ""


def frames(count: int) -> list[bytes]:
    return [picture(ledger.show_shares(["a"], {"x": [0.1 * k]}, "share")) for k in range(1, count + 1)]


def slider(labels: list[str], caption: str = "A caption.") -> str:
    alts = [f"Frame {label}" for label in labels]
    return frame_slider(
        frames(len(labels)), labels, alts, id="my-slider", name="blocks", caption=caption
    ).data


def test_a_picture_is_small_and_always_the_same() -> None:
    first, second = frames(1), frames(1)
    assert first == second
    image = Image.open(io.BytesIO(first[0]))
    assert len(image.getcolors(256) or []) <= 64
    assert plt.get_fignums() == []


def test_a_slider_has_a_labelled_range_and_words_for_each_frame() -> None:
    page = Page(slider(["one", "two"]))
    (control,) = page.found["input"]
    assert (control["type"], control["min"], control["max"]) == ("range", "0", "1")
    assert page.found["label"][0]["for"] == control["id"]
    assert page.found["img"][0]["alt"] == "Frame one"
    data = json.loads(page.scripts[0])
    assert [(d["label"], d["alt"]) for d in data] == [("one", "Frame one"), ("two", "Frame two")]
    assert data[0]["src"] == page.found["img"][0]["src"]
    assert "hidden" in page.found["div"][0], "without JavaScript the control must not be there"


def test_a_slider_asks_for_no_other_file() -> None:
    html = slider(["one", "two"])
    assert "http" not in html
    assert all((i["src"] or "").startswith("data:") for i in Page(html).found["img"])


def test_words_cannot_break_out_of_a_slider() -> None:
    page = Page(slider(['</script><b id="x">', "two"], caption="<i>1 < 2</i>"))
    assert json.loads(page.scripts[0])[0]["label"] == '</script><b id="x">'
    assert "b" not in page.found
    assert "i" not in page.found


def test_a_slider_needs_words_for_each_frame() -> None:
    with pytest.raises(ValueError, match="2 frames, 1 labels"):
        frame_slider(frames(2), ["one"], ["a", "b"], id="x", name="x", caption="x")
    with pytest.raises(ValueError, match="0 frames"):
        frame_slider([], [], [], id="x", name="x", caption="x")


# --- what grows


def test_curves_by_depth_have_a_panel_a_network_and_their_bounds() -> None:
    panels = {"pre": {"a": [1, 2, 4], "b": [1, 3]}, "post": {"a": [1, 1, 1]}}
    figure = growth.show_by_depth(panels, "RMS", bound={"a": [2, 2, 2]})
    left, right = figure.axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[1, 2, 4], [1, 3]]
    assert [line.get_ydata().tolist() for line in right.lines] == [[1, 1, 1], [2, 2, 2]]
    assert left.get_xlabel() == "block, pre"
    assert left.get_yscale() == "log"


def test_what_is_possible_is_a_line_in_its_panel_alone() -> None:
    panels = {"score": {"dot": [1, 4]}, "entropy": {"dot": [2, 0]}}
    figure = growth.show_against_scale([1, 2], panels, most={"entropy": 2.5}, log="score")
    score, entropy = figure.axes
    assert (len(score.lines), len(entropy.lines)) == (1, 2)
    assert (score.get_yscale(), entropy.get_yscale()) == ("log", "linear")


def test_accuracies_are_drawn_in_percent_over_the_windows_they_are_of() -> None:
    figure = growth.show_transfer([4, 8, 12], {"table": [0.9, 0.5, 0.4]}, {"table": [0.9, 0.8]})
    before, after = figure.axes
    assert before.lines[0].get_xydata().tolist() == [[4, 90], [8, 50], [12, 40]]
    assert after.lines[0].get_xydata().tolist() == [[4, 90], [8, 80]]


def test_the_right_bias_is_the_black_line() -> None:
    figure = growth.show_middle_rows({"near": {"right": [0, 1, 0], "table": [1, 1, 1]}}, trained=1)
    right, table = figure.axes[0].lines
    assert right.get_xydata().tolist() == [[-1, 0], [0, 1], [1, 0]]
    assert right.get_color() == "#222222" != table.get_color()
