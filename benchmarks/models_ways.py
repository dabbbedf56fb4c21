"""Measures a row of benchmarks.models with the runtime "best": the best way to run a network, PyTorch's layers and
ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from tconv_swap.inputs import named_tensors
from tconv_swap.verification.compare import roundoff
from tconv_swap.verification.noise import with_rounding
from tconv_swap.ways.optimize import WaySearch
from tconv_swap.ways.report import StageWays
from tconv_swap.ways.run import build
from tconv_swap.ways.search import Progress
from tconv_swap.ways.way import PYTORCH, TODAY, Way, with_layers

RUNTIME, LAYOUT = "best", "any"
#: The largest networks come first, so that the last rows are short.
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
#: For each stage of a row: seconds for the samples of each way, and of the last comparison.
TIMING_S, FINAL_S = 0.15, 0.5
#: A layout that is slower by this factor without compilation, with either layers, is not compiled.
HOPELESS = 1.2
#: The largest relative L2 difference of a network's outputs between its best way and eager: float16 in all layers; and
#: how many times as far they may be apart as one rounding in every layer moves them: a network that chooses boxes, or
#: normalises values that are nearly equal, amplifies it.
MAX_DIFFERENCE_OF_NETWORK, ROUNDING = 0.05, 2.0


def measure_best(
    case: Case, setting: Setting, announce: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Returns both stages: every way, and today's, PyTorch's best and ours timed in one run. ``announce`` is called
    with the next step.

    Raises:
        ValueError: a layer, or the network in its best way, computes something else.
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
            found = searched.run(ways, None, _progress(searched, announce), verified=False, profiled=False)
            stages.append(_stage(found))
            notes += [f"{found.stage}: {note}" for note in found.notes]
            apart, by_rounding = _apart(searched, found.best)
            if not apart <= max(MAX_DIFFERENCE_OF_NETWORK, ROUNDING * by_rounding):
                raise ValueError(
                    f"{found.stage} as {found.best} gives outputs that differ by {apart:.1e}; rounding changes "
                    f"PyTorch's by {by_rounding:.1e}"
                )
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
    """Returns a stage; as in other rows, `original` and `swapped` are compared: PyTorch's best way and ours."""
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


def _apart(searched: WaySearch, best: Way) -> tuple[float, float]:
    """Returns the relative L2 differences of the worst output from that of PyTorch's layers run eagerly in the way's
    layout: of the way, and of those layers with a rounding added to each output and gradient of every layer.

    The layout is the same, since dropout draws its mask in memory order.
    """
    theirs = with_layers(copy.deepcopy(searched.model), PYTORCH.name)
    laid_out = Way(PYTORCH.name, best.layout)
    running = build(theirs, laid_out, searched.inputs, training=searched.training)
    expected = _outputs(searched, running)
    found = _outputs(searched, searched.search.get(best))
    leaves = [name for name, module in theirs.named_modules() if not list(module.children())]
    with with_rounding(theirs, leaves, lambda _, output: roundoff(output.dtype, output.device), 0):
        rounded = _outputs(searched, running)
    return _worst(found, expected), _worst(rounded, expected)


def _outputs(searched: WaySearch, running: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.set_grad_enabled(searched.training):
        output = searched.inputs.map(torch.clone)(running.train(searched.training))
    return [t.detach().double() for _, t in named_tensors(output) if t.is_floating_point()]


def _worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(
        float((one - exact).norm() / exact.norm().clamp(min=1e-300))
        for one, exact in zip(found, expected, strict=True)
    )
