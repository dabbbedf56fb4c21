"""Every kernel source compiles for the architectures we name, without a GPU, and spills only where its plan says so."""

from __future__ import annotations

import re
from functools import cache
from itertools import permutations

import pytest
import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.cast import DTYPES, plan_cast
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.program import Kernel, Output

#: Bytes that one block may ask for (CUDA C++ programming guide, table of compute capabilities).
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
#: Where every mode and layout is compiled; the other architectures compile two modes in NCHW.
WHOLE = "sm_90a"
#: Compiled for on each commit, one kernel of each variant; `pytest --all-architectures` compiles every kernel for all.
EACH_COMMIT = ("sm_75", "sm_80", WHOLE, "sm_120")

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
    "tiny": Geometry(2, 8, 4, 4, 8, (2, 2), (2, 2)),
    "pixel": Geometry(64, 100, 1, 1, 512, (4, 4)),
    "large cells": Geometry(2, 21, 16, 16, 21, (32, 32), (16, 16), (8, 8)),
    "large": Geometry(8, 64, 4096, 4096, 64, (3, 3)),
    "odd rows of many channels": Geometry(8, 512, 32, 32, 256, (3, 3), (2, 2)),
}


@cache
def planned(architecture: str) -> dict[Kernel, int]:
    """Every kernel that is planned for GEOMETRIES, and how much of a multiprocessor a block of it takes: threads times
    bytes of shared memory."""
    device = plan.Device(architecture, 132, SHARED_BYTES[architecture])
    found: dict[Kernel, int] = {}
    for geometry in GEOMETRIES.values():
        for dtype, precision in MODES if architecture == WHOLE else MODES[1::2]:
            for channels_last in (False, True) if architecture == WHOLE else (False,):
                problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                # Down strips of large images no bias comes along.
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


def variants(kernel: Kernel) -> set[tuple[object, ...]]:
    """What of a source the kernel compiles: its types together with its precision, and each switch by itself."""
    of_entry = (kernel.source, kernel.entry)
    types = tuple(value for name, value in kernel.constants if isinstance(value, str) or name == "PRECISION")
    switches = {(*of_entry, name, value) for name, value in kernel.constants if isinstance(value, bool)}
    return {(*of_entry, types), *switches}


def one_of_each(kernels: dict[Kernel, int]) -> list[Kernel]:
    """The fewest kernels, chosen greedily, that compile every variant of every source; of equals the one whose block
    takes most."""
    found: list[Kernel] = []
    of = {kernel: variants(kernel) for kernel in sorted(kernels, key=lambda one: -kernels[one])}
    left = set().union(*of.values())
    while left:
        found.append(max(of, key=lambda kernel: len(of[kernel] & left)))
        left -= of[found[-1]]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        every = metafunc.config.getoption("all_architectures")
        metafunc.parametrize("architecture", SHARED_BYTES if every else EACH_COMMIT)


@pytest.mark.timeout(1800)
def test_planned_kernels_compile_without_unpromised_spills(
    architecture: str, request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("all_architectures")
    for kernel in planned(architecture) if every else one_of_each(planned(architecture)):
        _, log = jit.compile_with_log(kernel, architecture)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
        assert spilled, f"no resource report for {kernel.entry}: {log}"
        assert kernel.spills or not any(spilled), f"{kernel} spills on {architecture}: {log}"


def test_one_of_each_kernel_holds_every_variant_and_the_most_demanding() -> None:
    def kernel(element: str, switch: bool, tile: int, source: str = "a.cu") -> Kernel:
        return Kernel(source, "a", (("Element", element), ("SWITCH", switch), ("TILE", tile)))

    small, large = kernel("float", False, 8), kernel("float", False, 16)
    half, other = kernel("Half", True, 8), kernel("float", False, 8, "b.cu")
    assert one_of_each({small: 1, large: 2, half: 1, other: 1}) == [large, half, other]
    chosen = one_of_each(planned("sm_80"))
    assert set().union(*map(variants, chosen)) == set().union(*map(variants, planned("sm_80")))
    assert len(chosen) < len(planned("sm_80")) / 2


@pytest.mark.parametrize("chip", ["sm_80", WHOLE])
def test_a_kernel_of_many_taps_compiles(chip: str, request: pytest.FixtureRequest) -> None:
    """More taps than a compiler allows templates inside each other: forward/implicit_gemm_mma.cu and
    forward/implicit_gemm_wgmma.cu in float16, forward/implicit_gemm_mma.cu again in float32."""
    every = request.config.getoption("all_architectures")
    geometry = Geometry(1, 64, 9, 7, 40, (16, 16), (8, 8), (4, 4))
    device = plan.Device(chip, 132, SHARED_BYTES[chip])
    for dtype in (torch.float16, torch.float32) if every else (torch.float16,):
        made = plan.plan_forward(plan.Problem(geometry, dtype, "ieee", False, False), True, device)
        assert made.family != "general"
        for launch in made.launches:
            jit.compile_kernel(launch.kernel, chip)


def test_every_source_is_planned_somewhere() -> None:
    """A kernel file that no plan above uses would be compiled by nobody."""
    used = {kernel.source for kernel in planned(WHOLE)}
    directory = csrc_directory() / "kernels"
    sources = {path.relative_to(directory).as_posix() for path in directory.rglob("*.cu")}
    assert {source for source in sources if not source.startswith("norm/")} == used


def test_a_compile_error_names_the_log_and_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    broken = Kernel(
        "common/split_k_reduce.cu",
        "split_k_reduce",
        (("Element", "NoSuchType"), ("THREADS", 32), ("LANES", 1)),
    )
    with pytest.raises(RuntimeError, match="NoSuchType") as caught:
        jit.compile_kernel(broken, "sm_80")
    assert "The source is in" in str(caught.value)
    assert list((tmp_path / "kernels").glob("*.cu"))


def test_the_second_compilation_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    kernel = Kernel(
        "common/split_k_reduce.cu", "split_k_reduce", (("Element", "float"), ("THREADS", 32), ("LANES", 1))
    )
    first = jit.compile_kernel(kernel, "sm_80")
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", None)
    assert jit.compile_kernel(kernel, "sm_80") == first
