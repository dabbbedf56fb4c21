"""Norm and activation as one inside of somebody's own ``forward``, which runs as it is.

While a module runs whose ``forward`` gives a norm's output to one activation and to nothing else (``proof``), the norm
computes both, and the activation hands on what the norm has just computed for it. Anywhere else both compute their own.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.proof import OWN_FORWARD, Proofs
from tconv_swap.dispatch import is_eager
from tconv_swap.leaf import Leaf


class _Running(threading.local):
    """Of the module that runs in this thread. ``pending``: by ``id``, what was activated for an activation that has not
    come yet."""

    def __init__(self) -> None:
        self.activations: dict[int, nn.Module] = {}
        self.pending: dict[int, tuple[Tensor, nn.Module]] = {}


_running = _Running()
_proofs = Proofs()


class Handing(nn.Module):
    """Comes before the class of a module whose own ``forward`` has blocks in it; pickles it by that class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_handing, (type(self).__bases__[-1],), *reduced[2:])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own ``forward``.

        Raises:
            RuntimeError: a block was computed whose activation ``forward`` then did not call.
        """
        # A replica of nn.DataParallel is another module at every call.
        if len(args) != 1 or kwargs or "_is_replica" in vars(self) or not call.takes(args[0]):
            return super().forward(*args, **kwargs)
        before = _running.activations, _running.pending
        _running.activations, _running.pending = _proofs.activations(self), {}
        try:
            output = super().forward(*args)
            if _running.pending:
                raise RuntimeError(
                    f"{type(self).__name__}.forward did not call the activation behind a norm, as it had before: "
                    "tconv_swap.unswap_layers makes it as it was"
                )
            return output
        finally:
            _running.activations, _running.pending = before


def activation_behind(norm: nn.Module) -> nn.Module | None:
    """What alone gets the output of a norm that is called now; None where that is not known, or a hook wants to see."""
    activation = _running.activations.get(id(norm))
    if activation is None or call.is_watched(norm) or call.is_watched(activation):
        return None
    return activation if isinstance(activation, _Activation) else None


def hand_over(output: Tensor, activation: nn.Module) -> None:
    """``output`` is activated already when ``activation`` gets it."""
    _running.pending[id(output)] = output, activation


class _Activation(Leaf):
    """Base of the activations of ours, in front of the one of PyTorch's that each stands for."""

    def forward(self, input: Tensor) -> Tensor:
        """The activation of ``input``; ``input`` itself where the norm before it has been activated already."""
        if _running.pending and is_eager():
            entry = _running.pending.get(id(input))
            if entry is not None and entry[1] is self:
                del _running.pending[id(input)]
                return input
        return super().forward(input)  # type: ignore[no-any-return]


class ReLU(_Activation, nn.ReLU):
    """``nn.ReLU``; a norm may have computed it."""


class LeakyReLU(_Activation, nn.LeakyReLU):
    """``nn.LeakyReLU``; a norm may have computed it."""


class ReLU6(_Activation, nn.ReLU6):
    """``nn.ReLU6``; a norm may have computed it."""


class Tanh(_Activation, nn.Tanh):
    """``nn.Tanh``; a norm may have computed it."""


class Sigmoid(_Activation, nn.Sigmoid):
    """``nn.Sigmoid``; a norm may have computed it."""


class SiLU(_Activation, nn.SiLU):
    """``nn.SiLU``; a norm may have computed it."""


class GELU(_Activation, nn.GELU):
    """``nn.GELU``; a norm may have computed it."""


ACTIVATION_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    cls.__bases__[1]: cls for cls in (ReLU, LeakyReLU, ReLU6, Tanh, Sigmoid, SiLU, GELU)
}


@functools.cache
def handing_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with ``Handing`` before it.

    Raises:
        Exception: whatever a class raises that cannot be subclassed.
    """
    return types.new_class(
        cls.__name__,
        (Handing, cls),
        exec_body=lambda namespace: namespace.update(
            {"__module__": __name__, "__doc__": cls.__doc__, OWN_FORWARD: cls.forward}
        ),
    )


def before_handing(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The inverse of ``handing_class`` and ``ACTIVATION_CLASSES``; None for a class that neither gives."""
    for original, ours in ACTIVATION_CLASSES.items():
        if cls is ours:
            return original
    bases: tuple[type, ...] = cls.__bases__
    return bases[1] if len(bases) == 2 and bases[0] is Handing else None


def _new_handing(cls: type[nn.Module]) -> nn.Module:
    """A module without state, for the unpickler to fill. Pickles name this function: it must stay here."""
    made = handing_class(cls)  # type: ignore[arg-type]  # mypy compares the hash of the instances
    return made.__new__(made)
