"""Reflection padding on CUDA: plans a call that is not in the cache of csrc/pad.h.

A call goes through the op ``reflection_pad``, which keeps each result of ``plan_call`` under everything that it depends
on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tconv_swap.blocks.kernels import DECLINED, call_words, is_channels_last
from tconv_swap.cuda.call import device_facts, reads_as_it_lies
from tconv_swap.kernels.pad.reflection_pad import Pad, plan_backward, plan_forward
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.program import Plan

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# It returns None if it did nothing and PyTorch's module has to compute the call. Only eager calls on CUDA use it: a
# compiled graph contains PyTorch's operator.
_library.define("reflection_pad(Tensor input, int[] padding) -> Tensor?")
_library.define("plan_pad_call(Tensor tensor, int[] form, int stage) -> int[]")
reflection_pad = torch.ops.tconv_swap.reflection_pad.default

#: Stages, with the numbers of csrc/pad.h.
FORWARD, BACKWARD = 25, 26


def plan_call(tensor: Tensor, form: Sequence[int], stage: int) -> list[int]:
    """Returns the plan of a call, in the words that csrc/compute.cpp reads.

    Args:
        tensor: the image; for a backward pass the gradient of the padded image.
        form: columns on the left and on the right, rows above and below; for a backward pass also whether the image
            lies in channels_last.
        stage: ``FORWARD`` or ``BACKWARD``.

    Raises:
        BuildError, CompileError, RuntimeError: as ``launch.add_plan``.
    """
    made = planned(tensor, form, stage, device_facts(tensor.get_device()))
    if made is None:
        return DECLINED
    lies = torch.channels_last if made.outputs[0].channels_last else torch.contiguous_format
    return call_words(made, tensor, (None if reads_as_it_lies(tensor, lies) else lies, None, None))


def planned(tensor: Tensor, form: Sequence[int], stage: int, device: Device) -> Plan | None:
    """Returns the plan of the kernel for a call, with the arguments of ``plan_call``; None if PyTorch's module computes
    the call, and raises the error of one that is wrong. Only the shape, strides and dtype of the tensor matter."""
    padding = tuple(form[:4])
    if stage == FORWARD:
        channels_last = is_channels_last(tensor)
        if channels_last is None:
            return None
        return plan_forward(Pad(tuple(tensor.shape), channels_last, tensor.dtype, padding), device)
    left, right, above, below = padding
    *others, height, width = tensor.shape
    shape = (*others, height - above - below, width - left - right)
    made = plan_backward(Pad(shape, bool(form[4]), tensor.dtype, padding), device)
    assert made is not None  # every call with a forward plan has a backward plan
    return made


# Elsewhere than on CUDA the module computes the call.
_library.impl("reflection_pad", lambda *given: None, "CompositeExplicitAutograd")
# The lambda looks the function up at each call, so that a test may replace it.
_library.impl("plan_pad_call", lambda *given: plan_call(*given), "CompositeExplicitAutograd")
