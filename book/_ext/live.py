"""A model of the zoo that runs in the reader's browser: its ONNX file, and the figure around it.

    python book/_ext/live.py            writes book/_assets/live/ (build_site.py does it, too)
    python book/_ext/live.py samples    picks the garments once, into book/results/live_samples.json

As a Sphinx extension: `{live}` is the figure. The model is exported when the site is built, so it is never in git.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import vendor

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "book" / "_assets" / "live"
SAMPLES = ROOT / "book" / "results" / "live_samples.json"
NAME = "swin_micro_fmnist"
MADE_OF = (
    "swin_lessons/deploy/onnx.py",
    "swin_lessons/models/*.py",
    "constraints.txt",
    f"book/results/zoo/{NAME}.safetensors",
)
CAPTION = (
    "Everything here happens in your browser; nothing is sent anywhere. Pick a garment, draw one, or take an image of "
    "your own. Then click a token, cover a window, or move the image by a pixel."
)
ALT = "A garment, and in blue from where one of its tokens takes what it knows, in each of the four blocks."


def digest() -> str:
    """Hash of all that the exported model depends on."""
    files = sorted(path for pattern in MADE_OF for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def build() -> None:
    """Export the model, unless nothing has changed since."""
    stamp = FOLDER / "made_of.sha256"
    if stamp.is_file() and stamp.read_text() == digest() and (FOLDER / f"{NAME}.onnx").is_file():
        return
    from swin_lessons.deploy import export_onnx
    from swin_lessons.models import create_model

    FOLDER.mkdir(parents=True, exist_ok=True)
    export_onnx(
        create_model(NAME, pretrained=True), FOLDER / f"{NAME}.onnx", input_size=(1, 32, 32), attention=True
    )
    stamp.write_text(digest())


def pick_samples() -> None:
    """The first test image of each class, as 32 x 32 bytes."""
    from swin_lessons.data import load_dataset
    from swin_lessons.results import save_result

    data = load_dataset("fashion-mnist", split="test", img_size=32)
    first = {label: i for i, label in reversed(list(enumerate(data.labels.tolist())))}
    samples = []
    for label in sorted(first):
        image = (data[first[label]][0][0] * data.std + data.mean).clamp(0, 1)
        raw = (255 * image).round().byte().numpy().tobytes()
        samples.append({"name": data.classes[label], "pixels": base64.b64encode(raw).decode()})
    result = {
        "data": "fashion-mnist",
        "split": "test",
        "mean": data.mean.item(),
        "std": data.std.item(),
        "samples": samples,
    }
    print(save_result(SAMPLES, result))


def figure() -> str:
    """The HTML of the live model."""
    import torch

    from swin_lessons.models import create_model
    from swin_lessons.models.attention_maps import attention_maps
    from swin_lessons.plots.explorer import explorer
    from swin_lessons.plots.explorers import show_attention
    from swin_lessons.plots.sliders import picture
    from swin_lessons.plots.style import use_style

    kept = json.loads(SAMPLES.read_text(encoding="utf-8"))
    raw = bytearray(base64.b64decode(kept["samples"][0]["pixels"]))
    image = torch.frombuffer(raw, dtype=torch.uint8).reshape(1, 1, 32, 32) / 255
    maps = attention_maps(create_model(NAME, pretrained=True).eval(), (image - kept["mean"]) / kept["std"])
    use_style()
    drawn = picture(
        show_attention((1 - image[0]).expand(3, -1, -1).permute(1, 2, 0).numpy(), maps, (0.6, 0.5))
    )
    data: dict[str, Any] = {
        "side": 32,
        "inner": 28,
        "window": maps[0].window[0],
        "shifts": list(range(-4, 5)),
        "blocks": [{"size": list(m.size), "heads": m.weights.shape[1]} for m in maps],
        "classes": [sample["name"] for sample in kept["samples"]],
        "samples": kept["samples"],
        "mean": kept["mean"],
        "std": kept["std"],
        "model": f"../live/{NAME}.onnx",
        "runtime": "../vendor/ort/",
        "megabytes": megabytes(),
    }
    return explorer("live", data, id="live-swin", picture=drawn, alt=ALT, caption=CAPTION).data


def megabytes() -> int:
    """What the reader's browser loads, once asked: the model and the program that runs it."""
    files = (FOLDER / f"{NAME}.onnx", *vendor.VENDOR.glob("ort/*"))
    return round(sum(path.stat().st_size for path in files) / 1e6)


class Live(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        for path in (
            SAMPLES,
            ROOT / "swin_lessons" / "plots" / "js" / "live.js",
            ROOT / "swin_lessons" / "plots" / "js" / "core.js",
        ):
            self.env.note_dependency(str(path))
        return [nodes.raw("", figure(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("live", Live)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    pick_samples() if sys.argv[1:] == ["samples"] else build()
