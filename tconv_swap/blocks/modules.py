"""The classes that a swap with ``fuse`` gives to containers, norms and paddings.

At every call a swapped ``nn.Sequential`` checks, before it calls a norm, whether the norm and the activation behind
it can be computed as one. So the next call sees every change to the modules (a hook, another activation, a part of the
container taken out, a module called alone). The activations keep their classes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, cast

from torch import Tensor, nn

from tconv_swap.blocks import call, handed
from tconv_swap.blocks.form import NORMS, activation_of, takes_sum
from tconv_swap.blocks.postponed import Postponed
from tconv_swap.layer import SWAPPED, Swapped
from tconv_swap.leaf import Leaf

#: Which norms are fused: those behind a transposed convolution of ours, all of them (and all paddings), or none.
Fuse: TypeAlias = Literal["blocks", "all"] | None
CHOICES: tuple[Fuse, ...] = ("blocks", "all", None)


class Blocks(nn.Sequential):
    """``nn.Sequential`` that computes a norm and the activation behind it as one if they follow a transposed
    convolution of ours, where possible together with it."""

    def forward(self, input: Any) -> Any:
        """Calls the modules in turn, as ``nn.Sequential`` does."""
        if not call.takes(input):
            return super().forward(input)  # type: ignore[no-untyped-call]
        modules = list(self._modules.values())
        at, behind_ours = 0, False
        while at < len(modules):
            module = modules[at]
            assert module is not None
            if type(module) in SWAPPED and call.is_on_gpu(input):
                output, taken = _whole(modules, at, input)
                if output is not None:
                    input, at, behind_ours = output, at + taken, taken == 1
                    continue
            fits = (behind_ours or self._everywhere) and type(module) in FUSED_NORMS
            if fits and call.is_on_gpu(input):
                following = modules[at + 1] if at + 1 < len(modules) else None
                output, taken = _block(module, following, input)
                if output is not None:
                    input, at, behind_ours = output, at + taken, False
                    continue
            input = module(input)
            behind_ours = isinstance(module, SWAPPED)
            at += 1
        return input

    _everywhere = False


class AllBlocks(Blocks):
    """``Blocks`` that computes a norm and the activation behind it as one behind any module."""

    _everywhere = True


def _whole(modules: list[Any], at: int, input: Tensor) -> tuple[Tensor | None, int]:
    """Returns the output of a transposed convolution of ours, with the norm and the activation behind it if possible,
    and the number of these modules; None if the modules have to compute it."""
    layer = modules[at]
    norm, activation = _behind(modules, at)
    if norm is None and activation is None:
        return None, 0
    evaluates = norm is None or call.goes_by_running_statistics(norm)
    if evaluates:
        for observe in call.block_observers:
            observe(layer, norm, activation, input)
    # Observers and recorders of norms see each norm called by itself.
    if (
        call.observers
        or call.recorders
        or call.is_watched(layer)
        or (norm is not None and call.is_watched(norm))
    ):
        return None, 0
    count = 1 + (norm is not None) + (activation is not None)
    output = call.evaluated(layer, norm, activation, input) if evaluates else None
    if output is not None or norm is None:
        return output, count
    output, is_whole = call.trained(layer, norm, activation, input)
    return output, count if is_whole else 1


def _behind(modules: list[Any], at: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the norm and the activation that may be computed with the layer at this index."""
    end, norm = at + 1, None
    if end < len(modules) and type(modules[end]) in FUSED_NORMS:
        norm = modules[end]
        end += 1
    if end < len(modules) and activation_of(modules[end]) is not None and not call.is_watched(modules[end]):
        return norm, modules[end]
    return norm, None


def evaluated_together(
    model: nn.Module,
) -> Iterator[tuple[Swapped, nn.Module | None, nn.Module | None]]:
    """Yields each layer of a swapped network with the norm and the activation that evaluation may compute with it."""
    for container in model.modules():
        modules = list(container._modules.values()) if isinstance(container, Blocks) else []
        for at, layer in enumerate(modules):
            norm, activation = _behind(modules, at) if type(layer) in SWAPPED else (None, None)
            evaluates = norm is None or call.goes_by_running_statistics(norm)
            if evaluates and (norm is not None or activation is not None):
                yield cast(Swapped, layer), norm, activation


def _block(norm: nn.Module, following: nn.Module | None, input: Tensor) -> tuple[Tensor | None, int]:
    """Returns the output of a norm and of the activation behind it, if there is one, and the number of these modules;
    None if the modules have to compute it."""
    if call.is_watched(norm):
        return None, 0
    fits = following is not None and activation_of(following) is not None and not call.is_watched(following)
    return call.computed(norm, following if fits else None, input), 1 + fits


