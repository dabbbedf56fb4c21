"""The layers whose calls are expected, and which of them are probably called behind another one.

``swap_layers`` names the layers of a network. A call of one of them whose kernels must be compiled finds those behind
it, whose kernels are then compiled while its own are. Only the time of the first calls depends on it: a wrong guess
compiles what nobody uses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.layer_sizes import may_be_called

#: A process that swaps more different layers than this forgets the first ones.
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


def followers(called: ExpectedLayer) -> list[ExpectedLayer]:
    """Returns the layers that are probably called behind this one, each once, with the sizes that they probably get.

    In a decoder, a layer gets the map that the layer before it returns, with as many channels, or with twice as many
    where the features of an encoder stand beside it (Ronneberger et al. 2015, "U-Net").
    """
    with _lock:
        left = dict(_layers)
    left.pop(called._replace(geometry=called.geometry._replace(batch=1, height=1, width=1)), None)
    chain = [called]
    for one in chain:
        before = one.geometry
        channels = before.out_channels, 2 * before.out_channels
        for layer in [other for other in left if other.geometry.in_channels in channels]:
            del left[layer]
            of_size = layer.geometry._replace(
                batch=before.batch, height=before.out_height, width=before.out_width
            )
            if may_be_called(of_size):
                chain.append(layer._replace(geometry=of_size))
    return chain[1:]


def _forget_threads() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


# The threads of the parent do not run in a forked process.
os.register_at_fork(after_in_child=_forget_threads)
