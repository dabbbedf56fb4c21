"""Remembers on disk the first calls of each layer in a process, so that the next process can prepare for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tconv_swap.cuda.choice import CallKind
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.runtime import disk_cache

#: How many calls of a layer, forward passes and gradients, are remembered.
MAX_CALLS = 4
#: How many layers are in memory.
MAX_LAYERS = 1024


@dataclass(slots=True)
class _FirstCalls:
    """The calls of a layer on disk, the latest first, and how many this process has made, as far as these count."""

    path: Path
    kept: tuple[CallKind, ...]
    made: int = 0


def remember(kind: CallKind) -> None:
    """Remembers a call, if it is one of the first of its layer in this process."""
    first = _first_calls(of_any_size(kind.problem.geometry))
    if first.made == MAX_CALLS:
        return
    first.made += 1
    call = kind._replace(device=0)
    if call not in first.kept:
        first.kept = (call, *first.kept)[:MAX_CALLS]
        disk_cache.keep(first.path, first.kept)


def calls_of(geometry: Geometry) -> tuple[CallKind, ...]:
    """Returns the calls, on GPU 0, that were the first ones of a layer in earlier processes and this one, the latest
    first.

    Args:
        geometry: the layer's, of whatever size.
    """
    return _first_calls(of_any_size(geometry)).kept


@lru_cache(maxsize=MAX_LAYERS)
def _first_calls(layer: Geometry) -> _FirstCalls:
    path = disk_cache.path_of("first_calls", (layer,))
    return _FirstCalls(path, disk_cache.read(path) or ())
