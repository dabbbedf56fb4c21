"""Computes one call of a block or a padding by our kernels, or tells the caller to let PyTorch's modules compute
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tconv_swap.blocks.evaluation import block_output, block_words
from tconv_swap.blocks.form import NORMS, activation_of
from tconv_swap.blocks.kernels import block_training, form_words, is_plain, norm_activation
from tconv_swap.blocks.padding import reflection_pad
from tconv_swap.cuda.choice import check_backend
from tconv_swap.dispatch import is_eager, needs_gradient
from tconv_swap.layer import ConvTranspose2d, Swapped, is_ours
from tconv_swap.op import geometry_words
from tconv_swap.runtime import host

#: Called with a block's modules, input, output, the earlier buffers, and the tensor added before the activation or
#: None; for the verification. A padding is a block of one module without buffers.
Observer = Callable[..., None]
observers: list[Observer] = []
#: Called with the layer, the norm or None, the activation or None, and the input of each block that ``evaluated`` may
#: compute, before it is computed; for the verification.
block_observers: list[Callable[[Swapped, nn.Module | None, nn.Module | None, Tensor], None]] = []


class Recorded(NamedTuple):
    """The arguments of ``kernels.planned`` for a call; the tensors have no data."""

    tensors: tuple[Tensor | None, ...]
    form: list[int]


class RecordedPad(NamedTuple):
    """The arguments of ``padding.planned`` for a call; the image has no data."""

    image: Tensor
    padding: tuple[int, ...]


#: Each is called for every call that our kernels might compute, on any device. PyTorch's modules then compute the call.
recorders: list[list[Recorded | RecordedPad]] = []


@contextmanager
def recording() -> Iterator[list[Recorded | RecordedPad]]:
    """Collects the calls of blocks and paddings that are made inside; our kernels compute none of them."""
    found: list[Recorded | RecordedPad] = []
    recorders.append(found)
    try:
        yield found
    finally:
        recorders.remove(found)


def is_on_gpu(x: object) -> bool:
    """Returns whether ``x`` is a plain tensor on CUDA, or is recorded in place of one."""
    return type(x) is Tensor and (x.is_cuda or bool(recorders))


def takes(x: object) -> bool:
    """Returns whether our kernels may compute a call with ``x`` at all: nothing but its caller intercepts it."""
    return is_on_gpu(x) and is_eager() and not _has_any_global_hook()


def is_watched(module: nn.Module) -> bool:
    """Returns whether a hook, or a ``forward`` of the instance, intercepts the calls of this module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def computed(
    norm: nn.Module, activation: nn.Module | None, x: Tensor, added: Tensor | None = None
) -> Tensor | None:
    """Returns ``activation(norm(x))``, or ``activation(norm(x) + added)``, and updates the running statistics; returns
    None, without any effect, if the modules have to compute it. The caller has checked ``takes(x)`` and that nothing
    watches the modules.

    Raises:
        CompileError, RuntimeError: the kernels cannot be compiled, or CUDA fails.
    """
    if not (added is None or is_on_gpu(added)) or not (recorders or host.is_available()):
        return None
    arguments = _norm_arguments(norm, activation)
    if arguments is None:
        return None
    tensors, form = arguments
    if recorders:
        recorded = Recorded(
            tuple(None if one is None else _form_of(one) for one in (x, *tensors, added)), form
        )
        for recorder in recorders:
            recorder.append(recorded)
        return None
    buffers = norm._buffers if observers else {}
    before = {name: one.clone() for name, one in buffers.items() if one is not None}
    output: Tensor | None = norm_activation(x, *tensors, added, form)
    if output is not None:
        for observe in observers:
            observe(norm, activation, x, output, before, added)
    return output


def padded(pad: nn.ReflectionPad2d, x: Tensor) -> Tensor | None:
    """Returns ``pad(x)`` in the memory format of ``x``; None, without any effect, if PyTorch's module has to compute
    it. The caller has checked ``takes(x)``.

    Raises:
        CompileError, RuntimeError: the kernel cannot be compiled, or CUDA fails.
    """
    if recorders:
        for recorder in recorders:
            recorder.append(RecordedPad(_form_of(x), tuple(pad.padding)))
        return None
    if not host.is_available():
        return None
    output: Tensor | None = reflection_pad(x, pad.padding)
    if output is not None:
        for observe in observers:
            observe(pad, None, x, output, {}, None)
    return output


