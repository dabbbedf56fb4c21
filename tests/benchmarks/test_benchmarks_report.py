"""The benchmark of the layers: what it makes of its measurements, and its command line."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_layers import CEILINGS, H200, SUITE, TARGETS, small
from forked import run_python
from torch import Tensor

from benchmarks import layers, layers_report, measure, render, table
from benchmarks.results import Results, Row, geometric_mean, group_rows, summarise
from benchmarks.truth import Error
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.roof import Work
from tconv_swap.measurement.timing import Timing

ROOT = Path(__file__).parents[2]
GEOMETRIES = {layer.name: str(layer) for layer in SUITE.layers}


# Sums and tables


def row(
    layer: str = "kb57",
    speedup: float = 2.0,
    error: float = 1e-4,
    theirs: float = 1e-4,
    family: str = "implicit_gemm",
    mode: str = "tf32",
    layout: str = "nchw",
    stage: str = "forward",
) -> Row:
    name = "output" if stage == "forward" else "grad_input"
    return Row(
        layer=layer,
        geometry=GEOMETRIES[layer],
        mode=mode,
        layout=layout,
        stage=stage,
        family=family,
        why="",
        work=Work(2_000_000_000, 40_000_000),
        roof_ms=0.5,
        roundoff=MODES[mode].roundoff,
        pytorch=Timing(2.0, 1.9, 2.1, 9),
        ours=Timing(2.0 / speedup, 1.9 / speedup, 2.1 / speedup, 9),
        speedup_95=(speedup * 0.9, speedup * 1.1),
        errors_pytorch={name: Error(theirs, theirs)},
        errors_ours={name: Error(error, error)},
        repeatable_pytorch=stage == "forward",
        repeatable_ours=True,
    )


def results(*rows: Row, failures: tuple[str, ...] = ()) -> Results:
    environment = {
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "driver": "580.1",
        "cuda": "13.0",
        "cudnn": "9.19.0",
        "torch": "2.11.0",
    }
    return Results(
        environment, {"commit": "abc", "created": "2026-11-21"}, CEILINGS, list(rows), list(failures)
    )


def test_rates_and_the_fraction_of_the_roof() -> None:
    one = row(speedup=2.0)
    assert one.ours.median_ms == 1.0
    assert one.tflops == pytest.approx(2.0)
    assert one.gbps == pytest.approx(40.0)
    assert one.roof_fraction == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mode", "error", "theirs", "accurate"),
    [
        ("tf32", 1.09e-4, 1e-4, True),
        ("tf32", 1.11e-4, 1e-4, False),
        ("tf32", 2e-4, 1e-7, False),  # PyTorch not using TF32 where it may is no excuse for using it
        ("fp32", 2.9e-8, 0.0, True),  # what rounding the exact result costs
        ("fp32", 3.1e-8, 0.0, False),
        ("fp16", 2.4e-4, 1e-4, True),
        ("fp16", 2.5e-4, 1e-4, False),
        ("bf16", math.nan, 1e-3, False),
        ("bf16", math.inf, 1e-3, False),
    ],
)
def test_accuracy_against_pytorch(mode: str, error: float, theirs: float, accurate: bool) -> None:
    assert row(mode=mode, error=error, theirs=theirs).accurate(TARGETS) is accurate


def test_the_worst_tensor_decides() -> None:
    both = {"grad_input": Error(1e-7, 1e-7), "grad_weight": Error(1e-7, 1e-7)}
    one = replace(row(), errors_pytorch=both, errors_ours=both | {"grad_weight": Error(3e-7, 1e-7)})
    assert (one.worst_tensor, one.error, one.accurate(TARGETS)) == ("grad_weight", 3e-7, False)
    assert one.error_ratio == pytest.approx(3)
    nan = replace(one, errors_ours=both | {"grad_input": Error(math.nan, math.nan)})
    assert nan.worst_tensor == "grad_input"


def test_the_summary_of_a_mode_and_layout() -> None:
    rows = [
        row("kb57", 2.0),
        row("kb65", 8.0, family="general"),
        row("kb71", 0.96, error=1e-3),
        row("kb57", 3.5, mode="fp16"),
    ]
    tf32, fp16 = summarise(rows, TARGETS)
    assert (tf32.stage, tf32.mode, tf32.layout, tf32.rows) == ("forward", "tf32", "nchw", 3)
    assert tf32.speedup == pytest.approx((2.0 * 8.0 * 0.96) ** (1 / 3))
    assert (tf32.slowest.layer, tf32.own_rows, tf32.slower_rows, tf32.inaccurate_rows) == ("kb71", 2, 1, 1)
    assert tf32.roof_fraction == pytest.approx((0.5 * 2.0 * 0.24) ** (1 / 3))
    assert (tf32.target, tf32.roof_target, tf32.met) == (3.0, 0.6, False)
    assert (fp16.target, fp16.met) == (4.0, False)
    assert summarise([row("kb57", 4.0, mode="fp16")], TARGETS)[0].met
    assert not summarise([row("kb57", 99.0), row("kb65", 0.9)], TARGETS)[0].met
    assert not summarise([row("kb57", 99.0), row("kb65", 9.0, error=2e-4)], TARGETS)[0].met
    alone = summarise([row(stage="grad_input")], TARGETS)[0]
    assert (alone.target, alone.roof_target, alone.met) == (None, None, True)


def test_geometric_mean() -> None:
    assert geometric_mean([1, 8, 27]) == pytest.approx(6)
    assert list(group_rows([row(), row(layout="channels_last"), row("kb65")])) == [
        ("forward", "tf32", "nchw"),
        ("forward", "tf32", "channels_last"),
    ]


def test_json_round_trip_of_results(tmp_path: Path) -> None:
    before = results(row(), row("kb65", math.pi, stage="backward"), failures=("kb71: out of memory",))
    path = tmp_path / "new" / "h200.json"
    before.save(path, TARGETS)
    after = Results.load(path)
    assert after.rows == before.rows
    assert (after.failures, after.settings, after.environment) == (
        before.failures,
        before.settings,
        before.environment,
    )
    assert after.ceilings == before.ceilings
    assert render.text(after, TARGETS) == render.text(before, TARGETS)
    document = json.loads(path.read_text())
    assert (document["rows"][0]["speedup"], document["rows"][0]["fast"]) == (2.0, True)
    path.write_text("{}")
    with pytest.raises(ValueError, match="does not hold results"):
        Results.load(path)


def test_empty_results_can_be_saved(tmp_path: Path) -> None:
    results(failures=("all: no memory",)).save(tmp_path / "none.json", TARGETS)
    assert Results.load(tmp_path / "none.json").rows == []
    assert "no memory" in render.text(results(failures=("all: no memory",)), TARGETS)


def test_the_text_names_slow_and_inaccurate_rows() -> None:
    text = render.text(
        results(
            row(),
            row("stylegan2_mod", 0.9, family="general"),
            row("kb71", 123.456, error=3e-4, layout="channels_last"),
            row(stage="backward"),
            failures=("fcn32s: out of memory",),
        ),
        TARGETS,
    )
    assert max(map(len, text.splitlines())) <= table.WIDTH
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200 (sm_90)")
    assert "copy 4284 GB/s; matrix product tf32 365" in lines[1]
    (kb57,) = [
        line.split() for line in lines[: lines.index("tf32, channels_last, forward")] if "kb57" in line
    ]
    assert " ".join(kb57) == "kb57 implicit_gemm 2.0000 1.0000 2.00x 2.0 40 50% 1.0e-04 1.00"
    assert "3/4 rows = 75.0% by our" in text
    assert "- forward stylegan2_mod: tf32 nchw" in text
    assert "- forward stylegan2_mod tf32 nchw: 0.90x (general)" in text
    assert "- forward kb71 tf32 channels_last: output 3.0e-04, 3.00 times PyTorch's (implicit_gemm)" in text
    assert "PyTorch's not bitwise repeatable\n- backward kb57: tf32 nchw" in text
    assert "- fcn32s: out of memory" in text


def test_every_name_of_the_suite_fits_its_column() -> None:
    text = render.text(results(*(row(layer.name, 1234.5) for layer in SUITE.layers)), TARGETS)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= table.WIDTH
    for layer in SUITE.layers:
        assert f"\n{layer.name} " in text


def test_markdown_is_a_table() -> None:
    text = table.Table(["layer", "ms"], [["a_long_name", "1.0"], ["b", "[20.5]"]]).markdown()
    assert text.splitlines() == [
        "| layer       |     ms |",
        "|-------------|--------|",
        "| a_long_name |    1.0 |",
        "| b           | [20.5] |",
    ]


def test_the_table_of_means_and_the_chart() -> None:
    forward = results(
        row(), row("dpt_k4s4", 8.0), row(layout="channels_last"), row("unet4", 0.5, mode="fp16")
    )
    backward = results(row(stage="backward"), row(stage="grad_bias"))
    lines = layers_report.table([forward, backward], TARGETS).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "dtype", "layout", "forward", "backward", "grad_bias",
    ]  # fmt: skip
    assert "4.00x, 2.00x, 100%" in lines[2]
    assert lines[2].startswith("| tf32  | NCHW")
    assert len(lines) == 2 + 3
    svg = layers_report.chart([forward, backward])
    assert svg == layers_report.chart([forward, backward])
    assert "prefers-color-scheme: dark" in svg
    for word in ("kb57", "dpt_k4s4", "backward, all gradients", "fp16 channels_last"):
        assert f">{word}<" in svg


def test_the_readme_matches_the_results(tmp_path: Path) -> None:
    """If this fails: python -m benchmarks.layers --render"""
    readme = tmp_path / "README.md"
    before = layers.README.read_text()
    readme.write_text(before)
    for path in layers.RESULTS.glob("h200-*ward.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    layers_report.render(tmp_path, readme, TARGETS)
    assert readme.read_text() == before
    assert (tmp_path / "h200-layers.svg").read_text() == (layers.RESULTS / "h200-layers.svg").read_text()


def test_the_readme_is_filled_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "RESULTS", tmp_path)
    monkeypatch.setattr(layers, "README", tmp_path / "README.md")
    layers.README.write_text("before\n<!-- layers -->\nold\n<!-- end of layers -->\nafter\n")
    results(row("kb65", 0.5)).save(tmp_path / "h200-forward.json", TARGETS)
    with pytest.raises(SystemExit):
        layers.main(["--render"])
    results(row(stage="backward", error=3e-4)).save(tmp_path / "h200-backward.json", TARGETS)
    assert layers.main(["--render"]) == 0
    text = layers.README.read_text()
    assert "slower than PyTorch: kb65 tf32 NCHW forward (0.50x); less accurate: none" in text
    assert "less accurate: kb57 tf32 NCHW backward (2.00x)" in text
    assert text.startswith("before\n<!-- layers -->\n")
    assert "old" not in text
    assert layers.main(["--render"]) == 0
    assert layers.README.read_text() == text


def test_show_prints_the_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(row()).save(tmp_path / "kept.json", TARGETS)
    assert layers.main(["--show", str(tmp_path / "kept.json")]) == 0
    assert capsys.readouterr().out == render.text(results(row()), TARGETS) + "\n"


# The command line


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = run_python("-m", "benchmarks.layers", env=os.environ)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "no GPU" in line
    assert "python -m benchmarks.cpu" in line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "kb57,nothing"], "no such layer: nothing"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--seconds-per-row", "0"], "0 is not positive"),
        (["--iters", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_usage_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        layers.main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The whole program with the CPU in the GPU's place, and small layers."""
    monkeypatch.setattr(layers, "load_suite", lambda: replace(SUITE, layers=tuple(map(small, SUITE.layers))))
    monkeypatch.setattr(layers, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(layers.call, "device_facts", lambda index: H200)
    monkeypatch.setattr(layers, "compile_ahead", lambda plans, architecture: len(plans))
    monkeypatch.setattr(layers, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return layers.main(["--iters", "2", "--seconds-per-row", "0.01", *arguments])


def test_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    chosen = ("--only", "unet4,dcgan5", "--dtype", "fp32", "--dtype", "bf16", "--json", str(path))
    assert run_on_the_cpu(monkeypatch, *chosen, "--direction", "both") == 0
    out, err = capsys.readouterr()
    rows = Results.load(path).rows
    # 2 dtypes x 2 layouts x (forward, backward and its 2 or 3 gradients)
    assert len(rows) == 2 * 2 * ((1 + 3) + (1 + 4))
    assert "bf16, channels_last, gradient of the bias alone" in out
    assert "[16/16, " in err


def test_a_row_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = measure.conv_transpose2d

    def fails_in_bf16(input: Tensor, *arguments: object) -> Tensor:
        if input.dtype == torch.bfloat16:
            raise RuntimeError("CUDA error: too tired\nand more")
        return right(input, *arguments)

    monkeypatch.setattr(measure, "conv_transpose2d", fails_in_bf16)
    path = tmp_path / "out.json"
    chosen = ("--only", "unet4", "--layout", "nchw", "--json", str(path))
    assert run_on_the_cpu(monkeypatch, *chosen) == 1
    kept = Results.load(path)
    assert [row.mode for row in kept.rows] == ["tf32", "fp16", "fp32"]
    assert kept.failures == ["unet4 bf16 nchw forward: RuntimeError: CUDA error: too tired"]
    assert kept.failures[0] in capsys.readouterr().out
