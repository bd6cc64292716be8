"""What the kernels need on each GPU may not grow unnoticed: `book/results/kernels.json` is the budget.

After a change that is worth it, `swin-lessons kernels --target sm_80 sm_86 sm_89 sm_90 --out book/results/kernels.json`
writes it anew.
"""

import json
from pathlib import Path

import pytest

from swin_lessons.kernels import compile_report
from swin_lessons.kernels.report import all_specs

triton = pytest.importorskip("triton")

BUDGET = json.loads((Path(__file__).parents[2] / "book" / "results" / "kernels.json").read_text())
ROWS = {(row["name"], row["target"], row["dtype"]): row for row in BUDGET["rows"]}
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")
SPARE = 8  # registers: another compiler release may take a few more
DOTS = ("linear", "qkv_linear", "window_attention")
INT8_DOTS = ("int8_linear", "int8_window_attention")


def test_every_kernel_is_recorded_for_every_target():
    wanted = {(s.name, target, t) for s in all_specs() for target in TARGETS for t in s.dtypes}
    assert ROWS.keys() == wanted


def test_nothing_spills():
    assert [key for key, row in ROWS.items() if row["spill_bytes"]] == []


def test_products_of_halves_use_the_matrix_units():
    halves = [row for row in ROWS.values() if row["name"].startswith(DOTS) and row["dtype"] != "fp32"]
    dots = [row for row in halves if "linear_gelu" not in row["name"] or "backward" not in row["name"]]
    assert len(dots) > 20
    assert [row["name"] for row in dots if "MMA" not in row["mma"]] == []


def test_products_of_int8_use_the_matrix_units():
    """IMMA, and on Hopper IGMMA: 32 products along the sum in one instruction."""
    rows = [row for row in ROWS.values() if row["name"].startswith(INT8_DOTS)]
    assert {row["target"] for row in rows} == set(TARGETS)
    wanted = ("IMMA.16832.S8.S8", "IGMMA.64x")
    assert [row["name"] for row in rows if not row["mma"].startswith(wanted)] == []


def test_int8_kernels_load_16_bytes():
    rows = [row for row in ROWS.values() if "int8" in row["name"] or "quantize" in row["name"]]
    assert len(rows) >= 40
    assert [row["name"] for row in rows if row["vector_bytes"] < 16] == []


def test_loads_are_wide():
    assert [key for key, row in ROWS.items() if row["vector_bytes"] < 8] == []


@pytest.mark.parametrize(
    ("target", "dtype"), [*((t, "fp16") for t in TARGETS), ("sm_80", "fp32"), ("sm_90", "bf16")]
)
def test_the_budget_is_kept(target, dtype):
    if BUDGET["provenance"]["versions"].get("triton") != triton.__version__:
        pytest.skip(f"the budget is that of triton {BUDGET['provenance']['versions'].get('triton')}")
    for row in compile_report(target=target, dtypes=(dtype,)):
        allowed = ROWS[row["name"], target, dtype]
        assert row["registers"] <= allowed["registers"] + SPARE, row
        assert row["shared_bytes"] <= allowed["shared_bytes"], row
        assert row["occupancy"] >= 0.9 * allowed["occupancy"], row
        same = ("spill_bytes", "mma", "vector_bytes")
        assert [row[key] for key in same] == [allowed[key] for key in same], row
