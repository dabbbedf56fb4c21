"""The timer, on a clock that the test turns, and CUDA's clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tconv_swap.measurement.timing import (
    CudaClock,
    Timing,
    Variant,
    WallClock,
    balanced_order,
    clock_for,
    speedup_interval,
    time_interleaved,
)


class FakeTime:
    """A clock that moves only when a variant says that it took time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.seconds

    def taking(self, name: str, milliseconds: float | Callable[[int], float]) -> Callable[[], None]:
        calls = 0

        def run() -> None:
            nonlocal calls
            self.log.append(name)
            self.seconds += (milliseconds(calls) if callable(milliseconds) else milliseconds) / 1e3
            calls += 1

        return run


# --- the timer ----------------------------------------------------------------


def test_statistics_of_samples() -> None:
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.median_ms, timing.q1_ms, timing.q3_ms, timing.samples) == (3.0, 2.0, 4.0, 5)
    assert timing.samples_ms == (5.0, 1.0, 3.0, 2.0, 4.0)
    assert timing.spread == pytest.approx(1 / 3)
    assert timing.to_dict() == {"median_ms": 3.0, "q1_ms": 2.0, "q3_ms": 4.0, "samples": 5}
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1, (7.0,))


def test_variants_alternate_in_a_balanced_order() -> None:
    now = FakeTime()
    variants = {"A": now.taking("A", 1), "B": now.taking("B", 1)}
    time_interleaved(variants, warmup=0, iters=8, clock=WallClock(now))
    assert "".join(now.log) == "ABBABAABABBABAAB"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_variant_comes_first_equally_often(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = [balanced_order(names, index) for index in range(2 * count)]
    assert all(sorted(order) == names for order in rounds)
    for place in range(count):
        assert [sum(order[place] == name for order in rounds) for name in names] == [2] * count


def test_samples_are_measured_apart_and_warmup_is_not_among_them() -> None:
    now = FakeTime()
    slow_at_first = {
        "A": now.taking("A", lambda call: 1000 if call < 3 else 10 + call % 2),
        "B": now.taking("B", lambda call: 9999 if call < 3 else 30),
    }
    timings = time_interleaved(slow_at_first, warmup=3, iters=4, clock=WallClock(now))
    assert now.log.count("A") == now.log.count("B") == 7
    assert timings["A"].samples_ms == pytest.approx((11, 10, 11, 10))
    assert timings["A"].median_ms == pytest.approx(10.5)
    assert timings["B"] == Timing.of(timings["B"].samples_ms)
    assert timings["B"].median_ms == pytest.approx(30)


def test_preparation_precedes_every_run_and_is_not_timed() -> None:
    now = FakeTime()
    prepare, run = now.taking("prepare", 500), now.taking("run", 2)
    states: list[object] = []

    def fresh() -> object:
        prepare()
        return object()

    def timed(state: object) -> None:
        states.append(state)
        run()

    timings = time_interleaved({"A": Variant(timed, fresh)}, warmup=1, iters=5, clock=WallClock(now))
    assert now.log == ["prepare", "run"] * 6
    assert len({id(state) for state in states}) == 6
    assert timings["A"].samples_ms == pytest.approx([2.0] * 5)


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(4000, range(5, 6)), (10, range(40, 51)), (0.001, range(200, 201))],
    ids=["slow: the fewest", "as many as the budget holds", "fast: the most"],
)
def test_iterations_follow_the_budget(milliseconds: float, expected: range) -> None:
    now = FakeTime()
    variants = {"A": now.taking("A", milliseconds), "B": now.taking("B", milliseconds)}
    timings = time_interleaved(variants, budget_s=1.0, clock=WallClock(now))
    assert timings["A"].samples == timings["B"].samples
    assert timings["A"].samples in expected


