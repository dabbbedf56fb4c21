"""Times several callables in one run, interleaved, each from a cold L2 cache; gives medians with quartiles.

It knows callables only, no networks. The variants run alternately, in a balanced order (A B, B A, B A, A B, ...), so
that all of them meet the same clock rates, temperature and other load. Their ratio is therefore reliable even if their
times drift. Sample `i` of every variant comes from round `i`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

MIN_ITERS = 5  # the smallest number whose range contains the median with 94 % confidence
MAX_ITERS = 200
MIN_WARMUP = 2
WARMUP_SHARE = 0.2  # of the time budget
ROUNDS_IN_FLIGHT = 8  # between two synchronisations: limits the outputs and events that are alive

FLUSH_MARGIN = 1.25  # how much longer than the launches the flush that hides them must take
FLUSH_LIMIT_MS = 5.0  # launches that take longer than this are no longer hidden

Launches = Literal["hidden", "included"]


@dataclass(frozen=True)
class Timing:
    """The time of one variant in milliseconds: median, lower and upper quartile, number of samples."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    samples: int
    samples_ms: tuple[float, ...] = field(default=(), repr=False)
    """Every sample in the order of the rounds; pairs with that of the other variants of the same run."""

    @property
    def spread(self) -> float:
        """Returns half of the interquartile range, as a fraction of the median."""
        return (self.q3_ms - self.q1_ms) / 2 / self.median_ms if self.median_ms > 0 else 0.0

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Returns the statistics of at least one sample. Quartiles are interpolated between samples."""
        if len(samples_ms) == 1:
            only = samples_ms[0]
            return cls(only, only, only, 1, tuple(samples_ms))
        q1, median, q3 = statistics.quantiles(samples_ms, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples_ms), tuple(samples_ms))

    def to_dict(self) -> dict[str, Any]:
        return {
            "median_ms": self.median_ms,
            "q1_ms": self.q1_ms,
            "q3_ms": self.q3_ms,
            "samples": self.samples,
        }


def _no_state() -> None:
    return None


@dataclass(frozen=True)
class Variant:
    """Calls `run(prepare())`, of which only `run` is timed; `prepare` is called before every run."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = _no_state


class Clock(Protocol):
    """Times single calls; `time_interleaved` decides which calls and when."""

    def now(self) -> float:
        """Returns seconds of wall time, for budgets."""

    def calibrate(self, variants: Sequence[Variant]) -> None:
        """Prepares the clock once, between the warm-up and the first sample."""

    def measure(self, variant: Variant) -> Callable[[], float]:
        """Runs `variant` once; the returned function gives the milliseconds that it took, after the next
        `synchronize`."""

    def synchronize(self) -> None:
        """Waits until everything measured so far is done."""


class WallClock:
    """Measures wall time, for the CPU, where a call has done its work when it returns.

    The caches stay as the previous call left them: alternating variants evict each other's data equally.
    """

    def __init__(self, time_s: Callable[[], float] = time.perf_counter) -> None:
        self._time_s = time_s

    def now(self) -> float:
        return self._time_s()

    def calibrate(self, variants: Sequence[Variant]) -> None:
        pass

    def measure(self, variant: Variant) -> Callable[[], float]:
        state = variant.prepare()
        begin = self._time_s()
        result = variant.run(state)
        elapsed_ms = (self._time_s() - begin) * 1e3
        del result  # it is kept until here: freeing it is not part of the call
        return lambda: elapsed_ms

    def synchronize(self) -> None:
        pass


