"""Calls a layer many times by itself: every call has to give the result of the first, in memory of its own.

Its gradients have to be the same for every memory layout of the output's gradient: with gaps, transposed, expanded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tconv_swap.layer import plain_class
from tconv_swap.memory import is_out_of_memory
from tconv_swap.verification.aliases import share_memory
from tconv_swap.verification.layer_call import GRADIENTS, Differentiated, Gradients, LayerCall, own_class
from tconv_swap.verification.report import Kind
from tconv_swap.verification.runs import normal

#: The number of calls of a layer in turn; a fault that occurs more rarely is not found.
CALLS_IN_TURN = 32
#: The largest number of multiplications of one call. On a GPU, a smaller size would need other kernels to be compiled.
_MULTIPLICATIONS = {"cpu": 1 << 22}
_MULTIPLICATIONS_ELSEWHERE = 1 << 38


class Judge(Protocol):
    """Compares the result of a call with that of another, or with the truth if the two are far apart."""

    def output(self, call: LayerCall, value: Tensor, other: Tensor) -> bool:
        """Returns whether it is right; keeps a fault."""

    def gradients(self, call: LayerCall, grad_output: Tensor, values: Gradients, others: Gradients) -> bool:
        """Returns whether all of them are right; keeps faults."""

    def broken(self, call: LayerCall, kind: Kind, detail: str) -> None:
        """Keeps a fault that is not about numbers."""


def call_in_turn(call: LayerCall, backward: bool, key: str, judge: Judge) -> None:
    """Calls the layer `CALLS_IN_TURN` times on random numbers with the call's shape, or with a smaller one if that
    takes long to compute.

    Args:
        call: only its input's shape, dtype and strides are used; it may be on the meta device.
        backward: whether gradients are compared too.
        key: the seed of the numbers.
    """
    small = _smaller(call, key)
    if small is None:
        return
    theirs = Differentiated(small, plain_class(call.layer))
    expected = theirs.output(differentiable=backward)
    gradient = normal(expected.shape, expected.device, f"{key} gradient").to(expected.dtype)
    wanted = theirs.gradients(gradient, expected) if backward else None
    try:
        _compare_in_turn(small, gradient, expected.detach(), wanted, judge)
    except Exception as error:  # a broken layer may raise anything
        if is_out_of_memory(error):
            raise
        judge.broken(small, "layer_output", f"{type(error).__name__}: {error}".split("\n", 1)[0])


def _compare_in_turn(
    small: LayerCall, gradient: Tensor, expected: Tensor, wanted: Gradients | None, judge: Judge
) -> None:
    backward = wanted is not None
    ours = Differentiated(small, own_class(small.layer))
    first = ours.output(differentiable=False)
    first_gradients: Gradients = (None, None, None)
    if not judge.output(_without_gradients(_described(small, 1)), first, expected):
        return
    if wanted is not None:
        first_gradients = ours.gradients(gradient)
        if not judge.gradients(_described(small, 1), gradient, first_gradients, wanted):
            return
    for number in range(2, CALLS_IN_TURN + 1):
        if not _same_again(
            _described(small, number), ours, first, gradient, first_gradients, backward, judge
        ):
            return
    if backward:
        _in_other_layouts(small, ours, gradient, first_gradients, judge)


def _same_again(
    call: LayerCall,
    ours: Differentiated,
    first: Tensor,
    gradient: Tensor,
    first_gradients: Gradients,
    backward: bool,
    judge: Judge,
) -> bool:
    for differentiable in (False, True) if backward else (False,):
        output = ours.output(differentiable=differentiable)
        if share_memory(output, first):
            judge.broken(call, "layer_output", f"shares memory with an earlier output ({call.described})")
            return False
        described = call if differentiable else _without_gradients(call)
        if not judge.output(described, output.detach(), first):
            return False
    if not backward:
        return True
    gradients = ours.gradients(gradient, output)
    for kind, now, before in zip(GRADIENTS, gradients, first_gradients, strict=True):
        if now is not None and before is not None and share_memory(now, before):
            judge.broken(call, kind, f"shares memory with an earlier gradient ({call.described})")
            return False
    return judge.gradients(call, gradient, gradients, first_gradients)


def _in_other_layouts(
    call: LayerCall, ours: Differentiated, gradient: Tensor, known: Gradients, judge: Judge
) -> None:
    for layout, same in _layouts(gradient):
        described = replace(call, described=f"grad_output {layout}, {call.described}")
        if not judge.gradients(described, same, ours.gradients(same), known):
            return
    ones = torch.ones_like(gradient)
    known = ours.gradients(ones)
    expanded = ones.new_ones(()).expand(ones.shape)
    described = replace(call, described=f"grad_output expanded, {call.described}")
    judge.gradients(described, expanded, ours.gradients(expanded), known)


def _layouts(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the same numbers in other memory layouts."""
    gaps = torch.full((*gradient.shape, 2), math.nan, dtype=gradient.dtype, device=gradient.device)
    gaps[..., 0] = gradient
    yield "with gaps", gaps[..., 0]
    yield "turned", gradient.transpose(-1, -2).contiguous().transpose(-1, -2)
    if gradient.dim() == 4:
        last = gradient.is_contiguous(memory_format=torch.channels_last)
        other = torch.contiguous_format if last else torch.channels_last
        yield "contiguous" if last else "channels_last", gradient.contiguous(memory_format=other)


def _without_gradients(call: LayerCall) -> LayerCall:
    return replace(call, described=f"without gradients, {call.described}")


def _described(call: LayerCall, number: int) -> LayerCall:
    shape = "x".join(map(str, call.input.shape))
    return replace(call, described=f"call {number} of {CALLS_IN_TURN} in turn, input {shape}")


def _smaller(call: LayerCall, key: str) -> LayerCall | None:
    """Returns the call on random numbers, with as many samples and pixels as are computed quickly; None if it has no
    output."""
    for shape in _shapes(call):
        like = call.input
        numbers = normal(torch.Size(shape), call.weight.device, f"{key} input").to(like.dtype)
        last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
        if last:
            numbers = numbers.contiguous(memory_format=torch.channels_last)
        smaller = replace(call, input=numbers, extra=True)
        try:
            if smaller.output(plain_class(call.layer)).numel():
                return smaller
        except RuntimeError:
            continue  # the padding is larger than this small output
    return None


def _shapes(call: LayerCall) -> list[list[int]]:
    """Returns the largest shape that is computed quickly, and then larger ones."""
    layer, shape = call.layer, list(call.input.shape)
    kernel = len(layer.kernel_size)
    a_pixel = layer.in_channels * (layer.out_channels // layer.groups) * math.prod(layer.kernel_size)
    most = _MULTIPLICATIONS.get(call.weight.device.type, _MULTIPLICATIONS_ELSEWHERE) // max(a_pixel, 1)
    found = [list(shape)]

    def pixels() -> int:
        return math.prod(shape) // layer.in_channels

    if pixels() > most and len(shape) > kernel + 1:
        shape[0] = max(1, min(shape[0], most // max(1, math.prod(shape[-kernel:]))))
        found.append(list(shape))
    while call.output_size is None and pixels() > most and max(shape[-kernel:]) > 1:
        largest = max(range(len(shape) - kernel, len(shape)), key=shape.__getitem__)
        shape[largest] = (shape[largest] + 1) // 2
        found.append(list(shape))
    return found[::-1]
