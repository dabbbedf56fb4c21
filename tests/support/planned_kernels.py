"""Every kernel that the plans of a few geometries launch, and the fewest that compile each variant of each source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cache
from itertools import permutations, product

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.runtime.program import Kernel, Output

#: The most shared memory of a block in bytes (CUDA C++ programming guide, table of compute capabilities).
SHARED_BYTES = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
#: dtype and precision, the last two as float32 is computed with TF32 allowed and not.
MODES = (
    (torch.float64, "ieee"),
    (torch.float16, "ieee"),
    (torch.bfloat16, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
)
#: The architecture for which every mode and layout is compiled; for the others, two modes in NCHW are.
WHOLE = "sm_90a"
#: The architectures for which `pytest --exhaustive` compiles one kernel of each variant, and each commit those that
#: none before has, and a few; `pytest --all-architectures` compiles every kernel for all.
SOME = ("sm_80", WHOLE, "sm_75", "sm_120")
#: Of how many geometries, modes and layouts each commit plans one for them.
EACH_COMMIT = {"sm_80": 1, WHOLE: 3, "sm_75": 1, "sm_120": 4}
#: How many kernels each commit compiles for the last two in any case.
FEW = 4

GEOMETRIES = {
    "dcgan": Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "everything": Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
    "wide": Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1)),
    "odd rows": Geometry(16, 128, 64, 64, 64, (3, 3), (2, 2)),
    "odd channels": Geometry(32, 130, 64, 64, 66, (3, 3), (2, 2), (1, 1), (1, 1)),
    "deep": Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1)),
    "square": Geometry(2, 64, 64, 64, 64, (3, 3)),
    "nchw_to_nhwc": Geometry(8, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1)),
    "rgb": Geometry(2, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "large rgb": Geometry(2, 48, 40, 50, 3, (9, 9), (1, 1), (4, 4)),
    "depthwise": Geometry(2, 21, 20, 19, 21, (8, 8), (4, 4), (2, 2), groups=21),
    "tiny": Geometry(2, 32, 3, 3, 24, (2, 2)),
    "pixel": Geometry(64, 100, 1, 1, 512, (4, 4)),
    "large cells": Geometry(2, 21, 16, 16, 21, (32, 32), (16, 16), (8, 8)),
    "large": Geometry(8, 64, 4096, 4096, 64, (3, 3)),
    "odd rows of many channels": Geometry(8, 512, 32, 32, 256, (3, 3), (2, 2)),
}


@cache
def planned(architecture: str, every: bool = True) -> dict[Kernel, int]:
    """Returns every kernel that is planned for GEOMETRIES, and the resources of its blocks: threads times bytes of
    shared memory. Unless ``every``, only those of some geometries, modes and layouts."""
    device = plan.Device(architecture, 132, SHARED_BYTES[architecture])
    found: dict[Kernel, int] = {}
    modes = MODES if architecture == WHOLE else MODES[1::2]
    layouts = (False, True) if architecture == WHOLE else (False,)
    cases = list(product(GEOMETRIES.values(), modes, layouts))
    for geometry, (dtype, precision), channels_last in (
        cases if every else cases[:: EACH_COMMIT[architecture]]
    ):
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        # For large images stride1 computes the gradient of the weight, which leaves the bias to another kernel.
        wanted = (True, True, geometry != GEOMETRIES["large"])
        made = (plan.plan_forward(problem, True, device), plan.plan_backward(problem, wanted, device))
        for launch in (launch for one in made for launch in one.launches):
            taken = launch.block * max(launch.shared_bytes, 1)
            found[launch.kernel] = max(taken, found.get(launch.kernel, 0))
    for source, target in permutations(DTYPES, 2):
        made_cast = plan_cast([Output((8,), dtype=target)], source)
        assert made_cast is not None
        found[made_cast.launches[0].kernel] = made_cast.launches[0].block
    return found


def compiled_on_each_commit(architecture: str) -> list[Kernel]:
    """Returns kernels of an architecture of SOME with all types of every source that none before has, and for the last
    ones a few. (``pytest --exhaustive`` compiles every switch as well.)"""
    place = SOME.index(architecture)
    before = set().union(*(variants(kernel) for one in SOME[:place] for kernel in planned(one, every=False)))
    kernels = planned(architecture, every=False)
    few = one_of_each(kernels)[:FEW] if place > 1 else []
    return list(dict.fromkeys((*one_of_each(kernels, before | switches_of(kernels)), *few)))


def switches_of(kernels: Collection[Kernel]) -> set[tuple[object, ...]]:
    """Returns the variants of the kernels that are switches."""
    return {one for kernel in kernels for one in variants(kernel) if isinstance(one[-1], bool)}


def variants(kernel: Kernel) -> set[tuple[object, ...]]:
    """Returns the variants that a kernel compiles: its types together with its precision, and each switch."""
    of_entry = (kernel.source, kernel.entry)
    types = tuple(value for name, value in kernel.constants if isinstance(value, str) or name == "PRECISION")
    switches = {(*of_entry, name, value) for name, value in kernel.constants if isinstance(value, bool)}
    return {(*of_entry, types), *switches}


def one_of_each(
    kernels: dict[Kernel, int], but: Collection[tuple[object, ...]] = frozenset()
) -> list[Kernel]:
    """Returns the fewest kernels, chosen greedily, that compile every variant of every source; among equal ones the
    kernel whose block takes the most resources. One whose variants the later ones compile as well is left out.

    Args:
        but: the variants that no kernel needs to compile.
    """
    found: list[Kernel] = []
    of = {
        kernel: variants(kernel).difference(but) for kernel in sorted(kernels, key=lambda one: -kernels[one])
    }
    left = set().union(*of.values())
    while left:
        found.append(max(of, key=lambda kernel: len(of[kernel] & left)))
        left -= of[found[-1]]
    times = Counter(variant for kernel in found for variant in of[kernel])
    for kernel in list(found):
        if all(times[variant] > 1 for variant in of[kernel]):
            found.remove(kernel)
            times.subtract(of[kernel])
    return found
