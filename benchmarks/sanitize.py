"""Runs every kernel family on small layers, for NVIDIA's compute-sanitizer.

    python -m benchmarks.sanitize --prepare plans      # plans and compiles, on all cores
    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 python -m benchmarks.sanitize --plans plans
    done

racecheck is slow: run ``--share 0/12`` to ``--share 11/12`` at the same time. The families are those that planning
offers as candidates, so a new one is run without being named here. Exit codes: 0 all ran and gave PyTorch's results, 1
something did not, or no case ran some kernel source, 2 no GPU.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import STAGE_MASKS, compile_ahead
from tconv_swap.cuda import call
from tconv_swap.cuda.choice import FORWARD, Mask
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.runtime import host, launch
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.program import Output, Part, Plan
from tconv_swap.tuning import MAX_ERROR

Mode = tuple[torch.dtype, str]
#: The dtype and precision of each mode.
MODES: tuple[Mode, ...] = (
    (torch.float32, "tf32"),
    (torch.float16, "ieee"),
    (torch.bfloat16, "ieee"),
    (torch.float32, "ieee"),
    (torch.float64, "ieee"),
)
STAGES: dict[str, Mask] = {
    "forward": FORWARD,
    "grad_input": STAGE_MASKS["grad_input"],
    "grad_weight": (
        False,
        True,
        True,
    ),  # with the gradient of the bias, which such a kernel then computes too
    "grad_weight alone": STAGE_MASKS["grad_weight"],
    "grad_bias": STAGE_MASKS["grad_bias"],
    "all gradients": STAGE_MASKS["backward"],
    "cast": FORWARD,  # casts of input, weight and bias, as under an autocast
}
#: Small geometries that all families together support: many and few channels, odd sizes and whole tiles, any stride.
GEOMETRIES = (
    Geometry(2, 64, 9, 11, 32, (4, 4), (2, 2), (1, 1)),
    Geometry(1, 40, 7, 13, 24, (3, 3), (2, 2), (1, 1), (1, 1)),
    Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 64, 17, 19, 3, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 64, 14, 14, 32, (2, 2), (2, 2)),
    Geometry(1, 64, 12, 21, 64, (3, 3)),
    Geometry(2, 21, 10, 9, 21, (8, 8), (4, 4), (2, 2), groups=21),
    Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
    Geometry(1, 128, 32, 32, 128, (3, 3), (2, 2), (1, 1), (1, 1)),
    Geometry(2, 24, 9, 21, 1, (9, 9), (4, 4), (4, 4), (3, 3)),
    Geometry(4, 128, 32, 32, 128, (2, 2), (2, 2)),
    Geometry(4, 128, 32, 32, 96, (2, 2), (2, 2)),
    Geometry(2, 128, 32, 32, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(1, 64, 64, 64, 64, (3, 3)),
    Geometry(4, 64, 64, 64, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(1, 21, 16, 16, 21, (32, 32), (16, 16), (8, 8)),
    Geometry(3, 100, 1, 1, 24, (4, 4)),
    Geometry(2, 6, 4, 5, 9, (3, 2), (2, 3), (1, 0), (0, 1), groups=3),
    Geometry(8, 512, 32, 32, 256, (3, 3), (2, 2)),
    Geometry(2, 32, 3, 3, 24, (2, 2)),
)
CANDIDATES = 8


class Case(NamedTuple):
    """One stage of a layer, and the plan that computes it."""

    problem: plan.Problem
    stage: str
    made: Plan

    def __str__(self) -> str:
        problem = self.problem
        dtype = str(problem.dtype).removeprefix("torch.")
        precision = " TF32" if problem.precision == "tf32" else ""
        layout = "channels_last" if problem.channels_last else "NCHW"
        return f"{self.stage} {dtype}{precision} {layout} {problem.geometry}: {self.made.family}, {self.made.why}"


Key = tuple[object, ...]


def cases(
    geometries: Iterable[Geometry], device: plan.Device, each: int, modes: Sequence[Mode] = MODES
) -> list[Case]:
    """Returns for every dtype, layout and stage each sequence of kernels that is planned, on ``each`` geometries."""
    return _first([_of_geometry(geometry, device, modes) for geometry in geometries], each)


def _of_geometry(
    geometry: Geometry, device: plan.Device, modes: Sequence[Mode] = MODES
) -> list[tuple[Key, Case]]:
    """Returns each sequence of kernels once, with the best plan that has it."""
    found: dict[Key, Case] = {}
    for dtype, precision in modes:
        for channels_last in (False, True):
            problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
            for stage in STAGES:
                for made in candidates(problem, stage, device):
                    sources = tuple(one.kernel.source for one in made.launches)
                    key = (str(dtype), precision, channels_last, stage, sources)
                    found.setdefault(key, Case(problem, stage, made))
    return list(found.items())


def _first(of_geometries: Iterable[list[tuple[Key, Case]]], each: int) -> list[Case]:
    found: dict[Key, list[Case]] = {}
    for offered in of_geometries:
        for key, case in offered:
            known = found.setdefault(key, [])
            if len(known) < each:
                known.append(case)
    return [case for known in found.values() for case in known]


def candidates(problem: plan.Problem, stage: str, device: plan.Device) -> list[Plan]:
    """Returns every plan that may compute a stage: the families' candidates, and the general kernels."""
    mask = STAGES[stage]
    if stage == "cast":
        target = torch.float16 if problem.dtype == torch.float32 else torch.float32
        shapes = problem.geometry.input_shape, problem.geometry.weight_shape, (problem.geometry.out_channels,)
        made = plan_cast(
            [Output(shape, problem.channels_last and len(shape) == 4, target) for shape in shapes],
            problem.dtype,
        )
        return [] if made is None else [made]
    if mask == FORWARD:
        offered = plan.forward_candidates(problem, True, device, CANDIDATES)
        return [*offered, general.plan_forward(problem, True)]
    offered = plan.backward_candidates(problem, mask, device, CANDIDATES)
    if stage == "grad_input":
        return [*offered, _of_parts(problem, (True, False, False), [general.plan_grad_input(problem)])]
    if stage == "grad_weight":
        parts = [general.plan_grad_weight(problem, device), general.plan_grad_bias(problem, device)]
        return [*offered, _of_parts(problem, mask, parts)]
    return offered


