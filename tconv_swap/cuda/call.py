"""Transposed convolution on CUDA: from tensors to the steps that compute it, remembered, and their launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cuda import choice, launch, native, nvrtc, plan, tuned
from tconv_swap.cuda.choice import Mask, Step

#: Stride, padding, output_padding, groups, dilation: hashable.
Arguments = tuple[Any, ...]

#: Bytes: kernels copy in pieces of so many. PyTorch allocates so; a slice may begin elsewhere.
ALIGNMENT = 16


class Call(NamedTuple):
    """One step, ready to run.

    Attributes:
        handle: of the plan, or None for PyTorch's operator.
        mask: the gradients it computes; empty: the output.
        formats: what the plan wants its tensors brought to. None: the tensor as it lies.
        all_native: of a forward pass: PyTorch's operator computes it and every gradient.
    """

    handle: int | None
    mask: Mask
    formats: tuple[torch.memory_format | None, ...]
    all_native: bool = False


_calls: dict[tuple[Any, ...], tuple[Call, ...]] = {}


class Posed(NamedTuple):
    """What a call asked for: one stage of a problem on a GPU. An empty ``mask``: the forward pass."""

    problem: plan.Problem
    mask: Mask
    has_bias: bool
    device: int


_posed: list[Posed] | None = None


@contextmanager
def recording() -> Iterator[list[Posed]]:
    """Everything that is computed meanwhile and is not remembered (``route.forget``), but what a backend of
    ``"native"`` computes."""
    global _posed
    posed: list[Posed] = []
    _posed = posed
    try:
        yield posed
    finally:
        _posed = None


def forget() -> None:
    """Choose anew how each call is computed."""
    _calls.clear()


def _record(problem: plan.Problem, mask: Mask, has_bias: bool, device: int, backend: str) -> None:
    if _posed is not None and backend != choice.NATIVE:
        _posed.append(Posed(problem, mask, has_bias, device))


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str = "auto"
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]`` in PyTorch's memory format, on the current stream.

    Raises:
        RuntimeError: the tensors or arguments do not fit together (checked before anything is launched), the
            kernels cannot be built, or CUDA fails.
        ValueError: there is no such backend.
    """
    (call,) = forward_calls(input, weight, bias, arguments, backend)
    if call.handle is None:
        return native.forward(input, weight, bias, arguments)
    return _launch(call, input, weight, bias)[0]


def forward_calls(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str
) -> tuple[Call, ...]:
    key = (
        _layout(input),
        _layout(weight),
        None if bias is None else _layout(bias),
        arguments,
        precision(),
        backend,
    )
    calls = _calls.get(key)
    if calls is None:
        calls = _calls[key] = _make_forward(input, weight, bias, arguments, backend)
    return calls


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: Arguments,
    output_mask: Mask,
    backend: str = "auto",
) -> list[Tensor]:
    """The gradients ``output_mask`` asks for (input, weight, bias), in that order, on the current stream.

    Raises:
        RuntimeError, ValueError: as ``forward``.
    """
    return backward_and_calls(grad_output, input, weight, arguments, output_mask, backend)[0]


def backward_and_calls(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: Arguments,
    output_mask: Mask,
    backend: str,
) -> tuple[list[Tensor], tuple[Call, ...]]:
    key = (
        _layout(grad_output),
        _layout(input),
        _layout(weight),
        arguments,
        output_mask,
        precision(),
        backend,
    )
    calls = _calls.get(key)
    if calls is None:
        calls = _calls[key] = _make_backward(grad_output, input, weight, arguments, output_mask, backend)
    return in_order(calls, [_gradients(one, grad_output, input, weight, arguments) for one in calls]), calls


def in_order(calls: Sequence[Call], gradients: Sequence[list[Tensor]]) -> list[Tensor]:
    """Those of several steps as one would have given them out: of the input, the weight, the bias."""
    if len(calls) == 1:
        return gradients[0]
    found: list[Tensor | None] = [None, None, None]
    for one, computed in zip(calls, map(iter, gradients), strict=True):
        found = [next(computed) if wanted else other for wanted, other in zip(one.mask, found, strict=True)]
    return [gradient for gradient in found if gradient is not None]


def precision() -> str:
    """``"tf32"`` where PyTorch's switches allow it for a float32 convolution just now, else another word."""
    # What torch.backends.cudnn.conv.fp32_precision reads, without the 1 us of its descriptor.
    return torch._C._get_fp32_precision_getter("cuda", "conv")


