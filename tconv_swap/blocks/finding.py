"""Finds the norms of a network that our kernels compute, with or without the activation behind them, and the paddings,
and gives the reason for each of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tconv_swap.blocks.call import is_watched
from tconv_swap.blocks.form import NORMS, activation_of, takes_sum
from tconv_swap.blocks.handed import ACTIVATION_CLASSES, handing_class
from tconv_swap.blocks.modules import (
    FUSED_NORMS,
    LEFT_CLASSES,
    NORM_CLASSES,
    PAD_CLASSES,
    Blocks,
    Fuse,
    fused_class,
    original_class,
)
from tconv_swap.blocks.proof import Pair, pairs_of
from tconv_swap.kernels.common.dtypes import DTYPES

_WATCHED = "it has a hook or a forward of its own"


@dataclass(frozen=True)
class BlockPlan:
    """What happens to one normalisation, or one reflection padding, of a network, and why.

    Attributes:
        name: its (first) dotted name.
        kind: the names of its class and of the activation's that is computed with it: ``"BatchNorm2d + ReLU"``, or
            ``"BatchNorm2d + sum + ReLU"`` where the activation gets the sum of the norm's output and something else;
            or ``"ReflectionPad2d"``.
        activation: the dotted name of that activation; ``""`` where there is none.
        behind: the dotted name of the transposed convolution that it follows; ``""`` where it follows none.
        swap: whether our kernels compute it after the swap.
        reason: why our kernels do not compute it, or compute it without the activation behind it; ``""`` otherwise.
    """

    name: str
    kind: str
    activation: str
    behind: str
    swap: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that ``json`` can write."""
        return dict(vars(self))

    def __str__(self) -> str:
        names = f"{self.name}, {self.activation}" if self.activation else self.name
        what = "one kernel" if self.swap and self.activation else "our kernel" if self.swap else "leave"
        return f"{names}: {self.kind}: {what}{': ' + self.reason if self.reason else ''}"


@dataclass(frozen=True)
class Found:
    """The result of ``find``. ``classes``: the names and new classes of the modules that get another class."""

    blocks: tuple[BlockPlan, ...]
    classes: tuple[tuple[str, type[nn.Module]], ...]


def find(
    model: nn.Module, fuse: Fuse, is_ours: Callable[[nn.Module], bool], left: Collection[str] = ()
) -> Found:
    """Returns what a swap fuses.

    Args:
        is_ours: whether a module is a transposed convolution of ours after the swap.
        left: dotted names of norms and paddings that stay PyTorch's; a mapping has a reason for each.

    Raises:
        ValueError: ``left`` names something else than a norm or a padding.
    """
    if fuse is None:
        return Found((), ())
    names = {id(module): name for name, module in model.named_modules()}
    leavable = _NormBase | nn.GroupNorm | nn.ReflectionPad2d
    known = {name for name, module in model.named_modules() if isinstance(module, leavable)}
    if unknown := sorted(set(left) - known):
        raise ValueError(f"leave_blocks: no normalisation or padding of the model is called {unknown[0]!r}")
    places = _places(model)
    blocks: list[BlockPlan] = []
    classes: dict[str, type[nn.Module]] = {}
    pairs: dict[int, tuple[Pair, ...]] = {}
    for norm in model.modules():
        if not isinstance(norm, _NormBase | nn.GroupNorm):
            continue
        around = sorted(places.get(id(norm), []), key=lambda place: not is_ours(place.before))
        place = around[0] if around else _Place(None, norm, norm)
        own = place.parent if place.parent is not None and not _in_turn(place.parent) else None
        pair = None
        if own is not None and len(around) == 1:
            if id(own) not in pairs:
                pairs[id(own)] = pairs_of(own) if _can_hand(own) else ()
            pair = next((one for one in pairs[id(own)] if one.norm is norm), None)
        block = _block(norm, place, pair, fuse, is_ours, lambda module: names.get(id(module), ""), left)
        if block is None:
            continue
        blocks.append(block)
        if not block.swap:
            continue
        changing: list[nn.Module] = [norm]
        if place.parent is not None and _in_turn(place.parent) and not _why_no_container(place.parent, fuse):
            changing.append(place.parent)
        for module in changing:
            cls = _class_for(module, fuse)
            if cls is not None and cls is not type(module):
                classes[names[id(module)]] = cls
        if pair is not None and own is not None and block.activation:
            for module, cls in _classes_that_hand(own, pair):
                if cls is not type(module):
                    classes[names[id(module)]] = cls
    for pad, plan in _pads(model, left) if fuse == "all" else ():
        blocks.append(plan)
        if plan.swap and type(pad) in PAD_CLASSES:
            classes[plan.name] = PAD_CLASSES[type(pad)]
    for name, module in model.named_modules():
        if _evaluates_blocks(module, is_ours) and not _why_no_container(module, fuse):
            cls = _class_for(module, fuse)
            if cls is not None and cls is not type(module):
                classes[name] = cls
    for name in left:
        norm = model.get_submodule(name)
        # Its container computes every norm that has a class of PyTorch's.
        inside = any(
            isinstance(place.parent, Blocks) or names[id(place.parent)] in classes
            for place in places.get(id(norm), [])
            if place.parent is not None and _in_turn(place.parent)
        )
        plain = _original(norm)
        cls = LEFT_CLASSES.get(plain, plain) if inside else plain
        if cls is not type(norm):
            classes[name] = cls
    return Found(tuple(blocks), tuple(classes.items()))


