"""How symbolic tracing (torch.fx) sees a swapped layer: as a leaf of the graph, as it sees torch.nn's own layers."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy, Tracer
from torch.fx.proxy import TracerBase
from torch.nn import Module


class Leaf(Module):
    """Base of the layers of ours, which are not in ``torch.nn`` and would be traced into."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Before the hooks: the call that is recorded runs them.
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Proxy) and self._is_leaf_of(given.tracer):
            tracer: Any = given.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _is_leaf_of(self, tracer: TracerBase) -> bool:
        """Whether it can record this layer as a call; not where that is what it traces."""
        return isinstance(tracer, Tracer) and tracer.root is not self
