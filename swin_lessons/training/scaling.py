"""What several devices cost: bytes sent in a step, and how long they take beside the computation.

A calculator for a reader's own cluster. All bytes are those that one device sends; it receives as many.

>>> cluster = Cluster(devices=8, bandwidth=100e9)
>>> work = Work(params=28_288_354, compute_seconds=0.1)
>>> ddp_step(work, cluster).total

The ring algorithms' volumes are those of NCCL (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). An
`all-reduce` is a reduce-scatter and an all-gather, so it costs as much as the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4  # bytes


@dataclass(frozen=True)
class Cluster:
    """Devices that work together.

    Attributes:
        devices: how many.
        bandwidth: bytes a second that a device sends while all send: the slowest link of the ring.
        latency: seconds to start one message; a ring of n devices takes n - 1 steps a collective, twice for an
            all-reduce.
    """

    devices: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check("devices", self.devices, self.devices >= 1, "1 or more")
        _check("bandwidth", self.bandwidth, self.bandwidth > 0, "bytes a second above 0")
        _check("latency", self.latency, self.latency >= 0, "seconds, 0 or more")


@dataclass(frozen=True)
class Work:
    """What one device does in a step.

    Attributes:
        params: trainable parameters of the model.
        compute_seconds: a whole step on one device alone, with all its passes and the optimiser.
        overlap: part of that time during which the network can be busy too. With DDP it is the backward pass, about
            2/3 of a step without its last gradients; 0 for nothing.
        passes: forward and backward passes a step (gradient accumulation).
        param_bytes, gradient_bytes: of one value on its way: 4 for fp32, 2 for bf16 and fp16.
        buckets: how many collectives carry the gradients (DDP) or the blocks (FSDP), for the latency.
    """

    params: int
    compute_seconds: float
    overlap: float = 0.0
    passes: int = 1
    param_bytes: float = FP32
    gradient_bytes: float = FP32
    buckets: int = 1

    def __post_init__(self) -> None:
        _check("params", self.params, self.params >= 1, "1 or more")
        _check("compute_seconds", self.compute_seconds, self.compute_seconds > 0, "seconds above 0")
        _check("overlap", self.overlap, 0 <= self.overlap <= 1, "a part of the step from 0 to 1")
        _check("passes", self.passes, self.passes >= 1, "1 or more")
        _check("param_bytes", self.param_bytes, self.param_bytes > 0, "bytes above 0")
        _check("gradient_bytes", self.gradient_bytes, self.gradient_bytes > 0, "bytes above 0")
        _check("buckets", self.buckets, self.buckets >= 1, "1 or more")


@dataclass(frozen=True)
class StepTime:
    """A step on several devices, in seconds and bytes.

    Attributes:
        compute: a device's own work.
        communication: the network's, were it alone.
        exposed: the part of `communication` that nothing hides.
        bytes_sent: by each device.
    """

    compute: float
    communication: float
    exposed: float
    bytes_sent: float

    @property
    def total(self) -> float:
        """Seconds from one step to the next."""
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """Part of the time that computes: images a second of n devices over n times those of one."""
        return self.compute / self.total


def _check(name: str, value: float, valid: bool, remedy: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value!r}: use {remedy}")


def all_gather_bytes(size: float, devices: int) -> float:
    """Bytes that each of n devices sends to give all of them a tensor of `size` bytes: (n - 1) / n of it."""
    return (devices - 1) / devices * size


def reduce_scatter_bytes(size: float, devices: int) -> float:
    """Bytes each sends to sum n tensors of `size` bytes and keep 1/n of the sum: (n - 1) / n of one."""
    return (devices - 1) / devices * size


def all_reduce_bytes(size: float, devices: int) -> float:
    """Bytes each sends to sum n tensors of `size` bytes and have the sum everywhere: 2 (n - 1) / n of one."""
    return reduce_scatter_bytes(size, devices) + all_gather_bytes(size, devices)


def ddp_step(work: Work, cluster: Cluster) -> StepTime:
    """DDP: one all-reduce of all gradients a step, in the last pass; the other passes send nothing (`no_sync`).

    It can hide behind the last pass's backward alone, so `overlap` is divided by the passes.
    """
    n = cluster.devices
    sent = all_reduce_bytes(work.params * work.gradient_bytes, n)
    messages = 2 * (n - 1) * work.buckets
    return _step(work, cluster, sent, messages, hidden=work.overlap / work.passes)


def fsdp_step(work: Work, cluster: Cluster) -> StepTime:
    """FSDP2: in each pass the weights are gathered forward and again backward; gradients are reduced in the last.

    A device holds 1/n of the weights between their uses. Blocks are gathered ahead of time, so all of a step's
    `overlap` counts. Without accumulation that is 1.5 times DDP's volume, where values have one size.
    """
    n = cluster.devices
    gathered = 2 * work.passes * all_gather_bytes(work.params * work.param_bytes, n)
    reduced = reduce_scatter_bytes(work.params * work.gradient_bytes, n)
    messages = (2 * work.passes + 1) * (n - 1) * work.buckets
    return _step(work, cluster, gathered + reduced, messages, hidden=work.overlap)


def _step(work: Work, cluster: Cluster, sent: float, messages: int, hidden: float) -> StepTime:
    communication = sent / cluster.bandwidth + messages * cluster.latency
    exposed = max(0.0, communication - hidden * work.compute_seconds)
    return StepTime(work.compute_seconds, communication, exposed, sent)


def speedup_on_several(speedup: float, exposed: float) -> float:
    """What is left on several devices of a `speedup` on one, where each step also waits for the network.

    `exposed` is that wait over the slow version's step on one device; both versions wait as long. The time that
    a faster kernel saves is the same, but it is a smaller part of the whole (Amdahl's law):
    (1 + exposed) / (1 / speedup + exposed).
    """
    _check("speedup", speedup, speedup > 0, "a factor above 0")
    _check("exposed", exposed, exposed >= 0, "a part of the slow step, 0 or more")
    return (1 + exposed) / (1 / speedup + exposed)


def exposed_from_speedups(one: float, several: float) -> float:
    """The wait that makes of a speed-up on `one` device that on `several`: the inverse of `speedup_on_several`.

    It is a part of the slow version's step on one device. The article's 2.85 and 2.32 give 0.141: a wait of 14 % of
    the slow step, which is 40 % of the fast one.

    Raises:
        ValueError: the speed-up does not fall towards 1, so a wait does not explain it.
    """
    _check("several", several, 1 < several <= one, f"a factor above 1 and at most the one device's, {one!r}")
    return (1 - several / one) / (several - 1)
