"""Which kernels a measurement will run, asked of the library's own choice; and compiling them ahead."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import torch

from tconv_swap.checks import output_memory_format
from tconv_swap.cuda import jit, plan
from tconv_swap.cuda.choice import Step, choose_backward, choose_forward
from tconv_swap.cuda.nvrtc import CompileError
from tconv_swap.cuda.program import Kernel, Plan
from tconv_swap.cuda.tuned import NONE, Winners
from tconv_swap.measurement.modes import LAYOUTS, Mode
from tconv_swap.measurement.suite import Layer

#: Kernels whose compilation takes longer than it takes to start Python on every core.
WORTH_WORKERS = 24

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
    """What computes one stage (``forward``, ``frozen`` or one of ``STAGE_MASKS``); tensors all lie in ``layout``.

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
    """What a forward pass of the layer asks for whose tensors all lie in ``layout``."""
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
        # A weight that has both layouts at once counts as contiguous.
        weight_channels_last=not weight.is_contiguous(),
    )


def compile_ahead(plans: Iterable[Plan], architecture: str) -> int:
    """Put the machine code of all kernels of some plans into the disk cache, on all cores; returns how many.

    The measurements would compile them one by one, and do so where they are few. A kernel that does not compile
    is left for them to report.
    """
    kernels = list({launch.kernel: None for made in plans for launch in made.launches})
    if len(kernels) < WORTH_WORKERS:
        return 0
    # Spawned, because a forked process must not touch CUDA.
    workers = min(len(kernels), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(_compiles, kernels, repeat(architecture)))


def _compiles(kernel: Kernel, architecture: str) -> bool:
    try:
        jit.compile_kernel(kernel, architecture)
    except CompileError:
        return False
    return True
