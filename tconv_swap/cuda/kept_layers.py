"""Plans the layers of a network before their first calls, as far as an earlier process has searched their kernels.

A new process reads these from disk and runs each planner for the first time, which takes more than twice as long as
planning a second size. ``swap_layers`` does it, so that the first call need not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch

from tconv_swap.cuda import choice
from tconv_swap.cuda.call import CallKind, kind_of_gradients, plans_of, precision
from tconv_swap.cuda.expected import ExpectedLayer
from tconv_swap.kernels.common.layer_sizes import usual_sizes
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime import disk_cache

logger = logging.getLogger("tconv_swap")

#: The most layers that are planned, each in some milliseconds.
MAX_LAYERS = 32


class KeptLayer(NamedTuple):
    """A layer on a GPU, as its weight lies.

    Attributes:
        trains: whether a backward pass will probably need its gradients.
    """

    layer: ExpectedLayer
    dtype: torch.dtype
    channels_last: bool
    device: int
    backend: str
    trains: bool


def plan_kept(layers: Iterable[KeptLayer]) -> None:
    """Plans each layer for one usual size, unless that needs a search. At most ``MAX_LAYERS``, each once."""
    for layer in islice(dict.fromkeys(layers), MAX_LAYERS):
        try:
            with disk_cache.only_kept():
                for kind in _kinds(layer):
                    plans_of(kind, layer.backend)
        except disk_cache.NotKeptError:
            pass  # the first call searches
        except Exception as error:  # the call that needs the plan raises it again
            logger.info("not planned ahead: %s", error)


def _kinds(layer: KeptLayer) -> list[CallKind]:
    geometry, has_bias = layer.layer
    problem = Problem(
        geometry=next(iter(usual_sizes(geometry)), geometry),
        dtype=layer.dtype,
        precision="tf32" if precision() == "tf32" and layer.dtype == torch.float32 else "ieee",
        channels_last=layer.channels_last,
        weight_channels_last=layer.channels_last,
    )
    forward = CallKind(problem, choice.FORWARD, has_bias, layer.device)
    if not layer.trains:
        return [forward]
    return [forward, kind_of_gradients(problem, (True, True, has_bias), layer.device)]