class _Norm(Leaf):
    """The first base of our classes of norms; the second one is PyTorch's class."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes the normalisation by our kernels where they support the call.

        Args:
            input: as PyTorch's module.

        Returns:
            As PyTorch's module, except that an ``nn.InstanceNorm2d`` keeps its input's memory format.

        Raises:
            RuntimeError, ValueError: as PyTorch's module.
        """
        if not call.takes(input):
            return super().forward(input)  # type: ignore[no-any-return]
        pair = handed.pair_of(self)
        if pair is not None and pair.sums:
            if not takes_sum(pair.activation):
                return self._alone(input)
            later = Postponed(self, pair.activation, input, self._alone)
            handed.hand_over(later, pair.activation)
            return cast(Tensor, later)
        if pair is None:
            return self._alone(input)
        output = call.computed(self, pair.activation, input)
        if output is None:
            return super().forward(input)  # type: ignore[no-any-return]
        handed.hand_over(output, pair.activation)
        return output

    def _alone(self, input: Tensor) -> Tensor:
        output = call.computed(self, None, input)
        return super().forward(input) if output is None else output


class BatchNorm1d(_Norm, nn.BatchNorm1d):
    """``nn.BatchNorm1d``, computed by our kernels."""


class BatchNorm2d(_Norm, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, computed by our kernels."""


class InstanceNorm1d(_Norm, nn.InstanceNorm1d):
    """``nn.InstanceNorm1d``, computed by our kernels."""


class InstanceNorm2d(_Norm, nn.InstanceNorm2d):
    """``nn.InstanceNorm2d``, computed by our kernels."""


NORM_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
}
#: Exact types, since a subclass may compute something else.
FUSED_NORMS = frozenset({*NORMS, *NORM_CLASSES.values()})


class ReflectionPad2d(Leaf, nn.ReflectionPad2d):
    """``nn.ReflectionPad2d``, computed by our kernels."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads by our kernel where it supports the call.

        Args:
            input: as PyTorch's module.

        Returns:
            As PyTorch's module, except that it keeps its input's memory format.

        Raises:
            RuntimeError: as PyTorch's module.
        """
        output = call.padded(self, input) if call.takes(input) else None
        return super().forward(input) if output is None else output


#: Exact types, too.
PAD_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.ReflectionPad2d: ReflectionPad2d}


class LeftBatchNorm1d(Leaf, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that is left as it is, in a container that computes others as blocks."""


class LeftBatchNorm2d(Leaf, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that is left as it is, in a container that computes others as blocks."""


class LeftInstanceNorm1d(Leaf, nn.InstanceNorm1d):
    """``nn.InstanceNorm1d`` that is left as it is, in a container that computes others as blocks."""


class LeftInstanceNorm2d(Leaf, nn.InstanceNorm2d):
    """``nn.InstanceNorm2d`` that is left as it is, in a container that computes others as blocks."""


LEFT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: LeftBatchNorm1d,
    nn.BatchNorm2d: LeftBatchNorm2d,
    nn.InstanceNorm1d: LeftInstanceNorm1d,
    nn.InstanceNorm2d: LeftInstanceNorm2d,
}
#: Every class that a swap uses, except those made from a user's class.
CLASSES = (
    Blocks,
    AllBlocks,
    *NORM_CLASSES.values(),
    *PAD_CLASSES.values(),
    *LEFT_CLASSES.values(),
    *handed.ACTIVATION_CLASSES.values(),
)


class _PickledByFirstBase:
    """The second base of a class made by ``_made``; pickles its containers by their first base and ours."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        first, ours = type(self).__bases__[0], type(self).__bases__[-1]
        return (_new_container, (first, ours), *reduced[2:])


def fused_class(cls: type[nn.Module], fuse: Fuse) -> type[nn.Module] | None:
    """Returns the class that replaces ``cls``, a class of containers or, with ``"all"``, of norms or paddings; None if
    there is none."""
    if fuse is None:
        return None
    ours = AllBlocks if fuse == "all" else Blocks
    if cls is nn.Sequential:
        return ours
    for classes in (NORM_CLASSES, PAD_CLASSES) if fuse == "all" else ():
        if cls in classes:
            return classes[cls]
    if (
        issubclass(cls, nn.Sequential)
        and not issubclass(cls, Blocks)
        and cls.forward is nn.Sequential.forward
    ):
        return _made(cls, ours)  # type: ignore[arg-type]  # mypy compares the hash of the instances
    return None


def original_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the class that ``fused_class`` replaces by this one; None if there is none."""
    if cls in (Blocks, AllBlocks):
        return nn.Sequential
    for classes in (NORM_CLASSES, PAD_CLASSES, LEFT_CLASSES):
        for plain, ours in classes.items():
            if cls is ours:
                return plain
    if (original := handed.before_handing(cls)) is not None:
        return original
    bases: tuple[type, ...] = cls.__bases__
    return bases[0] if len(bases) == 3 and bases[1] is _PickledByFirstBase else None


@functools.cache
def _made(cls: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    # In this order the user's methods come before ours, and ours before those of nn.Sequential.
    return types.new_class(
        cls.__name__,
        (cls, _PickledByFirstBase, ours),
        exec_body=lambda namespace: namespace.update(__module__=__name__, __doc__=cls.__doc__),
    )


def _new_container(cls: type[nn.Module], ours: type[nn.Module]) -> nn.Module:
    """Returns a container without state, which the unpickler fills. Pickles name this function: it must stay here."""
    made = _made(cls, ours)  # type: ignore[arg-type]
    return made.__new__(made)