def _pads(model: nn.Module, left: Collection[str]) -> Iterator[tuple[nn.Module, BlockPlan]]:
    """Yields every reflection padding of images, and what happens to it."""
    for name, pad in model.named_modules():
        if isinstance(pad, nn.ReflectionPad2d):
            kind = _original(pad).__name__
            reason = _why_left(name, left)
            if not reason and _original(pad) not in PAD_CLASSES:
                reason = f"{kind} is not nn.ReflectionPad2d itself"
            if not reason and is_watched(pad):
                reason = _WATCHED
            yield pad, BlockPlan(name, kind, "", "", not reason, reason)


def _evaluates_blocks(module: nn.Module, is_ours: Callable[[nn.Module], bool]) -> bool:
    """Returns whether the module is a container with a transposed convolution of ours followed by what only a block in
    evaluation computes with it: an activation, or an InstanceNorm with running statistics."""
    if not _in_turn(module):
        return False
    children = [child for child in module._modules.values() if child is not None]
    return any(
        is_ours(first)
        and (
            activation_of(second) is not None
            or (
                isinstance(second, nn.InstanceNorm1d | nn.InstanceNorm2d)
                and type(second) in FUSED_NORMS
                and second.running_mean is not None
            )
        )
        for first, second in pairwise(children)
    )


def _can_hand(parent: nn.Module) -> bool:
    try:
        return "forward" not in vars(parent) and handing_class(_original(parent)) is not None
    except Exception:  # the __init_subclass__ or metaclass of a user's class may raise anything
        return False


def _classes_that_hand(parent: nn.Module, pair: Pair) -> list[tuple[nn.Module, type[nn.Module]]]:
    return [
        (parent, handing_class(_original(parent))),
        (pair.norm, NORM_CLASSES[_original(pair.norm)]),
        (pair.activation, ACTIVATION_CLASSES[_original(pair.activation)]),
    ]


