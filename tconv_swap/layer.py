"""The swapped layer, and which class a layer takes when it is swapped and when that is undone.

``ConvTranspose2d`` differs from ``nn.ConvTranspose2d`` by its ``forward`` alone: parameters, buffers, state
and constructor are the same. So giving a layer another class swaps it, and nothing that refers to it notices.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, fx, nn

# The module, not the function: whoever replaces the operator (a test, a profiler) then reaches every layer.
from tconv_swap import op
from tconv_swap.layer_state import LayerState, Operands

_DEVICES = ("cpu", "cuda", "meta")


class ConvTranspose2d(LayerState, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``, computed by ``tconv_swap.conv_transpose2d``.

    Constructor, initial values, ``state_dict`` and repr are those of ``nn.ConvTranspose2d``. What our
    operator does not support (complex and integer inputs, devices other than the CPU and CUDA) is left to
    PyTorch's, so a swapped layer goes on working wherever it is moved.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the transposed convolution.

        Args:
            input: ``[batch, in_channels, height, width]`` or, unbatched, ``[in_channels, height, width]``.
            output_size: the size wanted, in pixels: ``[out_height, out_width]``, or with batch and channels
                in front, out of those that the stride leaves open. None takes ``self.output_padding``.

        Returns:
            ``[batch, out_channels, out_height, out_width]``, unbatched where ``input`` is.

        Raises:
            ValueError: ``output_size`` cannot be had, or ``padding_mode`` is not ``"zeros"``.
            RuntimeError: the shapes, dtypes or devices of ``input`` and the parameters do not fit together.
        """
        if isinstance(input, fx.Proxy):
            return self._record(input, output_size)  # type: ignore[no-any-return]
        if not self._is_ours(input):
            return super().forward(input, output_size)
        operands = self.operands(input, output_size)
        if self._tconv_packed is not None:
            output = self._with_packed(self._tconv_packed, operands)
            if output is not None:
                return output
        # Whoever replaces the operator need know no more than PyTorch's arguments.
        if self.tconv_backend == "auto":
            return op.conv_transpose2d(*operands)
        return op.conv_transpose2d(*operands, self.tconv_backend)

    def operands(self, input: Tensor, output_size: list[int] | None = None) -> Operands:
        """What ``forward`` calls ``tconv_swap.conv_transpose2d`` with."""
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

    def _is_ours(self, input: Tensor) -> bool:
        """Whether our operator takes this call; PyTorch's takes the others, and raises for a broken layer.

        The weight is not asked: reading a parametrized one computes it and may change state (spectral_norm).
        """
        return (
            input.dtype in op.SUPPORTED_DTYPES
            and (input.is_cuda or input.device.type in _DEVICES)
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
        )

    def _record(self, input: fx.Proxy, output_size: list[int] | None) -> Any:
        """Records this layer as a leaf of the graph, as symbolic tracing does by itself for torch.nn's."""
        tracer = input.tracer
        if not isinstance(tracer, fx.Tracer) or tracer.root is self:
            return super().forward(input, output_size)  # type: ignore[arg-type]
        kwargs = {} if output_size is None else {"output_size": output_size}
        return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), kwargs)


class _SwappedSubclass(ConvTranspose2d):
    """The second base of a class made by ``_swapped_subclass``; pickles its layers by their first base.

    The made class is in no module, so a pickle cannot name it; it names the user's class and makes it anew.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced = super().__reduce_ex__(protocol)
        return (_new_swapped_layer, (type(self).__bases__[0],), *reduced[2:])


def swapped_class(cls: type[nn.ConvTranspose2d]) -> type[ConvTranspose2d]:
    """The class that takes the place of ``cls``: what ``cls`` is, but with the ``forward`` of ours.

    Args:
        cls: ``nn.ConvTranspose2d`` or a subclass that has no ``forward`` of its own.

    Raises:
        TypeError: ``cls`` has its own ``forward``, or cannot be subclassed.
    """
    if cls is nn.ConvTranspose2d:
        return ConvTranspose2d
    if not issubclass(cls, nn.ConvTranspose2d) or cls.forward is not nn.ConvTranspose2d.forward:
        raise TypeError(f"expected a subclass of nn.ConvTranspose2d that inherits its forward, got {cls}")
    return _swapped_subclass(cls)  # type: ignore[arg-type]  # mypy compares the hash of the instances


def original_class(cls: type[ConvTranspose2d]) -> type[nn.ConvTranspose2d]:
    """The inverse of ``swapped_class``; a class that somebody derived from ours is returned as it is."""
    if cls is ConvTranspose2d:
        return nn.ConvTranspose2d
    return cls.__bases__[0] if _SwappedSubclass in cls.__bases__ else cls


@functools.cache
def _swapped_subclass(cls: type[nn.ConvTranspose2d]) -> type[ConvTranspose2d]:
    # In this order the user's methods come before ours, and ours before those of nn.ConvTranspose2d.
    return types.new_class(
        cls.__name__,
        (cls, _SwappedSubclass),
        exec_body=lambda namespace: namespace.update(__module__=__name__, __doc__=cls.__doc__),
    )


def _new_swapped_layer(cls: type[nn.ConvTranspose2d]) -> ConvTranspose2d:
    """A layer without state, for the unpickler to fill. Pickles name this function: it must stay here."""
    swapped = swapped_class(cls)
    return swapped.__new__(swapped)