class CudaClock:
    """Measures with CUDA events on the device's current stream, after a write larger than the L2 cache has flushed it.

    launches="hidden" measures the kernels. The whole call is enqueued while the flush still runs (the flush is repeated
    until it takes longer than the launches), so the CPU's time never shows. Use it for layers and kernels.

    launches="included" measures what a caller sees who starts from an idle GPU: the longer of CPU and GPU work. Use it
    for whole networks, where hiding the CPU's part would promise a speedup that no user gets.

    Args:
        device: a CUDA device, with an index or without (the current one).
        launches: see above.

    Raises:
        ValueError: `device` is not a CUDA device.
    """

    def __init__(self, device: torch.device | str, launches: Launches = "hidden") -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ValueError(f"CudaClock needs a CUDA device, got device={str(device)!r}")
        if str(self._device) == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._launches = launches
        l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
        self._scratch = torch.empty(max(2 * l2_bytes, 1 << 25), dtype=torch.uint8, device=self._device)
        self._flushes = 1

    def now(self) -> float:
        return time.perf_counter()

    def calibrate(self, variants: Sequence[Variant]) -> None:
        if self._launches == "included":
            return
        launch_ms = max(self._launch_ms(variant) for variant in variants)
        flush_ms = self._flush_ms()
        wanted_ms = min(launch_ms * FLUSH_MARGIN, FLUSH_LIMIT_MS)
        self._flushes = max(1, math.ceil(wanted_ms / flush_ms))

    def measure(self, variant: Variant) -> Callable[[], float]:
        begin, end = self._event(), self._event()
        state = variant.prepare()
        for _ in range(self._flushes):
            self._scratch.zero_()
        if self._launches == "included":
            self.synchronize()
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        result = variant.run(state)
        end.record(stream)
        del result
        return lambda: float(begin.elapsed_time(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _launch_ms(self, variant: Variant) -> float:
        """Returns how long the CPU takes to enqueue one run, on an empty queue."""
        shortest = math.inf
        for _ in range(3):
            state = variant.prepare()
            self.synchronize()
            begin = time.perf_counter()
            result = variant.run(state)
            shortest = min(shortest, (time.perf_counter() - begin) * 1e3)
            del result
        self.synchronize()
        return shortest

    def _flush_ms(self) -> float:
        """Returns how long the GPU takes for one flush, back to back."""
        repeats = 10
        begin, end = self._event(), self._event()
        stream = torch.cuda.current_stream(self._device)
        self._scratch.zero_()
        begin.record(stream)
        for _ in range(repeats):
            self._scratch.zero_()
        end.record(stream)
        self.synchronize()
        return max(float(begin.elapsed_time(end)) / repeats, 1e-3)


def clock_for(device: torch.device | str, launches: Launches = "hidden") -> Clock:
    """Returns the clock that measures correctly on `device`.

    Raises:
        ValueError: the device is neither the CPU nor a CUDA device.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return CudaClock(device, launches)
    if kind == "cpu":
        return WallClock()
    raise ValueError(f"cannot time on device={str(device)!r}: expected a cpu or cuda device")


def time_interleaved(
    variants: Mapping[str, Callable[[], object] | Variant],
    *,
    device: torch.device | str = "cpu",
    launches: Launches = "hidden",
    warmup: int | None = None,
    iters: int | None = None,
    budget_s: float = 1.0,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Times all variants in one run, alternately, with one sample of each per round.

    Args:
        variants: by name; a plain callable is timed whole, a `Variant` has an untimed part.
        device: where the variants run.
        launches: on CUDA, whether the CPU's time for the launches counts (see `CudaClock`).
        warmup: rounds before the first sample; None: as many as take a fifth of the budget, at least 2.
        iters: samples of each variant; None: as many as the budget allows, from 5 to 200.
        budget_s: seconds for all variants together, used if `warmup` or `iters` is None.
        clock: replaces the clock for `device` and `launches`.

    Raises:
        ValueError: no variants, `warmup` < 0, `iters` < 1, `budget_s` <= 0, or a device that cannot be timed.
        Exception: whatever a variant raises.
    """
    if not variants:
        raise ValueError("variants is empty: expected at least one callable to time")
    if warmup is not None and warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    if iters is not None and iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    if budget_s <= 0:
        raise ValueError(f"budget_s must be positive, got {budget_s}")
    named = {
        name: variant if isinstance(variant, Variant) else Variant(_ignoring_state(variant))
        for name, variant in variants.items()
    }
    with _current(device):
        clock = clock or clock_for(device, launches)
        _warm_up(named, clock, warmup, budget_s)
        clock.calibrate(list(named.values()))
        return {name: Timing.of(samples) for name, samples in _sample(named, clock, iters, budget_s).items()}


def balanced_order(names: Sequence[str], round_index: int) -> list[str]:
    """Returns the order of one round: every other round is reversed, and every second pair begins one name later."""
    start = round_index // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if round_index % 2 else order


def speedup_interval(original: Timing, swapped: Timing, confidence: float = 0.95) -> tuple[float, float]:
    """Returns a confidence interval for how many times faster `swapped` is: of the median of the paired ratios.

    It is exact and distribution-free: the narrowest pair of order statistics that contains the median with that
    confidence, or the whole range if there are too few samples (less than 6 for 0.95). If the samples do not pair, it
    is computed from the quartiles.
    """
    count = len(original.samples_ms)
    if count == 0 or count != len(swapped.samples_ms):
        return original.q1_ms / swapped.q3_ms, original.q3_ms / swapped.q1_ms
    ratios = sorted(a / b for a, b in zip(original.samples_ms, swapped.samples_ms, strict=True))
    # The k-th smallest lies above the median with the probability that a fair coin shows fewer than k heads.
    rank, ways, outside = 0, 1, 2
    while outside / 2**count <= 1 - confidence:
        rank += 1
        ways = ways * (count - rank + 1) // rank
        outside += 2 * ways
    return ratios[max(rank, 1) - 1], ratios[count - max(rank, 1)]


def _ignoring_state(run: Callable[[], object]) -> Callable[[Any], object]:
    return lambda _: run()


@contextmanager
def _current(device: torch.device | str) -> Iterator[None]:
    """Makes a CUDA device the current one, so that plain `torch.cuda` calls in a variant use the device that is
    timed."""
    if torch.device(device).type != "cuda":
        yield
        return
    with torch.cuda.device(torch.device(device)):
        yield


def _warm_up(variants: Mapping[str, Variant], clock: Clock, warmup: int | None, budget_s: float) -> None:
    """Runs rounds untimed for compilation, autotuning, allocator and clock rates. The time of the first is not
    counted."""
    rounds = 0
    begin = clock.now()
    while rounds < warmup if warmup is not None else _too_cold(rounds, clock.now() - begin, budget_s):
        _round(variants, clock, rounds)
        clock.synchronize()
        rounds += 1
        if rounds == 1:
            begin = clock.now()


def _too_cold(rounds: int, elapsed_s: float, budget_s: float) -> bool:
    return rounds < MIN_WARMUP or elapsed_s < WARMUP_SHARE * budget_s


def _sample(
    variants: Mapping[str, Variant], clock: Clock, iters: int | None, budget_s: float
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    begin = clock.now()
    done = 0
    while True:
        spent_s = clock.now() - begin
        if iters is not None:
            left = iters - done
        elif done < MIN_ITERS:
            left = MIN_ITERS - done
        else:
            left = min(
                MAX_ITERS - done, int((budget_s - spent_s) / (spent_s / done)) if spent_s > 0 else MAX_ITERS
            )
        if left < 1:
            return samples
        pending: list[tuple[str, Callable[[], float]]] = []
        for index in range(done, done + min(left, ROUNDS_IN_FLIGHT)):
            pending += _round(variants, clock, index)
        clock.synchronize()
        for name, read_ms in pending:
            samples[name].append(read_ms())
        done += len(pending) // len(variants)


def _round(
    variants: Mapping[str, Variant], clock: Clock, index: int
) -> list[tuple[str, Callable[[], float]]]:
    return [(name, clock.measure(variants[name])) for name in balanced_order(list(variants), index)]