def _of_parts(problem: plan.Problem, mask: Mask, parts: Sequence[Part]) -> Plan:
    """Returns a plan with a part for each gradient of ``mask``."""
    g = problem.geometry
    shapes: tuple[tuple[int, ...], ...] = (g.input_shape, g.weight_shape, (g.out_channels,))
    return Plan(
        parts[0].family,
        parts[0].why,
        outputs=tuple(
            Output(shape, problem.channels_last and len(shape) == 4)
            for shape, wanted in zip(shapes, mask, strict=True)
            if wanted
        ),
        launches=tuple(one for index, part in enumerate(parts) for one in part.with_outputs(index)),
        workspace_bytes=max(part.workspace_bytes for part in parts),
    )


def prepare(path: Path, device: plan.Device, each: int) -> int:
    """Plans and compiles on all cores, and builds the host part, since a sanitizer slows down one process; returns the
    number of kernels."""
    host.build()
    # Spawned, because a forked process must not touch CUDA.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = _first(pool.map(_of_geometry, GEOMETRIES, repeat(device)), each)
    path.write_bytes(pickle.dumps(found))
    return compile_ahead([case.made for case in found], device.architecture)


def sources_without_case(found: Sequence[Case]) -> list[str]:
    """Returns the kernel files that no case launches."""
    launched = {one.kernel.source for case in found for one in case.made.launches}
    directory = csrc_directory() / "kernels"
    sources = {path.relative_to(directory).as_posix() for path in directory.rglob("*.cu")}
    return sorted({source for source in sources if not source.startswith(("norm/", "pad/"))} - launched)


