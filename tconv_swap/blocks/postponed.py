"""The output of a norm that is computed later, together with a tensor that is added to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.form import activate, activation_of


class Postponed:
    """Replaces ``norm(input)`` until a tensor is added to it and ``computed`` is called. ``proof`` ensures that
    nothing else uses it, that ``input`` does not change, and that the norm is called once."""

    def __init__(
        self, norm: nn.Module, activation: nn.Module, input: Tensor, alone: Callable[[Tensor], Tensor]
    ) -> None:
        """``alone`` computes the norm by itself."""
        self._norm, self._activation, self._input, self._alone = norm, activation, input, alone
        self._created = torch.is_grad_enabled()
        self._added: Any = None
        self._writes = False

    def __add__(self, other: object) -> Postponed:
        self._added = other
        return self

    __radd__ = __add__

    def __iadd__(self, other: object) -> Postponed:
        self._writes = True
        return self + other

    def computed(self) -> Tensor:
        """Returns the activation of the sum.

        Raises:
            Exception: whatever the modules or the sum raise.
        """
        norm, activation, added = self._norm, self._activation, self._added
        if isinstance(added, Tensor) and torch.is_grad_enabled() is self._created:
            output = call.computed(norm, activation, self._input, added)
            if output is not None:
                return output
        with torch.set_grad_enabled(self._created):
            normed = self._alone(self._input)
        # As in the user's ``forward``: a sum in place keeps the dtype.
        if self._writes:
            normed += added
        else:
            normed = normed + added
        applied = activation_of(activation)
        assert applied is not None  # otherwise it would not have been postponed
        return activate(normed, *applied)
