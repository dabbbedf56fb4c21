"""``prepare`` compiles all kernels that a network's layers will need, so that its first call on a GPU compiles
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from tconv_swap.block_calls import BlockCall, block_plans, block_variants, usual_blocks
from tconv_swap.blocks.call import recording
from tconv_swap.blocks.evaluation import block_words, epilogue_of
from tconv_swap.blocks.form import activation_of
from tconv_swap.blocks.modules import evaluated_together
from tconv_swap.cuda import call, first_use
from tconv_swap.cuda.choice import FORWARD, Mask, backward_units
from tconv_swap.inputs import Inputs
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.kernels.common.epilogue import with_epilogue
from tconv_swap.kernels.common.layer_sizes import usual_sizes
from tconv_swap.layer import ConvTranspose1d
from tconv_swap.layer_calls import (
    DEVICES,
    OperatorCall,
    calls_of,
    check_architecture,
    empty_form,
    form_of,
    in_format,
    steps_of,
)
from tconv_swap.layer_state import LayerState
from tconv_swap.op import SUPPORTED_DTYPES
from tconv_swap.runtime import ahead, host, jit
from tconv_swap.runtime.cache import cache_problem
from tconv_swap.runtime.program import Kernel, Output, Plan

#: OperatorCall with a description of the work, the amount that is done, and the total; both None where unknown.
Progress = Callable[[str, int | None, int | None], object]

FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True)
class PrepareReport:
    """The result of ``prepare``; its ``str`` is one line.

    Attributes:
        architecture: the architecture of the GPU for which the kernels are.
        layers: the number of swapped layers whose kernels were requested.
        compiled: the number of kernels that were compiled.
        found: the number of kernels that were on disk already.
        seconds: the time that it took.
        not_kept: why the next process has to compile the kernels again; ``""`` if it does not.
    """

    architecture: str
    layers: int
    compiled: int
    found: int
    seconds: float
    not_kept: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain values that ``json`` can write."""
        return asdict(self)

    def __str__(self) -> str:
        kept = f"; {self.not_kept}" if self.not_kept else ""
        return (
            f"{self.layers} layers are ready for {self.architecture}: {self.compiled} kernels compiled, "
            f"{self.found} found on disk, in {self.seconds:.1f} s{kept}"
        )


def prepare(
    model: nn.Module,
    inputs: Any = None,
    *,
    training: bool = False,
    architecture: str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    memory_formats: Sequence[torch.memory_format] | None = None,
    progress: Progress | None = None,
) -> PrepareReport:
    """Compiles, on all cores, the kernels that the swapped layers and blocks of a network need on a GPU, and builds the
    launcher, if they are not on disk already. Call it before a server's first request, or while an image is built.

    With inputs, the network is run on them once without gradients, to find out what its layers are called with;
    PyTorch's operator computes the layers, and the network's state is restored. Without inputs, each layer's few
    kernels are compiled: those of representative sizes. A call of a size for which another schedule is faster may
    compile one more.

    On a GPU for which nothing was measured, the candidates that the first use of a layer times are compiled too. They
    are also timed if there are inputs and the network is on that GPU (see ``conv_transpose2d``).

    Args:
        model: a network with swapped layers, or a layer, in the mode in which it will run.
        inputs: the arguments of a call: a tensor, a tuple (positional arguments), a dict (keyword arguments) or
            ``tconv_swap.Inputs``; or a list of several of these. None prepares for inputs of any size.
        training: compiles the kernels of the gradients too.
        architecture: of the GPU, such as ``"sm_90a"``; this machine need not have it. None: the network's GPU, or the
            current one.
        dtypes: the dtypes of the computation, as under an autocast. None: as observed, or that of each layer's
            parameters.
        memory_formats: the memory formats of the images. None: as observed, or contiguous.
        progress: called with a description of the work, how much of it is done, and the total.

    Raises:
        ValueError: there is no such architecture, dtype or memory format, or none is named and there is no GPU.
        BuildError, CompileError, NvrtcMissingError: the launcher or a kernel cannot be built.
        Exception: whatever the network raises.
    """
    check_architecture(architecture)
    _check("dtypes", dtypes, SUPPORTED_DTYPES)
    _check("memory_formats", memory_formats, FORMATS)
    begin = time.monotonic()
    device, index = _gpu(model, architecture)
    report_progress: Progress = progress or (lambda what, done, total: None)
    report_progress("planning", None, None)
    called: list[OperatorCall]
    blocks: list[BlockCall]
    if inputs is None:
        called, blocks = list(_usual_calls(model)), list(usual_blocks(model))
    else:
        called, blocks = _observed(model, inputs)
    variants = [one for each in called for one in _variants(each, dtypes, memory_formats)]
    stages = dict.fromkeys(stage for one in variants for stage in _stages(one, training))
    plans = ahead.make_all(partial(_plans, stage, device, index) for stage in stages)
    plans += [made for one in variants for made in _cast_plans(one, training)]
    plans += [made for one in variants for made in _evaluation_plans(one, model, device, index)]
    for block in blocks:
        for one in block_variants(block, dtypes, memory_formats):
            plans += block_plans(one, training, device)
    done = _compile(
        (launch.kernel for made in plans for launch in made.launches), device.architecture, report_progress
    )
    if index is not None and any(one.device.type == "cuda" for one in called):
        report_progress("timing", None, None)
        for stage in stages:
            if stage.backend == "auto":
                first_use.winners(stage.problem, stage.mask, stage.has_bias, index, device, "time")
    layers = len({id(one.layer) for one in called})
    seconds = time.monotonic() - begin
    return PrepareReport(device.architecture, layers, done.compiled, done.found, seconds, cache_problem())


