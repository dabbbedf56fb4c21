"""Every kernel source compiles for all supported architectures without a GPU, and spills only where its plan allows
it."""

from __future__ import annotations

import re

import older_gpus
import pytest
import torch
from planned_kernels import SHARED_BYTES, SOME, WHOLE, compiled_on_each_commit, one_of_each, planned, variants
from sampling import sampled

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.program import Kernel


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        every = metafunc.config.getoption("all_architectures")
        metafunc.parametrize("architecture", SHARED_BYTES if every else SOME)


@pytest.mark.timeout(1800)
def test_planned_kernels_compile_without_unpromised_spills(
    architecture: str, request: pytest.FixtureRequest, exhaustive: bool
) -> None:
    if request.config.getoption("all_architectures"):
        kernels = list(planned(architecture))
    else:
        kernels = one_of_each(planned(architecture)) if exhaustive else compiled_on_each_commit(architecture)
    for kernel in kernels:
        _, log = jit.compile_with_log(kernel, architecture)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
        assert spilled, f"no resource report for {kernel.entry}: {log}"
        assert kernel.spills or not any(spilled), f"{kernel} spills on {architecture}: {log}"
        assert "are serialized" not in log, f"{kernel} waits for each multiply of a warpgroup: {log}"


def test_one_of_each_kernel_holds_every_variant_and_the_most_demanding() -> None:
    def kernel(element: str, switch: bool, tile: int, source: str = "a.cu") -> Kernel:
        return Kernel(source, "a", (("Element", element), ("SWITCH", switch), ("TILE", tile)))

    small, large = kernel("float", False, 8), kernel("float", False, 16)
    half, other = kernel("Half", True, 8), kernel("float", False, 8, "b.cu")
    assert one_of_each({small: 1, large: 2, half: 1, other: 1}) == [large, half, other]
    chosen = one_of_each(planned("sm_80"))
    assert set().union(*map(variants, chosen)) == set().union(*map(variants, planned("sm_80")))
    assert len(chosen) < len(planned("sm_80")) / 2
    assert one_of_each({small: 1, half: 1}, variants(small)) == [half]


def test_each_commit_compiles_every_source() -> None:
    sources = {kernel.source for architecture in SOME for kernel in planned(architecture, every=False)}
    compiled = {kernel.source for architecture in SOME for kernel in compiled_on_each_commit(architecture)}
    assert compiled == sources


@pytest.mark.parametrize(
    ("chip", "stride", "source"),
    sampled([("sm_80", 4, "forward/implicit_gemm_mma.cu"), (WHOLE, 8, "forward/implicit_gemm_wgmma.cu")], 2),
)
def test_a_kernel_of_many_taps_compiles(
    chip: str, stride: int, source: str, request: pytest.FixtureRequest
) -> None:
    """There are more taps than a compiler allows nested templates; in float32 forward/implicit_gemm_mma.cu computes
    them on both architectures."""
    every = request.config.getoption("all_architectures")
    geometry = Geometry(1, 64, 9, 7, 40, (16, 16), (stride, stride), (4, 4))
    device = plan.Device(chip, 132, SHARED_BYTES[chip])
    for dtype in (torch.float16, torch.float32) if every else (torch.float16,):
        made = plan.plan_forward(plan.Problem(geometry, dtype, "ieee", False, False), True, device)
        assert dtype == torch.float32 or made.launches[-1].kernel.source == source
        assert made.family != "general"
        for launch in made.launches:
            jit.compile_kernel(launch.kernel, chip)


def test_every_source_is_planned_somewhere(exhaustive: bool) -> None:
    """No test would compile a kernel file that no plan above uses."""
    used = {kernel.source for kernel in planned(WHOLE, every=exhaustive)}
    directory = csrc_directory() / "kernels"
    sources = {path.relative_to(directory).as_posix() for path in directory.rglob("*.cu")}
    assert {source for source in sources if not source.startswith(("norm/", "pad/"))} == used


@pytest.mark.parametrize("device", older_gpus.DEVICES, ids=lambda device: device.architecture)
def test_every_kernel_that_is_planned_for_older_gpus_is_run(device: plan.Device) -> None:
    """test_older_gpus.py runs them on the GPU of this machine."""
    launched = {
        launch.kernel.entry
        for geometry in older_gpus.GEOMETRIES.values()
        for mode in ("fp64", "fp16", "tf32")
        for _, made in older_gpus.plans(plan.Problem(geometry, *older_gpus.MODES[mode], False, False), device)
        for launch in made.launches
    }
    wanted = {kernel.entry for kernel in planned(device.architecture)} - {"cast"}
    assert launched >= wanted, "a geometry that needs them"


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
