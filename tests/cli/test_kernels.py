"""`swin-lessons kernels`: rows for people and for programs; errors that name the remedy."""

import json

import pytest

from swin_lessons.cli import main

pytest.importorskip("triton")

FIELDS = {
    "name",
    "target",
    "dtype",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "mma",
    "vector_bytes",
    "occupancy",
}


def test_rows_as_json_and_as_a_result(capsys, tmp_path):
    out = tmp_path / "kernels.json"
    command = ["kernels", "--op", "add_layer_norm[C=96]", "--target", "sm_80", "sm_90", "--dtype", "fp16"]
    assert main([*command, "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["target"]) for r in rows] == [
        (name, target)
        for target in ("sm_80", "sm_90")
        for name in ("add_layer_norm[C=96]", "add_layer_norm[C=96] backward")
    ]
    for row in rows:
        assert row.keys() >= FIELDS
        assert 16 <= row["registers"] <= 255
        assert (row["spill_bytes"], row["mma"], row["vector_bytes"]) == (0, "", 16)
        assert 0 < row["occupancy"] <= 1
    assert json.loads(out.read_text())["rows"] == rows


def test_a_table_for_people(capsys):
    assert main(["kernels", "--op", "layer_norm[C=96] backward", "--dtype", "fp32"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "kernel",
        "target",
        "dtype",
        "regs",
        "spill",
        "shared",
        "mma",
        "load",
        "occupancy",
    ]
    assert row.startswith("layer_norm[C=96] backward")
    assert " sm_80   fp32 " in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_75"], "target='sm_75': choose one of sm_80"),
        (["--op", "softmax"], "there is no kernel 'softmax'; choose one of adamw, "),
        (["--out", "."], "is a folder"),
    ],
)
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err
