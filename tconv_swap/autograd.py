"""The derivative of a transposed convolution where csrc/node.h does not provide it: on the CPU and under tracers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tconv_swap import graph
from tconv_swap.dispatch import without_autocast
from tconv_swap.geometry import Arguments
from tconv_swap.runtime import native


class ConvTranspose2dFunction(torch.autograd.Function):
    """Computes the output from input, weight, bias, arguments and backend, as ``graph.output`` takes them."""

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
            # PyTorch's operator, which is differentiable any number of times, computes gradients of gradients.
            if torch.is_grad_enabled():
                found = native.backward(grad_output, input, weight, ctx.arguments, mask)
            else:
                found = graph.gradients(grad_output, input, weight, ctx.arguments, mask, ctx.backend)
        remaining = iter(found)
        return (*(next(remaining) if wanted else None for wanted in mask), None, None)


#: Function.apply first prepares the call for functorch, which only calls under a transform need.
apply_untransformed: Any = super(torch.autograd.Function, ConvTranspose2dFunction).apply
