"""What a swapped layer keeps besides its parameters: the backend that computes it, and the packed form of a frozen
weight; and what its kernels depend on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from tconv_swap import flops
from tconv_swap.cuda.choice import NATIVE, Backend
from tconv_swap.cuda.expected import ExpectedLayer, expect
from tconv_swap.cuda.packed import PackedWeight
from tconv_swap.cuda.preload import PreloadedLayer, preload
from tconv_swap.dispatch import is_plain_call
from tconv_swap.geometry import Geometry, Pair, as_pair
from tconv_swap.runtime import ahead

if TYPE_CHECKING:
    from typing_extensions import Self

#: These are input, weight, bias, stride, padding, output_padding, groups, dilation.
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int, Any]


def may_use_packed(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return input.is_cuda and is_plain_call(input, weight, bias)


class LayerState(nn.Module):
    """Base of our layers, in front of the layer of PyTorch's that each of them replaces.

    Attributes:
        tconv_backend: what computes the layer (see ``tconv_swap.conv_transpose2d``). May be set at any time. Copies and
            pickles of the layer keep it; its ``state_dict`` does not contain it.
    """

    #: The default on the class serves layers that have set no backend, also those of old pickles.
    tconv_backend: Backend = "auto"
    _tconv_packed: PackedWeight | None = None

    def tconv_operands(self, *args: Any, **kwargs: Any) -> Operands:
        """Returns the arguments, without the backend, with which ``forward`` calls ``tconv_swap.conv_transpose2d``."""
        raise NotImplementedError

    def tconv_geometry(self) -> Geometry:
        """Returns the layer's geometry for a map of one pixel; a 1-D layer is computed as a 2-D one of height 1.

        Raises:
            TypeError, RuntimeError: an attribute that somebody has replaced is no pair of integers.
        """
        given: Any = self

        def pair(name: str, first: int) -> Pair:
            vertical, horizontal = as_pair(getattr(given, name), name)
            return (first if isinstance(self, nn.ConvTranspose1d) else vertical, horizontal)

        return Geometry(
            batch=1,
            in_channels=given.in_channels,
            height=1,
            width=1,
            out_channels=given.out_channels,
            kernel=pair("kernel_size", 1),
            stride=pair("stride", 1),
            padding=pair("padding", 0),
            output_padding=pair("output_padding", 0),
            dilation=pair("dilation", 1),
            groups=given.groups,
        )

    def tconv_has_bias(self) -> bool:
        """Returns whether the layer has a bias. The parameters of a parametrized layer have other names; they are not
        read, which might compute them."""
        return any("bias" in name.split(".") for name, _ in self.named_parameters())

    def tconv_forget(self) -> None:
        """Removes the attributes that PyTorch's layer does not have."""
        self.tconv_release_packed()
        vars(self).pop("tconv_backend", None)

    # The packed weight is kept in the instance's dictionary, since a subclass may override __setattr__ (see
    # freezing.py).

    def tconv_keep_packed(self) -> None:
        """Freezes the weight, if it is a parameter whose changes can be noticed."""
        self.tconv_release_packed()
        weight = self._parameters.get("weight")
        if weight is not None and not weight.is_inference():
            vars(self)["_tconv_packed"] = PackedWeight(weight)

    def tconv_is_frozen(self) -> bool:
        """Returns whether a packed weight is kept that the next call may use."""
        packed = self._tconv_packed
        return (
            packed is not None and packed.weight is self._parameters.get("weight") and packed.is_unchanged()
        )

    def tconv_release_packed(self) -> None:
        """Unfreezes the weight."""
        packed = vars(self).pop("_tconv_packed", None)
        if packed is not None:
            packed.release()

    def _tconv_with_packed(self, packed: PackedWeight, operands: Operands) -> Tensor | None:
        """Returns the output computed from the packed weight; None if the call has to be computed in the ordinary
        way."""
        input, weight, bias, *arguments = operands
        if input.shape in packed.unpacked_shapes:
            return None
        # A call with another weight (torch.func.functional_call) leaves the frozen weight as it is.
        if weight is not packed.weight or input.dim() != 4 or not may_use_packed(input, weight, bias):
            return None
        if not packed.is_unchanged():
            self.tconv_release_packed()
            return None
        return packed.forward(input, bias, tuple(arguments), self.tconv_backend)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.tconv_release_packed()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.tconv_release_packed()
        before = _gpu_of(self)
        applied: Self = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if _gpu_of(self) != before:
            expect_calls([self])
        return applied

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.tconv_release_packed()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's method removes what belongs to this object alone: with it, a copy would call this object's compiled
        # forward.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_tconv_packed", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        flops.register()
        expect_calls([self])


def expect_calls(layers: Iterable[nn.Module]) -> None:
    """Prepares for the first calls of those layers that lie on a GPU: reads what the first call there needs, names the
    layers that our kernels will compute, so that the first call of one can compile for those behind it, and preloads
    what they called first in an earlier process.

    For other layers nothing asks for a GPU: a process that has asked for one cannot fork processes that use it. They do
    it when they come to one.
    """
    expected: list[ExpectedLayer] = []
    preloaded: list[PreloadedLayer] = []
    for layer in layers:
        if not isinstance(layer, LayerState) or layer.tconv_backend == NATIVE:
            continue
        weight = _weight_on_gpu(layer)
        if weight is None:
            continue
        with suppress(AttributeError, TypeError, RuntimeError):  # its call will say what is wrong
            geometry, trains = layer.tconv_geometry(), layer.training and weight.requires_grad
            expected.append(ExpectedLayer(geometry, layer.tconv_has_bias()))
            preloaded.append(PreloadedLayer(geometry, weight.get_device(), layer.tconv_backend, trains))
    if expected:
        ahead.read_sources()
        expect(expected)
        preload(preloaded)


def _gpu_of(layer: LayerState) -> int | None:
    """Returns the number of the GPU on which the layer's weight lies; None if it lies elsewhere."""
    weight = _weight_on_gpu(layer)
    return None if weight is None else weight.get_device()


def _weight_on_gpu(layer: LayerState) -> nn.Parameter | None:
    """Returns the layer's weight; None if it does not lie on a GPU. A parametrized layer has another parameter in its
    place; reading the weight itself might compute it."""
    with suppress(AttributeError):  # a damaged file may have left the layer without parameters
        return next((one for one in layer.parameters() if one.dim() > 2 and one.is_cuda), None)
    return None
