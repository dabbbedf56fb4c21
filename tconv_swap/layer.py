"""The swapped layer, and which class a layer takes when it is swapped and when that is undone.

``ConvTranspose2d`` differs from ``nn.ConvTranspose2d`` only by its ``forward``, and ``ConvTranspose1d`` from
``nn.ConvTranspose1d``: parameters, buffers, state and constructor are the same. To swap a layer it is therefore enough
to assign its ``__class__``; every reference to the layer stays valid.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

# The module is imported, not the function: if a test or a profiler replaces the operator, it reaches every layer.
from tconv_swap import op
from tconv_swap.layer_state import LayerState, Operands
from tconv_swap.leaf import Leaf


class ConvTranspose2d(Leaf, LayerState, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``, computed by ``tconv_swap.conv_transpose2d``.

    Constructor, initial values, ``state_dict`` and repr are those of ``nn.ConvTranspose2d``. PyTorch's operator
    computes what ours does not support (complex and integer inputs, devices other than the CPU and CUDA), so a swapped
    layer works wherever it is moved.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the transposed convolution.

        Args:
            input: ``[batch, in_channels, height, width]`` or, unbatched, ``[in_channels, height, width]``.
            output_size: the wanted size in pixels, one of those that the stride leaves open: ``[out_height,
                out_width]``, or with batch and channels in front. None takes ``self.output_padding``.

        Returns:
            ``[batch, out_channels, out_height, out_width]``, unbatched where ``input`` is unbatched.

        Raises:
            ValueError: ``output_size`` is not possible, or ``padding_mode`` is not ``"zeros"``.
            RuntimeError: the shapes, dtypes or devices of ``input`` and the parameters do not fit together.
        """
        if not is_ours(self, input):
            return super().forward(input, output_size)
        operands = self.tconv_operands(input, output_size)
        if self._tconv_packed is not None:
            output = self._tconv_with_packed(self._tconv_packed, operands)
            if output is not None:
                return output
        return _compute(self, operands)

    def tconv_reshape_output(self, output: Tensor) -> Tensor:
        """Returns the result of ``forward``, given the output that was computed from ``tconv_operands``."""
        return output

    def tconv_operands(self, input: Tensor, output_size: list[int] | None = None) -> Operands:
        """Returns the arguments with which ``forward`` calls ``tconv_swap.conv_transpose2d``."""
        output_padding: Any = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(
                input,
                output_size,
                self.stride,  # type: ignore[arg-type]
                self.padding,  # type: ignore[arg-type]
                self.kernel_size,  # type: ignore[arg-type]
                2,
                self.dilation,  # type: ignore[arg-type]
            )
        return (
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )


