"""FLOPs of our ops for ``torch.utils.flop_counter``, which counts zero for an operator without a formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import tconv_swap.op  # noqa: F401 - registers the ops

_NAMESPACE = torch.ops.tconv_swap


@cache
def register() -> None:
    """Registers the formulas: every new ``FlopCounterMode`` then counts our ops as it counts PyTorch's convolutions.

    The import of the package does not call this: the counters' module imports torch._decomp, which few programs need.
    """
    from torch.utils.flop_counter import conv_flop_count, register_flop_formula

    def count(input: Sequence[int], weight: Sequence[int]) -> int:
        return conv_flop_count(list(input), list(weight), [], transposed=True)

    @register_flop_formula([_NAMESPACE.conv_transpose2d, _NAMESPACE.conv_transpose2d_output])
    def _(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        return count(input, weight)

    # Each multiply-add of the forward pass occurs once in the gradient of the input and once in that of the weight.
    @register_flop_formula(_NAMESPACE.conv_transpose2d_gradients)
    def _(
        _: Any, input: Sequence[int], weight: Sequence[int], geometry: Any, mask: Any, *__: Any, **___: Any
    ) -> int:
        return int(sum(mask[:2])) * count(input, weight)
