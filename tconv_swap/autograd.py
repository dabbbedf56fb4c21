"""The derivative of a transposed convolution for whatever csrc/node.h does not differentiate: the CPU, and tracers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tconv_swap import graph
from tconv_swap.cuda import native
from tconv_swap.dispatch import without_autocast
from tconv_swap.geometry import Arguments


class ConvTranspose2dFunction(torch.autograd.Function):
    """Input, weight, bias, arguments and backend, as ``graph.output`` takes them, to the output."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, backend: str
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.arguments, ctx.backend = arguments, backend
        return graph.output(input, weight, bias, arguments, backend)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        with without_autocast():
            # Gradients of gradients are PyTorch's, whose operator is differentiable any number of times.
            if torch.is_grad_enabled():
                found = native.backward(grad_output, input, weight, ctx.arguments, mask)
            else:
                found = graph.gradients(grad_output, input, weight, ctx.arguments, mask, ctx.backend)
        remaining = iter(found)
        return (*(next(remaining) if wanted else None for wanted in mask), None, None)


#: What Function.apply does before it comes to this is for functorch: only for calls that no transform sees.
apply_untransformed: Any = super(torch.autograd.Function, ConvTranspose2dFunction).apply