def problem_of(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> plan.Problem:
    """What a forward call with these tensors asks to compute.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    geometry = check_forward(input, weight, bias, arguments)
    return plan.Problem(
        geometry=geometry,
        dtype=input.dtype,
        precision="tf32" if precision() == "tf32" and input.dtype == torch.float32 else "ieee",
        channels_last=output_memory_format(input, weight) == torch.channels_last,
        # A weight lies as its owner left it, whatever the activations do, and is read as it lies.
        weight_channels_last=not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last),
    )


def step_for(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str = "auto"
) -> Step:
    """What computes a forward call.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    problem = problem_of(input, weight, bias, arguments)
    device = input.get_device()
    return choice.choose_forward(
        problem, bias is not None, device_facts(device), backend, tuned.winners(device)
    )


@lru_cache(maxsize=64)
def device_facts(index: int) -> plan.Device:
    """What planning must know of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return plan.Device(
        architecture=nvrtc.architecture_for(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % ALIGNMENT)


def _gradients(
    call: Call, grad_output: Tensor, input: Tensor, weight: Tensor, arguments: Arguments
) -> list[Tensor]:
    if call.handle is None:
        return native.backward(grad_output, input, weight, arguments, call.mask)
    return _launch(call, grad_output, input, weight)


def _launch(call: Call, *tensors: Tensor | None) -> list[Tensor]:
    laid_out = [
        tensor if tensor is None or form is None else tensor.clone(memory_format=form)
        for tensor, form in zip(tensors, call.formats, strict=True)
    ]
    return torch.ops.tconv_swap.launch.default(call.handle, [*laid_out])  # type: ignore[no-any-return]


def _format(tensor: Tensor | None, wanted: torch.memory_format) -> torch.memory_format | None:
    if tensor is None:
        return None
    as_it_lies = tensor.is_contiguous(memory_format=wanted) and tensor.data_ptr() % ALIGNMENT == 0
    return None if as_it_lies else wanted


def _make_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str
) -> tuple[Call, ...]:
    problem = problem_of(input, weight, bias, arguments)
    _record(problem, choice.FORWARD, bias is not None, input.get_device(), backend)
    step = step_for(input, weight, bias, arguments, backend)
    activations = torch.channels_last if problem.channels_last else torch.contiguous_format
    weights = torch.channels_last if problem.weight_channels_last else torch.contiguous_format
    formats = (_format(input, activations), _format(weight, weights), _format(bias, torch.contiguous_format))
    call = _call(step, (input, weight, bias), formats)
    if step.plan is None:
        steps = _backward_steps(problem, (True, True, bias is not None), input.get_device(), backend)
        call = call._replace(all_native=all(step.plan is None for step in steps))
    return (call,)


def _make_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: Arguments,
    output_mask: Mask,
    backend: str,
) -> tuple[Call, ...]:
    check_backward(grad_output, input, weight, arguments)
    problem = problem_of(input, weight, None, arguments)
    _record(
        plan.with_weight_layout(problem, problem.channels_last),
        output_mask,
        False,
        input.get_device(),
        backend,
    )
    steps = _backward_steps(problem, output_mask, input.get_device(), backend)
    wanted = torch.channels_last if problem.channels_last else torch.contiguous_format
    tensors = (grad_output, input, weight)
    formats = tuple(_format(tensor, wanted) for tensor in tensors)
    return tuple(_call(step, tensors, formats) for step in steps)


def _backward_steps(problem: plan.Problem, mask: Mask, device: int, backend: str) -> tuple[Step, ...]:
    # PyTorch gives every gradient the format of the output, the weight's too.
    problem = plan.with_weight_layout(problem, problem.channels_last)
    return choice.choose_backward(problem, mask, device_facts(device), backend, tuned.winners(device))


def _call(
    step: Step, tensors: tuple[Tensor | None, ...], formats: tuple[torch.memory_format | None, ...]
) -> Call:
    if step.plan is None:
        return Call(None, step.mask, (None,) * 3)
    first = tensors[0]
    assert first is not None
    architecture = device_facts(first.get_device()).architecture
    laid_out = [
        tensor
        if tensor is None or form is None
        else torch.empty(tensor.shape, memory_format=form, device="meta")
        for tensor, form in zip(tensors, formats, strict=True)
    ]
    handle = launch.add_plan(step.plan, first.dtype, first.device, architecture, laid_out)
    return Call(handle, step.mask, formats)
