"""FLOPs of our ops for ``torch.utils.flop_counter``, which takes an operator that it has no formula of for free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import tconv_swap.op  # noqa: F401 - makes the ops

_NAMESPACE = torch.ops.tconv_swap


@cache
def register() -> None:
    """From here on every new ``FlopCounterMode`` counts what ours compute, as it counts PyTorch's convolutions.

    Not at import of this package: the module of the counters brings torch._decomp along, which few need.
    """
    from torch.utils.flop_counter import conv_flop_count, register_flop_formula

    def count(input: Sequence[int], weight: Sequence[int]) -> int:
        return conv_flop_count(list(input), list(weight), [], transposed=True)

    @register_flop_formula([_NAMESPACE.conv_transpose2d, _NAMESPACE.conv_transpose2d_output])
    def _(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        return count(input, weight)

    # Every product of the forward pass occurs in the gradient of the input once, and in that of the weight.
    @register_flop_formula(_NAMESPACE.conv_transpose2d_gradients)
    def _(
        _: Any, input: Sequence[int], weight: Sequence[int], geometry: Any, mask: Any, *__: Any, **___: Any
    ) -> int:
        return int(sum(mask[:2])) * count(input, weight)
