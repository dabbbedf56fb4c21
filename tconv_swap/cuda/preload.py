"""Plans and loads, before the first calls of layers, what they called first in an earlier process.

A new process reads the searches of planning and the kernels from disk, and runs each planner for the first time, which
takes more than twice as long as planning a second size. ``swap_layers`` does it, so that the first calls need not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch

from tconv_swap.cuda import call
from tconv_swap.cuda.choice import CallKind
from tconv_swap.cuda.first_calls import calls_of
from tconv_swap.geometry import Geometry
from tconv_swap.runtime import disk_cache, host, jit, launch

logger = logging.getLogger("tconv_swap")

#: The most calls that are planned, each in some milliseconds.
MAX_CALLS = 64


class PreloadedLayer(NamedTuple):
    """A layer on a GPU.

    Attributes:
        geometry: of any size.
        trains: whether a backward pass will probably need its gradients.
    """

    geometry: Geometry
    device: int
    backend: str
    trains: bool


def preload(layers: Iterable[PreloadedLayer]) -> None:
    """Plans the first calls that an earlier process made of each layer, unless that needs a search, and loads the
    kernels that are on disk. At most ``MAX_CALLS``, each layer once."""
    calls = (
        (layer, kind._replace(device=layer.device))
        for layer in dict.fromkeys(layers)
        for kind in calls_of(layer.geometry)
        if layer.trains or not kind.mask
    )
    for layer, kind in islice(calls, MAX_CALLS):
        try:
            _preload(kind, layer.backend)
        except disk_cache.NotKeptError:
            pass  # the call searches
        except Exception as error:  # the call that needs the plan or the kernel raises it again
            logger.info("not preloaded: %s", error)


def _preload(kind: CallKind, backend: str) -> None:
    with disk_cache.only_kept():
        plans = call.plans_of(kind, backend)
    architecture = call.device_facts(kind.device).architecture
    for plan in plans:
        missing = launch.missing_kernels(plan, architecture)
        if missing and host.is_loaded() and all(jit.is_on_disk(one, architecture) for one in missing):
            device = torch.device("cuda", kind.device)
            launch.drop_plan(launch.add_plan(plan, kind.problem.dtype, device, architecture))
