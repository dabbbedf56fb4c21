"""Every kernel source compiles for every architecture we name, without a GPU, spilling only where it says so."""

from __future__ import annotations

import re

import pytest
import torch

from tconv_swap import jit, plan
from tconv_swap.cache import csrc_directory
from tconv_swap.geometry import Geometry
from tconv_swap.program import Kernel

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

GEOMETRIES = {
    "dcgan": Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "everything": Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
    "rgb": Geometry(2, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "depthwise": Geometry(2, 21, 20, 19, 21, (8, 8), (4, 4), (2, 2), groups=21),
    "large": Geometry(8, 64, 4096, 4096, 64, (3, 3)),
}


def plans(geometry: Geometry, dtype: torch.dtype, channels_last: bool, architecture: str) -> list[Kernel]:
    device = plan.Device(architecture, 132, 227 << 10 if architecture != "sm_75" else 64 << 10)
    precision = "tf32" if dtype == torch.float32 else "ieee"
    problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
    made = (plan.plan_forward(problem, True, device), plan.plan_backward(problem, (True, True, True), device))
    return [launch.kernel for one in made for launch in one.launches]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_planned_kernels_compile_without_unpromised_spills(geometry: Geometry, architecture: str) -> None:
    dtypes = (torch.float32, torch.float16) if architecture != "sm_90" else tuple(jit_dtypes())
    for dtype in dtypes:
        for channels_last in (False, True) if architecture == "sm_90" else (False,):
            for kernel in plans(geometry, dtype, channels_last, architecture):
                _, log = jit.compile_with_log(kernel, architecture)
                spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
                assert spilled, f"no resource report for {kernel.entry}: {log}"
                assert kernel.spills or not any(spilled), (
                    f"{kernel.entry} {dtype} {architecture} spills: {log}"
                )


def jit_dtypes() -> list[torch.dtype]:
    return [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_every_source_is_planned_somewhere() -> None:
    """A kernel file that no plan above uses would be compiled by nobody."""
    used = {
        kernel.source
        for geometry in GEOMETRIES.values()
        for dtype in jit_dtypes()
        for channels_last in (False, True)
        for kernel in plans(geometry, dtype, channels_last, "sm_90")
    }
    sources = {path.name for path in (csrc_directory() / "kernels").glob("*.cu")}
    assert sources == used


def test_a_compile_error_names_the_log_and_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    broken = Kernel("reduce_slices.cu", "reduce_slices", (("Element", "NoSuchType"), ("THREADS", 32)))
    with pytest.raises(RuntimeError, match="NoSuchType") as caught:
        jit.compile_kernel(broken, "sm_80")
    assert "The source is in" in str(caught.value)
    assert list((tmp_path / "kernels").glob("*.cu"))


def test_the_second_compilation_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    kernel = Kernel("reduce_slices.cu", "reduce_slices", (("Element", "float"), ("THREADS", 32)))
    first = jit.compile_kernel(kernel, "sm_80")
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", None)
    assert jit.compile_kernel(kernel, "sm_80") == first
