"""Plans with an epilogue: what is launched, with which arguments, and that it compiles without a GPU."""

from __future__ import annotations

import re
import struct
from functools import cache

import pytest
import torch
from planned_kernels import one_of_each

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Argument, ArgumentKind, Kernel, Plan, fields, input_, output

SHARED_BYTES = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90a": 227 << 10}
GEOMETRIES = {
    "dcgan": Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "wide": Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1)),
    "square": Geometry(2, 64, 64, 64, 64, (3, 3)),
    "groups": Geometry(2, 27, 14, 14, 33, (2, 2), (2, 2), groups=3),
    "rgb": Geometry(2, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "pixel": Geometry(64, 100, 1, 1, 512, (4, 4)),
    "split": Geometry(2, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1)),
}
NORMED = Epilogue(True, Activation.RELU, torch.float32, 1e-3)
ACTIVATED = Epilogue(False, Activation.TANH)
LEAKY = Epilogue(True, Activation.LEAKY_RELU, torch.float16, 1e-3, 0.25)


@cache
def plans(architecture: str) -> tuple[Plan, ...]:
    """Returns a plan for each kernel that stores outputs, and each dtype: the chosen plan of a geometry before the
    others."""
    device = plan.Device(architecture, 132, SHARED_BYTES[architecture])
    problems = [
        plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        for name, geometry in GEOMETRIES.items()
        for dtype, precision in ((torch.float16, "ieee"), (torch.float32, "tf32"))
        for channels_last in ((False, True) if name in ("dcgan", "groups") else (False,))
    ]
    chosen = [(problem, plan.plan_forward(problem, True, device)) for problem in problems]
    others = [
        (problem, made)
        for problem in problems
        for made in (
            *plan.forward_candidates(problem, True, device, 4),
            general.plan_forward(problem, True),
        )
    ]
    found: dict[tuple[str, torch.dtype], Plan] = {}
    for problem, made in (*chosen, *others):
        found.setdefault((made.launches[-1].kernel.source, problem.dtype), made)
    return tuple(found.values())


def stores(made: Plan) -> list[str]:
    return [one.kernel.entry for one in made.launches if output(0) in one.operands]


def test_every_family_takes_one_in_its_last_kernel() -> None:
    """Where nothing is behind the bias, its plan stays as it is."""
    entries = set()
    for made in plans("sm_90a"):
        assert with_epilogue(made, Epilogue(False, Activation.IDENTITY)) is made
        ended = with_epilogue(made, LEAKY)
        assert ended is not None
        assert (ended.family, ended.outputs, ended.workspace_bytes) == (
            made.family,
            made.outputs,
            made.workspace_bytes,
        )
        assert ended.launches[:-1] == made.launches[:-1]
        assert stores(ended) == stores(made) == [made.launches[-1].kernel.entry]
        before, after = made.launches[-1], ended.launches[-1]
        entries.add(after.kernel.entry)
        changed = dict(after.kernel.constants).items() - dict(before.kernel.constants).items()
        assert changed == {("NORMALIZES", True), ("ACTIVATION", 2), ("Parameter", "Half")}
        # The bias becomes a struct of the bias, the norm's four vectors, and two numbers.
        numbers = Argument(ArgumentKind.INT64, struct.unpack("<q", struct.pack("<2f", 1e-3, 0.25))[0])
        at = before.arguments.index(input_(2))
        given = fields(*map(input_, range(2, 7)), numbers)
        assert given[0] == Argument(ArgumentKind.FIELDS, 6)
        assert after.arguments == (*before.arguments[:at], *given, *before.arguments[at + 1 :])
        assert len(after.arguments) <= 16
    assert entries == {
        *(
            "forward_implicit_gemm_mma",
            "forward_implicit_gemm_tma",
            "forward_implicit_gemm_wgmma",
            "forward_implicit_gemm_tma_nchw",
            "forward_implicit_gemm_split_k",
        ),
        *("forward_narrow_mma", "forward_col2im", "forward_narrow_ffma", "forward_gemm", "forward_stride1"),
        "forward_general",
    }


def test_what_takes_none() -> None:
    device = plan.Device("sm_90a", 132, SHARED_BYTES["sm_90a"])
    problem = plan.Problem(GEOMETRIES["dcgan"], torch.float16, "ieee", False, False)
    assert with_epilogue(plan.plan_backward(problem, (True, True, True), device), NORMED) is None
    nothing = plan.Problem(
        Geometry(0, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)), torch.float16, "ieee", False, False
    )
    empty = plan.plan_forward(nothing, True, device)
    assert not empty.launches
    assert with_epilogue(empty, NORMED) is empty


def test_a_packed_weight_comes_in_front_of_it() -> None:
    device = plan.Device("sm_90a", 132, SHARED_BYTES["sm_90a"])
    # With so many images no sum is split, so that the last launch reads the input.
    layer = GEOMETRIES["dcgan"].with_batch(64)
    problem = plan.Problem(layer, torch.float16, "ieee", False, False)
    ended = with_epilogue(plan.plan_forward(problem, True, device), NORMED)
    assert ended is not None
    parts = ended.without_packing(2)
    assert parts is not None
    assert [argument.value for argument in parts[1].launches[-1].arguments if argument.kind == 0] == [
        *(0, 1, 2, 3, 4, 5, 6),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compiled" in metafunc.fixturenames:
        on_request = [("sm_75", NORMED), ("sm_90a", ACTIVATED)]
        every = metafunc.config.getoption("all_architectures")
        compiled = [("sm_80", ACTIVATED), ("sm_90a", NORMED), *(on_request if every else [])]
        metafunc.parametrize("compiled", compiled, ids=str)


def test_kernels_compile_and_spill_no_more_than_without(
    compiled: tuple[str, Epilogue], request: pytest.FixtureRequest, exhaustive: bool
) -> None:
    """One kernel of each variant is compiled, the one whose block takes the most resources; on each commit those of one
    variant of a source."""
    architecture, epilogue = compiled
    without: dict[Kernel, Kernel] = {}
    resources: dict[Kernel, int] = {}
    for made in plans(architecture):
        ended = with_epilogue(made, epilogue)
        assert ended is not None
        assert not ended.launches[-1].kernel.spills or made.launches[-1].kernel.spills
        last = ended.launches[-1]
        without[last.kernel] = made.launches[-1].kernel
        taken = last.block * max(last.shared_bytes, 1)
        resources[last.kernel] = max(taken, resources.get(last.kernel, 0))
    every = request.config.getoption("all_architectures")
    kernels = list(resources) if every else one_of_each(resources)
    for kernel in kernels if exhaustive else {one.source: one for one in kernels}.values():
        if after := spilled(kernel, architecture):
            assert after <= spilled(without[kernel], architecture), f"{kernel} spills on {architecture}"


def spilled(kernel: Kernel, architecture: str) -> int:
    """Returns the bytes that a thread spills to local memory."""
    _, log = jit.compile_with_log(kernel, architecture)
    found = re.findall(r"(\d+) bytes spill stores", log)
    assert found
    return sum(map(int, found))
