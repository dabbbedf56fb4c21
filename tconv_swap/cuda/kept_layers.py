"""Plans the layers of a network before their first calls, and loads their kernels, as far as an earlier process has
searched and compiled these.

A new process reads both from disk and runs each planner for the first time, which takes more than twice as long as
planning a second size. ``swap_layers`` does it, so that the first call need not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch

from tconv_swap.cuda import call, choice
from tconv_swap.cuda.call import CallKind
from tconv_swap.cuda.expected import ExpectedLayer
from tconv_swap.kernels.common.layer_sizes import usual_sizes
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime import disk_cache, host, jit, launch
from tconv_swap.runtime.program import Plan

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
    """Plans each layer for one usual size, unless that needs a search, and loads the kernels if they are compiled. At
    most ``MAX_LAYERS``, each once."""
    for layer in islice(dict.fromkeys(layers), MAX_LAYERS):
        try:
            with disk_cache.only_kept():
                for kind in _kinds(layer):
                    for plan in call.plans_of(kind, layer.backend):
                        _load(plan, layer)
        except disk_cache.NotKeptError:
            pass  # the first call searches
        except Exception as error:  # the call that needs the plan or the kernel raises it again
            logger.info("not planned ahead: %s", error)


def _kinds(layer: KeptLayer) -> list[CallKind]:
    geometry, has_bias = layer.layer
    problem = Problem(
        geometry=next(iter(usual_sizes(geometry)), geometry),
        dtype=layer.dtype,
        precision="tf32" if call.precision() == "tf32" and layer.dtype == torch.float32 else "ieee",
        channels_last=layer.channels_last,
        weight_channels_last=layer.channels_last,
    )
    forward = CallKind(problem, choice.FORWARD, has_bias, layer.device)
    if not layer.trains:
        return [forward]
    return [forward, call.kind_of_gradients(problem, (True, True, has_bias), layer.device)]


def _load(plan: Plan, layer: KeptLayer) -> None:
    architecture = call.device_facts(layer.device).architecture
    missing = launch.missing_kernels(plan, architecture)
    if missing and host.is_loaded() and all(jit.is_on_disk(kernel, architecture) for kernel in missing):
        program = launch.add_plan(plan, layer.dtype, torch.device("cuda", layer.device), architecture)
        launch.drop_plan(program)
