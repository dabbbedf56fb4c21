"""What the ops of ``op.py`` come to below autograd, and what a compiled graph calls: two ops without derivatives.

A call in a graph costs the CPU time for every argument and every kernel on the way: so all of the geometry is one
list, and where a derivative is wanted after all, they call the whole op. What a compiler can fuse with its own kernels
stands in the graph beside them: changes of an activation's memory format, and a bias that an autocast casts, which
would take a kernel of its own.
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
from tconv_swap.cuda import graph_calls, native
from tconv_swap.eager import DIRECT, cast

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# Inductor keeps graphs on disk that call these, whatever version of this package made them: another meaning of an
# argument needs another name.
_OUTPUT = "(Tensor input, Tensor weight, Tensor? bias, SymInt[] geometry, str backend) -> Tensor"
_GRADIENTS = (
    "(Tensor grad_output, Tensor input, Tensor weight, SymInt[] geometry, bool[3] output_mask, str backend)"
    " -> Tensor[]"
)
for _name, _schema in (("conv_transpose2d_output", _OUTPUT), ("conv_transpose2d_gradients", _GRADIENTS)):
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # What csrc/node.cpp calls, which stands in the place of the above on CUDA once it is built.
    _library.define(f"{_name}_anew{_schema}")
_functional_mode = torch._C._TorchDispatchModeKey.FUNCTIONAL
_output_op = torch.ops.tconv_swap.conv_transpose2d_output.default
_gradients_op = torch.ops.tconv_swap.conv_transpose2d_gradients.default
_bias_is_cast: ContextVar[bool] = ContextVar("_bias_is_cast", default=False)


def output(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any], backend: str
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]``.

    Args:
        arguments: stride, padding, output_padding, groups, dilation.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
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
    """Those of the input, the weight and the bias that ``mask`` asks for, in that order.

    Raises:
        RuntimeError: as ``output``.
    """
    if _is_for_a_compiler(input):
        memory_format = output_memory_format(input, weight)
        grad_output = grad_output.contiguous(memory_format=memory_format)
        # As the forward pass had it; the weight, which is small, is not kept in another format from there to here.
        input = input.contiguous(memory_format=memory_format) if mask[1] else input
    return _gradients_op(grad_output, input, weight, as_list(arguments), mask, backend)  # type: ignore[no-any-return]


@contextmanager
def bias_is_cast(whether: bool) -> Iterator[None]:
    """Around a call that an autocast makes: whether it had to cast the bias for it."""
    token = _bias_is_cast.set(whether)
    try:
        yield
    finally:
        _bias_is_cast.reset(token)


def _is_for_a_compiler(input: Tensor) -> bool:
    """Whether a call to be computed by our kernels is on its way into a compiler's graph."""
    return input.is_cuda and torch._C._get_dispatch_mode(_functional_mode) is not None


def as_list(arguments: Sequence[Any]) -> list[Any]:
    """Stride, padding, output_padding, groups and dilation as the two ops take them."""
    stride, padding, output_padding, groups, dilation = arguments
    return [*stride, *padding, *output_padding, groups, *dilation]


def from_list(geometry: Sequence[Any]) -> tuple[Any, ...]:
    """``arguments`` again, hashable."""
    s0, s1, p0, p1, o0, o1, groups, d0, d1 = geometry
    return (s0, s1), (p0, p1), (o0, o1), groups, (d0, d1)


# What leaves these two lies as the fake kernels promise, also where PyTorch's operator had another idea.
def _compute_output(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: list[int], backend: str
) -> Tensor:
    arguments = from_list(geometry)
    if input.is_cuda:
        computed = graph_calls.output(input, weight, bias, geometry, arguments, backend)
    else:
        _refuse_but_on_the_cpu(input)
        computed = DIRECT["cpu"][0](input, weight, bias, arguments, backend)
    return computed.contiguous(memory_format=output_memory_format(input, weight))


def _compute_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: list[int], mask: list[bool], backend: str
) -> list[Tensor]:
    tensors, arguments, wanted = (grad_output, input, weight), from_list(geometry), tuple(mask)
    if input.is_cuda:
        computed = graph_calls.gradients(*tensors, geometry, arguments, wanted, backend)
    else:
        _refuse_but_on_the_cpu(input)
        computed = DIRECT["cpu"][1](*tensors, arguments, wanted, backend)
    memory_format = output_memory_format(input, weight)
    return [g.contiguous(memory_format=memory_format) if g.dim() == 4 else g for g in computed]


def _refuse_but_on_the_cpu(input: Tensor) -> None:
    if not input.is_cpu:
        raise NotImplementedError(
            f"tconv_swap computes on the CPU and on CUDA, but input is on {input.device}"
        )


def _autograd(name: str, with_derivatives: str) -> Callable[..., Any]:
    """A compiled graph differentiates around its calls; a decomposed program is run as anything else is."""
    op = getattr(torch.ops.tconv_swap, name).default

    def kernel(keys: torch._C.DispatchKeySet, *given: Any) -> Any:
        differentiated = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        if differentiated or forward_ad._current_level >= 0:
            *tensors, geometry = given[:4]
            differentiable = getattr(torch.ops.tconv_swap, with_derivatives).default
            return differentiable(*tensors, *from_list(geometry), *given[4:])
        return op.redispatch(keys & torch._C._after_autograd_keyset, *given)

    return kernel


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


def register_autocast(library: torch.library.Library, name: str) -> None:
    """An autocast casts input, weight and bias, an op's first arguments, as it would a convolution's."""
    op = getattr(torch.ops.tconv_swap, name).default
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, _autocast(op, device_type, getattr(torch._C.DispatchKey, key)), key)


def _autocast(op: Any, device_type: str, key: torch._C.DispatchKey) -> Callable[..., Tensor]:
    excluded = torch._C.DispatchKeySet(key)

    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        operands = [cast(tensor, device_type, dtype) for tensor in (input, weight, bias)]
        with torch._C._ExcludeDispatchKeyGuard(excluded), bias_is_cast(operands[2] is not bias):
            return op(*operands, *more)  # type: ignore[no-any-return]

    return kernel


# Not for CUDA and its autograd by name: node.cpp's kernels are, and so come before these.
for _name, _compute, _with_derivatives, _by_pytorch in (
    ("conv_transpose2d_output", _compute_output, "conv_transpose2d", _output_by_pytorch),
    ("conv_transpose2d_gradients", _compute_gradients, "conv_transpose2d_backward", _gradients_by_pytorch),
):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    _library.impl(_name, _autograd(_name, _with_derivatives), "Autograd", with_keyset=True)
    _library.impl(f"{_name}_anew", _compute, "CUDA")
    # As of the ops of op.py.
    for _key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
        _library.impl(_name, _by_pytorch, _key)
register_autocast(_library, "conv_transpose2d_output")


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
