"""``tune`` measures on this GPU what computes the layers of a network fastest, and keeps the winners on disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.cuda import call, choice, first_use, tuned
from tconv_swap.cuda.choice import NATIVE, CallKind, backward_units
from tconv_swap.files.fileformat import first_line
from tconv_swap.inputs import Inputs
from tconv_swap.kernels import plan
from tconv_swap.measurement.modes import cudnn_benchmark
from tconv_swap.measurement.stages import sum_of_squares
from tconv_swap.measurement.timing import time_interleaved
from tconv_swap.preserving import preserved
from tconv_swap.runtime import jit, launch, native
from tconv_swap.runtime.program import Plan

logger = logging.getLogger("tconv_swap")

#: A candidate must be faster than the default choice by this factor: a smaller difference may be noise.
MARGIN = 1.03
BUDGET_S = 0.5
PYTORCH = "PyTorch's operator"
_FLOAT64 = "float64"
#: A candidate is wrong beyond this relative L2 distance from the right result, which is far above rounding.
MAX_ERROR = {"tf32": 1e-2, "float16": 3e-2, "bfloat16": 2e-1, "float32": 1e-3, "float64": 1e-6}


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem.

    Attributes:
        family: the family of the kernels; ``"native"``: PyTorch's operator.
        what: its tiles, and why it is a candidate.
        microseconds: the median from a cold L2 cache; None where it did not run or was wrong.
        failure: one line that says why it did not run or was wrong; else ``""``.
    """

    family: str
    what: str
    microseconds: float | None
    failure: str = ""


@dataclass(frozen=True)
class TunedProblem:
    """One problem, its measurements, and what is used from now on.

    Attributes:
        problem: a description of stage, shapes, arguments, dtype and layout.
        candidates: in the order in which they were tried, the default choice first.
        chosen: the index of the candidate that ``backend="auto"`` uses from now on.
    """

    problem: str
    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def speedup_over_default(self) -> float:
        """The speedup of the chosen candidate over the default choice; NaN if that did not run."""
        return _ratio(self.candidates[0], self.candidates[self.chosen])

    @property
    def speedup_over_pytorch(self) -> float:
        """The speedup of the chosen candidate over PyTorch's operator; 1 if it is that, NaN if that did not run."""
        native = next(c for c in self.candidates if c.family == NATIVE)
        return _ratio(native, self.candidates[self.chosen])

    def __str__(self) -> str:
        lines = [
            f"{self.problem}: {_speedup_text(self.speedup_over_default)} over the default choice, "
            f"{_speedup_text(self.speedup_over_pytorch)} over PyTorch"
        ]
        for index, candidate in enumerate(self.candidates):
            time = candidate.failure or f"{candidate.microseconds:8.1f} us"
            mark = "*" if index == self.chosen else " "
            lines.append(f"  {mark} {time}  {candidate.family}: {candidate.what}")
        return "\n".join(lines)


