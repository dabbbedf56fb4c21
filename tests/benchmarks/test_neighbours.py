"""The neighbours of layers: which they are, how they are measured, what is said of them; with a pretended GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation_cases import DRAWN, SUITE
from pretended_gpu import GPU, H200, pretended_gpu
from sampling import sampled

from benchmarks import neighbours, selection
from benchmarks.ablation_measure import Task
from benchmarks.families import PYTORCH
from benchmarks.neighbours import Prepared, measure, prepare
from benchmarks.neighbours_rows import OWN, Row, groups_of, neighbours_of, report, summary
from benchmarks.sweep import Results
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.measurement.suite import Layer
from tconv_swap.runtime.program import Plan

DIRECTIONS = selection.directions_of(argparse.Namespace(stage=None))
SMALL = Geometry(2, 64, 5, 6, 32, (4, 4), (2, 2), (1, 1))
TASK = Task(Layer("small", "made up", SMALL, True, False), False, "fp16", "nchw", "backward")
CPU = torch.device("cpu")
EVERY = [
    OWN,
    *(f"{name} {by}" for name in ("batch", "height", "width") for by in ("-1", "+1")),
    *(f"{name} {by}" for name in ("in_channels", "out_channels") for by in ("-8", "+8")),
]


def test_the_neighbours() -> None:
    found = neighbours_of(SMALL)
    assert list(found) == EVERY
    assert found["height +1"] == SMALL._replace(height=6)
    assert found["in_channels -8"] == SMALL._replace(in_channels=56)
    alone = neighbours_of(SMALL._replace(batch=1, height=1, out_channels=8))
    assert {"batch -1", "height -1", "out_channels -8"}.isdisjoint(alone)
    assert len(alone) == len(EVERY) - 3


@pytest.mark.parametrize("layer", [*SUITE, *DRAWN[:60]], ids=lambda layer: layer.name)
def test_pytorch_takes_every_neighbour(layer: Layer) -> None:
    for g in neighbours_of(layer.geometry).values():
        input, weight = (torch.empty(shape, device="meta") for shape in (g.input_shape, g.weight_shape))
        output = torch.nn.functional.conv_transpose2d(
            input, weight, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation
        )
        assert tuple(output.shape) == g.output_shape


def test_channels_stay_divisible_by_groups() -> None:
    depthwise = Geometry(2, 32, 8, 8, 32, (4, 4), (2, 2), (1, 1), groups=32)
    found = neighbours_of(depthwise)
    assert found["channels +8"] == depthwise._replace(in_channels=40, out_channels=40, groups=40)
    grouped = Geometry(2, 96, 8, 8, 48, (4, 4), (2, 2), (1, 1), groups=3)
    found = neighbours_of(grouped)
    assert found["in_channels +24"].in_channels == 120
    assert found["out_channels -24"].out_channels == 24


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours.jit, "compile_kernel", lambda kernel, architecture: b"")


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    ("direction", "layout"),
    sampled(
        ((at, last) for at, turn in (("forward", 1), ("backward", -1)) for last in list(LAYOUTS)[::turn]), 2
    ),
)
def test_rows_of_a_pretended_gpu(
    direction: str, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = prepare(replace(TASK, direction=direction, layout=layout), H200, DIRECTIONS)
    announced: list[str] = []
    with pretended_gpu(monkeypatch):
        rows = measure(ready, CPU, H200.architecture, announced.append)
    assert [row.stage for row in rows] == [s for s, of in selection.STAGES.items() if of == direction]
    for row in rows:
        assert list(row.microseconds) == EVERY
        assert row.macs["width +1"] * 6 == row.macs[OWN] * 7
        assert row.failures == {}
        assert {f"{row.stage}/{name}" for name in EVERY} < set(announced)
    assert ready.launches > len(EVERY)
    results = Results("neighbours", {"gpu": "pretended"}, {}, rows, {TASK.key})
    results.save(tmp_path / "rows.json", summary(rows))
    assert Results.load(tmp_path / "rows.json", "neighbours", Row).rows == rows


@pytest.mark.usefixtures("_no_compiler")
def test_a_plan_that_does_not_run_is_noted_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(replace(TASK, direction="forward"), H200, DIRECTIONS)
    refused = ready.stages["forward"]["height +1"][1]
    add = GPU.add_plan

    def add_plan(gpu: GPU, made: Plan, *others: Any) -> int:
        if made is refused:
            raise RuntimeError("refused\nand more")
        return add(gpu, made, *others)

    monkeypatch.setattr(GPU, "add_plan", add_plan)
    with pretended_gpu(monkeypatch):
        (row,) = measure(ready, CPU, H200.architecture, lambda _: None)
    assert row.failures == {"height +1": "RuntimeError: refused"}
    assert list(row.microseconds) == [name for name in EVERY if name != "height +1"]


@pytest.mark.usefixtures("_no_compiler")
def test_a_hanging_neighbour_is_left_out_but_not_the_layer() -> None:
    ready = prepare(replace(TASK, direction="forward"), H200, DIRECTIONS)
    fewer = ready.without("forward/batch +1", "hung")
    assert fewer is not None
    assert "batch +1" not in fewer.stages["forward"]
    assert fewer.failures == {"forward/batch +1": "hung"}
    assert fewer.without("forward/batch +1", "hung") is None
    assert ready.without(f"forward/{OWN}", "hung") is None
    assert ready.without("forward/timing", "hung") is None


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(kernel: Any, architecture: str) -> bytes:
        if ("IN_CHANNELS", 72) in kernel.constants:
            raise neighbours.jit.nvrtc.CompileError("no\nand more")
        return b""

    monkeypatch.setattr(neighbours.jit, "compile_kernel", compile_kernel)
    ready: Prepared = prepare(replace(TASK, direction="forward"), H200, DIRECTIONS)
    assert ready.failures == {"forward/in_channels +8": "CompileError: no"}
    assert "in_channels +8" not in ready.stages["forward"]


def made_up(times: Mapping[str, float], macs: Mapping[str, int], **changes: Any) -> Row:
    families = dict.fromkeys(times, PYTORCH)
    row = Row("layer", "1x1", "k4s2", True, "tf32", "nchw", "forward", times, macs, families, {})
    return replace(row, **changes)


def test_the_summary_of_the_rows() -> None:
    rows = [
        made_up({OWN: 10.0, "batch -1": 9.0, "batch +1": 12.0}, {OWN: 2, "batch -1": 1, "batch +1": 3}),
        made_up({OWN: 10.0, "width +1": 30.0}, {OWN: 4, "width +1": 5}, layer="cliff"),
        made_up({OWN: 10.0, "width +1": 12.0}, {OWN: 4, "width +1": 5}, of_suite=False),
    ]
    assert [row.worst for row in rows] == ["batch -1", "width +1", OWN]
    assert [row.ratio(row.worst) for row in rows] == pytest.approx([1.8, 2.4, 1.0])
    assert [row.is_cliff for row in rows] == [False, True, False]
    found = {group.group: group for group in groups_of(rows)}
    assert list(found) == ["forward, suite", "forward, random layers", "all, suite", "all, random layers"]
    suite = found["all, suite"]
    assert (suite.rows, suite.above, suite.cliffs) == (2, 2, 1)
    assert suite.mean == pytest.approx((1.8 * 2.4) ** 0.5)
    assert suite.largest == pytest.approx(2.4)
    cliff = "  2.40 cliff tf32 nchw forward: pytorch 10.0 us, width +1: pytorch 30.0 us"
    assert cliff in report(rows).splitlines()
    assert report([]) == "nothing was measured"


def test_without_a_gpu_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert neighbours.main(["--json", str(tmp_path / "found.json")]) == 2
    assert "no GPU" in capsys.readouterr().err