class ConvTranspose1d(Leaf, LayerState, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d``, computed as a 2-D transposed convolution of height 1; otherwise like
    ``ConvTranspose2d``."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the transposed convolution.

        Args:
            input: ``[batch, in_channels, length]`` or, unbatched, ``[in_channels, length]``.
            output_size: the wanted length, one of those that the stride leaves open: ``[out_length]``, or with batch
                and channels in front. None takes ``self.output_padding``.

        Returns:
            ``[batch, out_channels, out_length]``, unbatched where ``input`` is unbatched; contiguous, like PyTorch's.

        Raises:
            ValueError, RuntimeError: as ``ConvTranspose2d.forward``.
        """
        if not is_ours(self, input) or input.dim() not in (2, 3):
            return super().forward(input, output_size)
        return self.tconv_reshape_output(_compute(self, self.tconv_operands(input, output_size)))

    def tconv_reshape_output(self, output: Tensor) -> Tensor:
        """Returns the result of ``forward``, given the output that was computed from ``tconv_operands``."""
        output = output.contiguous()
        # Autograd refuses to write in place into a view.
        return torch.ops.aten._unsafe_view.default(output, [*output.shape[:-2], output.shape[-1]])  # type: ignore[no-any-return]

    def tconv_operands(self, input: Tensor, output_size: list[int] | None = None) -> Operands:
        """Returns the arguments with which ``forward`` calls ``tconv_swap.conv_transpose2d``."""
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            1,
            self.dilation,  # type: ignore[arg-type]
        )
        # PyTorch does this too: otherwise a transposed signal would be taken for a channels_last image.
        return (
            input.contiguous().unsqueeze(-2),
            self.weight.contiguous().unsqueeze(-2),
            self.bias,
            (1, self.stride[0]),
            (0, self.padding[0]),
            (0, output_padding[0]),
            self.groups,
            (1, self.dilation[0]),
        )


#: Our layers. Each replaces one layer of PyTorch's, see _PLAIN.
SWAPPED = (ConvTranspose2d, ConvTranspose1d)
Plain: TypeAlias = nn.ConvTranspose2d | nn.ConvTranspose1d
Swapped: TypeAlias = ConvTranspose2d | ConvTranspose1d
_PLAIN: dict[type[Swapped], type[Plain]] = {
    ConvTranspose2d: nn.ConvTranspose2d,
    ConvTranspose1d: nn.ConvTranspose1d,
}
_CHANGE = "_tconv_swap_changes_class"
#: The original functions: other code may replace PyTorch's.
_FORWARDS = [cls.forward for cls in (*_PLAIN, *_PLAIN.values())]


def _compute(layer: Swapped, operands: Operands) -> Tensor:
    # Without the backend, code that replaces the operator needs to know PyTorch's arguments only.
    if layer.tconv_backend == "auto":
        return op.conv_transpose2d(*operands)
    return op.conv_transpose2d(*operands, layer.tconv_backend)


def is_ours(layer: Plain, input: Tensor) -> bool:
    """Returns whether our operator takes this call. PyTorch's takes all others, and raises for a broken layer.

    The weight is not read: reading a parametrized weight computes it and may change state (spectral_norm).
    """
    return (
        isinstance(input, Tensor)
        and input.dtype in op.SUPPORTED_DTYPES
        and (input.is_cuda or input.device.type in op.SUPPORTED_DEVICES)
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
    )


class _PickledByFirstBase:
    """The second base of a class that ``_swapped_subclass`` makes; pickles its layers by their first base.

    No module contains the new class, so a pickle cannot name it; it names the user's class, and loading makes it again.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_swapped_layer, (type(self).__bases__[0],), *reduced[2:])


class _SwappedSubclass(_PickledByFirstBase, ConvTranspose2d):
    pass


class _SwappedSubclass1d(_PickledByFirstBase, ConvTranspose1d):
    pass


def swapped_class(cls: type[Plain]) -> type[Swapped]:
    """Returns the class that replaces ``cls``: the same class with our layer in the place of PyTorch's.

    If ``cls`` defines a ``forward``, it stays; what it calls as ``super().forward`` is then ours.

    Args:
        cls: ``nn.ConvTranspose2d``, ``nn.ConvTranspose1d`` or a subclass of one of them.

    Raises:
        TypeError: ``cls`` is something else, is ours already, or cannot be subclassed.
    """
    for ours, plain in _PLAIN.items():
        if cls is plain:
            return ours
    if not issubclass(cls, tuple(_PLAIN.values())) or issubclass(cls, SWAPPED):
        raise TypeError(f"expected a subclass of nn.ConvTranspose2d or nn.ConvTranspose1d, got {cls}")
    return _swapped_subclass(cls)  # type: ignore[arg-type]  # mypy compares the hash of the instances


def original_class(cls: type[Swapped]) -> type[Plain]:
    """Returns the inverse of ``swapped_class``; a class that a user derived from ours is returned unchanged."""
    if cls in _PLAIN:
        return _PLAIN[cls]
    first, last = cls.__bases__[0], cls.__bases__[-1]
    if last in (_SwappedSubclass, _SwappedSubclass1d):
        return first
    # FSDP2's fully_shard, or code built on it, has made the class.
    if any(base.__name__ == "FSDPModule" for base in first.__mro__) and issubclass(last, SWAPPED):
        namespace = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        return type(cls.__name__, (first, original_class(last)), namespace)
    return cls


def set_classes(classes: Sequence[tuple[nn.Module, type[Plain]]]) -> None:
    """Gives each layer its new class. All classes are made before the first is assigned."""
    for layer, cls in [(layer, _parametrized_like(layer, cls)) for layer, cls in classes]:
        object.__setattr__(
            layer, "__class__", cls
        )  # not by __setattr__, which a subclass may override and raise in
        # torch.compile skips its guards, also that on the class, while no dictionary of the network has changed. The
        # assignment below changes one, so a network that is already compiled sees its new layer.
        vars(layer)[_CHANGE] = None
        del vars(layer)[_CHANGE]


def _parametrized_like(layer: nn.Module, cls: type[Plain]) -> type[nn.Module]:
    """Returns ``cls`` with the properties that ``torch.nn.utils.parametrize`` has put into the class of ``layer``.

    The class is new, because deep copies of a layer share its class. Its first base is ``cls``:
    ``remove_parametrizations`` restores that class.
    """
    if not is_parametrized(layer):
        return cls
    namespace = {k: v for k, v in vars(type(layer)).items() if k not in ("__dict__", "__weakref__")}
    return type(layer.__class__.__name__, (cls,), namespace)


def plain_class(layer: Plain) -> type[Plain]:
    """Returns ``nn.ConvTranspose1d`` or ``nn.ConvTranspose2d``, whichever ``layer`` is."""
    return nn.ConvTranspose1d if isinstance(layer, nn.ConvTranspose1d) else nn.ConvTranspose2d


def has_own_forward(cls: type[nn.Module]) -> bool:
    """Returns whether a subclass of PyTorch's or our layer defines a ``forward``."""
    asks_otherwise = getattr(cls, "_output_padding", None) is not _ConvTransposeNd._output_padding
    return asks_otherwise or getattr(cls, "forward", None) not in _FORWARDS


@functools.cache
def _swapped_subclass(cls: type[Plain]) -> type[Swapped]:
    second = _SwappedSubclass1d if issubclass(cls, nn.ConvTranspose1d) else _SwappedSubclass
    # In this order the user's methods come before ours, and ours before those of PyTorch's layer.
    return types.new_class(
        cls.__name__,
        (cls, second),
        exec_body=lambda namespace: namespace.update(__module__=__name__, __doc__=cls.__doc__),
    )


def _new_swapped_layer(cls: type[Plain]) -> Swapped:
    """Returns a layer without state, which the unpickler fills. Pickles name this function: it must stay here."""
    swapped = swapped_class(cls)
    return swapped.__new__(swapped)
