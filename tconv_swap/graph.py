"""The two ops that compute: the output and the gradients. Eager layers on CUDA and compiled graphs call them.

A call costs the CPU time for every argument and for every kernel that the dispatcher passes, so all of the geometry is
one list. On CUDA the kernels of these ops are csrc/call.cpp's, which also cast and differentiate; those below serve
every other device and tracers. What a compiler can fuse with its own kernels is in its graph beside the ops: changes of
an activation's memory format, and a bias that an autocast casts, which would take a separate kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cpu import call as cpu_call
from tconv_swap.cuda.choice import KERNEL
from tconv_swap.dispatch import are_plain, cast, is_eager
from tconv_swap.geometry import as_list, from_list
from tconv_swap.runtime import host, native

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# Inductor keeps graphs on disk that call these ops, whatever version of this package made them. A new meaning of an
# argument therefore needs a new name.
_OUTPUT = "(Tensor input, Tensor weight, Tensor? bias, SymInt[] geometry, str backend) -> Tensor"
_GRADIENTS = (
    "(Tensor grad_output, Tensor input, Tensor weight, SymInt[] geometry, bool[3] output_mask, str backend)"
    " -> Tensor[]"
)
for _name, _schema in (("conv_transpose2d_output", _OUTPUT), ("conv_transpose2d_gradients", _GRADIENTS)):
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_functional_mode = torch._C._TorchDispatchModeKey.FUNCTIONAL
_output_op = torch.ops.tconv_swap.conv_transpose2d_output.default
_gradients_op = torch.ops.tconv_swap.conv_transpose2d_gradients.default
_bias_is_cast: ContextVar[bool] = ContextVar("_bias_is_cast", default=False)


def output(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any], backend: str
) -> Tensor:
    """Returns ``[batch, out_channels, out_height, out_width]``.

    Args:
        arguments: stride, padding, output_padding, groups, dilation.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    if input.is_cpu and is_eager() and are_plain(input, weight, bias):
        return cpu_call.output(input, weight, bias, tuple(arguments))
    apart = None
    if _is_for_a_compiler(input):
        input = input.contiguous(memory_format=output_memory_format(input, weight))
        if bias is not None and _bias_is_cast.get():
            check_forward(input, weight, bias, tuple(arguments))
            bias, apart = None, bias
    computed: Tensor = _output_op(input, weight, bias, as_list(arguments), backend)
    return computed if apart is None else computed + apart.view(-1, 1, 1)


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: Sequence[Any],
    mask: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Returns the gradients of input, weight and bias for which ``mask`` is true, in that order.

    Raises:
        RuntimeError: as ``output``.
    """
    # autograd.grad(is_grads_batched=True) passes a batch of gradients that looks like a single one.
    if input.is_cpu and is_eager() and are_plain(input, weight, grad_output) and not _is_batched(grad_output):
        return cpu_call.gradients(grad_output, input, weight, tuple(arguments), mask)
    if _is_for_a_compiler(input):
        memory_format = output_memory_format(input, weight)
        grad_output = grad_output.contiguous(memory_format=memory_format)
        # The same as in the forward pass. The weight is small, and is not kept in another format between the two
        # passes.
        input = input.contiguous(memory_format=memory_format) if mask[1] else input
    return _gradients_op(grad_output, input, weight, as_list(arguments), mask, backend)  # type: ignore[no-any-return]


@contextmanager
def bias_is_cast(whether: bool) -> Iterator[None]:
    """Surrounds a call under an autocast; ``whether`` says if the autocast had to cast the bias."""
    token = _bias_is_cast.set(whether)
    try:
        yield
    finally:
        _bias_is_cast.reset(token)


def _is_for_a_compiler(input: Tensor) -> bool:
    """Returns whether a compiler records, into its graph, a call that our kernels compute."""
    return input.is_cuda and torch._C._get_dispatch_mode(_functional_mode) is not None


# The results of these two have the layout that the fake kernels promise, also where PyTorch's operator differs.
def compute_output(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: list[int], backend: str
) -> Tensor:
    arguments = from_list(geometry)
    if input.is_cuda:
        if _is_left_to_host(backend):
            return _output_op(input, weight, bias, geometry, backend)  # type: ignore[no-any-return]
        computed = native.forward(input, weight, bias, arguments)
    else:
        _check_device_is_cpu(input)
        computed = cpu_call.output(input, weight, bias, arguments)
    return computed.contiguous(memory_format=output_memory_format(input, weight))


def compute_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: list[int], mask: list[bool], backend: str
) -> list[Tensor]:
    tensors, arguments = (grad_output, input, weight), from_list(geometry)
    if input.is_cuda:
        if _is_left_to_host(backend):
            return _gradients_op(*tensors, geometry, mask, backend)  # type: ignore[no-any-return]
        computed = native.backward(*tensors, arguments, mask)
    else:
        _check_device_is_cpu(input)
        computed = cpu_call.gradients(*tensors, arguments, mask)
    memory_format = output_memory_format(input, weight)
    return [g.contiguous(memory_format=memory_format) if g.dim() == 4 else g for g in computed]


def _is_left_to_host(backend: str) -> bool:
    """Loads the host part; returns whether it has a CUDA kernel of the op. If not, PyTorch's operator computes.

    Raises:
        BuildError: the host part cannot be built, and ``backend`` requires our kernels.
    """
    if backend == KERNEL:
        host.library()
    return host.is_available()


def _check_device_is_cpu(input: Tensor) -> None:
    if not input.is_cpu:
        raise NotImplementedError(
            f"tconv_swap computes on the CPU and on CUDA, but input is on {input.device}"
        )


def _output_autograd(
    keys: torch._C.DispatchKeySet,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
    backend: str,
) -> Tensor:
    """Differentiates a call outside of a compiled graph, such as one of a decomposed program. A compiled graph
    differentiates by itself."""
    if _wants_derivative(input, weight, bias):
        whole_op = torch.ops.tconv_swap.conv_transpose2d.default
        return whole_op(input, weight, bias, *from_list(geometry), backend)  # type: ignore[no-any-return]
    keys = keys & torch._C._after_autograd_keyset
    return _output_op.redispatch(keys, input, weight, bias, geometry, backend)  # type: ignore[no-any-return]


def _gradients_autograd(
    keys: torch._C.DispatchKeySet,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Sequence[Any],
    mask: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Differentiates the gradients: PyTorch's operator computes gradients of gradients."""
    if _wants_derivative(grad_output, input, weight):
        return _gradients_by_pytorch(grad_output, input, weight, geometry, mask, backend)
    keys = keys & torch._C._after_autograd_keyset
    return _gradients_op.redispatch(keys, grad_output, input, weight, geometry, mask, backend)  # type: ignore[no-any-return]