def _check(name: str, given: Sequence[Any] | None, known: Sequence[Any]) -> None:
    if unknown := [one for one in given or () if one not in known]:
        raise ValueError(f"{name}: expected some of {', '.join(map(str, known))}, got {unknown[0]}")


def _gpu(model: nn.Module, architecture: str | None) -> tuple[plan.Device, int | None]:
    """Returns what planning must know about the GPU, and its index if this machine has it."""
    if architecture is not None:
        return plan.Device(architecture, *DEVICES[architecture]), None
    if not torch.cuda.is_available():
        raise ValueError(f"architecture: there is no GPU here; name one of {', '.join(DEVICES)}")
    tensors = (*model.parameters(), *model.buffers())
    index = next((one.get_device() for one in tensors if one.is_cuda), torch.cuda.current_device())
    return call.device_facts(index), index


# The calls to prepare for.


def _observed(model: nn.Module, inputs: Any) -> tuple[list[OperatorCall], list[BlockCall]]:
    """Returns the calls of layers and of blocks."""
    called: list[OperatorCall] = []
    blocks: list[BlockCall] = []
    for given in inputs if isinstance(inputs, list) else [inputs]:
        with recording() as recorded:
            called += calls_of(model, Inputs.of(given))
        blocks += recorded
    return called, blocks


def _usual_calls(model: nn.Module) -> Iterator[OperatorCall]:
    """Yields, for each layer that our kernels may compute, a call of each representative size."""
    for name, layer in model.named_modules():
        given: Any = layer
        if not isinstance(layer, LayerState) or given.padding_mode != "zeros":
            continue
        dtype = next((one.dtype for one in layer.parameters()), torch.get_default_dtype())
        of_layer = layer.tconv_geometry()
        weight = empty_form(of_layer.weight_shape, dtype)
        bias = empty_form((of_layer.out_channels,), dtype) if layer.tconv_has_bias() else None
        arguments = (
            of_layer.stride,
            of_layer.padding,
            of_layer.output_padding,
            of_layer.groups,
            of_layer.dilation,
        )
        for size in usual_sizes(of_layer):
            input = empty_form(size.input_shape, dtype)
            operands = (input, weight, bias, *arguments)
            yield OperatorCall(layer, name, tuple(input.shape), input.device, operands, dtype)


