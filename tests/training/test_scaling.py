"""The calculator against numbers worked out by hand."""

import pytest

from swin_lessons.training.scaling import (
    Cluster,
    Work,
    all_gather_bytes,
    all_reduce_bytes,
    ddp_step,
    exposed_from_speedups,
    fsdp_step,
    reduce_scatter_bytes,
    speedup_on_several,
)


def test_ring_volumes():
    assert all_gather_bytes(800, 8) == reduce_scatter_bytes(800, 8) == 700
    assert all_reduce_bytes(800, 8) == 1400
    assert all_reduce_bytes(800, 2) == 800
    assert all_reduce_bytes(800, 1) == 0


def ring_all_reduce(values):
    """Sum vectors by the ring algorithm, chunk by chunk, and count the values that each device sends."""
    n = len(values)
    sent = [0] * n
    for phase, combine in enumerate((lambda mine, theirs: mine + theirs, lambda mine, theirs: theirs)):
        for step in range(n - 1):
            moves = [(d, (d - step + phase) % n) for d in range(n)]
            chunks = [values[d][c] for d, c in moves]
            for (d, c), chunk in zip(moves, chunks, strict=True):
                sent[d] += 1
                values[(d + 1) % n][c] = combine(values[(d + 1) % n][c], chunk)
    return values, sent


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_formula_counts_what_a_ring_sends(n):
    values, sent = ring_all_reduce([[10 * d + c for c in range(n)] for d in range(n)])
    expected = [sum(10 * d + c for d in range(n)) for c in range(n)]
    assert values == [expected] * n
    assert sent == [all_reduce_bytes(n, n)] * n


def test_ddp_by_hand():
    """1 M parameters in fp32 on 4 devices: 2 * 3/4 * 4 MB = 6 MB at 1 GB/s are 6 ms; 6 messages of 0.1 ms."""
    step = ddp_step(Work(params=1_000_000, compute_seconds=0.010), Cluster(4, 1e9, latency=1e-4))
    assert step.bytes_sent == 6e6
    assert step.communication == pytest.approx(6.6e-3)
    assert step.exposed == pytest.approx(6.6e-3)
    assert step.total == pytest.approx(16.6e-3)
    assert step.efficiency == pytest.approx(10 / 16.6)


def test_overlap_hides_what_fits_behind_it():
    work = Work(params=1_000_000, compute_seconds=0.010, overlap=0.5)
    assert ddp_step(work, Cluster(4, 1e9)).exposed == pytest.approx(1e-3)  # 6 ms behind 5 ms
    assert ddp_step(work, Cluster(4, 2e9)).exposed == 0  # 3 ms behind 5 ms


def test_accumulation_sends_gradients_once_but_hides_less():
    work = Work(params=1_000_000, compute_seconds=0.040, overlap=0.5, passes=4)
    step = ddp_step(work, Cluster(4, 1e9))
    assert step.bytes_sent == 6e6
    assert step.exposed == pytest.approx(1e-3)  # 6 ms behind half of the last pass's 10 ms


def test_fsdp_by_hand():
    """Weights twice in bf16, 2 * 3/4 * 2 MB = 3 MB, and gradients once in fp32, 3/4 * 4 MB = 3 MB."""
    work = Work(params=1_000_000, compute_seconds=0.010, param_bytes=2)
    step = fsdp_step(work, Cluster(4, 1e9, latency=1e-4))
    assert step.bytes_sent == 6e6
    assert step.communication == pytest.approx(6e-3 + 9e-4)
    four = Work(params=1_000_000, compute_seconds=0.010, param_bytes=2, passes=4)
    assert fsdp_step(four, Cluster(4, 1e9)).bytes_sent == 15e6


def test_fsdp_sends_half_as_much_again_as_ddp():
    work, cluster = Work(params=7, compute_seconds=1.0), Cluster(8, 1.0)
    assert fsdp_step(work, cluster).bytes_sent == pytest.approx(1.5 * ddp_step(work, cluster).bytes_sent)


@pytest.mark.parametrize("step", [ddp_step, fsdp_step])
def test_one_device_sends_nothing(step):
    time = step(Work(params=10**6, compute_seconds=0.01), Cluster(1, 1e9, latency=1.0))
    assert (time.bytes_sent, time.exposed, time.efficiency) == (0, 0, 1)


def test_the_article_s_drop():
    """One GPU 2.85x, eight 2.32x: x = (1 - 2.32/2.85) / 1.32 = 0.1409 of the slow step, 0.4015 of the fast one."""
    exposed = exposed_from_speedups(2.85, 2.32)
    assert exposed == pytest.approx(0.14088, abs=1e-5)
    assert exposed * 2.85 == pytest.approx(0.40152, abs=1e-5)
    assert speedup_on_several(2.85, exposed) == pytest.approx(2.32)
    assert speedup_on_several(2.85, 0) == 2.85


def test_both_ways_to_the_several_devices_speedup_agree():
    """Two runs by `ddp_step`, slow and fast, wait as long; their ratio is `speedup_on_several`."""
    cluster = Cluster(8, 10e9)
    slow, fast = (ddp_step(Work(28_288_354, seconds), cluster) for seconds in (0.2, 0.2 / 2.85))
    assert slow.total / fast.total == pytest.approx(speedup_on_several(2.85, slow.exposed / 0.2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0, 1e9), "devices is 0: use 1 or more"),
        (lambda: Cluster(2, 0), "bandwidth is 0: use bytes a second above 0"),
        (lambda: Cluster(2, 1, -1), "latency is -1: use seconds"),
        (lambda: Work(0, 1), "params is 0"),
        (lambda: Work(1, 0), "compute_seconds is 0"),
        (lambda: Work(1, 1, overlap=2), "overlap is 2: use a part of the step from 0 to 1"),
        (lambda: Work(1, 1, passes=0), "passes is 0"),
        (lambda: exposed_from_speedups(2.0, 2.5), "several is 2.5: use a factor above 1 and at most .* 2.0"),
        (lambda: exposed_from_speedups(2.0, 0.9), "several is 0.9"),
        (lambda: speedup_on_several(0, 0.1), "speedup is 0"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
