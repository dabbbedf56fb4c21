"""``conv_transpose2d`` and the torch ops behind it: checks, gradients of every order, autocast, fake tensors.

The op and its backward are written once, here, for every device. What computes them stands below: ``cpu``
(PyTorch's own operators in their fastest formulation) and ``cuda`` (our kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from tconv_swap import cpu, cuda
from tconv_swap.geometry import Geometry, as_pair, cached_geometry, check_geometry

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_GEOMETRY = "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt groups, SymInt[2] dilation"

_library = torch.library.Library("tconv_swap", "DEF")
_library.define(
    f"conv_transpose2d(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Only the gradients that output_mask asks for (input, weight, bias) are computed and returned, in that order.
_library.define(
    f"conv_transpose2d_backward(Tensor grad_output, Tensor input, Tensor weight, {_GEOMETRY}, "
    "bool[3] output_mask) -> Tensor[]",
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
) -> Tensor:
    """A 2-D transposed convolution, argument for argument ``torch.nn.functional.conv_transpose2d``.

    Args:
        input: ``[batch, in_channels, height, width]`` or, unbatched, ``[in_channels, height, width]``.
        weight: ``[in_channels, out_channels / groups, kernel_height, kernel_width]``.
        bias: ``[out_channels]`` or None.

    All three of one dtype (float64, float32, float16, bfloat16) and on one device. float32 on CUDA obeys
    ``torch.backends.cudnn.allow_tf32`` and ``torch.backends.cudnn.conv.fp32_precision`` as they are at the
    call.

    Returns:
        ``[batch, out_channels, out_height, out_width]`` in the memory format PyTorch would choose.

    Raises:
        RuntimeError, TypeError: as PyTorch does, naming the argument, its value and what was expected.
    """
    if input.dtype not in SUPPORTED_DTYPES:
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
        groups,
        as_pair(dilation, "dilation"),
    )
    if input.dim() == 3:
        return _forward_op(input.unsqueeze(0), weight, bias, *arguments).squeeze(0)  # type: ignore[no-any-return]
    return _forward_op(input, weight, bias, *arguments)  # type: ignore[no-any-return]


def _check_tensors(input: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"Input type ({input.dtype}) and {name} type ({tensor.dtype}) should be the same: "
                f"expected {name} of {input.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but input is on {input.device} and "
                f"{name} is on {tensor.device}"
            )


def _memory_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """The format PyTorch gives out: channels_last if input or weight has it (cuDNN: never for float64)."""
    if input.device.type == "cuda" and input.dtype == torch.float64:
        return torch.contiguous_format
    for tensor in (input, weight):
        if suggest_memory_format(tensor) == torch.channels_last:
            return torch.channels_last
    return torch.contiguous_format


def _forward_kernel(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(
        input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
    ) -> Tensor:  # arguments: stride, padding, output_padding, groups, dilation
        _check_tensors(input, {"weight": weight, "bias": bias})
        geometry = _geometry_of(cached_geometry, input, weight, bias, arguments)
        return compute(input, weight, bias, geometry, _memory_format(input, weight))

    return kernel


def _backward_kernel(compute: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def kernel(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
        *arguments_, mask = arguments
        _check_tensors(input, {"weight": weight, "grad_output": grad_output})
        geometry = _geometry_of(cached_geometry, input, weight, None, arguments_)
        _check_grad_output(grad_output, geometry)
        return compute(grad_output, input, weight, geometry, _memory_format(input, weight), tuple(mask))

    return kernel


def _check_grad_output(grad_output: Tensor, geometry: Geometry) -> None:
    if tuple(grad_output.shape) != geometry.output_shape:
        raise RuntimeError(
            f"expected grad_output of size {list(geometry.output_shape)}, but got {list(grad_output.shape)}"
        )


def _geometry_of(
    check: Callable[..., Geometry],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: Sequence[Any],
) -> Geometry:
    stride, padding, output_padding, groups, dilation = arguments
    return check(
        tuple(input.shape),
        tuple(weight.shape),
        None if bias is None else tuple(bias.shape),
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        groups,
        tuple(dilation),
    )


_library.impl("conv_transpose2d", _forward_kernel(cpu.forward), "CPU")
_library.impl("conv_transpose2d_backward", _backward_kernel(cpu.backward), "CPU")
_library.impl("conv_transpose2d", _forward_kernel(cuda.forward), "CUDA")
_library.impl("conv_transpose2d_backward", _backward_kernel(cuda.backward), "CUDA")


@torch.library.register_fake("tconv_swap::conv_transpose2d", lib=_library)  # type: ignore[untyped-decorator]
def _(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    _check_tensors(input, {"weight": weight, "bias": bias})
    geometry = _geometry_of(check_geometry, input, weight, bias, arguments)
    return torch.empty(
        geometry.output_shape,
        dtype=input.dtype,
        device=input.device,
        memory_format=_memory_format(input, weight),
    )


@torch.library.register_fake("tconv_swap::conv_transpose2d_backward", lib=_library)  # type: ignore[untyped-decorator]
def _(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
    *arguments_, mask = arguments
    geometry = _geometry_of(check_geometry, input, weight, None, arguments_)
    memory_format = _memory_format(input, weight)
    shapes = (geometry.input_shape, geometry.weight_shape, (geometry.out_channels,))
    return [
        torch.empty(
            shape,
            dtype=input.dtype,
            device=input.device,
            memory_format=memory_format if len(shape) == 4 else torch.contiguous_format,
        )
        for shape, wanted in zip(shapes, mask, strict=True)
        if wanted
    ]


def _spread(gradients: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    """The gradients a mask asked for, each back in its own place."""
    remaining = iter(gradients)
    return [next(remaining) if wanted else None for wanted in mask]


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, *arguments = inputs
    ctx.save_for_backward(input, weight)
    ctx.arguments = arguments


def _differentiate_forward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    gradients = _backward_op(grad_output, input, weight, *ctx.arguments, mask)
    return (*_spread(gradients, mask), *[None] * len(ctx.arguments))


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad_output, input, weight, *arguments, mask = inputs
    ctx.save_for_backward(grad_output, input, weight)
    ctx.arguments = arguments
    ctx.mask = list(mask)


def _differentiate_backward(ctx: Any, cotangents: Sequence[Tensor]) -> tuple[Any, ...]:
    """<grad_output, T(input, weight)> is linear in each of the three, so the derivatives of the gradients
    are the same three maps again, with the cotangent of a gradient in place of what it is a gradient of."""
    grad_output, input, weight = ctx.saved_tensors
    for_input, for_weight, for_bias = _spread(cotangents, ctx.mask)
    wants_grad_output, wants_input, wants_weight = ctx.needs_input_grad[:3]

    def gradient(of: Tensor, with_weight: Tensor, which: int) -> Tensor:
        mask = [which == i for i in range(3)]
        return _backward_op(grad_output, of, with_weight, *ctx.arguments, mask)[0]  # type: ignore[no-any-return]

    grad_grad_output = grad_input = grad_weight = None
    if wants_grad_output:
        terms = []
        if for_weight is not None:
            terms.append(_forward_op(input, for_weight, for_bias, *ctx.arguments))
        if for_input is not None:
            bias = for_bias if for_weight is None else None
            terms.append(_forward_op(for_input, weight, bias, *ctx.arguments))
        if not terms and for_bias is not None:
            terms.append(for_bias.view(1, -1, 1, 1).expand_as(grad_output))
        grad_grad_output = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    if wants_input and for_weight is not None:
        grad_input = gradient(input, for_weight, 0)
    if wants_weight and for_input is not None:
        grad_weight = gradient(for_input, weight, 1)
    return (grad_grad_output, grad_input, grad_weight, *[None] * (len(ctx.arguments) + 1))


torch.library.register_autograd(
    "tconv_swap::conv_transpose2d", _differentiate_forward, setup_context=_save_forward, lib=_library
)
torch.library.register_autograd(
    "tconv_swap::conv_transpose2d_backward",
    _differentiate_backward,
    setup_context=_save_backward,
    lib=_library,
)


def _autocast_kernel(device_type: str, key: torch._C.DispatchKey) -> Callable[..., Tensor]:
    """Cast as PyTorch's autocast does for conv_transpose2d: float tensors but float64, to its dtype."""
    excluded = torch._C.DispatchKeySet(key)

    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor | None) -> Tensor | None:
            eligible = (
                tensor is not None
                and tensor.is_floating_point()
                and tensor.dtype != torch.float64
                and tensor.device.type == device_type
            )
            return tensor.to(dtype) if tensor is not None and eligible else tensor

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _forward_op(cast(input), cast(weight), cast(bias), *arguments)  # type: ignore[no-any-return]

    return kernel


_library.impl("conv_transpose2d", _autocast_kernel("cuda", torch._C.DispatchKey.AutocastCUDA), "AutocastCUDA")
_library.impl("conv_transpose2d", _autocast_kernel("cpu", torch._C.DispatchKey.AutocastCPU), "AutocastCPU")
