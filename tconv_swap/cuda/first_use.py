"""On a GPU for which nothing was measured, the first call of a stage of a layer times our best candidates and PyTorch's
operator, and keeps the winner on disk.

Rules and costs hold for the compute capabilities in ``MEASURED``. A winner is kept for a layer, a stage and a class of
sizes with about the same number of pixels, so that a stream of changing sizes times only a few of them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from tconv_swap.cuda import tuned
from tconv_swap.cuda.choice import CANDIDATES as ALL_CANDIDATES
from tconv_swap.cuda.choice import FORWARD, GENERAL, Mask, backward_units
from tconv_swap.cuda.tuned import Winner, Winners, problem_key
from tconv_swap.dispatch import without_autocast
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.memory import free_bytes
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import Plan

logger = logging.getLogger("tconv_swap")

ENVIRONMENT_VARIABLE = "TCONV_SWAP_TIME_FIRST_USE"

#: Compute capabilities for which rules and costs were measured.
MEASURED = frozenset({90})
#: How many plans of ours are timed beside PyTorch's operator, and for how many seconds together.
CANDIDATES = 3
BUDGET_S = 0.05
#: How many classes of sizes are timed for one layer and stage. Further classes use the winner of the nearest one.
MAX_CLASSES = 6
#: The largest class: maps of 4**19 pixels.
_LAST_CLASS = 20
#: Timing needs the tensors of a call and a second result; they may take this fraction of the free memory.
_SHARE_OF_MEMORY = 0.25

#: "time" times what is not known; "known" only uses what is known.
Way = Literal["time", "known"]


class Timed(NamedTuple):
    """The times of one problem in microseconds; None for what did not run.

    Attributes:
        native: whether PyTorch's operator was the fastest.
        kernel: ``Plan.digest`` of the fastest plan of ours; ``""`` where none ran.
    """

    native: bool
    kernel: str
    ours: float | None
    pytorch: float | None


#: Measures a problem: its mask, whether it has a bias, the GPU, how many candidates, seconds. None: nothing ran.
Measure = Callable[[Problem, Mask, bool, int, int, float], Timed | None]

#: At most one. ``tuning``, which is above the kernels, sets it.
measures: list[Measure] = []

_lock = threading.RLock()
#: For each GPU: winners that could not be written, and the keys of stages that could not be timed.
_unwritten: dict[int, dict[str, Winner]] = {}
_untimed: set[tuple[int, str]] = set()


def is_measured(device: Device) -> bool:
    """Returns whether rules and costs were measured on a GPU of this compute capability."""
    return device.compute_capability in MEASURED


def is_on() -> bool:
    """Returns whether the environment lets a first use be timed."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") != "0"


def describe(device: Device) -> str:
    """Returns a clause that says how ``backend="auto"`` chooses on a GPU for which nothing is tuned."""
    if is_measured(device):
        return "'auto' goes by rules measured on an H200"
    if is_on():
        return "nothing was measured for it: 'auto' times each layer's stages at their first use"
    return f"nothing was measured for it, and {ENVIRONMENT_VARIABLE}=0: 'auto' goes by rules of an H200"


def winners(problem: Problem, mask: Mask, has_bias: bool, index: int, device: Device, way: Way) -> Winners:
    """Returns the winners by which a stage of a problem is chosen: what ``tune`` found and, on a GPU for which nothing
    was measured, what a first use found.

    If ``way`` is "time", it times what was not timed before, but not while a CUDA graph is captured, under a tracer,
    or if PyTorch is set to deterministic algorithms. If timing fails, the rules choose.
    """
    known = tuned.winners(index)
    if is_measured(device):
        return known
    found = {}
    for unit in backward_units(mask) if mask else [FORWARD]:
        with_bias = has_bias and not unit
        key = problem_key(problem, unit, with_bias)
        if key in known or unit == (False, False, True) or 0 in problem.geometry.output_shape:
            continue
        stage = _Stage(problem, unit, with_bias, index, device)
        of_class = stage.known() or (stage.timed() if way == "time" else None)
        if of_class is not None and (winner := stage.of_this_size(of_class)) is not None:
            found[key] = winner
    return {**known, **found} if found else known


