"""Selects the layers, modes, layouts and stages of a sweep over what "auto" takes: all, or those of its options."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.ablation_measure import Task
from benchmarks.random_layers import SEED, random_layers
from benchmarks.sweep import shuffled
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.measurement.suite import Layer, load_suite

MODES = ("tf32", "fp16")
#: Each stage with its direction: the stages of one direction share their tensors.
STAGES = {"forward": "forward", "grad_input": "backward", "grad_weight": "backward"}
#: With so many of each class there are 60 random layers in all.
OF_EACH_CLASS = 5


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a part of the rows."""
    parser.add_argument(
        "--layers", choices=["suite", "random", "both"], default="both", help="default: %(default)s"
    )
    parser.add_argument("--mode", choices=MODES, action="append", help="repeatable (default: all)")
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="repeatable (default: both)")
    parser.add_argument("--stage", choices=list(STAGES), action="append", help="repeatable (default: all)")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options, for the file."""
    return {
        "seed": SEED,
        "random_layers_of_each_class": OF_EACH_CLASS,
        "layers": options.layers,
        "modes": options.mode or list(MODES),
        "layouts": options.layout or list(LAYOUTS),
        "stages": options.stage or list(STAGES),
    }


def directions_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns the selected stages of each direction."""
    wanted = options.stage or STAGES
    return {
        direction: tuple(stage for stage, of in STAGES.items() if of == direction and stage in wanted)
        for direction in dict.fromkeys(STAGES.values())
    }


def layers_of(which: str) -> list[tuple[Layer, bool]]:
    """Returns each layer, and whether it is of the suite."""
    suite = [] if which == "random" else [(layer, True) for layer in load_suite().layers]
    drawn = [] if which == "suite" else [(layer, False) for layer in random_layers(OF_EACH_CLASS)]
    return suite + drawn


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Returns all tasks in an order in which every prefix is a sample of the whole."""
    return shuffled(
        [
            Task(layer, of_suite, mode, layout, direction)
            for layer, of_suite in layers_of(options.layers)
            for mode in options.mode or MODES
            for layout in options.layout or LAYOUTS
            for direction, stages in directions_of(options).items()
            if stages
        ],
        SEED,
    )
