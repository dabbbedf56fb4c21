"""Transposed convolution on CUDA: decides what computes a call that csrc/call.cpp does not know yet.

Every call goes through csrc/call.cpp, which remembers each result of ``answer`` with everything that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cuda import choice, first_use
from tconv_swap.cuda.choice import Mask, Step
from tconv_swap.geometry import Arguments, from_list
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.runtime import launch, nvrtc
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import Output, Plan

#: In bytes: kernels copy pieces of this size. PyTorch's allocations are aligned to it; a slice may not be.
ALIGNMENT = 16

#: The formats that a step wants its tensors copied into; None: it reads the tensor as it lies.
Formats = tuple[torch.memory_format | None, ...]
_AS_THEY_LIE: Formats = (None, None, None)
#: A memory format, or none, in the words of an answer.
FORMAT_WORDS = {None: -1, torch.contiguous_format: 0, torch.channels_last: 1}
#: Stands for PyTorch's operator, in place of a program's handle.
_PYTORCH = -1


class Posed(NamedTuple):
    """What a call asks for: one stage of a problem on a GPU. An empty ``mask`` means the forward pass."""

    problem: plan.Problem
    mask: Mask
    has_bias: bool
    device: int


#: Each is called with every question that csrc/call.cpp asks, except for the backend ``"native"``. It is called in
#: the thread that asks, which may be one of autograd's.
observers: list[Callable[[Posed], object]] = []

_library = torch.library.Library("tconv_swap", "FRAGMENT")
_library.define("answer(Tensor?[] tensors, int[] geometry, bool[3] mask, str backend) -> int[]")


@contextmanager
def recording() -> Iterator[list[Posed]]:
    """Collects every question that is asked inside: after ``forget``, one for each kind of call that is computed."""
    posed: list[Posed] = []
    observers.append(posed.append)
    try:
        yield posed
    finally:
        observers.remove(posed.append)


def answer(
    tensors: Sequence[Tensor | None], geometry: Sequence[int], mask: Sequence[bool], backend: str
) -> list[int]:
    """Returns how a call is computed, in the words that csrc/compute.h reads.

    Args:
        tensors: input, weight and bias of a forward pass; grad_output, input and weight of gradients.
        geometry: as ``geometry.as_list`` writes it.
        mask: which gradients (input, weight, bias); none: the forward pass.

    Returns:
        The format of the result; whether PyTorch's operator computes a forward pass and all its gradients; then each
        step: the handle of its program, its mask, the formats of its tensors.

    Raises:
        RuntimeError: the tensors or arguments do not fit together, or the kernels cannot be built.
        ValueError: there is no such backend.
    """
    choice.check_backend(backend)
    arguments = from_list(geometry)
    if any(mask):
        grad_output, input, weight = tensors
        assert grad_output is not None
        assert input is not None
        assert weight is not None
        check_backward(grad_output, input, weight, arguments)
        problem = problem_of(input, weight, None, arguments)
        steps = _gradient_steps(problem, tuple(mask), input.get_device(), backend)
        formats = _formats(tensors, (_format(problem.channels_last),) * 3)
        is_pytorchs = False
        posed = Posed(
            plan.with_weight_layout(problem, problem.channels_last), tuple(mask), False, input.get_device()
        )
    else:
        input, weight, bias = tensors
        assert input is not None
        assert weight is not None
        problem = problem_of(input, weight, bias, arguments)
        steps = (step_for(input, weight, bias, arguments, backend),)
        formats = _forward_formats(problem, tensors)
        is_pytorchs = steps[0].plan is None and all(
            step.plan is None
            for step in _gradient_steps(
                problem, (True, True, bias is not None), input.get_device(), backend, "known"
            )
        )
        posed = Posed(problem, choice.FORWARD, bias is not None, input.get_device())
    _tell(posed, backend)
    words = [FORMAT_WORDS[output_memory_format(input, weight)], int(is_pytorchs)]
    for step in steps:
        words += _step_words(step, input, tensors, formats)
    return words


def block_answer(
    tensors: Sequence[Tensor | None],
    geometry: Sequence[int],
    backend: str,
    ending: Callable[[Plan], Plan | None],
) -> list[int] | None:
    """Returns how a forward pass is computed by the plan that ``ending`` makes of its plan, in the words of ``answer``;
    None if PyTorch's operator computes it, or if ``ending`` returns None.

    Args:
        tensors: input, weight and bias.

    Raises:
        RuntimeError, ValueError: as ``answer``.
    """
    choice.check_backend(backend)
    arguments = from_list(geometry)
    input, weight, bias = tensors
    assert input is not None
    assert weight is not None
    step = step_for(input, weight, bias, arguments, backend)
    made = None if step.plan is None else ending(step.plan)
    if made is None:
        return None
    problem = problem_of(input, weight, bias, arguments)
    _tell(Posed(problem, choice.FORWARD, bias is not None, input.get_device()), backend)
    words = _step_words(replace(step, plan=made), input, tensors, _forward_formats(problem, tensors))
    return [FORMAT_WORDS[output_memory_format(input, weight)], 0, *words]


def cast_answer(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[int]:
    """How up to three tensors of one dtype are cast to another, in the words of ``answer``.

    Args:
        tensors: which; None behind the last.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    first = given[0]
    copies = [
        Output(tuple(tensor.shape), not tensor.is_contiguous(), dtype)
        for tensor in given
        if any(reads_as_it_lies(tensor, form) for form in (torch.contiguous_format, torch.channels_last))
    ]
    made = plan_cast(copies, first.dtype) if len(copies) == len(given) else None
    step = Step(choice.FORWARD, made, "")
    return [FORMAT_WORDS[torch.contiguous_format], 0, *_step_words(step, first, tensors, _AS_THEY_LIE)]


