"""Every kernel source compiles for every architecture we name, without a GPU, spilling only where it says so."""

from __future__ import annotations

import re

import pytest
import torch

from tconv_swap.cuda import jit, plan
from tconv_swap.cuda.cache import csrc_directory
from tconv_swap.cuda.program import Kernel
from tconv_swap.geometry import Geometry

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

GEOMETRIES = {
    "dcgan": Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "everything": Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
    "wide": Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1)),
    "odd rows": Geometry(16, 128, 64, 64, 64, (3, 3), (2, 2)),
    "odd channels": Geometry(32, 130, 64, 64, 66, (3, 3), (2, 2), (1, 1), (1, 1)),
    "deep": Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1)),
    "square": Geometry(2, 64, 64, 64, 64, (3, 3)),
    "arranged": Geometry(8, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1)),
    "rgb": Geometry(2, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "large rgb": Geometry(2, 48, 40, 50, 3, (9, 9), (1, 1), (4, 4)),
    "depthwise": Geometry(2, 21, 20, 19, 21, (8, 8), (4, 4), (2, 2), groups=21),
    "pixel": Geometry(64, 100, 1, 1, 512, (4, 4)),
    "large cells": Geometry(2, 21, 16, 16, 21, (32, 32), (16, 16), (8, 8)),
    "large": Geometry(8, 64, 4096, 4096, 64, (3, 3)),
}


def plans(
    geometry: Geometry, dtype: torch.dtype, precision: str, channels_last: bool, architecture: str
) -> list[Kernel]:
    device = plan.Device(architecture, 132, SHARED_BYTES[architecture])
    problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
    # Down strips of large images no bias comes along.
    wanted = (True, True, geometry != GEOMETRIES["large"])
    made = (plan.plan_forward(problem, True, device), plan.plan_backward(problem, wanted, device))
    return [launch.kernel for one in made for launch in one.launches]


@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_planned_kernels_compile_without_unpromised_spills(geometry: Geometry, architecture: str) -> None:
    for dtype, precision in MODES if architecture == WHOLE else MODES[1::2]:
        for channels_last in (False, True) if architecture == WHOLE else (False,):
            for kernel in plans(geometry, dtype, precision, channels_last, architecture):
                _, log = jit.compile_with_log(kernel, architecture)
                spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
                assert spilled, f"no resource report for {kernel.entry}: {log}"
                assert kernel.spills or not any(spilled), (
                    f"{kernel.entry} {dtype} {architecture} spills: {log}"
                )


@pytest.mark.parametrize("architecture", ["sm_80", WHOLE])
def test_a_kernel_of_many_taps_compiles(architecture: str) -> None:
    """More taps than a compiler allows templates inside each other."""
    geometry = Geometry(1, 64, 9, 7, 40, (16, 16), (8, 8), (4, 4))
    device = plan.Device(architecture, 132, SHARED_BYTES[architecture])
    for dtype in (torch.float16, torch.float32):
        made = plan.plan_forward(plan.Problem(geometry, dtype, "ieee", False, False), True, device)
        assert made.family != "general"
        for launch in made.launches:
            jit.compile_kernel(launch.kernel, architecture)


def test_every_source_is_planned_somewhere() -> None:
    """A kernel file that no plan above uses would be compiled by nobody."""
    used = {
        kernel.source
        for geometry in GEOMETRIES.values()
        for dtype, precision in MODES
        for channels_last in (False, True)
        for kernel in plans(geometry, dtype, precision, channels_last, WHOLE)
    }
    sources = {path.name for path in (csrc_directory() / "kernels").glob("*.cu")}
    assert sources == used


def test_a_compile_error_names_the_log_and_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    broken = Kernel(
        "reduce_slices.cu", "reduce_slices", (("Element", "NoSuchType"), ("THREADS", 32), ("LANES", 1))
    )
    with pytest.raises(RuntimeError, match="NoSuchType") as caught:
        jit.compile_kernel(broken, "sm_80")
    assert "The source is in" in str(caught.value)
    assert list((tmp_path / "kernels").glob("*.cu"))


def test_the_second_compilation_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    kernel = Kernel(
        "reduce_slices.cu", "reduce_slices", (("Element", "float"), ("THREADS", 32), ("LANES", 1))
    )
    first = jit.compile_kernel(kernel, "sm_80")
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", None)
    assert jit.compile_kernel(kernel, "sm_80") == first