def candidates_of(problem: Problem, mask: Mask, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns at most ``count`` plans of ours for a stage, the default first."""
    if mask:
        return plan.backward_candidates(problem, mask, device, count)
    return plan.forward_candidates(problem, has_bias, device, count)


class _Stage(NamedTuple):
    """One stage of a layer, or the gradients that are decided together, on a GPU."""

    problem: Problem
    mask: Mask
    has_bias: bool
    gpu: int
    device: Device

    def known(self) -> Winner | None:
        """Returns the winner of this class of sizes or, once many are known, of the nearest."""
        everything = {**tuned.winners(self.gpu), **_unwritten.get(self.gpu, {})}
        own = _class_of(self.problem.geometry)
        of_class = {
            number: everything[key]
            for number in range(_LAST_CLASS)
            if (key := self._key(number)) in everything
        }
        if own in of_class or len(of_class) < MAX_CLASSES:
            return of_class.get(own)
        return of_class[min(of_class, key=lambda number: abs(number - own))]

    def of_this_size(self, winner: Winner) -> Winner | None:
        """Returns the winner of a class for this size; None if the plan that won is not among the candidates of the
        size."""
        if winner.native:
            return replace(winner, kernel="")
        candidates = self._candidates()
        alike = [made for made in candidates if made.kernels_digest == winner.kernel]
        alike += [made for made in candidates if made.family == winner.family]
        return replace(winner, kernel=alike[0].digest) if alike else None

    def timed(self) -> Winner | None:
        """Times the stage and keeps the winner of its class; returns None if it cannot be timed now."""
        key = self._key(_class_of(self.problem.geometry))
        if (self.gpu, key) in _untimed or not measures or not is_on() or _wants_determinism():
            return None
        if _is_capturing(self.gpu):
            # Call plans made now are dropped: the next call may be outside of the capture.
            launch.forget_plans()
            return None
        with _lock:
            if (found := self.known()) is not None or (self.gpu, key) in _untimed:
                return found
            winner = self._measured()
            if winner is None:
                _untimed.add((self.gpu, key))
                return None
            try:
                # Another process may have been first: its winner stays on disk.
                tuned.keep(self.gpu, {key: winner}, replacing=False)
            except OSError as error:
                logger.warning("what was timed at first use is not kept (%s)", error.strerror or error)
                _unwritten.setdefault(self.gpu, {})[key] = winner
            return self.known()

    def _candidates(self) -> list[Plan]:
        return candidates_of(self.problem, self.mask, self.has_bias, self.device, ALL_CANDIDATES)

    def _measured(self) -> Winner | None:
        candidates = self._candidates()
        if all(made.family == GENERAL for made in candidates):
            return None
        problem, device = self.problem, torch.device("cuda", self.gpu)
        (measure,) = measures
        try:
            free = free_bytes(device)
            if free is not None and _bytes_of(problem) > _SHARE_OF_MEMORY * free:
                raise RuntimeError("too little memory is free")
            with torch.cuda.device(device), torch.no_grad(), without_autocast():
                found = measure(problem, self.mask, self.has_bias, self.gpu, CANDIDATES, BUDGET_S)
        except RuntimeError as error:  # out of memory, or a compiler that is missing
            reason = str(error).partition("\n")[0]
            logger.info("not timed at first use, so chosen by rule: %s", reason)
            return None
        if found is None:
            return None
        ours = next((made for made in candidates if made.digest == found.kernel), None)
        if ours is None and not found.native:
            return None
        shape = "x".join(map(str, problem.geometry.input_shape))
        why = f"timed at first use, {shape}: {_us(found.ours)} against PyTorch's {_us(found.pytorch)}"
        logger.info("%s", why)
        kernel, family = ("", "") if ours is None else (ours.kernels_digest, ours.family)
        return Winner(found.native, kernel, why, family)

    def _key(self, number: int) -> str:
        maps = _kind_of(self.problem.geometry)
        return problem_key(self.problem, self.mask, self.has_bias, f"{maps} of some 4^{number} pixels in all")


def _kind_of(geometry: Geometry) -> str:
    if geometry.height * geometry.width == 1:
        return "single pixels"
    return "single rows" if geometry.height == 1 else "maps"


def _class_of(geometry: Geometry) -> int:
    """Returns the power of four that is nearest to the pixels of all images."""
    return round(math.log(geometry.batch * geometry.height * geometry.width, 4))


def _bytes_of(problem: Problem) -> int:
    """Returns the bytes of all tensors of a call, of a second result, and of a copy of each in another layout."""
    geometry = problem.geometry
    shapes = (geometry.input_shape, geometry.weight_shape, geometry.output_shape)
    return 3 * problem.dtype.itemsize * sum(map(math.prod, shapes))


def _wants_determinism() -> bool:
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def _is_capturing(index: int) -> bool:
    if torch.compiler.is_compiling():
        return True
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _us(microseconds: float | None) -> str:
    return "(does not run)" if microseconds is None else f"{microseconds:.1f} us"
