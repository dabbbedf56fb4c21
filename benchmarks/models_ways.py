"""One row of benchmarks.models with the runtime "best": the best way to run a network, PyTorch's layers and ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models_row import (
    MOST_DIFFERENCE,
    Case,
    Setting,
    _difference,
    _switched,
    original_and_swapped,
    summed_loss,
)
from benchmarks.networks import NETWORKS
from tconv_swap.inputs import named_tensors
from tconv_swap.ways.optimize import WaySearch
from tconv_swap.ways.report import StageWays
from tconv_swap.ways.run import build
from tconv_swap.ways.search import Progress
from tconv_swap.ways.way import PYTORCH, TODAY, Way, with_layers

RUNTIME, LAYOUT = "best", "any"
#: The largest first: the last rows to begin are to be short.
ORDER = (
    "maskrcnn",
    "dpt",
    "vitpose",
    "sam",
    "simplebaseline",
    "cyclegan",
    "unet",
    "pix2pix",
    "vae",
    "dcgan",
)
PRECISIONS = ("fp16", "tf32")
#: Of a row's stage: seconds for the samples of each way, and of the last comparison.
TIMING_S, FINAL_S = 0.15, 0.5
#: Whose-ever the layers, a layout that is slower by this factor where nothing is compiled is not compiled.
HOPELESS = 1.2
#: Between the outputs of a network in its best way and eagerly, relative (L2): float16 through a whole network.
MOST_APART = 0.05


def measure_best(
    case: Case, setting: Setting, announce: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Both stages: every way, and today's, PyTorch's best and ours side by side. ``announce`` is called with what comes
    next.

    Raises:
        ValueError: a layer, or the network in its best way, computes something else.
        Exception: whatever the network raises as it is run today.
    """
    network = NETWORKS[case.network]
    stages, notes = [], []
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, network, setting)
        difference = _difference(original, swapped, inputs)
        if not difference <= MOST_DIFFERENCE:
            raise ValueError(f"the outputs of a layer differ by {difference:.1e} of their norm")
        del swapped
        for training in (True, False):
            searched = WaySearch(
                original, inputs, training=training, loss=summed_loss, timing_s=TIMING_S, final_s=FINAL_S
            )
            ways = [way for way in searched.chosen_from(None) if not (network.no_compile and way.compiled)]
            searched.search.hopeless = HOPELESS
            found = searched.run(ways, None, _progress(searched, announce), verified=False, profiled=False)
            stages.append(_stage(found))
            notes += [f"{found.stage}: {note}" for note in found.notes]
            apart = _apart(searched, found.best)
            if not apart <= MOST_APART:
                raise ValueError(f"{found.stage} as {found.best} gives outputs that differ by {apart:.1e}")
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


def _stage(found: StageWays) -> dict[str, Any]:
    """As of other rows, `original` and `swapped` are compared: PyTorch's best way and ours."""
    fastest = found.best_of(PYTORCH.name), found.our_best
    their_way, our_way = (TODAY.name if row is None else row.way.name for row in fastest)
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
        "ways": [
            {
                "way": row.way.name,
                "ms": row.timing.median_ms if row.timing else None,
                "today_ms": row.reference.median_ms if row.reference else None,
                "why_not": row.why_not,
            }
            for row in found.rows
        ],
    }


def _apart(searched: WaySearch, best: Way) -> float:
    """Relative L2 between what a way and PyTorch's layers run eagerly in its layout give, of the worst output.

    In its layout, since dropout draws its mask in the order of the memory.
    """
    theirs = build(
        with_layers(copy.deepcopy(searched.model), PYTORCH.name),
        Way(PYTORCH.name, best.layout),
        searched.inputs,
        training=searched.training,
    )
    outputs = []
    for running in (theirs, searched.search.get(best)):
        torch.manual_seed(0)
        with torch.set_grad_enabled(searched.training):
            output = searched.inputs.map(torch.clone)(running.train(searched.training))
        outputs.append([t.detach().double() for _, t in named_tensors(output) if t.is_floating_point()])
    return max(
        float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))
        for theirs, ours in zip(*outputs, strict=True)
    )