def run(case: Case, device: torch.device, architecture: str) -> str:
    """Launches the case once; returns what is wrong with the results, or ""."""
    problem, geometry = case.problem, case.problem.geometry
    torch.manual_seed(0)
    layout = torch.channels_last if problem.channels_last else torch.contiguous_format
    # The CPU makes the tensors: the sanitizer would also have to watch a kernel of PyTorch.
    input, weight, grad_output = (
        torch.randn(shape).to(problem.dtype).contiguous(memory_format=layout)
        for shape in (geometry.input_shape, geometry.weight_shape, geometry.output_shape)
    )
    bias = torch.randn(geometry.out_channels).to(problem.dtype)
    mask = STAGES[case.stage]
    tensors = (grad_output, input, weight) if mask else (input, weight, bias)
    handle = launch.add_plan(case.made, problem.dtype, device, architecture)
    results = torch.ops.tconv_swap.launch.default(handle, [*(tensor.to(device) for tensor in tensors)])
    truths = [tensor.double() for tensor in tensors]
    if case.stage != "cast":
        truths = _truths(geometry, mask, grad_output, input, weight, bias)
    dtype = str(problem.dtype).removeprefix("torch.")
    allowed = MAX_ERROR["tf32" if problem.precision == "tf32" else dtype]
    for result, truth in zip(results, truths, strict=True):
        distance = float((result.cpu().double() - truth).norm() / truth.norm())
        if not distance <= allowed:
            return f"{distance:.1e} from PyTorch's result"
    return ""


def _truths(geometry: Geometry, mask: Mask, grad_output: Tensor, *operands: Tensor) -> list[Tensor]:
    exact = [operand.double().requires_grad_() for operand in operands]
    g = geometry
    output = F.conv_transpose2d(
        exact[0], exact[1], exact[2], g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    if not mask:
        return [output.detach()]
    wanted = [operand for operand, needed in zip(exact, mask, strict=True) if needed]
    return list(torch.autograd.grad(output, wanted, grad_output.double()))


def share(text: str) -> tuple[int, int]:
    first, shares = (int(number) for number in text.split("/"))
    if not 0 <= first < shares:
        raise ValueError(text)
    return first, shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sanitize", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--each", type=int, default=2, help="geometries for each kernel, dtype and layout")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="plan, compile, keep the plans, stop")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="run the plans that --prepare kept")
    parser.add_argument("--list", action="store_true", help="print what is run")
    parser.add_argument(
        "--share",
        type=share,
        metavar="I/N",
        help="run every Nth plan from the Ith on (from 0), for N processes at a time",
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch.cuda.is_available() is False: no GPU", file=sys.stderr)
        return 2
    # Each tensor is a separate allocation, so that an access beyond it is detected. Read at the first allocation.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    device = torch.device("cuda", 0)
    facts = call.device_facts(0)
    if options.prepare:
        print(f"{prepare(options.prepare, facts, options.each)} kernels compiled or found")
        return 0
    found: list[Case]
    found = (
        pickle.loads(options.plans.read_bytes()) if options.plans else cases(GEOMETRIES, facts, options.each)
    )
    failures = [f"no case launches {name}" for name in sources_without_case(found)]
    if options.share:
        first, shares = options.share
        found = found[first::shares]
        # Each process would have a thread for each core, and threads that wait for one another would spin.
        torch.set_num_threads(1)
    for case in found:
        if options.list:
            print(case, flush=True)
        try:
            wrong = run(case, device, facts.architecture)
        except RuntimeError as error:  # the other cases are still useful
            wrong = str(error).splitlines()[0]
        if wrong:
            failures.append(f"{case}: {wrong}")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(found)} plans of {facts.architecture} run, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
