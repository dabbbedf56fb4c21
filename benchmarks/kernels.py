"""Finds the kernels that a measurement will run, by the library's own choice, and compiles them ahead."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tconv_swap.checks import output_memory_format
from tconv_swap.cuda.choice import Step, choose_backward, choose_forward
from tconv_swap.cuda.tuned import NONE, Winners
from tconv_swap.kernels import plan
from tconv_swap.measurement.modes import LAYOUTS, Mode
from tconv_swap.measurement.suite import Layer
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Plan

#: The GPU that is planned for where there is none.
H200 = plan.Device("sm_90a", 132, 227 << 10)
STAGE_MASKS = {
    "backward": (True, True, True),
    "grad_input": (True, False, False),
    "grad_weight": (False, True, False),
    "grad_bias": (False, False, True),
}


def steps_of(
    layer: Layer,
    mode: Mode,
    layout: str,
    stage: str,
    device: plan.Device,
    backend: str = "auto",
    winners: Winners = NONE,
) -> tuple[Step, ...]:
    """Returns what computes one stage (``forward``, ``frozen`` or one of ``STAGE_MASKS``); all tensors have ``layout``.

    Raises:
        CompileError, RuntimeError: whatever the library's plan raises.
    """
    problem = problem_of(layer, mode, layout)
    if stage in ("forward", "frozen"):
        return (choose_forward(problem, layer.bias, device, backend, winners),)
    problem = plan.with_weight_layout(problem, problem.channels_last)
    wanted_input, wanted_weight, wanted_bias = STAGE_MASKS[stage]
    mask = (wanted_input, wanted_weight, wanted_bias and layer.bias)
    return choose_backward(problem, mask, device, backend, winners)


def problem_of(layer: Layer, mode: Mode, layout: str) -> plan.Problem:
    """Returns the problem of a forward pass of the layer whose tensors all have ``layout``."""
    g = layer.geometry
    input, weight = (
        torch.empty(shape, dtype=mode.dtype, device="meta", memory_format=LAYOUTS[layout])
        for shape in (g.input_shape, g.weight_shape)
    )
    return plan.Problem(
        geometry=g,
        dtype=mode.dtype,
        precision=mode.precision,
        channels_last=output_memory_format(input, weight) == torch.channels_last,
        # A weight that has both layouts counts as contiguous.
        weight_channels_last=not weight.is_contiguous(),
    )


def compile_ahead(plans: Iterable[Plan], architecture: str) -> int:
    """Puts the machine code of all kernels of some plans into the disk cache, on all cores; returns their number.

    A kernel that does not compile is left for the measurements to report.
    """
    done = jit.compile_all((launch.kernel for made in plans for launch in made.launches), architecture)
    return done.compiled + done.found
