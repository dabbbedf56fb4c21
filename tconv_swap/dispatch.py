"""Says who intercepts a call (compilers, tracers, modes, transforms, subclasses), and what an autocast casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_functorch_level = torch._C._functorch.maybe_current_level
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def is_untransformed() -> bool:
    """Returns whether a tensor's sizes and strides are real: there is no compiler, tracer or vmap."""
    return not torch.compiler.is_compiling() and _functorch_level() is None and not _is_tracing()


def is_eager() -> bool:
    """Returns whether no compiler, tracer, mode or transform intercepts calls."""
    return is_untransformed() and _dispatch_modes() == 0 and forward_ad._current_level < 0


def is_left_to_pytorch() -> bool:
    """Returns whether the code that records the call knows only PyTorch's operator.

    A TorchScript trace and an ONNX graph run without us; forward-mode derivatives have no rule for our op.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
    return _is_tracing() or forward_ad._current_level >= 0


def are_plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether none of them is of a subclass that intercepts the call."""
    return (
        type(input) is Tensor
        and type(weight) in (Parameter, Tensor)
        and (bias is None or type(bias) in (Parameter, Tensor))
    )


def is_plain_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether nothing intercepts, casts or differentiates a call."""
    return (
        is_eager()
        and not _any_autocast()
        and are_plain(input, weight, bias)
        and not needs_gradient(input, weight, bias)
    )


def needs_gradient(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        weight.requires_grad or input.requires_grad or (bias is not None and bias.requires_grad)
    )


def cast(tensor: Tensor | None, device_type: str, dtype: torch.dtype) -> Tensor | None:
    """Casts an operand of conv_transpose2d as PyTorch's autocast does: floating-point tensors, except float64, to
    its dtype."""
    eligible = (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device_type
    )
    return tensor.to(dtype) if tensor is not None and eligible else tensor


def cast_operands(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the operands as the active autocast casts them, or unchanged if none is active."""
    device_type = input.device.type
    if not (_any_autocast() and torch.is_autocast_enabled(device_type)):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    operands = (cast(tensor, device_type, dtype) for tensor in (input, weight, bias))
    return tuple(operands)  # type: ignore[return-value]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disables autocast inside: the operands have been cast already, and a backward pass under an autocast casts
    nothing."""
    if not _any_autocast():
        yield
        return
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        yield
