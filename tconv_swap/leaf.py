"""Makes symbolic tracing (torch.fx) treat a swapped layer as a leaf of the graph, like the layers of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.fx import Proxy, Tracer
from torch.fx.proxy import TracerBase
from torch.nn import Module

_CALL = Module.__call__


class _CallImpl:
    """Gives ``_call_impl`` of the next class, but a recording one while a tracer has replaced ``Module.__call__``.

    torch.compile checks whether a layer's ``_call_impl`` is ``Module._call_impl`` itself. If it is another one,
    torch.compile traces into it, and each call of the compiled code checks the dictionaries of all the layer's classes.
    """

    def __get__(self, layer: Leaf | None, cls: type[Leaf]) -> Callable[..., Any]:
        if layer is None:
            return super(Leaf, cls)._call_impl
        call: Callable[..., Any] = super(Leaf, layer)._call_impl
        return call if Module.__call__ is _CALL else partial(_recorded, layer, call)


def _recorded(layer: Leaf, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # The hooks are not run here: the call that is recorded runs them.
    given = args[0] if args else kwargs.get("input")
    if isinstance(given, Proxy) and _is_leaf_of(given.tracer, layer):
        tracer: Any = given.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)
    return call(*args, **kwargs)


def _is_leaf_of(tracer: TracerBase, layer: Leaf) -> bool:
    """Returns whether the tracer can record this layer as a call; it cannot if it traces the layer itself."""
    return isinstance(tracer, Tracer) and tracer.root is not layer


class Leaf(Module):
    """Base of our layers: they are not in ``torch.nn``, so tracers would trace into them."""

    _call_impl = _CallImpl()
