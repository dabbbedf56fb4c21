"""Plans which layers of a network are swapped, swaps them, and undoes it.

A swap gives a layer another class and changes nothing else (see ``layer``). All decisions are made before the first
layer is changed, and the changes themselves cannot fail half-way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import type_before_parametrizations

from tconv_swap import flops, op
from tconv_swap.blocks.finding import BlockPlan, Found, find
from tconv_swap.blocks.modules import CHOICES, Fuse
from tconv_swap.blocks.modules import original_class as before_fusing
from tconv_swap.computed import deep_copy
from tconv_swap.cuda.choice import Backend, check_backend
from tconv_swap.layer import SWAPPED, has_own_forward, original_class, set_classes, swapped_class
from tconv_swap.layer_description import count_parameters, describe_layer
from tconv_swap.layer_state import LayerState, expect_calls
from tconv_swap.patterns import Patterns, as_patterns, matches_any

FilterFn: TypeAlias = Callable[[nn.Module, str], bool]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TRANSPOSED_NAMES = tuple(cls.__name__ for cls in _TRANSPOSED)


class SwapWarning(UserWarning):
    """A swap is probably not what the user meant: nothing is swapped, or a pattern matches no layer."""


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one transposed convolution of a network, and why.

    Attributes:
        names: its dotted names in the network, several if it is shared; the name of the network itself is ``""``.
        kind: the name of its class (before any parametrization).
        geometry: channels and arguments in short form, such as ``"128->64 k4 s2 p1 bias"``; arguments at their default
            are left out.
        parameters: the number of elements of its parameters.
        swap: whether it is one of our layers after the swap.
        reason: why it is not swapped; ``""`` if it is.
        already: whether it is one of our layers before the swap.
    """

    names: tuple[str, ...]
    kind: str
    geometry: str
    parameters: int
    swap: bool
    reason: str = ""
    already: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain values that ``json`` can write."""
        return {**vars(self), "names": list(self.names)}

    def __str__(self) -> str:
        names = " = ".join(name or "(the model itself)" for name in self.names)
        what = "already swapped" if self.already else "swap" if self.swap else f"leave: {self.reason}"
        return f"{names}: {self.kind} {self.geometry}, {self.parameters:,} parameters: {what}"


@dataclass(frozen=True)
class SwapPlan:
    """What ``swap_layers`` does to a network; its ``str`` is a few lines.

    Attributes:
        layers: every transposed convolution found, in the order of ``named_modules``.
        unused_patterns: the include and exclude patterns that match none of them.
        blocks: with ``fuse``, every normalisation and reflection padding that it concerns.
    """

    layers: tuple[LayerPlan, ...]
    unused_patterns: tuple[str, ...] = ()
    blocks: tuple[BlockPlan, ...] = ()

    @property
    def swapped(self) -> tuple[LayerPlan, ...]:
        """Returns the layers that are ours after the swap, including those that were ours before."""
        return tuple(layer for layer in self.layers if layer.swap)

    @property
    def skipped(self) -> tuple[LayerPlan, ...]:
        """Returns the layers that stay as they are, each with its reason."""
        return tuple(layer for layer in self.layers if not layer.swap)

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain values that ``json`` can write."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "unused_patterns": list(self.unused_patterns),
            "blocks": [block.to_dict() for block in self.blocks],
        }

    def __str__(self) -> str:
        if not self.layers:
            lines = ["nothing to swap: no layer of the model is a transposed convolution"]
        elif not self.swapped:
            lines = [f"nothing to swap: 0 of {len(self.layers)} transposed convolutions"]
        else:
            lines = [f"swapped: {len(self.swapped)} of {len(self.layers)} transposed convolutions"]
        lines += [str(layer) for layer in self.layers]
        lines += [str(block) for block in self.blocks]
        lines += [self.describe_unused(pattern) for pattern in self.unused_patterns]
        return "\n  ".join(lines)

    def describe_unused(self, pattern: str) -> str:
        """Returns the text of the warning that ``pattern`` matches nothing."""
        names = [name for layer in self.layers for name in layer.names]
        hint = f"; '{pattern}.**' would match what is below" if matches_any(f"{pattern}.**", names) else ""
        return f"pattern '{pattern}' matches no transposed convolution{hint}"


def plan_swap(
    model: nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    filter_fn: FilterFn | None = None,
    include_1d: bool = False,
    fuse: Fuse = None,
    leave_blocks: Collection[str] = (),
) -> SwapPlan:
    """Returns what ``swap_layers`` would do with the same arguments; changes nothing.

    Args:
        model: the network; may itself be the layer.
        include: patterns, at least one of which a layer's name has to match; None includes every layer. A pattern is
            compared with the dotted name component by component: ``*``, ``?`` and ``[...]`` match characters within one
            component, and a component ``**`` matches any number of components, also none. So ``decoder.*`` matches
            ``decoder.up`` but not ``decoder.up.0``; ``decoder.**`` matches both. A single string is one pattern. A
            shared layer matches by any of its names.
        exclude: patterns, none of which may match any of a layer's names.
        filter_fn: called with a module and each of its names, until it returns true, for every layer that could be
            swapped and that the patterns include; a layer for which it never returns true stays as it is. A subclass
            that defines a ``forward`` is swapped only if a filter_fn returns true for it: its ``forward`` stays, and
            what it calls as ``super().forward`` becomes ours.
        include_1d: swap ``nn.ConvTranspose1d`` too, as a 2-D problem of height 1.
        fuse: what one kernel computes on CUDA. ``"blocks"``: a norm behind a swapped layer (``nn.BatchNorm2d``,
            ``nn.InstanceNorm2d``, the 1-D ones) and the activation behind the norm (ReLU, LeakyReLU, ReLU6, Tanh,
            Sigmoid, SiLU, GELU), in an ``nn.Sequential`` or in a ``forward`` that proves what reads the norm's output.
            ``"all"``: these norms anywhere in the network, with the activation behind them, or with a sum and then
            ReLU, Tanh or Sigmoid, where it is known what follows; and each ``nn.ReflectionPad2d``. None: nothing.
            ``include``, ``exclude`` and ``filter_fn`` concern the layers only.
        leave_blocks: dotted names of norms and paddings that ``fuse`` leaves as they are; a mapping gives the reason
            that the plan then has.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or a pattern is not a string.
        ValueError: ``fuse`` has another value, or ``leave_blocks`` names a module that is no norm or padding.
    """
    return _plan(model, include, exclude, filter_fn, include_1d, fuse, leave_blocks)[0]


def swap_layers(
    model: nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    filter_fn: FilterFn | None = None,
    backend: Backend | None = None,
    include_1d: bool = False,
    fuse: Fuse = None,
    leave_blocks: Collection[str] = (),
    inplace: bool = True,
) -> nn.Module:
    """Makes each ``nn.ConvTranspose2d`` of a network a ``tconv_swap.ConvTranspose2d`` by changing its class.

    With ``include_1d`` also each ``nn.ConvTranspose1d`` a ``tconv_swap.ConvTranspose1d``. With ``fuse``, norms and the
    activations behind them are computed as one: the modules that contain them get other classes, and where necessary
    they themselves; at every call these check whether they still can be computed as one.

    Parameters, buffers, hooks, names, attributes and modes stay the same objects, so optimizers, tied weights and
    references to a layer stay valid. Layers that are ours already stay so. ``plan_swap`` says which layers are left,
    and why.

    Args:
        model, include, exclude, filter_fn, include_1d, fuse, leave_blocks: as in ``plan_swap``.
        backend: what computes the layers that are ours after the swap: ``"auto"``, ``"rules"``, ``"kernel"`` or
            ``"native"`` (see ``tconv_swap.conv_transpose2d``). None leaves the backend of each: ``"auto"`` for those
            that are newly swapped.
        inplace: False swaps in a deep copy and leaves ``model`` as it is.

    Returns:
        ``model``, or the copy.

    Raises:
        TypeError: as in ``plan_swap``. If anything is raised, ``model`` is unchanged.
        ValueError: there is no such backend or ``fuse``, or ``leave_blocks`` names a module that is no norm or padding.

    Warns:
        SwapWarning: nothing to swap, or a pattern matches no layer.
    """
    if backend is not None:
        check_backend(backend)
    plan, fused = _plan(model, include, exclude, filter_fn, include_1d, fuse, leave_blocks)
    for pattern in plan.unused_patterns:
        warnings.warn(plan.describe_unused(pattern), SwapWarning, stacklevel=2)
    if not plan.swapped and not any(block.swap for block in plan.blocks):
        warnings.warn(str(plan), SwapWarning, stacklevel=2)
    target = model if inplace else deep_copy(model)
    modules = dict(target.named_modules(remove_duplicate=False))
    layers = [modules[layer.names[0]] for layer in plan.swapped if not layer.already]
    classes: list[Any] = [(layer, swapped_class(type_before_parametrizations(layer))) for layer in layers]
    classes += [(modules[name], cls) for name, cls in fused.classes]
    set_classes(classes)
    if backend is not None:
        for layer in plan.swapped:
            object.__setattr__(modules[layer.names[0]], "tconv_backend", backend)
    flops.register()
    expect_calls(modules[layer.names[0]] for layer in plan.swapped)
    return target


def unswap_layers(model: nn.Module, *, inplace: bool = True) -> nn.Module:
    """Undoes ``swap_layers``: every layer of ours becomes what it was, and all else stays as it is.

    A ``tconv_swap.ConvTranspose2d`` that was constructed as such becomes an ``nn.ConvTranspose2d`` (1-D likewise). A
    class that a user derived from ours has no original and stays. A layer whose ``forward`` was replaced on the
    instance stays ours, with a ``SwapWarning``; so does one that was sharded after it was parametrized.

    Args:
        model: the network; may itself be the layer.
        inplace: False works on a deep copy and leaves ``model`` as it is.

    Returns:
        ``model``, or the copy.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
    """
    _check_model(model)
    target = model if inplace else deep_copy(model)
    originals: list[Any] = []
    for name, layer in target.named_modules():
        if (original := before_fusing(type(layer))) is not None:
            originals.append((layer, original))
        if isinstance(layer, SWAPPED):
            if reason := _why_kept(layer):
                warnings.warn(f"{name or 'the layer'} stays swapped: {reason}", SwapWarning, stacklevel=2)
            else:
                originals.append((layer, original_class(type_before_parametrizations(layer))))
    for layer, original in originals:
        if isinstance(layer, LayerState) and not issubclass(original, LayerState):
            layer.tconv_forget()
    set_classes(originals)
    return target


def _why_kept(layer: nn.Module) -> str:
    """Returns why ``layer`` cannot get its original class back, or ``""``."""
    if "forward" in vars(layer):
        return "its forward was replaced on the instance, and may hold on to ours"
    if not issubclass(type_before_parametrizations(layer), nn.Module):
        return "it is parametrized, and was sharded after that"
    return ""


def _plan(
    model: nn.Module,
    include: Patterns,
    exclude: Patterns,
    filter_fn: FilterFn | None,
    include_1d: bool,
    fuse: Fuse,
    leave_blocks: Collection[str],
) -> tuple[SwapPlan, Found]:
    _check_model(model)
    if fuse not in CHOICES:
        raise ValueError(f"fuse must be 'blocks', 'all' or None, not {fuse!r}")
    included = None if include is None else as_patterns(include, "include")
    excluded = as_patterns(exclude, "exclude")
    found = _transposed_convolutions(model)
    layers = []
    for module, names in found:
        already = isinstance(module, SWAPPED)
        reason = ""
        if not already:
            reason = _why_unfit(module, include_1d) or _why_unwanted(
                module, names, included, excluded, filter_fn
            )
        layers.append(
            LayerPlan(
                names=names,
                kind=_kind(module),
                geometry=describe_layer(module),
                parameters=count_parameters(module),
                swap=not reason,
                reason=reason,
                already=already,
            )
        )
    ours = {id(module) for (module, _), layer in zip(found, layers, strict=True) if layer.swap}
    fused = find(model, fuse, lambda module: id(module) in ours, leave_blocks)
    all_names = [name for _, names in found for name in names]
    patterns = dict.fromkeys([*(included or ()), *excluded])
    unused = tuple(pattern for pattern in patterns if not matches_any(pattern, all_names))
    return SwapPlan(tuple(layers), unused, fused.blocks), fused


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")


def _transposed_convolutions(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Returns every module that is a transposed convolution of any kind, once, with all its names."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _TRANSPOSED) or _is_quantized(module) or _is_scripted(module):
            found.setdefault(id(module), (module, []))[1].append(name)
    return [(module, tuple(names)) for module, names in found.values()]


def _is_quantized(module: nn.Module) -> bool:
    # The check is by name: importing torch.ao is slow, and PyTorch is going to remove it.
    return any(
        cls.__module__.startswith("torch.ao.nn.quantized") and cls.__name__ in _TRANSPOSED_NAMES
        for cls in type(module).__mro__
    )


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and _kind(module) in _TRANSPOSED_NAMES


def _why_unfit(module: nn.Module, include_1d: bool) -> str:
    """Returns why ``module`` cannot be swapped, or ``""``."""
    kind = _kind(module)
    if _is_scripted(module):
        return "compiled by TorchScript, which has fixed its code"
    if _is_quantized(module):
        return f"quantized ({type(module).__module__})"
    if isinstance(module, nn.ConvTranspose3d):
        return "3-D; only 2-D layers are swapped"
    if isinstance(module, nn.ConvTranspose1d) and not include_1d:
        return "1-D; only 2-D layers are swapped without include_1d (--include-1d)"
    if isinstance(module, LazyModuleMixin):
        return "lazy and not initialised; run the model once, then swap"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if _pickles_itself(type(module)):
        return f"{kind} has its own way of being pickled"
    if not issubclass(type_before_parametrizations(module), nn.Module):
        return "parametrized and sharded (FSDP2): swap before fully_shard"
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if unsupported := sorted(str(dtype) for dtype in dtypes.difference(op.SUPPORTED_DTYPES)):
        return f"unsupported dtype {', '.join(unsupported)}"
    try:
        swapped_class(type_before_parametrizations(module))
    except Exception as error:  # the __init_subclass__ or metaclass of a user's class may raise anything
        return f"{kind} cannot be subclassed ({error})"
    return ""


def _pickles_itself(cls: type[nn.Module]) -> bool:
    return cls.__reduce__ is not object.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__


def _why_unwanted(
    module: nn.Module,
    names: tuple[str, ...],
    included: tuple[str, ...] | None,
    excluded: tuple[str, ...],
    filter_fn: FilterFn | None,
) -> str:
    """Returns why the user does not want ``module`` swapped, or ``""``."""
    if included is not None and not any(matches_any(pattern, names) for pattern in included):
        return "matches no include pattern"
    for pattern in excluded:
        if matches_any(pattern, names):
            return f"excluded by '{pattern}'"
    if filter_fn is not None:
        return "" if any(filter_fn(module, name) for name in names) else "filter_fn does not want it"
    if has_own_forward(type(module)):
        return f"{_kind(module)} has a forward of its own"
    return ""


def _kind(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", type(module).__name__))
    return type_before_parametrizations(module).__name__