def _variants(
    called: OperatorCall,
    dtypes: Sequence[torch.dtype] | None,
    memory_formats: Sequence[torch.memory_format] | None,
) -> Iterator[OperatorCall]:
    """Yields the same call in other dtypes and layouts."""
    for dtype, memory_format in product(dtypes or (None,), memory_formats or (None,)):
        # PyTorch makes the input of a 1-D layer contiguous.
        target_format = None if isinstance(called.layer, ConvTranspose1d) else memory_format
        input, weight, bias, *arguments = called.operands
        tensors = (in_format(form_of(one, dtype), target_format) for one in (input, weight, bias))
        yield called._replace(operands=(*tensors, *arguments))


# What computes the calls.


class _Stage(NamedTuple):
    """A forward pass (``mask`` is empty) or gradients."""

    problem: plan.Problem
    mask: Mask
    has_bias: bool
    backend: str


def _stages(called: OperatorCall, training: bool) -> Iterator[_Stage]:
    problem, backend = called.problem_on_gpu(), called.layer.tconv_backend
    if problem.dtype not in SUPPORTED_DTYPES:
        return
    yield _Stage(problem, FORWARD, called.has_bias, backend)
    if training:
        problem = plan.with_weight_layout(problem, problem.channels_last)
        for wants_input in (True, False):
            yield _Stage(problem, (wants_input, True, called.has_bias), False, backend)


def _plans(stage: _Stage, device: plan.Device, index: int | None) -> Iterator[Plan]:
    """Yields the plans that compute a stage and, where nothing was measured, the candidates that a first use times."""
    for step in steps_of(*stage[:3], device, stage.backend, index):
        if step.plan is not None:
            yield step.plan
    if stage.backend == "auto" and not first_use.is_measured(device) and first_use.is_on():
        for unit in backward_units(stage.mask) if stage.mask else [FORWARD]:
            yield from first_use.candidates_of(
                stage.problem, unit, stage.has_bias, device, first_use.CANDIDATES
            )


def _evaluation_plans(
    called: OperatorCall, model: nn.Module, device: plan.Device, index: int | None
) -> Iterator[Plan]:
    """Yields the plans that compute a layer with the norm and the activation behind it, in evaluation."""
    input, weight, bias, *geometry = called.operands
    for layer, norm, activation in evaluated_together(model):
        applied = activation_of(activation)
        if layer is not called.layer or applied is None:
            continue
        given: Any = norm
        names = ("weight", "bias", "running_mean", "running_var")
        vectors = [None if norm is None else form_of(getattr(given, name)) for name in names]
        words = block_words(*geometry, 0.0 if norm is None else given.eps, *applied)
        epilogue = epilogue_of((*map(form_of, (input, weight, bias)), *vectors), words)
        if epilogue is None:
            continue
        for stage in _stages(called, training=False):
            for made in _plans(stage, device, index):
                fused = with_epilogue(made, epilogue)
                if fused is not None:
                    yield fused


def _cast_plans(called: OperatorCall, training: bool) -> Iterator[Plan]:
    """Yields the plans that cast the parameters under an autocast, and their gradients back."""
    weight, given = called.operands[1], called.parameters
    ways = [(given, weight.dtype), (weight.dtype, given)][: 1 + training]
    for source, target in ways if weight.dtype != given else ():
        made = plan_cast([Output(tuple(weight.shape), False, target)], source)
        if made is not None:
            yield made


def _compile(kernels: Iterable[Kernel], architecture: str, report_progress: Progress) -> jit.Compiled:
    """Compiles the kernels and meanwhile builds the launcher.

    Raises:
        BuildError, CompileError, NvrtcMissingError: one of them cannot be built; the others have been built.
    """
    wanted = list(dict.fromkeys(kernels))
    if not wanted:
        return jit.Compiled()
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(host.build)
        done = jit.compile_all(
            wanted, architecture, lambda count, total: report_progress("compiling kernels", count, total)
        )
        if not building.done() and not host.is_built():
            report_progress("building the launcher", None, None)
        building.result()
    if done.failures:
        raise done.failures[0]
    return done
