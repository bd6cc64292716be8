"""A calculator for the reader's own cluster: how far a training step scales, from `training.scaling`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from IPython.display import HTML
from matplotlib.figure import Figure

from swin_lessons.training.scaling import Cluster, StepTime, Work, ddp_step

from .explorer import explorer
from .sliders import picture
from .style import CYCLE

CAPTION = (
    "A step on your own GPUs. Put in what you know. Dark blue: a GPU computes. Light blue: the network sends while it "
    "computes, which costs nothing. Orange: the GPU waits. All of it is arithmetic with peak rates: an upper bound, "
    "not a measurement."
)
ALT = (
    "Efficiency against the number of GPUs: flat near 100 % for fast links, and falling early for slow ones."
)
NODES = (1, 2, 4, 8, 16, 32, 64)
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

MODELS = {
    "Swin-T (28 M)": 28_288_354,
    "Swin-S (50 M)": 49_606_258,
    "Swin-B (88 M)": 87_768_224,
    "Swin-L (197 M)": 196_532_476,
    "SwinV2-G (3.0 B)": 3_001_912_008,
}


@dataclass(frozen=True)
class Links:
    """What joins GPUs, in bytes a second and one direction.

    Attributes:
        within: what a GPU sends to its neighbours of the same node.
        between: what a whole node sends to others.
    """

    within: float
    between: float


LINKS = {  # peaks of the makers; no ring reaches them whole
    "NVLink 3, 8 × 200 Gb/s": Links(300e9, 200e9),
    "NVLink 4, 8 × 400 Gb/s": Links(450e9, 400e9),
    "PCIe 4.0 × 16, 100 Gb/s": Links(31.5e9, 12.5e9),
    "PCIe 4.0 × 16, 10 Gb/s": Links(31.5e9, 1.25e9),
}


@dataclass(frozen=True)
class Start:
    """What the calculator shows first.

    Attributes:
        images, milliseconds: of a pass on one GPU.
        gpus: of a node.
        nodes: how many.
        overlap: percent of a pass.
        links: which of the list, from 0.
    """

    images: int = 128
    milliseconds: float = 100.0
    gpus: int = 8
    nodes: int = 2
    overlap: float = 50.0
    links: int = 3


START = Start()


def cluster_of(gpus: int, nodes: int, links: Links) -> Cluster:
    """`nodes` machines of `gpus` GPUs as one ring.

    NCCL lays several rings, and each enters and leaves a node through another card. So all GPUs of a node share its
    cards, and together the rings run at the speed of the slower: a GPU's link within, or the node's cards together.
    """
    slowest = links.within if nodes == 1 else min(links.within, links.between)
    return Cluster(gpus * nodes, slowest)


def scaling_explorer(
    *,
    models: Mapping[str, int] = MODELS,
    links: Mapping[str, Links] = LINKS,
    start: Start = START,
    id: str = "explore-scaling",
) -> HTML:
    """The calculator.

    Args:
        models: name -> parameters, to choose from.
        links: name -> bandwidths, to choose from.
        start: the numbers shown first.
        id: of the figure, its own on a page.
    """
    data = {
        "models": [{"name": name, "params": params} for name, params in models.items()],
        "links": [
            {"name": name, "within": pair.within / 1e9, "between": pair.between / 1e9}
            for name, pair in links.items()
        ],
        "start": vars(start),
    }
    work = Work(next(iter(models.values())), start.milliseconds / 1000)
    curves = {
        name: [ddp_step(work, cluster_of(start.gpus, n, pair)) for n in NODES] for name, pair in links.items()
    }
    drawn = picture(show_scaling(curves, [start.gpus * n for n in NODES]))
    return explorer("scaling", data, id=id, picture=drawn, alt=ALT, caption=CAPTION)


def show_scaling(curves: Mapping[str, Sequence[StepTime]], devices: Sequence[int]) -> Figure:
    """Efficiency against the number of GPUs, a line for each name."""
    figure, ax = plt.subplots(figsize=(7.4, 3.0))
    for (name, steps), colour, style in zip(curves.items(), CYCLE, STYLES, strict=False):
        shares = [100 * step.efficiency for step in steps]
        ax.plot(devices, shares, color=colour, linestyle=style, marker="o", markersize=4, label=name)
    ax.set_xscale("log", base=2)
    ax.set(xticks=devices, xticklabels=[str(n) for n in devices], ylim=(0, 104))
    ax.set(xlabel="GPUs", ylabel="efficiency in %")
    ax.legend(loc="center right", bbox_to_anchor=(1.0, 0.44))  # between the lines, which fall at the left
    return figure
