"""Transposed convolution on CUDA: plans a call that is not in the cache of csrc/plan_cache.h.

Every call goes through csrc/call.cpp or csrc/blocks.cpp. The cache keeps each result of ``plan_call`` under everything
that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cuda import choice, expected, first_calls, first_use
from tconv_swap.cuda.choice import CallKind, Mask, Step
from tconv_swap.cuda.expected import ExpectedLayer
from tconv_swap.geometry import Arguments, from_list
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.kernels.common.layer_sizes import other_sizes
from tconv_swap.runtime import ahead, jit, launch, nvrtc
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import Output, Plan

#: Bytes. Kernels copy vectors of this size; PyTorch aligns allocations to it, but a slice may be misaligned.
ALIGNMENT = 16

#: The format that each tensor of a step is copied into, or None if the step reads the tensor as it lies in memory.
Formats = tuple[torch.memory_format | None, ...]
_AS_THEY_LIE: Formats = (None, None, None)
#: The word of a call plan that stands for a memory format, or for none.
FORMAT_WORDS = {None: -1, torch.contiguous_format: 0, torch.channels_last: 1}
#: Stands for PyTorch's operator, in place of a program's handle.
_PYTORCH = -1


#: Each is called for every call that is planned, except for the backend ``"native"``. It runs in the thread of the
#: call, which may be one of autograd's.
observers: list[Callable[[CallKind], object]] = []

_library = torch.library.Library("tconv_swap", "FRAGMENT")
_library.define(
    "plan_call(Tensor?[] tensors, int[] geometry, bool[3] mask, str backend, bool[3] later) -> int[]"
)


@contextmanager
def recording() -> Iterator[list[CallKind]]:
    """Collects the calls that are planned inside: after ``forget``, one for each kind of call that is computed."""
    kinds: list[CallKind] = []
    observers.append(kinds.append)
    try:
        yield kinds
    finally:
        observers.remove(kinds.append)


def plan_call(
    tensors: Sequence[Tensor | None],
    geometry: Sequence[int],
    mask: Sequence[bool],
    backend: str,
    later: Sequence[bool] = (False, False, False),
) -> list[int]:
    """Returns the plan of a call, in the words that csrc/compute.cpp reads.

    Args:
        tensors: input, weight and bias of a forward pass; grad_output, input and weight of gradients.
        geometry: as ``geometry.as_list`` writes it.
        mask: which gradients (input, weight, bias) are computed; if none is, the forward pass.
        later: which gradients a backward pass will compute; they are planned and compiled in the background.

    Returns:
        The format of the result; whether PyTorch's operator computes a forward pass and all its gradients; then for
        each step the handle of its program, its mask, and the formats of its tensors.

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
        kind = kind_of_gradients(problem, tuple(mask), input.get_device())
        ahead.settle((kind, backend))
        steps = _gradient_steps(kind.problem, kind.mask, kind.device, backend)
        formats = _formats(tensors, (_format(problem.channels_last),) * 3)
        is_pytorchs = False
    else:
        input, weight, bias = tensors
        assert input is not None
        assert weight is not None
        problem = problem_of(input, weight, bias, arguments)
        kind = CallKind(problem, choice.FORWARD, bias is not None, input.get_device())
        ahead.settle((kind, backend))
        steps = (_forward_step(problem, kind.has_bias, kind.device, backend),)
        formats = _forward_formats(problem, tensors)
        is_pytorchs = steps[0].plan is None and not plans_of(
            kind_of_gradients(problem, (True, True, kind.has_bias), kind.device), backend
        )
        _plan_what_follows(kind, steps[0].plan, tuple(later), backend)
    _notify(kind, backend)
    words = [FORMAT_WORDS[output_memory_format(input, weight)], int(is_pytorchs)]
    architecture, compiled = device_facts(input.get_device()).architecture, False
    for step in steps:
        if step.plan is not None:
            compiled |= launch.load_kernels(step.plan, input.device, architecture)
        words += _step_words(step, input, tensors, formats)
    if compiled:
        ahead.begin_others((kind, backend), _plans_of_other_sizes(kind, backend), architecture)
    return words


def plan_block_call(
    tensors: Sequence[Tensor | None],
    geometry: Sequence[int],
    backend: str,
    ending: Callable[[Plan], Plan | None],
) -> list[int] | None:
    """Returns the plan of a forward pass after ``ending`` has changed it, in the words of ``plan_call``; None if
    PyTorch's operator computes the forward pass, or if ``ending`` returns None.

    Args:
        tensors: input, weight and bias.

    Raises:
        RuntimeError, ValueError: as ``plan_call``.
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
    _notify(CallKind(problem, choice.FORWARD, bias is not None, input.get_device()), backend)
    words = _step_words(replace(step, plan=made), input, tensors, _forward_formats(problem, tensors))
    return [FORMAT_WORDS[output_memory_format(input, weight)], 0, *words]


def plan_cast_call(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[int]:
    """Returns the plan that casts up to three tensors of one dtype to another, in the words of ``plan_call``.

    Args:
        tensors: the tensors, with None behind the last one.
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


# The lambda looks the function up at each call, so that a test may replace it.
_library.define("plan_cast_call(Tensor?[] tensors, ScalarType dtype) -> int[]")
_library.impl("plan_cast_call", plan_cast_call, "CompositeExplicitAutograd")
_library.impl("plan_call", lambda *given: plan_call(*given), "CompositeExplicitAutograd")


def forget() -> None:
    """Empties the cache of call plans: the next call of each kind is planned again."""
    launch.forget_plans()


