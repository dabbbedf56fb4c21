"""Blocks in evaluation as one program: what computes a call that csrc/block.h does not know yet.

A call goes by the op ``block_output``, which remembers the answers of ``answer`` by everything that they depend on.
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
from tconv_swap.geometry import as_list, as_pair
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.norm.plan import DTYPES
from tconv_swap.kernels.norm.shape import Activation

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# None: nothing was done. For eager calls on CUDA alone: a graph has the modules.
_library.define(
    "block_output(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias,"
    " Tensor? running_mean, Tensor? running_var, int[] words, str backend) -> Tensor?"
)
_library.define("block_answer(Tensor?[] tensors, int[] words, str backend) -> int[]")
block_output = torch.ops.tconv_swap.block_output.default

#: Numbers of a layer's geometry, with which the op's ``words`` begin.
_GEOMETRY = 9


# A network asks with the same numbers again and again.
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
    """The op's ``words``: the layer's geometry, and what follows the layer. ``eps``: of the norm, if there is one."""
    geometry = as_list(
        (
            as_pair(stride, "stride"),
            as_pair(padding, "padding"),
            as_pair(output_padding, "output_padding"),
            groups,
            as_pair(dilation, "dilation"),
        )
    )
    return [*geometry, int(activation), *struct.unpack("<2q", struct.pack("<2d", eps, slope))]


def answer(tensors: Sequence[Tensor | None], words: Sequence[int], backend: str) -> list[int]:
    """How a call is computed, in the words that csrc/compute.h reads.

    Args:
        tensors: input, weight and bias of the layer; weight, bias, running_mean and running_var of the norm, all four
            None where there is none.
        words: as ``block_words`` writes them.

    Raises:
        BuildError, CompileError, RuntimeError, ValueError: as ``call.answer``.
    """
    epilogue = epilogue_of(tensors, words)
    if epilogue is None:
        return DECLINED
    found = call.block_answer(
        tensors[:3], words[:_GEOMETRY], backend, lambda made: with_epilogue(made, epilogue)
    )
    return DECLINED if found is None else found


def epilogue_of(tensors: Sequence[Tensor | None], words: Sequence[int]) -> Epilogue | None:
    """What follows the layer of such a call; None if our kernels do not compute it behind one. The tensors need no
    numbers."""
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


# Off CUDA the modules compute it.
_library.impl("block_output", lambda *given: None, "CompositeExplicitAutograd")
# Called through the module, whose function a test may replace.
_library.impl("block_answer", lambda *question: answer(*question), "CompositeExplicitAutograd")