def _norm_arguments(
    norm: nn.Module, activation: nn.Module | None
) -> tuple[tuple[Tensor | None, ...], list[int]] | None:
    """Returns weight, bias, running_mean, running_var and num_batches_tracked, None where the norm has or updates none,
    and the ``form`` of its ops; None if the modules have to compute it."""
    parameters, buffers = norm._parameters, norm._buffers
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        running_mean, running_var = buffers["running_mean"], buffers["running_var"]
    except KeyError:  # a hook computes them, so they are no parameters
        return None
    applied = activation_of(activation)
    if applied is None:
        return None
    given: Any = norm
    updates = norm.training and given.track_running_stats and running_mean is not None
    batches = buffers.get("num_batches_tracked") if updates else None
    if not (
        is_plain(weight)
        and is_plain(bias)
        and is_plain(running_mean)
        and is_plain(running_var)
        and is_plain(batches)
    ):
        return None
    form = form_words(
        type(norm),  # type: ignore[arg-type]  # mypy compares the hash of the instances
        given.num_features,
        norm.training or running_mean is None,
        updates,
        given.eps,
        given.momentum,
        *applied,
    )
    return (weight, bias, running_mean, running_var, batches), form


def _form_of(tensor: Tensor) -> Tensor:
    """Returns the tensor without its numbers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def goes_by_running_statistics(norm: nn.Module) -> bool:
    """Returns whether a norm of ``NORMS`` normalises by its running statistics."""
    given: Any = norm
    if given.training or norm._buffers.get("running_mean") is None:
        return False
    # PyTorch's InstanceNorm checks the flag, its BatchNorm the buffers.
    return bool(given.track_running_stats) or not isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d)


def evaluated(
    layer: Swapped, norm: nn.Module | None, activation: nn.Module | None, input: Tensor
) -> Tensor | None:
    """Returns ``activation(norm(layer(input)))``, by one program, from the running statistics as they are now; returns
    None, without any effect, if the modules have to compute it. The caller has checked ``takes(input)``, that nothing
    watches the modules, and that the norm ``goes_by_running_statistics``.

    Raises:
        CompileError, RuntimeError: the kernels cannot be compiled, the tensors do not fit together, or CUDA fails.
    """
    applied = activation_of(activation)
    if applied is None or not _fits(layer, input):
        return None
    vectors: tuple[Tensor | None, ...] = (None, None, None, None)
    eps = 0.0
    if norm is not None:
        parameters, buffers = norm._parameters, norm._buffers
        try:
            vectors = (
                parameters["weight"],
                parameters["bias"],
                buffers["running_mean"],
                buffers["running_var"],
            )
        except KeyError:  # a hook computes them, so they are no parameters
            return None
        if not any(isinstance(norm, cls) and input.dim() in taken for cls, (taken, _) in NORMS.items()):
            return None
        eps = norm.eps  # type: ignore[assignment]
    x, weight, bias, *geometry = layer.tconv_operands(input)
    if needs_gradient(x, weight, bias) or not all(map(is_plain, (weight, bias, *vectors))):
        return None
    words = block_words(*geometry, eps, *applied)
    output: Tensor | None = block_output(x, weight, bias, *vectors, words, layer.tconv_backend)
    return None if output is None else layer.tconv_reshape_output(output)


def _fits(layer: Swapped, input: Tensor) -> bool:
    """Returns whether our kernels may compute a call of this layer together with the norm behind it."""
    return (
        layer.tconv_backend != "native"
        and layer._tconv_packed is None
        and input.dim() == 2 + len(layer.kernel_size)
        and is_ours(layer, input)
        and host.is_available()
    )


def trained(
    layer: Swapped, norm: nn.Module, activation: nn.Module | None, input: Tensor
) -> tuple[Tensor | None, bool]:
    """Computes ``activation(norm(layer(input)))`` with one autograd node, and updates the running statistics. The
    caller has checked ``takes(input)``, and that nothing watches the modules.

    Returns:
        The output, and whether it is that of all three; if not, it is that of the layer. None and False, without any
        effect, if the modules have to compute it.

    Raises:
        CompileError, RuntimeError: the kernels cannot be compiled, the tensors do not fit together, or CUDA fails.
        ValueError: the layer's backend does not exist.
    """
    # A 1-D layer reshapes what the op would have to compute between the layer and the norm.
    if type(layer) is not ConvTranspose2d or not torch.is_grad_enabled() or not _fits(layer, input):
        return None, False
    arguments = _norm_arguments(norm, activation)
    x, weight, bias, *geometry = layer.tconv_operands(input)
    if arguments is None or not (is_plain(weight) and is_plain(bias)):
        return None, False
    check_backend(layer.tconv_backend)
    tensors, form = arguments
    words = geometry_words(*geometry)
    return block_training(x, weight, bias, *tensors, words, layer.tconv_backend, form)  # type: ignore[no-any-return]
