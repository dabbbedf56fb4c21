"""The way past the dispatcher, for calls that nothing but the caller wants to see: half the cost of a call.

On CUDA a call that was made before goes the way it went then (``cuda.call.Route``), which is cheaper still.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cpu.backward import backward as cpu_backward
from tconv_swap.cpu.forward import forward as cpu_forward
from tconv_swap.cuda import call as cuda_call
from tconv_swap.cuda import route as cuda_route
from tconv_swap.cuda.route import Route

_functorch_level = torch._C._functorch.maybe_current_level
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_is_tracing = torch._C._is_tracing
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def is_untransformed() -> bool:
    """Whether a tensor's sizes and strides are those that PyTorch would see: no compiler or tracer, no vmap."""
    return not torch.compiler.is_compiling() and _functorch_level() is None and not _is_tracing()


def is_eager() -> bool:
    """Whether there is no compiler, tracer, mode or transform that wants to see a call."""
    return is_untransformed() and _dispatch_modes() == 0 and forward_ad._current_level < 0


def is_left_to_pytorch() -> bool:
    """Whether what follows the call knows PyTorch's operator only.

    A TorchScript trace and an ONNX graph run without us; forward-mode derivatives have no rule for our op.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
    return _is_tracing() or forward_ad._current_level >= 0


def are_plain(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether neither is of a subclass that wants to see the call."""
    return type(weight) in (Parameter, Tensor) and (bias is None or type(bias) in (Parameter, Tensor))


def cast(tensor: Tensor | None, device_type: str, dtype: torch.dtype) -> Tensor | None:
    """As PyTorch's autocast casts an operand of conv_transpose2d: float tensors but float64, to its dtype."""
    eligible = (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device_type
    )
    return tensor.to(dtype) if tensor is not None and eligible else tensor


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What the autocast that is on wants operands to be; None where none is on."""
    if _any_autocast() and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def cast_operands(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as an autocast to ``dtype`` wants them; None: as they are."""
    if dtype is None:
        return input, weight, bias
    device_type = input.device.type
    operands = (cast(tensor, device_type, dtype) for tensor in (input, weight, bias))
    return tuple(operands)  # type: ignore[return-value]


def is_plain_cuda(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether nobody wants to see or differentiate a call on CUDA."""
    return (
        type(input) is Tensor
        and input.is_cuda
        and is_eager()
        and not _any_autocast()
        and are_plain(weight, bias)
        and not needs_gradient(input, weight, bias)
    )


def needs_gradient(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        weight.requires_grad or input.requires_grad or (bias is not None and bias.requires_grad)
    )


def again(
    key: Hashable, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor | None:
    """What a call on CUDA computes that was made before with such a key and such tensors; else None.

    Args:
        dtype: of ``autocast_dtype``; the tensors have not been cast yet. Part of ``key``.
    """
    try:
        route = cuda_route.find(key)
    except TypeError:  # a list among the arguments cannot be hashed
        return None
    if route is None:
        return None
    needed = needs_gradient(input, weight, bias)
    is_differentiated = needed and not route.all_native
    # Without gradients, too, it casts in a fifth of the time.
    if is_differentiated or (dtype is not None and not needed and route.number is not None):
        output = route.differentiable(input, weight, bias)
        if output is not None:
            return output
    input, weight, bias = cast_operands(input, weight, bias, dtype)
    if is_differentiated:
        return _apply(input, weight, bias, (route, route.arguments, route.backend))  # type: ignore[no-any-return]
    return route.forward(input, weight, bias)


def first(
    key: Hashable,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    arguments: tuple[Any, ...],
    backend: str,
) -> Tensor:
    """What a call on the CPU or on CUDA computes; ``again`` then knows it.

    Args:
        dtype: as of ``again``.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    input, weight, bias = cast_operands(input, weight, bias, dtype)
    if needs_gradient(input, weight, bias):
        output: Tensor = _apply(input, weight, bias, (None, arguments, backend))
    else:
        output = DIRECT[input.device.type][0](input, weight, bias, arguments, backend)
    if input.is_cuda:
        cuda_route.remember(key, input, weight, bias, dtype, arguments, backend)
    return output


#: The way of an earlier call, if there is one; stride, padding, output_padding, groups, dilation; the backend.
_How = tuple[Route | None, tuple[Any, ...], str]


class TransposedConvolution(torch.autograd.Function):
    """The same gradients as the op's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.how = how
        route, arguments, backend = how
        output = None if route is None else route.forward(input, weight, bias)
        if output is None:
            output = DIRECT[input.device.type][0](input, weight, bias, arguments, backend)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        route, arguments, backend = ctx.how
        mask = ctx.needs_input_grad[:3]
        # Gradients of gradients are the op's business.
        if torch.is_grad_enabled() or not _is_plain_gradient(grad_output):
            backward_op = torch.ops.tconv_swap.conv_transpose2d_backward.default
            gradients = backward_op(grad_output, input, weight, *arguments, mask, backend)
        elif route is not None:
            gradients = route.backward(grad_output, input, weight, mask)
        else:
            gradients = DIRECT[input.device.type][1](grad_output, input, weight, arguments, mask, backend)
        if len(gradients) == 3:
            return (*gradients, None)
        return (*spread(gradients, mask), None)


def _is_plain_gradient(grad_output: Tensor) -> bool:
    # autograd.grad(is_grads_batched=True) hands over a batch of gradients that looks like a single one.
    return type(grad_output) is Tensor and is_eager() and not _is_batched(grad_output)


# What Function.apply does before it comes to this is for functorch, which is_eager has ruled out.
_apply: Callable[..., Any] = super(torch.autograd.Function, TransposedConvolution).apply


def spread(gradients: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    """The gradients a mask asked for, each back in its own place."""
    remaining = iter(gradients)
    return [next(remaining) if wanted else None for wanted in mask]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operands have been cast by now, or came as they are wanted: a backward pass inside of an autocast casts none."""
    if not _any_autocast():
        yield
        return
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        yield


def _forward_on_cpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...], backend: str
) -> Tensor:
    geometry = check_forward(input, weight, bias, arguments)
    with without_autocast():
        return cpu_forward(input, weight, bias, geometry, output_memory_format(input, weight))


def _backward_on_cpu(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    mask: tuple[bool, ...],
    backend: str,
) -> list[Tensor]:
    geometry = check_backward(grad_output, input, weight, arguments)
    memory_format = output_memory_format(input, weight)
    with without_autocast():
        return cpu_backward(grad_output, input, weight, geometry, memory_format, mask)


#: Forward and backward of each device, past the dispatcher.
DIRECT: dict[str, tuple[Callable[..., Tensor], Callable[..., list[Tensor]]]] = {
    "cpu": (_forward_on_cpu, _backward_on_cpu),
    "cuda": (cuda_call.forward, cuda_call.backward),
}