@dataclass(frozen=True)
class TuneReport:
    """The measurements of ``tune``; its ``str`` is a few lines.

    Attributes:
        device: the GPU's name, or ``"cpu"``.
        problems: every distinct problem of the network's layers.
        path: the file that keeps the winners; None where there was nothing to keep, or it could not be written.
        not_kept: why winners could not be kept, in a line; else ``""``.
    """

    device: str
    problems: tuple[TunedProblem, ...]
    path: str | None = None
    not_kept: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain values that ``json`` can write; a speedup is None where it is not known."""
        problems = [
            {
                **asdict(problem),
                "speedup_over_default": _or_none(problem.speedup_over_default),
                "speedup_over_pytorch": _or_none(problem.speedup_over_pytorch),
            }
            for problem in self.problems
        ]
        return {
            "device": self.device,
            "problems": problems,
            "path": self.path,
            "not_kept": self.not_kept,
        }

    def __str__(self) -> str:
        if not self.problems:
            return f"nothing to tune: no swapped layer was computed on a GPU (device: {self.device})"
        kept = "" if self.path is None else f"; kept in {self.path}"
        kept += f"; not kept: {self.not_kept}" if self.not_kept else ""
        return "\n".join([f"{len(self.problems)} problems on {self.device}{kept}", *map(str, self.problems)])


def tune(
    model: nn.Module,
    inputs: Any,
    *,
    backward: bool | None = None,
    candidates: int = choice.CANDIDATES,
    budget_s: float = BUDGET_S,
) -> TuneReport:
    """Measures the candidates, including PyTorch's operator, for every problem that the swapped layers of a network
    compute on a GPU, and keeps the winner of each at once. From then on ``backend="auto"`` uses the winners, also in
    later processes, and ``backend="kernel"`` the fastest of our candidates. The network is run once; its state is
    restored.

    PyTorch's operator is measured with ``torch.backends.cudnn.benchmark`` on, at its best. Where the winners cannot be
    written, a warning and the report say so.

    Args:
        model: a network with swapped layers, on the GPU, in the mode and layout in which it will run. Call ``tune``
            under the autocast under which it will run.
        inputs: the arguments of the call: a tensor, a tuple or list (positional arguments), a dict (keyword arguments)
            or ``tconv_swap.Inputs``.
        backward: tunes the gradients too. None: if a parameter or an input requires one.
        candidates: how many of our plans are measured for a problem, from 1 to 8.
        budget_s: the seconds of measuring for each problem, without compilation.

    Returns:
        The candidates and the choice for each problem. Empty on the CPU, where there is nothing to tune.

    Raises:
        ValueError: ``candidates`` or ``budget_s`` is out of range.
        Exception: whatever the network raises.
    """
    if not 1 <= candidates <= choice.CANDIDATES:
        raise ValueError(f"candidates: expected 1 to {choice.CANDIDATES}, got {candidates}")
    arguments = Inputs.of(inputs)
    if backward is None:
        tensors = [tensor for _, tensor in arguments.named_tensors()]
        backward = any(tensor.requires_grad for tensor in (*model.parameters(), *tensors))
    kinds = _collect(model, arguments, backward)
    if not kinds:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return TuneReport(_name(device), ())
    problems: list[TunedProblem] = []
    paths: dict[str, None] = {}
    not_kept = ""
    try:
        for one in kinds:
            with cudnn_benchmark():
                problem, winner = measure_problem(one, candidates, budget_s)
            problems.append(problem)
            if winner is None:
                continue
            try:
                paths[str(tuned.keep(one.device, {problem.problem: winner}))] = None
            except OSError as error:  # the report is useful even if the winners cannot be kept
                not_kept = f"{tuned.path_for(tuned.machine(one.device))}: {error.strerror or error}"
    finally:
        call.forget()
    if not_kept:
        logger.warning("the winners of the tuning are not kept: %s", not_kept)
    device = torch.device("cuda", kinds[0].device)
    return TuneReport(_name(device), tuple(problems), ", ".join(paths) or None, not_kept)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _collect(model: nn.Module, arguments: Inputs, backward: bool) -> list[CallKind]:
    """Returns every distinct problem; the gradients are split into groups that are decided together."""
    call.forget()
    with preserved(model), call.recording() as recorded:
        if backward:
            with torch.enable_grad():
                sum_of_squares(arguments.map(_leaf)(model)).backward()
        else:
            with torch.no_grad():
                arguments.map(Tensor.detach)(model)
    found: dict[CallKind, None] = {}
    for one in recorded:
        for mask in backward_units(one.mask) if one.mask else [one.mask]:
            if one.problem.geometry.batch > 0:
                found[one._replace(mask=mask)] = None
    return list(found)


def _leaf(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad) if copy.is_floating_point() else copy


def measure_problem(kind: CallKind, count: int, budget_s: float) -> tuple[TunedProblem, tuned.Winner | None]:
    """Measures the candidates for one problem. There is no winner if nothing ran."""
    problem, mask, has_bias, index = kind
    device, facts = torch.device("cuda", index), call.device_facts(index)
    key = tuned.problem_key(problem, mask, has_bias)
    if mask:
        plans = plan.backward_candidates(problem, mask, facts, count)
        default = choice.choose_backward(problem, mask, facts, "auto")[0]
    else:
        plans = plan.forward_candidates(problem, has_bias, facts, count)
        default = choice.choose_forward(problem, has_bias, facts, "auto")
    # A kernel that does not compile fails again when its plan is loaded, which reports it.
    jit.compile_all((one.kernel for made in plans for one in made.launches), facts.architecture)
    tensors = _tensors(kind, device)
    runs, failures = _runnable(kind, plans, tensors, facts.architecture)
    times: dict[int, float] = {}
    if runs:
        timings = time_interleaved(
            {str(number): run for number, run in runs.items()}, device=device, budget_s=budget_s
        )
        times = {number: timings[str(number)].median_ms * 1e3 for number in runs}
    entries = [(made.family, made.why) for made in plans] + [(NATIVE, PYTORCH)]
    # The default choice comes first: the first plan, or PyTorch's operator.
    order = list(range(len(entries)))
    if default.plan is None:
        order = [order[-1], *order[:-1]]
    tried = tuple(Candidate(*entries[n], times.get(n), failures.get(n, "")) for n in order)
    if not times:
        return TunedProblem(key, tried, 0), None
    fastest = _fastest(times, order)
    own = {n: time for n, time in times.items() if n < len(plans)}
    ours = _fastest(own, order) if own else None
    report = TunedProblem(key, tried, order.index(fastest))
    pytorch = times.get(len(plans))
    why = f"{PYTORCH} " + ("did not run" if pytorch is None else f"{pytorch:.1f} us")
    if ours is not None:
        why = f"tuned: {times[ours]:.1f} us, {why}"
    return report, tuned.Winner(fastest == len(plans), "" if ours is None else plans[ours].digest, why)


def _runnable(
    kind: CallKind, plans: Sequence[Plan], tensors: tuple[Tensor, Tensor, Tensor | None], architecture: str
) -> tuple[dict[int, Callable[[], list[Tensor]]], dict[int, str]]:
    """Returns the candidates that compute the problem, by number, and why the others do not. PyTorch's operator
    has the last number."""
    runs: dict[int, Callable[[], list[Tensor]]] = {}
    failures: dict[int, str] = {}
    truth: list[Tensor] = []
    whose = ""
    # PyTorch's operator comes first, then the default choice. Where one differs from the first that runs, the result in
    # float64 decides: cuDNN was seen to compute a gradient wrongly (docs/choice.md).
    for number in (len(plans), *range(len(plans))):
        try:
            if number == len(plans):
                run: Callable[[], list[Tensor]] = partial(_native, kind, tensors)
            else:
                handle = launch.add_plan(plans[number], kind.problem.dtype, tensors[0].device, architecture)
                run = _launching(handle, tensors)
            found = run()
            if not truth:
                truth, whose = found, PYTORCH if number == len(plans) else plans[number].family
            elif whose != _FLOAT64 and _wrong(found, truth, kind):
                truth, whose = _in_float64(kind, tensors), _FLOAT64
                for other, earlier in list(runs.items()):
                    if wrong := _wrong(earlier(), truth, kind):
                        failures[other] = f"wrong: {wrong} from {whose}"
                        del runs[other]
            if wrong := _wrong(found, truth, kind):
                failures[number] = f"wrong: {wrong} from {whose}"
            else:
                runs[number] = run
        except (
            RuntimeError
        ) as error:  # a candidate that does not compile, load, launch or find memory is left out
            failures[number] = first_line(error)
    return runs, failures


def _fastest(times: dict[int, float], order: Iterable[int]) -> int:
    """Returns the first in ``order`` that is as fast as the fastest, within noise."""
    limit = MARGIN * min(times.values())
    return next(n for n in order if n in times and times[n] <= limit)


def _tensors(kind: CallKind, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns random tensors with the layouts of the problem: input, weight, bias, or grad_output, input, weight."""
    problem, mask, has_bias, _ = kind
    geometry = problem.geometry
    # The user's random state does not change.
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], channels_last: bool) -> Tensor:
        values = torch.randn(shape, dtype=problem.dtype, device=device, generator=generator)
        return values.contiguous(memory_format=torch.channels_last) if channels_last else values

    input = random(geometry.input_shape, problem.channels_last)
    weight = random(geometry.weight_shape, problem.weight_channels_last)
    if mask:
        return random(geometry.output_shape, problem.channels_last), input, weight
    return input, weight, random((geometry.out_channels,), False) if has_bias else None