def precision() -> str:
    """Returns ``"tf32"`` if PyTorch's switches currently allow TF32 for a float32 convolution, else another word."""
    # The same value as torch.backends.cudnn.conv.fp32_precision, without its descriptor, which takes 1 us.
    return torch._C._get_fp32_precision_getter("cuda", "conv")


def problem_of(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> plan.Problem:
    """Returns the problem of a forward call with these tensors.

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
    return _forward_step(problem, bias is not None, input.get_device(), backend)


@lru_cache(maxsize=64)
def device_facts(index: int) -> plan.Device:
    """Returns the properties of a GPU that planning uses."""
    properties = torch.cuda.get_device_properties(index)
    return plan.Device(
        architecture=nvrtc.architecture_for(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def reads_as_it_lies(tensor: Tensor, wanted: torch.memory_format) -> bool:
    """Returns whether kernels that want a tensor in this format can read this one without a copy."""
    return tensor.is_contiguous(memory_format=wanted) and tensor.data_ptr() % ALIGNMENT == 0


def _notify(kind: CallKind, backend: str) -> None:
    """Remembers the call and calls the observers, unless the backend leaves no choice."""
    if backend != choice.NATIVE:
        first_calls.remember(kind)
        for observe in list(observers):
            observe(kind)


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


def _forward_step(
    problem: plan.Problem, has_bias: bool, index: int, backend: str, way: first_use.Way | None = None
) -> Step:
    device = device_facts(index)
    winners = first_use.winners(problem, choice.FORWARD, has_bias, index, device, way or _way(backend))
    return choice.choose_forward(problem, has_bias, device, backend, winners)


def _gradient_steps(
    problem: plan.Problem, mask: Mask, index: int, backend: str, way: first_use.Way | None = None
) -> tuple[Step, ...]:
    device = device_facts(index)
    winners = first_use.winners(problem, mask, False, index, device, way or _way(backend))
    return choice.choose_backward(problem, mask, device, backend, winners)


def kind_of_gradients(problem: plan.Problem, mask: Mask, index: int) -> CallKind:
    # PyTorch gives every gradient, also the weight's, the format of the output.
    return CallKind(plan.with_weight_layout(problem, problem.channels_last), mask, False, index)


def _plan_what_follows(kind: CallKind, made: Plan | None, later: Mask, backend: str) -> None:
    """Plans and compiles in the background what is probably called behind a forward pass by the plan ``made``: the
    layers behind it, if it has kernels that must be compiled, and the gradients."""
    architecture = device_facts(kind.device).architecture
    missing = [] if made is None else launch.missing_kernels(made, architecture)
    compiles = not all(jit.is_on_disk(kernel, architecture) for kernel in missing)
    called = ExpectedLayer(kind.problem.geometry, kind.has_bias)
    followers = [
        kind._replace(problem=kind.problem._replace(geometry=layer.geometry), has_bias=layer.has_bias)
        for layer in (expected.followers(called) if compiles else ())
    ]
    for follower in followers:
        _plan_ahead(follower, backend)
    if not any(later):
        return
    for follower in reversed(followers):  # the order of the backward pass
        mask = True, later[1], later[1] and follower.has_bias
        _plan_ahead(kind_of_gradients(follower.problem, mask, follower.device), backend)
    _plan_ahead(kind_of_gradients(kind.problem, later, kind.device), backend)


def _plan_ahead(kind: CallKind, backend: str) -> None:
    """Plans a kind of call and compiles its kernels in the background."""
    architecture = device_facts(kind.device).architecture
    others = _plans_of_other_sizes(kind, backend)
    ahead.begin((kind, backend), lambda: plans_of(kind, backend), architecture, others)


def plans_of(kind: CallKind, backend: str) -> list[Plan]:
    """Returns our plans of a kind of call, chosen by what is known."""
    if kind.mask:
        steps = _gradient_steps(kind.problem, kind.mask, kind.device, backend, "known")
    else:
        steps = (_forward_step(kind.problem, kind.has_bias, kind.device, backend, "known"),)
    return [step.plan for step in steps if step.plan is not None]


def _plans_of_other_sizes(kind: CallKind, backend: str) -> Callable[[], Iterator[Plan]]:
    """Returns a function that plans a layer for other sizes, the nearest first: it has few kernels."""

    def make_plans() -> Iterator[Plan]:
        for geometry in other_sizes(kind.problem.geometry):
            yield from plans_of(kind._replace(problem=kind.problem._replace(geometry=geometry)), backend)

    return make_plans


def _way(backend: str) -> first_use.Way:
    """Returns "time" if the choice may be measured now: with the backend "auto", and if nobody records calls to measure
    them."""
    return "time" if backend == "auto" and not observers else "known"


def _step_words(step: Step, input: Tensor, tensors: Sequence[Tensor | None], formats: Formats) -> list[int]:
    handle, made = _PYTORCH, step.plan
    if made is None:
        formats = _AS_THEY_LIE
    else:
        strides = {
            index: tensor.stride()
            for index, tensor in enumerate(tensors)
            if tensor is not None and can_read_strides(made, index, tensor)
        }
        formats = tuple(None if index in strides else form for index, form in enumerate(formats))
        architecture = device_facts(input.get_device()).architecture
        handle = launch.add_plan(made.with_strides(strides), input.dtype, input.device, architecture)
    mask = step.mask or (False, False, False)
    return [handle, *map(int, mask), *(FORMAT_WORDS[form] for form in formats)]


def can_read_strides(made: Plan, index: int, tensor: Tensor) -> bool:
    """Returns whether the kernels read this input by its strides, which needs offsets of 32 bits."""
    if index not in made.read_as_they_lie:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last < INT32_LIMIT and max(tensor.stride()) < INT32_LIMIT