def _original(module: nn.Module) -> Any:  # mypy compares the hash of the instances where a class is cached by
    return original_class(type(module)) or type(module)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a norm in a network: its parent, and its neighbours if the parent is an ``nn.Sequential``, else
    the norm alone."""

    parent: nn.Module | None
    before: nn.Module
    after: nn.Module


def _places(model: nn.Module) -> dict[int, list[_Place]]:
    """Returns the places of every norm, by its ``id``: a shared norm has several."""
    found: dict[int, list[_Place]] = {}
    for parent in model.modules():
        children = [child for child in parent._modules.values() if child is not None]
        for at, child in enumerate(children):
            if isinstance(child, _NormBase | nn.GroupNorm):
                before = children[at - 1] if at and _in_turn(parent) else child
                after = children[at + 1] if at + 1 < len(children) and _in_turn(parent) else child
                found.setdefault(id(child), []).append(_Place(parent, before, after))
    return found


def _in_turn(parent: nn.Module) -> bool:
    return isinstance(parent, nn.Sequential)


def _class_for(module: nn.Module, fuse: Fuse) -> type[nn.Module] | None:
    return fused_class(_original(module), fuse)


def _block(
    norm: nn.Module,
    place: _Place,
    pair: Pair | None,
    fuse: Fuse,
    is_ours: Callable[[nn.Module], bool],
    name_of: Callable[[nn.Module], str],
    left: Collection[str],
) -> BlockPlan | None:
    """Returns what happens to a norm; None if ``fuse`` does not concern it."""
    name, kind = name_of(norm), _original(norm).__name__
    source = place.before if pair is None or pair.source is None else pair.source
    behind = name_of(source) if is_ours(source) else ""
    container = place.parent if place.parent is not None and _in_turn(place.parent) else None
    if fuse == "blocks" and not is_ours(source):
        siblings = () if place.parent is None else place.parent._modules.values()
        if container is not None or not any(map(is_ours, filter(None, siblings))):
            return None

    def plan(swap: bool, reason: str = "", activation: nn.Module | None = None) -> BlockPlan:
        between = " + sum" if pair is not None and pair.sums else ""
        whole = kind if activation is None else f"{kind}{between} + {_original(activation).__name__}"
        return BlockPlan(
            name, whole, name_of(activation) if activation is not None else "", behind, swap, reason
        )

    if reason := _why_left(name, left) or _why_unfit(norm):
        return plan(False, reason)
    if pair is not None and (fuse == "all" or behind) and not is_watched(pair.activation):
        if not pair.sums or takes_sum(pair.activation):
            return plan(True, activation=pair.activation)
        why = "no kernel for a sum and then " + _original(pair.activation).__name__
        return plan(fuse == "all", why)
    why_alone = "not in an nn.Sequential, and not proven that an activation alone reads its output"
    if container is not None:
        why_alone = _why_no_container(container, fuse)
    if why_alone:
        return plan(fuse == "all", why_alone)
    if place.after is norm or activation_of(place.after) is None:
        return plan(True, _why_without(place.after, name_of))
    if is_watched(place.after):
        return plan(True, f"without {name_of(place.after)}, which has a hook or a forward of its own")
    return plan(True, activation=place.after)


def _why_without(following: nn.Module, name_of: Callable[[nn.Module], str]) -> str:
    """Returns why a norm is computed without the module behind it, if that is an activation that our kernels lack."""
    kind = type(following)
    if kind.__module__ != nn.ReLU.__module__ or kind is nn.MultiheadAttention:
        return ""
    known = ", ".join(cls.__name__ for cls in ACTIVATION_CLASSES)
    return f"without {name_of(following)}: {kind.__name__} is none of {known}"


def _why_left(name: str, left: Collection[str]) -> str:
    if name not in left:
        return ""
    return left[name] if isinstance(left, Mapping) else "left out by leave_blocks"


def _why_unfit(norm: nn.Module) -> str:
    kind = type(norm)
    if kind in LEFT_CLASSES.values():
        return "left out by an earlier swap: unswap_layers makes it a candidate again"
    if kind not in FUSED_NORMS:
        known = ", ".join(cls.__name__ for cls in NORMS)
        return f"{kind.__name__} is none of {known}"
    if is_watched(norm):
        return _WATCHED
    given: Any = norm
    if isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d) and given.track_running_stats:
        return "running statistics of every image: PyTorch's operator averages them"
    dtypes = {one.dtype for one in norm.parameters()}
    if unsupported := sorted(str(dtype) for dtype in dtypes.difference(DTYPES)):
        return f"unsupported dtype {', '.join(unsupported)}"
    return ""


def _why_no_container(container: nn.Module, fuse: Fuse) -> str:
    kind = type(container).__name__
    if "forward" in vars(container):
        return "the forward of its nn.Sequential was replaced on the instance"
    if isinstance(container, Blocks) and original_class(type(container)) is not None:
        return ""
    try:
        return "" if fused_class(type(container), fuse) else f"{kind} has a forward of its own"
    except Exception as error:  # the __init_subclass__ or metaclass of a user's class may raise anything
        return f"{kind} cannot be subclassed ({error})"
