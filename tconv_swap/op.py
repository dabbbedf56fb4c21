"""``conv_transpose2d`` and the torch ops behind it: checks, gradients of every order, autocast, fake tensors.

The op and its backward are written once, here, for every device. What computes them stands below: ``cpu``
(PyTorch's own operators in their fastest formulation) and ``cuda`` (our kernels).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tconv_swap import graph
from tconv_swap.cpu.forward import is_plain
from tconv_swap.cuda import native
from tconv_swap.cuda.choice import Backend, check_backend
from tconv_swap.eager import (
    DIRECT,
    again,
    are_plain,
    autocast_dtype,
    first,
    is_eager,
    is_left_to_pytorch,
    is_untransformed,
    spread,
    without_autocast,
)
from tconv_swap.geometry import as_pair

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUPPORTED_DEVICES = ("cpu", "cuda", "meta")

_GEOMETRY = "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt groups, SymInt[2] dilation"

_library = torch.library.Library("tconv_swap", "DEF")
_library.define(
    f"conv_transpose2d(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Only the gradients that output_mask asks for (input, weight, bias) are computed and returned, in that order.
_library.define(
    f"conv_transpose2d_backward(Tensor grad_output, Tensor input, Tensor weight, {_GEOMETRY}, "
    "bool[3] output_mask, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward_op = torch.ops.tconv_swap.conv_transpose2d.default
_backward_op = torch.ops.tconv_swap.conv_transpose2d_backward.default


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    backend: Backend = "auto",
) -> Tensor:
    """A 2-D transposed convolution, argument for argument ``torch.nn.functional.conv_transpose2d``.

    Args:
        input: ``[batch, in_channels, height, width]`` or, unbatched, ``[in_channels, height, width]``.
        weight: ``[in_channels, out_channels / groups, kernel_height, kernel_width]``.
        bias: ``[out_channels]`` or None.
        backend: ``"kernel"`` computes by our kernels (on the CPU: our formulations), ``"native"`` by PyTorch's
            operator. ``"auto"``: ours, save where measurements say that PyTorch's is faster on this GPU, the
            forward pass and each gradient apart (``tconv_swap.explain`` tells).

    All three of one dtype and on one device; what is not float64, float32, float16 or bfloat16 on the CPU or on CUDA,
    or is a DTensor, is computed by PyTorch's operator. float32 on CUDA obeys
    ``torch.backends.cudnn.allow_tf32`` and ``torch.backends.cudnn.conv.fp32_precision`` as they are at the
    call.

    Returns:
        ``[batch, out_channels, out_height, out_width]`` in the memory format PyTorch would choose.

    Raises:
        RuntimeError, TypeError: as PyTorch does, naming the argument, its value and what was expected.
        ValueError: there is no such backend.
    """
    key: tuple[Any, ...] = ()
    if input.is_cuda and type(input) is Tensor and is_eager() and are_plain(weight, bias):
        dtype = autocast_dtype("cuda")
        tensors = input.get_device(), input.shape, weight.shape, input.dtype, dtype, bias is None
        key = *tensors, stride, padding, output_padding, groups, dilation, backend
        output = again(key, input, weight, bias, dtype)
        if output is not None:
            return output
    if backend != "auto":
        check_backend(backend)
    if (
        backend == "native"
        or input.dtype not in SUPPORTED_DTYPES
        or input.device.type not in SUPPORTED_DEVICES
        or input.layout is not torch.strided
        or _is_distributed(input)
    ):
        return torch.nn.functional.conv_transpose2d(
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
        )
    arguments = (
        as_pair(stride, "stride"),
        as_pair(padding, "padding"),
        as_pair(output_padding, "output_padding"),
        groups if type(groups) is int else operator.index(groups),
        as_pair(dilation, "dilation"),
    )
    # Where PyTorch's own call is the fastest, nothing is put in its way.
    plain = input.dim() == 4 and type(input) is Tensor and is_untransformed()
    if plain and input.is_cpu and is_plain(input, weight, bias, arguments):
        return torch.nn.functional.conv_transpose2d(
            input, weight, bias, arguments[0], arguments[1], arguments[2], groups, arguments[4]
        )
    if plain and input.device.type in DIRECT and is_eager() and are_plain(weight, bias):
        return first(key, input, weight, bias, autocast_dtype(input.device.type), arguments, backend)
    if is_left_to_pytorch():
        return torch.nn.functional.conv_transpose2d(input, weight, bias, *arguments)
    if input.dim() == 3:
        return _forward_op(input.unsqueeze(0), weight, bias, *arguments, backend).squeeze(0)  # type: ignore[no-any-return]
    return _forward_op(input, weight, bias, *arguments, backend)  # type: ignore[no-any-return]


def _is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor: how PyTorch's own operators are computed in parts is known of these alone."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    *arguments, backend = given
    return graph.output(input, weight, bias, arguments, backend)


def _backward(grad_output: Tensor, input: Tensor, weight: Tensor, *given: Any) -> list[Tensor]:
    *arguments, mask, backend = given
    return graph.gradients(grad_output, input, weight, arguments, mask, backend)


_library.impl("conv_transpose2d", _forward, "CompositeExplicitAutograd")
_library.impl("conv_transpose2d_backward", _backward, "CompositeExplicitAutograd")


def _save_forward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    input, weight, _, *arguments, backend = inputs
    ctx.save_for_backward(input, weight)
    ctx.arguments, ctx.backend = arguments, backend


def _differentiate_forward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    gradients = _backward_op(grad_output, input, weight, *ctx.arguments, mask, ctx.backend)
    return (*spread(gradients, mask), *[None] * (len(ctx.arguments) + 1))


def _save_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    grad_output, input, weight, *arguments, mask, backend = inputs
    ctx.save_for_backward(grad_output, input, weight)
    ctx.arguments, ctx.mask, ctx.backend = arguments, list(mask), backend


def _differentiate_backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
    """<grad_output, T(input, weight)> is linear in each of the three, so the derivatives of the gradients
    are the same three maps again, with the cotangent of a gradient in place of what it is a gradient of."""
    grad_output, input, weight = ctx.saved_tensors
    for_input, for_weight, for_bias = spread(cotangents, ctx.mask)
    wants_grad_output, wants_input, wants_weight = ctx.needs_input_grad[:3]

    def output(of: Tensor, with_weight: Tensor, bias: Tensor | None) -> Tensor:
        return _forward_op(of, with_weight, bias, *ctx.arguments, ctx.backend)  # type: ignore[no-any-return]

    def gradient(of: Tensor, with_weight: Tensor, which: int) -> Tensor:
        mask = [which == i for i in range(3)]
        return _backward_op(grad_output, of, with_weight, *ctx.arguments, mask, ctx.backend)[0]  # type: ignore[no-any-return]

    grad_grad_output = grad_input = grad_weight = None
    if wants_grad_output:
        terms = []
        if for_weight is not None:
            terms.append(output(input, for_weight, for_bias))
        if for_input is not None:
            terms.append(output(for_input, weight, for_bias if for_weight is None else None))
        if not terms and for_bias is not None:
            terms.append(for_bias.view(1, -1, 1, 1).expand_as(grad_output))
        grad_grad_output = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    if wants_input and for_weight is not None:
        grad_input = gradient(input, for_weight, 0)
    if wants_weight and for_input is not None:
        grad_weight = gradient(for_input, weight, 1)
    return (grad_grad_output, grad_input, grad_weight, *[None] * (len(ctx.arguments) + 2))


def _forward_by_pytorch(input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    *arguments, _ = given
    return native.forward(input, weight, bias, arguments)


def _backward_by_pytorch(grad_output: Tensor, input: Tensor, weight: Tensor, *given: Any) -> list[Tensor]:
    *arguments, mask, _ = given
    return native.backward(grad_output, input, weight, arguments, mask)


def _register_derivatives(
    name: str,
    compute: Callable[..., Any],
    save: Callable[..., None],
    differentiate: Callable[..., Any],
    by_pytorch: Callable[..., Any],
) -> None:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            save(ctx, arguments)
            computed = compute(*arguments)
            return tuple(computed) if isinstance(computed, list) else computed

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            with without_autocast():
                return differentiate(ctx, *cotangents)

    # torch.library.register_autograd would give a silent zero for a forward-mode tangent.
    def autograd(*arguments: Any) -> Any:
        # Inside a level of forward-mode derivatives, the op is PyTorch's convolution, which has every rule ...
        if forward_ad._current_level >= 0:
            return by_pytorch(*arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return compute(*arguments)
        computed = Differentiable.apply(*arguments)  # type: ignore[no-untyped-call]
        return list(computed) if isinstance(computed, tuple) else computed

    _library.impl(name, autograd, "Autograd")
    # ... and so it is in vmap, grad, jvp and what is made of them, and in autograd.grad(is_grads_batched=True).
    for key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
        _library.impl(name, by_pytorch, key)


_register_derivatives(
    "conv_transpose2d", _forward, _save_forward, _differentiate_forward, _forward_by_pytorch
)
_register_derivatives(
    "conv_transpose2d_backward", _backward, _save_backward, _differentiate_backward, _backward_by_pytorch
)


graph.register_autocast(_library, "conv_transpose2d")
