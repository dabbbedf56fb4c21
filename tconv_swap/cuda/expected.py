"""The layers whose first call is expected, and which of them are probably called behind another one.

``swap_layers`` names the layers of a network. The first call of one of them finds those behind it, whose kernels are
then compiled while its own are. Only the time of the first calls depends on it: a wrong guess compiles what nobody
uses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tconv_swap.geometry import Geometry

#: A process that swaps more layers than this without calling them forgets the first ones.
MAX_LAYERS = 1024


class ExpectedLayer(NamedTuple):
    """A layer: its geometry, with a map of one pixel where no size is known, and whether it has a bias."""

    geometry: Geometry
    has_bias: bool


_lock = threading.Lock()
#: In the order in which they were named; the values do not matter.
_layers: dict[ExpectedLayer, None] = {}


def expect(layers: Iterable[ExpectedLayer]) -> None:
    """Names layers that will be called."""
    with _lock:
        _layers.update(dict.fromkeys(layers))
        for oldest in list(_layers)[: max(0, len(_layers) - MAX_LAYERS)]:
            del _layers[oldest]


def followers(called: ExpectedLayer) -> Iterator[ExpectedLayer]:
    """Yields the expected layers that are probably called behind this one, with the sizes that they probably get;
    neither they nor this one are expected any longer.

    In a decoder, a layer gets the map that the layer before it returns, with as many channels, or with twice as many
    where the features of an encoder stand beside it (Ronneberger et al. 2015, "U-Net").
    """
    before = called.geometry
    with _lock:
        _layers.pop(called._replace(geometry=replace(before, batch=1, height=1, width=1)), None)
        found = [
            one
            for one in _layers
            if one.geometry.in_channels in (before.out_channels, 2 * before.out_channels)
        ]
        for one in found:
            del _layers[one]
    for one in found:
        of_size = replace(one.geometry, batch=before.batch, height=before.out_height, width=before.out_width)
        follower = one._replace(geometry=of_size)
        yield follower
        yield from followers(follower)


def _forget_threads() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


# The threads of the parent do not run in a forked process.
os.register_at_fork(after_in_child=_forget_threads)