def _wants_derivative(*tensors: Tensor | None) -> bool:
    differentiated = torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    return bool(differentiated or forward_ad._current_level >= 0)


def _output_by_pytorch(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any], backend: str
) -> Tensor:
    return native.forward(input, weight, bias, from_list(geometry))


def _gradients_by_pytorch(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Sequence[Any],
    mask: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    return native.backward(grad_output, input, weight, from_list(geometry), tuple(mask))


def register_autocast(
    register: Callable[[str, Callable[..., Tensor], str], object], op: Any, device_type: str
) -> None:
    """Registers an op for autocast: input, weight and bias, its first arguments, are cast like a convolution's."""
    key = getattr(torch._C.DispatchKey, {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type])
    excluded = torch._C.DispatchKeySet(key)

    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        operands = [cast(tensor, device_type, dtype) for tensor in (input, weight, bias)]
        with torch._C._ExcludeDispatchKeyGuard(excluded), bias_is_cast(operands[2] is not bias):
            return op(*operands, *more)  # type: ignore[no-any-return]

    register(op._schema.name, kernel, key.name)


# The host part registers its kernels for CUDA and AutogradCUDA, which the dispatcher prefers to these.
for _name, _compute, _autograd, _by_pytorch in (
    ("conv_transpose2d_output", compute_output, _output_autograd, _output_by_pytorch),
    ("conv_transpose2d_gradients", compute_gradients, _gradients_autograd, _gradients_by_pytorch),
):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)
    # vmap, grad, jvp and the functions made of them use this, and so does autograd.grad(is_grads_batched=True).
    for _key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
        _library.impl(_name, _by_pytorch, _key)
register_autocast(_library.impl, _output_op, "cpu")
register_autocast(host.stand_in, _output_op, "cuda")


@torch.library.register_fake("tconv_swap::conv_transpose2d_output", lib=_library)  # type: ignore[untyped-decorator]
def _(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any], backend: str) -> Tensor:
    checked = check_forward(input, weight, bias, from_list(geometry))
    return torch.empty(
        checked.output_shape,
        dtype=input.dtype,
        device=input.device,
        memory_format=output_memory_format(input, weight),
    )


@torch.library.register_fake("tconv_swap::conv_transpose2d_gradients", lib=_library)  # type: ignore[untyped-decorator]
def _(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Sequence[Any],
    mask: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    checked = check_backward(grad_output, input, weight, from_list(geometry))
    memory_format = output_memory_format(input, weight)
    shapes = (checked.input_shape, checked.weight_shape, (checked.out_channels,))
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