def test_warmup_goes_on_for_a_fifth_of_the_budget_not_counting_the_first_round() -> None:
    now = FakeTime()
    run = now.taking("A", lambda call: 5000 if call == 0 else 10)
    time_interleaved({"A": run}, iters=1, budget_s=1.0, clock=WallClock(now))
    assert len(now.log) in (21 + 1, 22 + 1)  # 200 ms of 10 ms after the first, up to rounding, and one sample


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        ({}, {}, "variants is empty"),
        ({"A": lambda: None}, {"iters": 0}, "iters must be at least 1, got 0"),
        ({"A": lambda: None}, {"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"A": lambda: None}, {"budget_s": 0.0}, "budget_s must be positive, got 0.0"),
        ({"A": lambda: None}, {"device": "meta"}, "cannot time on device='meta'"),
    ],
)
def test_bad_arguments_are_named(variants: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        time_interleaved(variants, **options)


def test_the_cuda_clock_requires_a_cuda_device() -> None:
    assert isinstance(clock_for("cpu"), WallClock)
    with pytest.raises(ValueError, match="device='cpu'"):
        CudaClock("cpu")


@pytest.mark.parametrize(("launch_ms", "flushes"), [(0.01, 1), (1.0, 25), (1000.0, 100)])
def test_flushes_outlast_the_launches_up_to_a_limit(
    launch_ms: float, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = object.__new__(CudaClock)  # without a GPU
    clock._launches, clock._flushes = "hidden", 1
    monkeypatch.setattr(clock, "_flush_ms", lambda: 0.05)
    monkeypatch.setattr(clock, "_launch_ms", lambda variant: launch_ms * variant.prepare())
    clock.calibrate([Variant(lambda _: None, lambda share=share: share) for share in (0.5, 1.0)])
    assert clock._flushes == flushes


def test_interval_is_of_the_pairs_and_drift_cancels() -> None:
    drifting = [float(i) for i in range(1, 41)]
    low, high = speedup_interval(Timing.of([2 * ms for ms in drifting]), Timing.of(drifting))
    assert (low, high) == (2.0, 2.0)


def test_the_interval_contains_the_median_as_often_as_claimed() -> None:
    source = random.Random(0)
    ones = Timing.of([1.0] * 15)
    hits = 0
    for _ in range(2000):
        low, high = speedup_interval(Timing.of([source.expovariate(1.0) for _ in range(15)]), ones)
        hits += low <= 0.693147 <= high
    assert 0.95 <= hits / 2000 <= 0.985  # exact coverage for 15 samples: 0.965


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_the_interval_has_the_ranks_of_the_sign_test(count: int, low: int, high: int) -> None:
    ratios = Timing.of([float(i) for i in range(count, 0, -1)])
    assert speedup_interval(ratios, Timing.of([1.0] * count)) == (low, high)


def test_interval_of_few_samples_is_their_range_and_of_unpaired_ones_from_the_quartiles() -> None:
    assert speedup_interval(Timing.of([1.0, 2.0, 4.0]), Timing.of([1.0] * 3)) == (1.0, 4.0)
    assert speedup_interval(Timing(2.0, 1.0, 4.0, 9), Timing(1.0, 0.5, 2.0, 9)) == (0.5, 8.0)


# --- on a GPU -----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("side_stream", [False, True])
def test_cuda_clock_hides_or_includes_launches(side_stream: bool) -> None:
    x = torch.zeros(1 << 10, device="cuda")
    # The GPU may stamp the first event a time slice late, where another process, as another test's, has its turn.
    slept_ms, slice_ms = 3.0, 2.0

    def launches_slowly() -> None:
        x.add_(1.0)
        time.sleep(slept_ms / 1e3)
        x.add_(1.0)

    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        # Such turns lay between the two launches throughout one measurement of a full run, but not throughout five.
        hidden_ms = min(
            time_interleaved({"A": launches_slowly}, device="cuda", launches="hidden", iters=20)[
                "A"
            ].median_ms
            for _ in range(5)
        )
        included = time_interleaved({"A": launches_slowly}, device="cuda", launches="included", iters=20)["A"]
    assert hidden_ms < 0.1
    assert slept_ms - slice_ms <= included.median_ms < slept_ms + 4.0


@pytest.mark.gpu
def test_cuda_clock_flushes_more_than_the_cache_before_the_time_begins() -> None:
    clock = CudaClock("cuda")
    properties = torch.cuda.get_device_properties("cuda")
    assert clock._scratch.numel() > properties.L2_cache_size
    clock._scratch.fill_(1)
    # The scratch is zero when the timed part runs, and only since the preparation.
    seen: list[Tensor] = []
    variant = Variant(lambda _: seen.append(clock._scratch.max()), lambda: seen.append(clock._scratch.max()))
    milliseconds = clock.measure(variant)
    clock.synchronize()
    assert [int(value) for value in seen] == [1, 0]
    assert milliseconds() > 0
