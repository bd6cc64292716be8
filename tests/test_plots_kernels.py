"""Pictures of kernels: that they draw what they are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

matplotlib = pytest.importorskip("matplotlib", reason='figures need `pip install "swin-lessons[plots]"`')
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

from swin_lessons.models.windows import (  # noqa: E402
    cyclic_shift,
    pad_to_windows,
    window_partition,
)
from swin_lessons.plots import moves, programs  # noqa: E402
from swin_lessons.plots.style import use_style  # noqa: E402


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    with matplotlib.rc_context():
        use_style()
        yield
    plt.close("all")


def words(figure: Figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def boxes(figure: Figure, hatched: bool) -> int:
    patches = [p for ax in figure.axes for p in ax.patches if isinstance(p, Rectangle)]
    return sum(bool(p.get_hatch()) == hatched for p in patches)


@pytest.mark.parametrize(("n", "block", "programs_needed"), [(19, 8, 3), (8, 8, 1), (9, 4, 3)])
def test_programs_cover_the_vector_and_masks_the_rest(n: int, block: int, programs_needed: int) -> None:
    figure = programs.show_programs(n, block)
    assert sum(word.startswith("program") for word in words(figure)) == programs_needed
    assert boxes(figure, hatched=True) == 2 * (programs_needed * block - n)
    assert boxes(figure, hatched=False) == 2 * n


def test_a_tile_shows_its_padding() -> None:
    figure = programs.show_tiles(96, 16, 128)
    assert boxes(figure, hatched=True) == boxes(figure, hatched=False) == 1 + 16
    assert words(figure) == ["96 channels", "32"] * 2


def test_partial_sums_are_dealt_out_in_turn() -> None:
    text = words(programs.show_partial_sums(blocks=9, programs=3))
    assert [word for word in text if word.startswith("partial")] == [f"partial sum {i}" for i in range(3)]
    assert sum(word.startswith("rows of block") for word in text) == 9


def test_bars_carry_their_numbers() -> None:
    text = words(programs.show_bars({"before": [2.263, 1.0], "after": [0.792, 0.5]}, ["AdamW", "norm"], "GB"))
    assert [word.strip() for word in text] == ["2.263", "1", "0.792", "0.5"]


# --- tokens on their way to windows


@pytest.mark.parametrize(("size", "window", "shift"), [((6, 9), (4, 4), (2, 2)), ((7, 5), (3, 5), (1, 0))])
def test_places_are_those_of_the_package(size: tuple, window: tuple, shift: tuple) -> None:
    H, W = size
    numbers = torch.arange(1.0, H * W + 1).reshape(1, H, W, 1)  # 0 is padding
    rows = window_partition(cyclic_shift(pad_to_windows(numbers, window), shift), window)[..., 0].long()
    y, x = map(torch.from_numpy, moves.places(size, window, shift))
    assert torch.equal(rows, ((y * W + x + 1) * ((y < H) & (x < W))).long())


def test_rows_carry_the_tokens_that_they_hold() -> None:
    text = words(moves.show_rows((6, 9), (4, 4), (2, 2)))
    assert sorted(int(word) for word in text if word) == sorted([*range(54)] * 2)
    assert text.count("") == 2 * (8 * 12 - 54)


def test_the_explorer_of_rows_has_words_and_limits() -> None:
    html = moves.rows_explorer().data
    assert 'alt="Left: a padded map' in html
    assert '"size": [6, 9]' in html
    with pytest.raises(ValueError, match="use 0 to 3, and 0 to 95"):
        moves.rows_explorer(shift=4)
