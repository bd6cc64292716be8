"""The table by kind: its numbers are those of the parts, and each kind stands on the roofline."""

import gc

import pytest
import torch

from swin_lessons.models import create_model
from swin_lessons.profiling import KindRow, Roofline, count_macs, kind_table, profile_model
from swin_lessons.profiling.kinds import KINDS, REST
from swin_lessons.profiling.report import total_row
from swin_lessons.profiling.steps import images_and_labels

ROOF = Roofline("cpu", 10e9, {"fp32": 100e9, "bf16": 400e9})


def profiled(name="swin_micro_fmnist", **options):
    torch.set_num_threads(1)
    model = create_model(name)
    return model, profile_model(model, *images_and_labels(2, 1, 32, 10), ROOF, **options)


@pytest.fixture(scope="module", autouse=True)
def no_collection():
    """Collecting garbage is slow with torch loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)
        yield


@pytest.fixture(scope="module")
def trained(no_collection):
    model = create_model("swin_micro_fmnist")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.set_num_threads(1)
    made = profile_model(model, *images_and_labels(2, 1, 32, 10), ROOF, train=True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return made


@pytest.fixture(scope="module")
def inferred(no_collection):
    return profiled("swinv2_micro_fmnist")


def test_rows_are_the_kinds_in_order(trained):
    made = trained
    assert [row.kind for row in made.rows] == [*KINDS, REST]
    assert sum(row.share for row in made.rows) == pytest.approx(1)
    assert sum(row.seconds for row in made.rows) == pytest.approx(made.profiled, rel=0.01)
    assert made.covered == pytest.approx(1 - made.rows[-1].share)
    assert sum(row.saved for row in made.rows) == made.memory.activations
    assert made.peak == pytest.approx(made.memory.peak, rel=0.1)


def test_inference_counts_what_count_macs_counts(inferred):
    model, made = inferred
    assert sum(row.macs for row in made.rows) == 2 * count_macs(model, (1, 32, 32)).counted
    assert made.memory is made.peak is None
    assert all(row.backward == row.saved == 0 for row in made.rows)


def test_half_precision_has_its_own_roof():
    made = profiled(train=True, dtype="bf16")[1]
    mlp = next(row for row in made.rows if row.kind == "MLP")
    assert mlp.bound == max(2 * mlp.macs / 400e9, mlp.bytes / 10e9)
    assert mlp.limit == "memory"
    assert sum(row.saved for row in made.rows) == made.memory.activations
    assert made.peak == pytest.approx(made.memory.peak, rel=0.1)


def test_a_row_on_the_roofline():
    row = KindRow("MLP", 0.25, 0.75, 0.5, 5_000, 100, 0, 1, bound=0.5, limit="compute")
    assert row.intensity == 100.0
    assert row.roof == 0.5
    idle = KindRow("the rest", 0.1, 0.0, 0.1, 0, 0, 0, 0, bound=0.0, limit="memory")
    assert idle.intensity is None
    assert idle.roof is None
    whole = total_row([row, idle])
    assert (whole.seconds, whole.macs, whole.bound) == (pytest.approx(1.1), 5_000, 0.5)


def test_the_table_has_a_line_a_kind_and_fits_a_screen(trained, inferred):
    lines = kind_table(trained).splitlines()
    assert lines[0].split()[:5] == ["kind", "fwd", "ms", "bwd", "ms"]
    assert [line.split("  ")[0] for line in lines[1:]] == [*KINDS, REST, "total"]
    assert "100.0%" in lines[-1]
    assert max(map(len, lines)) <= 120
    inference = kind_table(inferred[1])
    assert "bwd" not in inference
    assert "kept" not in inference


def test_bad_input_is_named():
    model, (x, y) = create_model("swin_micro_fmnist"), images_and_labels(1, 1, 32, 10)
    with pytest.raises(ValueError, match="dtype='int8': choose one of fp32, bf16"):
        profile_model(model, x, y, ROOF, dtype="int8")
    with pytest.raises(ValueError, match="rounds=3 is too few"):
        profile_model(model, x, y, ROOF, rounds=3)
