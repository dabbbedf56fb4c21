"""One call of a block: by our kernels where they take it, else the caller is told to go PyTorch's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook

from tconv_swap.blocks import kernels
from tconv_swap.blocks.form import NORMS, Form, activation_of, by_pytorch
from tconv_swap.blocks.kernels import Call, Running
from tconv_swap.cuda.call import ALIGNMENT
from tconv_swap.dispatch import is_eager

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_calls: dict[tuple[Any, ...], Call | None] = {}
#: What is called with a block's modules, input, output and the buffers from before; for verification.
Observer = Callable[[nn.Module, nn.Module | None, Tensor, Tensor, dict[str, Tensor]], None]
observers: list[Observer] = []


def is_on_gpu(x: object) -> bool:
    """Whether ``x`` is a plain tensor on CUDA."""
    return type(x) is Tensor and x.is_cuda


def takes(x: object) -> bool:
    """Whether a call with ``x`` may go by our kernels at all: nobody but the caller wants to see it."""
    return is_on_gpu(x) and is_eager() and not _has_any_global_hook()


def is_watched(module: nn.Module) -> bool:
    """Whether a hook, or a ``forward`` of the instance, wants to see a call of this very module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def computed(norm: nn.Module, activation: nn.Module | None, x: Tensor) -> Tensor | None:
    """What ``activation(norm(x))`` gives, running statistics brought up to date; None, and nothing done, where the
    modules have to compute it. ``takes(x)`` has been asked, and the modules are not watched.

    Raises:
        BuildError, CompileError, RuntimeError: the kernels cannot be built, or CUDA fails.
    """
    parameters, buffers = norm._parameters, norm._buffers
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        running_mean, running_var = buffers["running_mean"], buffers["running_var"]
    except KeyError:  # somebody keeps them elsewhere, computed
        return None
    given: Any = norm
    training, tracks = norm.training, given.track_running_stats
    trains = training or running_mean is None
    updates = training and tracks and running_mean is not None
    needed = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    applied = activation_of(activation)
    if applied is None:
        return None
    batches = buffers.get("num_batches_tracked") if updates else None
    tensors = (weight, bias, running_mean, running_var, batches)
    key = (
        type(norm),
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        x.data_ptr() % ALIGNMENT,
        trains,
        updates,
        needed,
        given.eps,
        given.momentum,
        applied,
        *[None if one is None else (one.dtype, one.shape, one.get_device(), type(one)) for one in tensors],
    )
    if key in _calls:
        call = _calls[key]
    else:
        call = _calls[key] = _make(norm, x, tensors, trains, updates, needed, applied)
    if call is None:
        return None
    if updates and given.momentum is None and batches is not None:
        batches.add_(1)
    before = {name: one.clone() for name, one in buffers.items() if one is not None} if observers else {}
    if needed:
        output: Tensor = _apply(x, weight, bias, (call, tensors))
    else:
        output = kernels.forward(call, x, *tensors)[0]
    for observe in observers:
        observe(norm, activation, x, output, before)
    return output


def _make(
    norm: nn.Module,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    trains: bool,
    updates: bool,
    needed: bool,
    applied: tuple[Any, float],
) -> Call | None:
    given: Any = norm
    dimensions, per_image = next(how for cls, how in NORMS.items() if isinstance(norm, cls))
    _, _, running_mean, running_var, batches = tensors
    if per_image and running_mean is not None:
        return None  # the average over images of their statistics is left to PyTorch
    channels_last = kernels.lies(x)
    count = x.numel() // max(1, x.shape[1]) // (x.shape[0] if per_image and x.shape[0] else 1)
    # A wrong number of dimensions or channels, or one value to take the statistics of: PyTorch's error.
    if x.dim() not in dimensions or x.shape[1] != given.num_features or channels_last is None:
        return None
    if (trains and count < 2) or (running_mean is None) is not (running_var is None):
        return None
    floats = [one for one in tensors[:4] if one is not None]
    dtypes = {one.dtype for one in floats} or {torch.float32}
    if len(dtypes) > 1 or any(not _is_plain(one, x) for one in (*floats, batches) if one is not None):
        return None
    if updates and batches is None:
        return None
    running = Running(given.momentum) if updates else None
    form = Form(per_image, trains, given.eps, *applied)
    return kernels.prepare(x, dtypes.pop(), form, running, needed, channels_last)


def _is_plain(tensor: Tensor, x: Tensor) -> bool:
    return type(tensor) in (Parameter, Tensor) and tensor.device == x.device and tensor.is_contiguous()


_How = tuple[Call, tuple[Tensor | None, ...]]


class NormActivation(torch.autograd.Function):
    """Normalisation and activation; gradients of gradients by PyTorch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: _How) -> Tensor:
        call, tensors = how
        output, saved = kernels.forward(call, x, *tensors)
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        plain = type(grad) is Tensor and is_eager() and not _is_batched(grad)
        if torch.is_grad_enabled() or not plain:
            return (*_by_pytorch(ctx.call.form, grad, (x, weight, bias), saved, needs), None)
        wants = needs[0], needs[1] or needs[2]
        found = kernels.backward(ctx.call, grad, x, saved, weight, bias, wants)
        return (*[one if wanted else None for one, wanted in zip(found, needs, strict=True)], None)


def _by_pytorch(
    form: Form,
    grad: Tensor,
    of: tuple[Tensor, Tensor | None, Tensor | None],
    saved: Tensor,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    created = torch.is_grad_enabled()
    with torch.enable_grad():
        wanted = [one for one, needed in zip(of, needs, strict=True) if needed and one is not None]
        output = by_pytorch(*of, saved, form)
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=created))
    return [next(found) if needed else None for needed in needs]


# What Function.apply does before it comes to this is for functorch, which is_eager has ruled out.
_apply: Callable[..., Any] = super(torch.autograd.Function, NormActivation).apply
