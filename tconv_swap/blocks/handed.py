"""Computes a norm and an activation as one inside a user's own ``forward``, which is not changed.

While a module runs whose ``forward`` passes a norm's output to one activation and to nothing else (``proof``), the norm
computes both, and the activation returns its input. Everywhere else each module computes its own part. If the output is
added to another tensor before the activation, the norm computes nothing yet, because that tensor may not exist. It
returns a ``Postponed``, which the sum completes and the activation computes.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.postponed import Postponed
from tconv_swap.blocks.proof import OWN_FORWARD, Pair, Proofs
from tconv_swap.dispatch import is_eager
from tconv_swap.leaf import Leaf


class _Running(threading.local):
    """The state of the module that runs in this thread. ``pending``: by ``id``, what was activated or postponed for an
    activation that has not been called yet."""

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.pending: dict[int, tuple[Tensor | Postponed, nn.Module]] = {}


_running = _Running()
_proofs = Proofs()


class Handing(nn.Module):
    """The first base of the class of a module whose own ``forward`` contains blocks; pickles the module by its own
    class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_handing, (type(self).__bases__[-1],), *reduced[2:])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own ``forward``.

        Raises:
            RuntimeError: a block was computed whose activation ``forward`` then did not call.
        """
        # nn.DataParallel makes new replicas of the module for every call.
        if len(args) != 1 or kwargs or "_is_replica" in vars(self) or not call.takes(args[0]):
            return super().forward(*args, **kwargs)
        before = _running.pairs, _running.pending
        _running.pairs, _running.pending = _proofs.pairs(self), {}
        try:
            output = super().forward(*args)
            if _running.pending:
                raise RuntimeError(
                    f"{type(self).__name__}.forward did not call the activation behind a norm, as it had before: "
                    "tconv_swap.unswap_layers makes it as it was"
                )
            return output
        finally:
            _running.pairs, _running.pending = before


def pair_of(norm: nn.Module) -> Pair | None:
    """Returns the only consumer of the output of the norm that is being called; None if it is not known, or if a hook
    intercepts one of the two."""
    pair = _running.pairs.get(id(norm))
    if pair is None or call.is_watched(norm) or call.is_watched(pair.activation):
        return None
    return pair if isinstance(pair.activation, _Activation) else None


def hand_over(output: Tensor | Postponed, activation: nn.Module) -> None:
    """Records that ``output`` has been activated, or postponed, for ``activation``."""
    _running.pending[id(output)] = output, activation


class _Activation(Leaf):
    """The first base of our classes of activations; the second one is PyTorch's class."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the activation of ``input``, or ``input`` itself if the norm before it has applied the
        activation."""
        if _running.pending and is_eager():
            entry = _running.pending.get(id(input))
            if entry is not None and entry[1] is self:
                del _running.pending[id(input)]
                return entry[0].computed() if isinstance(entry[0], Postponed) else input
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
    """Returns ``cls`` with ``Handing`` before it.

    Raises:
        Exception: whatever a class raises that cannot be subclassed.
    """

    @functools.wraps(cls.forward)  # exporters read the names of its arguments
    def forward(self: Handing, *args: Any, **kwargs: Any) -> Any:
        return Handing.forward(self, *args, **kwargs)

    namespace = {"__module__": __name__, "__doc__": cls.__doc__, "forward": forward, OWN_FORWARD: cls.forward}
    return types.new_class(cls.__name__, (Handing, cls), exec_body=lambda made: made.update(namespace))


def before_handing(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the class that ``handing_class`` or ``ACTIVATION_CLASSES`` replaced by ``cls``; None if neither did."""
    for original, ours in ACTIVATION_CLASSES.items():
        if cls is ours:
            return original
    bases: tuple[type, ...] = cls.__bases__
    return bases[1] if len(bases) == 2 and bases[0] is Handing else None


def _new_handing(cls: type[nn.Module]) -> nn.Module:
    """Returns a module without state, which the unpickler fills. Pickles name this function: it must stay here."""
    made = handing_class(cls)  # type: ignore[arg-type]  # mypy compares the hash of the instances
    return made.__new__(made)