# Called through the module, whose function a test may replace.
_library.define("cast_answer(Tensor?[] tensors, ScalarType dtype) -> int[]")
_library.impl("cast_answer", cast_answer, "CompositeExplicitAutograd")
_library.impl("answer", lambda *question: answer(*question), "CompositeExplicitAutograd")


def forget() -> None:
    """Makes the next call of each kind ask ``answer`` again."""
    launch.forget_answers()


def precision() -> str:
    """Returns ``"tf32"`` if PyTorch's switches currently allow TF32 for a float32 convolution, else another word."""
    # The same value as torch.backends.cudnn.conv.fp32_precision, without its descriptor, which takes 1 us.
    return torch._C._get_fp32_precision_getter("cuda", "conv")


def problem_of(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> plan.Problem:
    """Returns the problem that a forward call with these tensors poses.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    geometry = check_forward(input, weight, bias, arguments)
    return plan.Problem(
        geometry=geometry,
        dtype=input.dtype,
        precision="tf32" if precision() == "tf32" and input.dtype == torch.float32 else "ieee",
        channels_last=output_memory_format(input, weight) == torch.channels_last,
        # The weight's layout does not depend on the activations', and the weight is read as it lies.
        weight_channels_last=not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last),
    )


def step_for(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str = "auto"
) -> Step:
    """Returns the step that computes a forward call.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    problem = problem_of(input, weight, bias, arguments)
    index, has_bias = input.get_device(), bias is not None
    device = device_facts(index)
    winners = first_use.winners(problem, choice.FORWARD, has_bias, index, device, _way(backend))
    return choice.choose_forward(problem, has_bias, device, backend, winners)


@lru_cache(maxsize=64)
def device_facts(index: int) -> plan.Device:
    """Returns what planning must know about a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return plan.Device(
        architecture=nvrtc.architecture_for(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def reads_as_it_lies(tensor: Tensor, wanted: torch.memory_format) -> bool:
    """Returns whether kernels that want a tensor in this format can read this one without a copy."""
    return tensor.is_contiguous(memory_format=wanted) and tensor.data_ptr() % ALIGNMENT == 0


def _tell(posed: Posed, backend: str) -> None:
    if backend != choice.NATIVE:
        for observe in list(observers):
            observe(posed)


def _forward_formats(problem: plan.Problem, tensors: Sequence[Tensor | None]) -> Formats:
    layouts = problem.channels_last, problem.weight_channels_last, False
    return _formats(tensors, tuple(map(_format, layouts)))


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def _formats(tensors: Sequence[Tensor | None], wanted: Sequence[torch.memory_format]) -> Formats:
    return tuple(
        None if tensor is None or reads_as_it_lies(tensor, form) else form
        for tensor, form in zip(tensors, wanted, strict=True)
    )


def _gradient_steps(
    problem: plan.Problem, mask: Mask, index: int, backend: str, way: first_use.Way | None = None
) -> tuple[Step, ...]:
    # PyTorch gives every gradient, also the weight's, the format of the output.
    problem = plan.with_weight_layout(problem, problem.channels_last)
    device = device_facts(index)
    winners = first_use.winners(problem, mask, False, index, device, way or _way(backend))
    return choice.choose_backward(problem, mask, device, backend, winners)


def _way(backend: str) -> first_use.Way:
    """Only "auto" leaves the choice to a measurement; who records what is asked measures it."""
    return "time" if backend == "auto" and not observers else "known"


def _step_words(step: Step, input: Tensor, tensors: Sequence[Tensor | None], formats: Formats) -> list[int]:
    handle, made = _PYTORCH, step.plan
    if made is None:
        formats = _AS_THEY_LIE
    else:
        told = {
            index: tensor.stride()
            for index, tensor in enumerate(tensors)
            if tensor is not None and can_be_told(made, index, tensor)
        }
        formats = tuple(None if index in told else form for index, form in enumerate(formats))
        architecture = device_facts(input.get_device()).architecture
        handle = launch.add_plan(made.with_strides(told), input.dtype, input.device, architecture)
    mask = step.mask or (False, False, False)
    return [handle, *map(int, mask), *(FORMAT_WORDS[form] for form in formats)]


def can_be_told(made: Plan, index: int, tensor: Tensor) -> bool:
    """Returns whether the kernels read this input however it lies: its offsets must be of 32 bits."""
    if index not in made.read_as_they_lie:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last < INT32_LIMIT and max(tensor.stride()) < INT32_LIMIT
