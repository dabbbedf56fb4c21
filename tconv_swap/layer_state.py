"""What a swapped layer keeps beside its parameters: which backend computes it."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from tconv_swap.cuda.choice import Backend

#: Input, weight, bias, stride, padding, output_padding, groups, dilation.
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int, Any]


class LayerState(nn.Module):
    """Base of the layers of ours, in front of the layer of PyTorch's that each stands for.

    Attributes:
        tconv_backend: what computes the layer (see ``tconv_swap.conv_transpose2d``). May be set at any time; it goes
            with the layer into copies and pickles, and is no part of its ``state_dict``.
    """

    #: On the class, for layers that nobody gave one: those of old pickles too.
    tconv_backend: Backend = "auto"

    def operands(self, *args: Any, **kwargs: Any) -> Operands:
        """What ``forward`` with these arguments calls ``tconv_swap.conv_transpose2d`` with, the backend apart."""
        raise NotImplementedError

    def forget_ours(self) -> None:
        """Take away what the layer of PyTorch's does not know."""
        vars(self).pop("tconv_backend", None)
