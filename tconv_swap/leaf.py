"""How symbolic tracing (torch.fx) sees a swapped layer: as a leaf of the graph, as it sees torch.nn's own layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.fx import Proxy, Tracer
from torch.fx.proxy import TracerBase
from torch.nn import Module

_CALL = Module.__call__


class _CallImpl:
    """``_call_impl`` of the next class, but while something stands in the place of ``Module.__call__``: a tracer does.

    torch.compile looks whether a layer's is ``Module._call_impl`` itself. It goes through any other, and then, at every
    call of what it has compiled, looks whether that is still in all the dictionaries of the layer's classes.
    """

    def __get__(self, layer: Leaf | None, cls: type[Leaf]) -> Callable[..., Any]:
        if layer is None:
            return super(Leaf, cls)._call_impl
        call: Callable[..., Any] = super(Leaf, layer)._call_impl
        return call if Module.__call__ is _CALL else partial(_recorded, layer, call)


def _recorded(layer: Leaf, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # Before the hooks: the call that is recorded runs them.
    given = args[0] if args else kwargs.get("input")
    if isinstance(given, Proxy) and _is_leaf_of(given.tracer, layer):
        tracer: Any = given.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)
    return call(*args, **kwargs)


def _is_leaf_of(tracer: TracerBase, layer: Leaf) -> bool:
    """Whether it can record this layer as a call; not where that is what it traces."""
    return isinstance(tracer, Tracer) and tracer.root is not layer


class Leaf(Module):
    """Base of the layers of ours, which are not in ``torch.nn`` and would be traced into."""

    _call_impl = _CallImpl()
