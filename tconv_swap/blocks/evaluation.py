"""Blocks in evaluation as one program: plans a call that is not in the cache of csrc/block.h.

A call goes through the op ``block_output``, which keeps each result of ``plan_call`` under everything that it depends
on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tconv_swap.blocks.kernels import DECLINED
from tconv_swap.cuda import call
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.op import geometry_words

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# It returns None if it did nothing. Only eager calls on CUDA use it: a compiled graph contains the modules.
_library.define(
    "block_output(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias,"
    " Tensor? running_mean, Tensor? running_var, int[] words, str backend) -> Tensor?"
)
_library.define("plan_block_call(Tensor?[] tensors, int[] words, str backend) -> int[]")
block_output = torch.ops.tconv_swap.block_output.default

#: How many numbers of a layer's geometry the op's ``words`` begin with.
_GEOMETRY = 9


# A network calls this with the same numbers again and again.
@lru_cache(maxsize=4096)
def block_words(
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
    eps: float,
    activation: Activation,
    slope: float,
) -> list[int]:
    """Returns the op's ``words``: the geometry of the layer, and the epilogue behind it. ``eps`` is that of the norm,
    if there is one."""
    geometry = geometry_words(stride, padding, output_padding, groups, dilation)
    return [*geometry, int(activation), *struct.unpack("<2q", struct.pack("<2d", eps, slope))]


def plan_call(tensors: Sequence[Tensor | None], words: Sequence[int], backend: str) -> list[int]:
    """Returns the plan of a call, in the words that csrc/compute.cpp reads.

    Args:
        tensors: input, weight and bias of the layer; weight, bias, running_mean and running_var of the norm, all four
            None where there is none.
        words: as ``block_words`` returns them.

    Raises:
        BuildError, CompileError, RuntimeError, ValueError: as ``call.plan_call``.
    """
    epilogue = epilogue_of(tensors, words)
    if epilogue is None:
        return DECLINED
    found = call.plan_block_call(
        tensors[:3], words[:_GEOMETRY], backend, lambda made: with_epilogue(made, epilogue)
    )
    return DECLINED if found is None else found


def epilogue_of(tensors: Sequence[Tensor | None], words: Sequence[int]) -> Epilogue | None:
    """Returns the epilogue of a call; None if our kernels do not compute it. Only the shapes, strides and dtypes of the
    tensors matter."""
    input, weight, _, *vectors = tensors
    assert input is not None
    assert weight is not None
    activation = Activation(words[_GEOMETRY])
    eps, slope = struct.unpack("<2d", struct.pack("<2q", *words[_GEOMETRY + 1 :]))
    if input.dtype not in DTYPES or input.dim() != 4 or weight.dim() != 4:
        return None
    given = [one for one in vectors if one is not None]
    if not given:
        return Epilogue(False, activation, slope=slope)
    if vectors[2] is None or vectors[3] is None:
        return None
    groups = words[6]
    channels = (weight.shape[1] * groups,)
    dtypes = {one.dtype for one in given}
    if (
        len(dtypes) > 1
        or not dtypes <= {input.dtype, torch.float32}
        or any(
            one.shape != channels or one.device != input.device or not one.is_contiguous() for one in given
        )
    ):
        return None
    return Epilogue(True, activation, dtypes.pop(), eps, slope)


# Elsewhere than on CUDA the modules compute the call.
_library.impl("block_output", lambda *given: None, "CompositeExplicitAutograd")
# The lambda looks the function up at each call, so that a test may replace it.
_library.impl("plan_block_call", lambda *given: plan_call(*given), "CompositeExplicitAutograd")