def _launching(handle: int, tensors: tuple[Tensor | None, ...]) -> Callable[[], list[Tensor]]:
    return lambda: torch.ops.tconv_swap.launch.default(handle, [*tensors])


def _native(kind: CallKind, tensors: tuple[Tensor, Tensor, Tensor | None]) -> list[Tensor]:
    g = kind.problem.geometry
    arguments = (g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    first, second, third = tensors
    if not kind.mask:
        return [native.forward(first, second, third, arguments)]
    assert third is not None
    return native.backward(first, second, third, arguments, kind.mask)


def _in_float64(kind: CallKind, tensors: tuple[Tensor, Tensor, Tensor | None]) -> list[Tensor]:
    """Returns PyTorch's result in float64, not computed by cuDNN."""
    first, second, third = tensors
    with torch.backends.cudnn.flags(enabled=False):
        return _native(kind, (first.double(), second.double(), None if third is None else third.double()))


def _wrong(found: list[Tensor], truth: list[Tensor], kind: CallKind) -> str:
    """Returns how far a result is from the right one if it is too far, else ``""``: a wrong candidate must not be
    chosen."""
    dtype = str(kind.problem.dtype).removeprefix("torch.")
    allowed = MAX_ERROR["tf32" if kind.problem.precision == "tf32" else dtype]
    for ours, theirs in zip(found, truth, strict=True):
        distance = float((ours - theirs).float().norm() / theirs.float().norm().clamp_min(1e-30))
        if not distance <= allowed:
            return f"{distance:.1e}"
    return ""


def _timed(
    problem: plan.Problem, mask: choice.Mask, has_bias: bool, index: int, count: int, budget_s: float
) -> first_use.Timed | None:
    """Measures as ``tune`` does, but PyTorch's operator with the user's switches."""
    report, winner = measure_problem(CallKind(problem, mask, has_bias, index), count, budget_s)
    if winner is None:
        return None
    pytorch = next(one.microseconds for one in report.candidates if one.family == NATIVE)
    times = [one.microseconds for one in report.candidates if one.family != NATIVE]
    ours = report.candidates[report.chosen].microseconds
    if winner.native:
        ours = min((time for time in times if time is not None), default=None)
    return first_use.Timed(winner.native, winner.kernel, ours, pytorch)


first_use.measures.append(_timed)


def _ratio(slower: Candidate, faster: Candidate) -> float:
    if slower.microseconds is None or faster.microseconds is None:
        return math.nan
    return slower.microseconds / faster.microseconds


def _or_none(ratio: float) -> float | None:
    return None if math.isnan(ratio) else ratio


def _speedup_text(ratio: float) -> str:
    return "unknown" if math.isnan(ratio) else f"{ratio:.2f}x"
