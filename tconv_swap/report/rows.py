"""Defines the rows of a report, the same for every form of it: plain data and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tconv_swap.measurement.roof import Ceilings, Work
from tconv_swap.report.ways import WayTable
from tconv_swap.report.words import times_as_fast


@dataclass(frozen=True)
class Before:
    """The medians of PyTorch's and ours in milliseconds, and half the interquartile range as a share of each median."""

    original_ms: float
    swapped_ms: float
    original_spread: float = 0.0
    swapped_spread: float = 0.0


@dataclass(frozen=True)
class StageRow:
    """One stage, before and after.

    Attributes:
        stage: `forward`, `backward`, `step` (whole networks) or `both` (layers: forward and backward together).
        times: those of both.
        verdict: `faster`, `slower`, `same` (within noise) or `noisy` (noise may be all of the difference).
        family: what computes it, in the reader's words; `""` if not known.
        why: for each part one line that says why this computes it.
        roof_ms: a lower bound for the time at the measured ceilings; None if not known.
        work: useful FLOPs and fewest bytes; None if not known.
    """

    stage: str
    times: Before
    verdict: str
    family: str = ""
    why: tuple[str, ...] = ()
    roof_ms: float | None = None
    work: Work | None = None

    @property
    def speedup(self) -> float:
        return self.times.original_ms / self.times.swapped_ms

    @property
    def of_roof(self) -> float | None:
        """Returns the fraction of the chip's limit that ours reaches, 0 to 1."""
        return None if self.roof_ms is None else self.roof_ms / self.times.swapped_ms

    @property
    def of_roof_before(self) -> float | None:
        """Returns the fraction of the chip's limit that PyTorch's reaches, 0 to 1."""
        return None if self.roof_ms is None else self.roof_ms / self.times.original_ms


@dataclass(frozen=True)
class ErrorRow:
    """Of several comparisons the one nearest to its limit: errors against the reference, and the limit of ours."""

    what: str
    mode: str
    name: str
    original: float
    swapped: float
    limit: float
    passed: bool
    detail: str = ""

    @property
    def of_limit(self) -> float:
        """Returns the used share of the limit: if it is above 1, or NaN, the comparison fails."""
        if self.swapped == 0:
            return 0.0
        return self.swapped / self.limit if self.limit else math.inf


@dataclass(frozen=True)
class LayerRow:
    """One transposed convolution with inputs of one form (shape, dtype, layout); several rows if it has inputs of
    several.

    Attributes:
        name: its dotted names.
        geometry: channels and arguments in short form.
        form: `32x512x4x4 float32 channels_last, 2 calls`; `""` if it was not timed.
        mode: the arithmetic, a key of the ceilings' rates; `""` if not known.
        stages: the timed ones.
        error: the largest error of its own comparisons; None if there was none.
        kernels: the launched kernels in words, for details.
    """

    name: str
    geometry: str
    parameters: int
    form: str = ""
    mode: str = ""
    stages: tuple[StageRow, ...] = ()
    error: ErrorRow | None = None
    kernels: tuple[str, ...] = ()

    def stage(self, name: str) -> StageRow | None:
        return next((row for row in self.stages if row.stage == name), None)


@dataclass(frozen=True)
class Summary:
    """The whole report.

    Attributes:
        facts: labels and texts, in the order for the reader.
        outcome: as in the document.
        verdict: the verdict in one line.
        network: the stages of the whole network.
        layers: the swapped layers.
        left: the other layers, then the norms that are left: name, geometry or classes, reason.
        errors: the largest error of every kind and mode.
        remarks: lines on shares of time and on memory.
        no_roof: why no roof is shown; `""` if one is.
        notes, failures: lines.
        ways: the ways to run the network, if they were tried; a table for each stage.
    """

    facts: tuple[tuple[str, str], ...]
    outcome: str
    verdict: str
    network: tuple[StageRow, ...]
    layers: tuple[LayerRow, ...]
    left: tuple[tuple[str, str, str], ...]
    errors: tuple[ErrorRow, ...]
    reference: str
    remarks: tuple[str, ...]
    ceilings: Ceilings | None
    no_roof: str
    notes: tuple[str, ...]
    failures: tuple[str, ...]
    first_divergence: str
    output: str
    load_snippet: str
    ways: tuple[WayTable, ...] = ()


def speedup_text(row: StageRow) -> str:
    """Returns the speedup as `words.times_as_fast` writes it."""
    return times_as_fast(row.speedup, row.verdict)
