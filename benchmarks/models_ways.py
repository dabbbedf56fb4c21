"""Measures a row of benchmarks.models with the runtime "best": the best way to run a network, PyTorch's layers and
ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.models_row import (
    MAX_DIFFERENCE,
    Case,
    Setting,
    _difference,
    _switched,
    original_and_swapped,
    summed_loss,
)
from benchmarks.networks import NETWORKS
from tconv_swap.ways.optimize import WaySearch
from tconv_swap.ways.report import StageWays
from tconv_swap.ways.search import NO_MEMORY, Progress
from tconv_swap.ways.way import FUSED, OURS, TODAY, Way

RUNTIME, LAYOUT = "best", "any"
#: Those measured at the same time share the GPU's memory, so a large network is followed by a small one.
ORDER = (
    "dpt",
    "dcgan",
    "vitpose",
    "vae",
    "maskrcnn",
    "pix2pix",
    "sam",
    "unet",
    "simplebaseline",
    "cyclegan",
)
PRECISIONS = ("fp16", "tf32")
#: For each stage of a row: seconds for the samples of each way, and of the last comparison.
TIMING_S, FINAL_S = 0.15, 0.5
#: A layout that is slower by this factor without compilation, with either layers, is not compiled.
HOPELESS = 1.2


def measure_best(
    case: Case,
    setting: Setting,
    announce: Callable[[str], None] | None = None,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Returns both stages: every way, and today's, PyTorch's best and ours timed in one run. Our best way is verified
    as `tconv_swap.optimize` verifies the fastest. ``announce`` is called with the next step. The last timing, whose
    times are the row's, runs inside ``alone``.

    Raises:
        ValueError: a layer, or the network in each of our ways, computes something else, or there is not enough memory
            for a way or to compare the best ways.
        Exception: whatever the network raises in today's way.
    """
    network = NETWORKS[case.network]
    stages, notes = [], []
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, network, setting)
        difference = _difference(original, swapped, inputs)
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"the outputs of a layer differ by {difference:.1e} of their norm")
        del swapped
        for training in (True, False):
            searched = WaySearch(
                original, inputs, training=training, loss=summed_loss, timing_s=TIMING_S, final_s=FINAL_S
            )
            ways = [way for way in searched.chosen_from(None) if not (network.no_compile and way.compiled)]
            searched.search.hopeless = HOPELESS
            found = searched.fastest(
                ways, None, _progress(searched, announce), layers=(OURS.name, FUSED.name)
            )
            if lacking := [row.way.name for row in found.rows if NO_MEMORY in (row.why_not or row.failure)]:
                raise ValueError(f"{found.stage}: {NO_MEMORY} for {', '.join(lacking)}")
            if found.our_best is None:
                raise ValueError(f"{found.stage}: none of our ways is right: {'; '.join(found.notes)}")
            with alone():
                searched.compare(found)
                if not found.finals:
                    raise ValueError(f"{found.stage}: {'; '.join(found.notes)}")
                stages.append(_stage(found, searched.bound))
            notes += [f"{found.stage}: {note}" for note in found.notes]
    return {
        **case._asdict(),
        "batch": 2 if setting.tiny else network.batch,
        "difference": difference,
        "stages": stages,
        "share": {"forward": None, "step": None},
        "notes": notes,
    }


def _progress(searched: WaySearch, announce: Callable[[str], None] | None) -> Progress | None:
    if announce is None:
        return None

    def progress(text: str, done: int | None = None, total: int | None = None) -> None:
        announce(f"{searched.stage}, {text}")

    return progress


def _stage(found: StageWays, bound: Callable[[Way], str]) -> dict[str, Any]:
    """Returns a stage; as in other rows, `original` and `swapped` are compared: PyTorch's best way and ours.
    ``bound`` says what bounds a way."""
    theirs_way, ours_row = found.pytorch_best or TODAY, found.our_best
    assert ours_row is not None
    their_way, our_way = theirs_way.name, ours_row.way.name
    times = found.finals
    theirs, ours = times[their_way], times[our_way]
    return {
        "stage": found.stage,
        "today": times[TODAY.name].to_dict(),
        "original": theirs.to_dict(),
        "swapped": ours.to_dict(),
        "speedup": theirs.median_ms / ours.median_ms,
        "over_today": times[TODAY.name].median_ms / ours.median_ms,
        "pytorch_way": their_way,
        "our_way": our_way,
        "pytorch_bound": bound(theirs_way),
        "our_bound": bound(ours_row.way),
        "ways": [
            {
                "way": row.way.name,
                "ms": row.timing.median_ms if row.timing else None,
                "today_ms": row.reference.median_ms if row.reference else None,
                "why_not": row.why_not or row.failure,
            }
            for row in found.rows
        ],
    }
