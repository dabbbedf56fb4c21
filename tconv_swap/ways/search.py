"""Finds the fastest way: tries the ways in turn within a time limit, leaves out those that cannot win, and keeps what
it has measured.

It knows neither networks nor devices: `build` and `measure` are given. Every way is timed beside the reference, the way
in which the network runs today, for its speedup. Ways are compared with one another by their own times: the reference
waits for the CPU more than a captured network does, so its time varies more, and their quotient would vary as much.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from tconv_swap import interruption
from tconv_swap.measurement.timing import Timing, speedup_interval
from tconv_swap.memory import is_out_of_memory
from tconv_swap.ways.way import Runtime, Way

logger = logging.getLogger("tconv_swap")

_R = TypeVar("_R")

#: The default of `Search.hopeless`.
HOPELESS = 1.5
#: The seconds that building and timing a way are expected to take before a way with the same runtime was tried.
FIRST_GUESS_S: dict[Runtime, float] = {"eager": 2.0, "graph": 4.0, "compile+graph": 40.0, "compile": 40.0}
#: A gain up to this fraction is no reason for a way that requires more of the network.
EQUAL_WITHIN = 0.01
NO_TIME = "no time left"
INTERRUPTED = "interrupted"
NO_MEMORY = "not enough memory"


class Progress(Protocol):
    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None: ...


@dataclass(frozen=True)
class WayRow:
    """One way: its time and the reference's, or why it was not timed.

    Attributes:
        way: the way.
        reference: the time of the network today, from the same run; None if it was not timed.
        timing: the time of the way.
        why_not: why it was not timed; `""` if it was.
        failure: why it cannot be chosen although it was timed: it does not compute the same; otherwise `""`.
        verified: whether it was found to compute the same; None if that was not checked.
    """

    way: Way
    reference: Timing | None = None
    timing: Timing | None = None
    why_not: str = ""
    failure: str = ""
    verified: bool | None = None

    @property
    def speedup(self) -> float:
        """Returns the speedup over today; 0 if it was not timed."""
        if self.reference is None or self.timing is None:
            return 0.0
        return self.reference.median_ms / self.timing.median_ms

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "way": self.way.name,
            "layers": self.way.layers,
            "layout": self.way.layout,
            "runtime": self.way.runtime,
            "requirements": list(self.way.requirements),
            "why_not": self.why_not,
            "failure": self.failure,
            "verified": self.verified,
            "today": None,
            "timing": None,
            "speedup": None,
            "speedup_interval": None,
        }
        if self.reference is not None and self.timing is not None:
            found |= {
                "today": self.reference.to_dict(),
                "timing": self.timing.to_dict(),
                "speedup": self.speedup,
                "speedup_interval": list(speedup_interval(self.reference, self.timing)),
            }
        return found


@dataclass
class Search(Generic[_R]):
    """One search over `ways`, the first of which is the reference.

    Attributes:
        build: builds what runs in a way, or raises.
        measure: times one of them beside the reference: (reference, way); for the same object twice, it times that one.
        seconds: no further way is started that would take longer; None: no limit. The reference is always timed.
        hopeless: a layout is not compiled if, uncompiled, it takes longer than another layout by this factor.
        now: a clock in seconds.
        rows: one for each way, in their order.
        built: those that are still built.
        notes: what the user should know.
        interrupted: whether Ctrl-C has ended it.
    """

    ways: Sequence[Way]
    build: Callable[[Way], _R]
    measure: Callable[[_R, _R], tuple[Timing, Timing]]
    now: Callable[[], float]
    seconds: float | None = None
    hopeless: float = HOPELESS
    rows: list[WayRow] = field(default_factory=list)
    built: dict[Way, _R] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def run(self, progress: Progress | None = None) -> None:
        """Tries all ways. Ctrl-C ends the search; what was measured until then stays.

        Raises:
            KeyboardInterrupt: before the reference was timed.
            Exception: whatever building or timing the reference raises; the error of another way becomes its `why_not`.
        """
        begin = self.now()
        costs = dict(FIRST_GUESS_S)
        for place, way in enumerate(self.ways):
            started = self.now()
            why_not = self._why_not(way, costs, started - begin) if place else ""
            try:
                if why_not:
                    self.rows.append(WayRow(way, why_not=why_not))
                    continue
                if progress is not None:
                    progress(self._announced(way, place, costs), place, len(self.ways))
                self._try(way)
            except KeyboardInterrupt:
                if not place:
                    raise
                interruption.forget_interruption()
                self.interrupted = True
                self.notes.append(f"interrupted: {place} of {len(self.ways)} ways were tried")
                self.rows += [WayRow(later, why_not=INTERRUPTED) for later in self.ways[place:]]
                return
            except torch.AcceleratorError:  # the GPU has failed: no later result can be trusted
                raise
            except Exception as error:  # a network, a compiler or a capture may raise anything
                if not place:
                    raise
                logger.info("%s: %s", way, error)
                self.rows.append(WayRow(way, why_not=_reason(error)))
                self._drop(way)
            costs[way.runtime] = self.now() - started
            if way.runtime == "eager":  # no other runtime is built faster
                costs = {runtime: max(cost, costs["eager"]) for runtime, cost in costs.items()}

    def _announced(self, way: Way, place: int, costs: dict[Runtime, float]) -> str:
        left = sum(costs[later.runtime] for later in self.ways[place:] if not self._hopeless(later))
        if self.seconds is not None:
            left = min(left, self.seconds)
        needs = f" (needs {'; '.join(way.requirements)})" if way.requirements else ""
        return f"trying {way}, at most {max(left, 1):.0f} s to go{needs}"

    def best(self, *layers: str) -> WayRow | None:
        """Returns the result of `fastest_of` for the rows."""
        return fastest_of(self.rows, *layers)

    def row(self, way: Way) -> WayRow | None:
        return next((row for row in self.rows if row.way == way), None)

    def change(self, way: Way, **found: Any) -> None:
        """Changes the row of a way."""
        self.rows = [replace(row, **found) if row.way == way else row for row in self.rows]

    def get(self, way: Way) -> _R:
        """Returns what runs in a way; builds it again if it was dropped."""
        if way not in self.built:
            self.built[way] = self.build(way)
        return self.built[way]

    def _try(self, way: Way) -> None:
        running = self.get(way)
        reference, timing = self.measure(self.built[self.ways[0]], running)
        self.rows.append(WayRow(way, reference, timing))
        kept = {self.ways[0]}
        for layers in {row.way.layers for row in self.rows}:
            best = self.best(layers)
            kept |= {best.way} if best is not None else set()
        self.drop_others(kept)

    def drop_others(self, kept: Collection[Way]) -> None:
        """Drops what is built for other ways than these."""
        for other in [other for other in self.built if other not in kept]:
            self._drop(other)

    def _drop(self, way: Way) -> None:
        self.built.pop(way, None)
        if way.runtime != "eager":
            gc.collect()  # compiled networks contain reference cycles

    def _why_not(self, way: Way, costs: dict[Runtime, float], spent: float) -> str:
        if reason := self._hopeless(way):
            return reason
        if self.seconds is not None and spent + costs[way.runtime] > self.seconds:
            return NO_TIME
        return ""

    def _hopeless(self, way: Way) -> str:
        """Returns why a way cannot win, judged by the measurements so far."""
        same = [row for row in self.rows if row.way.layers == way.layers]
        for row in same:
            failed = row.why_not and not row.why_not.startswith(("not tried: ", NO_TIME))
            if failed and row.way.runtime == way.runtime:
                return f"not tried: {row.way} failed"
        graph = next((row for row in same if row.way == replace(way, runtime="compile+graph")), None)
        if way.runtime == "compile" and graph is not None and graph.timing is not None:
            return f"not tried: {graph.way} launches the same kernels in fewer calls"
        if not way.compiled:
            return ""
        uncompiled = [
            (row.way.layout, row.timing.median_ms) for row in same if row.timing and not row.way.compiled
        ]
        mine = min((ms for layout, ms in uncompiled if layout == way.layout), default=0.0)
        others = min((ms for layout, ms in uncompiled if layout != way.layout), default=math.inf)
        if mine > self.hopeless * others:
            return f"not tried: this layout is {mine / others:.1f} times slower where nothing is compiled"
        return ""


def fastest_of(rows: Sequence[WayRow], *layers: str) -> WayRow | None:
    """Returns the fastest way that was timed and not found wrong, of all ways or of those with one of these layers.

    Among ways within `EQUAL_WITHIN` of the fastest, it is the first, which requires least.
    """
    found = [
        (row, row.timing.median_ms)
        for row in rows
        if row.timing is not None and not row.failure and (not layers or row.way.layers in layers)
    ]
    fastest = min((ms for _, ms in found), default=0.0)
    return next((row for row, ms in found if (1 - EQUAL_WITHIN) * ms <= fastest), None)


def _reason(error: Exception) -> str:
    if is_out_of_memory(error):
        return NO_MEMORY
    return f"{type(error).__name__}: {str(error).strip()}".strip().partition("\n")[0]
