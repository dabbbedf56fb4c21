"""Defines a way to run a network: its layers, layout and runtime; its name, and what it requires."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs
from tconv_swap.layer import SWAPPED
from tconv_swap.surgery import SwapWarning, plan_swap, swap_layers, unswap_layers

Layout = Literal["as it is", "channels_last"]
Runtime = Literal["eager", "graph", "compile+graph", "compile"]

LAYOUTS: tuple[Layout, ...] = ("as it is", "channels_last")
#: In the order in which they are tried; those that are built fastest come first.
RUNTIMES: tuple[Runtime, ...] = ("eager", "graph", "compile+graph", "compile")
#: The device types on which PyTorch captures CUDA graphs.
GRAPH_DEVICES = ("cuda",)

STATIC_SHAPES = "static shapes: inputs of another shape run eagerly"
REQUIREMENTS: dict[Runtime, tuple[str, ...]] = {
    "eager": (),
    "graph": (
        STATIC_SHAPES,
        "no control flow that depends on data, and no wait for the GPU in forward",
        "Python in forward, hooks included, runs only at the capture",
        "random numbers from PyTorch's default generator",
        "parameters keep their place in memory",
        "one forward pass at a time between two backward passes",
    ),
    "compile+graph": (
        STATIC_SHAPES,
        "control flow that depends on data breaks the graph into parts",
        "hooks that are added later are not seen",
        "random numbers from PyTorch's default generator",
        "one forward pass at a time between two backward passes",
    ),
    "compile": (
        STATIC_SHAPES,
        "control flow that depends on data breaks the graph into parts",
        "hooks that are added later are not seen",
    ),
}


@dataclass(frozen=True)
class Layers:
    """The layers with which a network runs: a name for the user, a title for the reader, and what makes the layers.

    `make` changes the network that it is given and returns it.
    """

    name: str
    title: str
    make: Callable[[nn.Module], nn.Module]


def _ours(network: nn.Module) -> nn.Module:
    """Swaps a network, unless it is swapped already: then it keeps the layers that the user chose."""
    if any(isinstance(module, SWAPPED) for module in network.modules()):
        return network
    with warnings.catch_warnings():
        # The plan says which layers are swapped.
        warnings.simplefilter("ignore", SwapWarning)
        return swap_layers(network)


def _fused(network: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)
        return swap_layers(network, fuse="all")


PYTORCH = Layers("pytorch", "PyTorch's layers", unswap_layers)
OURS = Layers("ours", "our layers", _ours)
FUSED = Layers("fused", "our layers, norms and activations fused", _fused)
#: All kinds of layers. The others are compared with the first.
LAYERS: tuple[Layers, ...] = (PYTORCH, OURS, FUSED)


@dataclass(frozen=True)
class Way:
    """One way to run a network."""

    layers: str
    layout: Layout = "as it is"
    runtime: Runtime = "eager"

    @property
    def name(self) -> str:
        """Returns for example `ours+channels_last+compile+graph`. Defaults are left out."""
        layout = "" if self.layout == "as it is" else self.layout
        runtime = "" if self.runtime == "eager" else self.runtime
        return "+".join(part for part in (self.layers, layout, runtime) if part)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Returns what the way requires of the network and of its calls; one line each."""
        return REQUIREMENTS[self.runtime]

    @property
    def graph(self) -> bool:
        """Returns whether it replays CUDA graphs."""
        return "graph" in self.runtime

    @property
    def compiled(self) -> bool:
        return "compile" in self.runtime

    def __str__(self) -> str:
        return self.name


#: The way in which a network runs by default.
TODAY = Way(PYTORCH.name)


def parse_way(text: str) -> Way:
    """Returns the way that a name such as `channels_last+graph` describes, with its words in any order. It has our
    layers unless the name says otherwise.

    Raises:
        ValueError: a word is unknown, or two exclude each other.
    """
    words = text.split("+")
    names = [layers.name for layers in LAYERS]
    known = [*names, "channels_last", "eager", "compile", "graph"]
    for word in words:
        if word not in known:
            raise ValueError(
                f"{word!r} is not part of a way: expected some of {', '.join(known)}, joined by +"
            )
    chosen = [name for name in names if name in words]
    if len(chosen) > 1 or len(set(words)) < len(words):
        raise ValueError(f"{text!r} names {' and '.join(chosen) if len(chosen) > 1 else 'a word twice'}")
    if "eager" in words and {"compile", "graph"} & set(words):
        raise ValueError(f"{text!r}: eager excludes compile and graph")
    runtimes: dict[tuple[bool, bool], Runtime] = {
        (False, False): "eager",
        (True, False): "compile",
        (False, True): "graph",
        (True, True): "compile+graph",
    }
    return Way(
        chosen[0] if chosen else OURS.name,
        "channels_last" if "channels_last" in words else "as it is",
        runtimes["compile" in words, "graph" in words],
    )


def all_ways(network: nn.Module, inputs: Inputs, device: torch.device) -> list[Way]:
    """Returns every way that the device supports: `TODAY`, then those that are built fastest.

    channels_last is left out if the network and its inputs have this layout already, or if no tensor has four
    dimensions. Norms and activations are fused on CUDA, if the network has some that can be; a compiler fuses them
    itself.
    """
    fuses = device.type == "cuda" and any(block.swap for block in plan_swap(network, fuse="all").blocks)
    layouts = LAYOUTS if _layouts_differ(network, inputs) else LAYOUTS[:1]
    runtimes = [runtime for runtime in RUNTIMES if "graph" not in runtime or device.type in GRAPH_DEVICES]
    return [
        Way(layers.name, layout, runtime)
        for runtime, layout, layers in product(runtimes, layouts, LAYERS)
        if layers is not FUSED or (fuses and "compile" not in runtime)
    ]


def why_impossible(way: Way, device: torch.device) -> str:
    """Returns why no network can run in this way on the device; `""` if one can."""
    if way.graph and device.type not in GRAPH_DEVICES:
        return f"CUDA graphs need a CUDA device, not {device.type}"
    return ""


def in_layout(network: nn.Module, layout: Layout) -> nn.Module:
    """Returns `network` itself with its parameters and buffers in the layout. The objects stay the same."""
    if layout == "channels_last":
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return network


def inputs_in_layout(inputs: Inputs, layout: Layout) -> Inputs:
    """Returns the inputs in the layout."""
    return inputs.to(memory_format=torch.channels_last) if layout == "channels_last" else inputs


def with_layers(network: nn.Module, name: str) -> nn.Module:
    """Returns `network` itself with the layers of this name."""
    return next(layers for layers in LAYERS if layers.name == name).make(network)


def _layouts_differ(network: nn.Module, inputs: Inputs) -> bool:
    tensors: Iterable[Tensor] = (*network.parameters(), *(tensor for _, tensor in inputs.named_tensors()))
    return any(
        tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in tensors
        if tensor.layout == torch.strided
    )
