"""``conv_transpose2d``: the function that layers call, and the op that tracers see in its place."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tconv_swap import graph
from tconv_swap.autograd import ConvTranspose2dFunction, apply_untransformed
from tconv_swap.cpu.forward import is_plain
from tconv_swap.cuda.choice import Backend, check_backend
from tconv_swap.dispatch import (
    are_plain,
    cast_operands,
    is_eager,
    is_left_to_pytorch,
    is_untransformed,
    needs_gradient,
)
from tconv_swap.geometry import Arguments, as_list, as_pair
from tconv_swap.runtime import host, native

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUPPORTED_DEVICES = ("cpu", "cuda", "meta")

_GEOMETRY = "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt groups, SymInt[2] dilation"

_library = torch.library.Library("tconv_swap", "DEF")
_library.define(
    f"conv_transpose2d(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_whole_op = torch.ops.tconv_swap.conv_transpose2d.default
_output_op = torch.ops.tconv_swap.conv_transpose2d_output.default


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
    """Returns a 2-D transposed convolution; the arguments are those of ``torch.nn.functional.conv_transpose2d``.

    Args:
        input: ``[batch, in_channels, height, width]`` or, unbatched, ``[in_channels, height, width]``.
        weight: ``[in_channels, out_channels / groups, kernel_height, kernel_width]``.
        bias: ``[out_channels]`` or None.
        backend: ``"kernel"`` computes with our kernels (on the CPU: our formulations), ``"native"`` with PyTorch's
            operator. ``"auto"`` chooses for the forward pass and each gradient separately: ours, except where
            measurements say that PyTorch's is faster on this GPU (``tconv_swap.explain`` says which). On a GPU for
            which nothing was measured, ``"auto"`` times our best candidates and PyTorch's operator at the first use of
            each stage and keeps the winner on disk; ``"rules"`` never times.

    All three tensors have one dtype and one device. PyTorch's operator computes what is not float64, float32, float16
    or bfloat16 on the CPU or on CUDA, and DTensors. float32 on CUDA obeys ``torch.backends.cudnn.allow_tf32`` and
    ``torch.backends.cudnn.conv.fp32_precision`` as they are set at the call.

    Returns:
        ``[batch, out_channels, out_height, out_width]`` in the memory format that PyTorch would choose.

    Raises:
        RuntimeError, TypeError: as PyTorch does, naming the argument, its value and what was expected.
        ValueError: there is no such backend.
    """
    if backend != "auto":
        check_backend(backend)
    # Most calls take this path, so it does as little as possible.
    if (
        input.is_cuda
        and backend != "native"
        and input.dtype in SUPPORTED_DTYPES
        and input.layout is torch.strided
        and is_eager()
        and are_plain(input, weight, bias)
        and host.is_available()
    ):
        geometry = geometry_words(stride, padding, output_padding, groups, dilation)
        if input.dim() == 3:
            return _output_op(input.unsqueeze(0), weight, bias, geometry, backend).squeeze(0)  # type: ignore[no-any-return]
        return _output_op(input, weight, bias, geometry, backend)  # type: ignore[no-any-return]
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
    arguments = _as_arguments(stride, padding, output_padding, groups, dilation)
    if input.is_cpu and input.dim() == 4 and type(input) is Tensor and is_untransformed():
        # PyTorch's own call is the fastest here, so it is made directly.
        if is_plain(input, weight, bias, arguments):
            return torch.nn.functional.conv_transpose2d(
                input, weight, bias, arguments[0], arguments[1], arguments[2], groups, arguments[4]
            )
        if is_eager() and are_plain(input, weight, bias):
            input, weight, bias = cast_operands(input, weight, bias)
            if needs_gradient(input, weight, bias):
                return apply_untransformed(input, weight, bias, arguments, backend)  # type: ignore[no-any-return]
            return graph.output(input, weight, bias, arguments, backend)
    if is_left_to_pytorch():
        return torch.nn.functional.conv_transpose2d(input, weight, bias, *arguments)
    if input.dim() == 3:
        return _whole_op(input.unsqueeze(0), weight, bias, *arguments, backend).squeeze(0)  # type: ignore[no-any-return]
    return _whole_op(input, weight, bias, *arguments, backend)  # type: ignore[no-any-return]


def _as_arguments(stride: Any, padding: Any, output_padding: Any, groups: Any, dilation: Any) -> Arguments:
    return (
        as_pair(stride, "stride"),
        as_pair(padding, "padding"),
        as_pair(output_padding, "output_padding"),
        groups if type(groups) is int else operator.index(groups),
        as_pair(dilation, "dilation"),
    )


def geometry_words(*given: Any) -> list[int]:
    """Returns stride, padding, output_padding, groups and dilation, as a layer has them, as the ops take them."""
    try:
        return _cached_list(*given)
    except TypeError:  # a list cannot be hashed; for another value the conversion raises
        return as_list(_as_arguments(*given))


# A layer repeats the same integers at every call.
@lru_cache(maxsize=4096, typed=True)
def _cached_list(*given: Any) -> list[int]:
    return as_list(_as_arguments(*given))


def _is_distributed(tensor: Tensor) -> bool:
    """Returns whether it is a DTensor: PyTorch can shard only its own operators."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _compute(input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    *arguments, backend = given
    return graph.output(input, weight, bias, arguments, backend)


def _by_pytorch(input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    *arguments, _ = given
    return native.forward(input, weight, bias, arguments)


# torch.library.register_autograd would give a silent zero for a forward-mode tangent.
def _differentiate(input: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    # At a level of forward-mode derivatives the op becomes PyTorch's convolution, which has every derivative rule.
    if forward_ad._current_level >= 0:
        return _by_pytorch(input, weight, bias, *given)
    if not needs_gradient(input, weight, bias):
        return _compute(input, weight, bias, *given)
    *arguments, backend = given
    return ConvTranspose2dFunction.apply(input, weight, bias, tuple(arguments), backend)  # type: ignore[no-any-return,no-untyped-call]


_library.impl("conv_transpose2d", _compute, "CompositeExplicitAutograd")
_library.impl("conv_transpose2d", _differentiate, "Autograd")
# vmap, grad, jvp and the functions made of them use this, and so does autograd.grad(is_grads_batched=True).
for _key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
    _library.impl("conv_transpose2d", _by_pytorch, _key)
for _device_type in ("cpu", "cuda"):
    graph.register_autocast(_library.impl, _whole_op, _device_type)
