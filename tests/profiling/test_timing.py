"""compare(): order, clocks and statistics. The tests move the clocks by hand: nothing here measures time."""

import gc
import json
import random
import statistics

import pytest
import torch

from swin_lessons.profiling import timing
from swin_lessons.profiling.timing import Comparison, Timer, Timing, cache_bytes, compare, rotating


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; call `clock.run(wall, cpu)` to let time pass."""

    class Clock:
        wall = cpu = 0.0

        def run(self, wall, cpu):
            self.wall, self.cpu = self.wall + wall, self.cpu + cpu

    fake = Clock()
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # slow with torch loaded
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.wall)
    monkeypatch.setattr(timing.time, "process_time", lambda: fake.cpu)
    return fake


def test_medians_and_ratios_under_drift(clock):
    """The machine gets slower all the time; a ratio of turns in one round still tells the truth."""
    drift = iter(range(1, 1000))
    fns = {"a": lambda: clock.run(next(drift) * 2.0, 1.0), "b": lambda: clock.run(next(drift) * 1.0, 3.0)}
    result = compare(fns, rounds=31, warmup=0)
    assert result.ratio("b") == pytest.approx(0.5, rel=0.05)
    assert result.ratio("b", "cpu") == pytest.approx(3.0)
    assert result.speedup("b") == pytest.approx(2.0, rel=0.05)
    assert result.ratio("a") == 1.0
    assert result.timings["a"].median == statistics.median(result.timings["a"].wall)


def test_each_round_runs_all_in_a_new_order(clock):
    seen = []
    fns = {name: lambda name=name: (seen.append(name), clock.run(1, 1)) for name in "abcd"}
    compare(fns, rounds=10, warmup=0, seed=3)
    rounds = ["".join(seen[i : i + 4]) for i in range(0, 40, 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 3


def test_short_calls_are_repeated_within_a_sample(clock):
    calls = []
    result = compare(
        {"fast": lambda: (calls.append(1), clock.run(0.25, 0.5))}, rounds=7, warmup=2, min_time=1.0
    )
    assert len(calls) == 2 + 7 * 4
    assert result.timings["fast"].wall == [0.25] * 7
    assert result.timings["fast"].cpu == [0.5] * 7


def test_global_state_is_left_alone(clock):
    random.seed(5)
    expected = random.Random(5).random()
    inside = []
    compare({"a": lambda: inside.append(gc.isenabled())}, rounds=7, warmup=0)
    assert inside == [False] * 7
    assert gc.isenabled()
    assert random.random() == expected


def test_garbage_collection_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError):
        compare({"a": lambda: 1 / 0}, rounds=7, warmup=0)
    assert gc.isenabled()


def test_result_is_json_and_printable(clock):
    fns = {"base": lambda: clock.run(1.0, 1.0), "other": lambda: clock.run(0.8, 0.4)}
    result = compare(fns, rounds=7, warmup=0, baseline="base")
    values = json.loads(json.dumps(result.to_dict()))
    assert values["timings"]["other"]["ratio"] == pytest.approx(0.8)
    assert values["timings"]["other"]["ratio_cpu"] == pytest.approx(0.4)
    assert values["timings"]["other"]["samples"].keys() == {"wall", "cpu"}
    assert result.table().splitlines()[2].split() == [
        "other",
        "800.00",
        "0.00",
        "400.00",
        "0.800",
        "0.400",
        "1.25x",
    ]


def test_spread():
    result = Comparison("a", {"a": Timing([1.0, 2.0, 3.0, 4.0, 9.0], [1.0] * 5)}, 1, 5)
    assert result.timings["a"].iqr == 2.0
    assert result.timings["a"].best == 1.0


def test_gpu_clock_wins_where_there_is_one():
    samples = {"a": Timing([5.0] * 3, [1.0] * 3, [2.0] * 3), "b": Timing([5.0] * 3, [1.0] * 3, [1.0] * 3)}
    result = Comparison("a", samples, 1, 3)
    assert result.timings["b"].median == 1.0
    assert result.speedup("b") == 2.0


def test_timer(clock):
    with Timer() as timer:
        clock.run(1.5, 2.5)
    assert (timer.wall, timer.cpu, timer.cuda) == (1.5, 2.5, None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"contestants": {}}, "contestants is empty"),
        ({"contestants": {"a": int}, "rounds": 3}, "rounds=3 is too few"),
        ({"contestants": {"a": int}, "baseline": "z"}, "baseline='z' is not among the contestants: a"),
    ],
)
def test_bad_input_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        compare(**kwargs)


def test_operands_rotate_and_cover_the_cache():
    x, w = torch.arange(6.0), torch.ones(4, requires_grad=True)  # 40 bytes together
    seen = []
    call = rotating(lambda *args: seen.append(args), x, "as it is", w, cover=100)
    for _ in range(6):
        call()
    assert len({args[0].data_ptr() for args in seen}) == 3  # 120 bytes
    assert [args[0].data_ptr() for args in seen[:3]] == [args[0].data_ptr() for args in seen[3:]]
    assert x.data_ptr() not in {args[0].data_ptr() for args in seen}
    assert all(torch.equal(args[0], x) and args[1] == "as it is" and args[2].requires_grad for args in seen)
    assert all(args[2].is_leaf for args in seen)


def test_rotation_covers_twice_the_last_cache(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1000)
    addresses = set()
    call = rotating(lambda x: addresses.add(x.data_ptr()), torch.ones(100))
    for _ in range(50):
        call()
    assert len(addresses) == 6  # 2400 bytes, more than 2000


def test_rotation_needs_tensors():
    with pytest.raises(ValueError, match="needs tensors to copy"):
        rotating(abs, 1.0)


def test_the_last_cache_is_larger_than_a_first_one():
    assert cache_bytes() >= 256 << 10


def test_the_cache_of_a_gpu(monkeypatch):
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert cache_bytes("cuda") == 50 << 20
