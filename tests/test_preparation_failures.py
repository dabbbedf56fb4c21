"""``prepare`` where nothing has to be compiled, where something fails or is interrupted, and its command."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import run
from preparation_cases import Compiler, compiler, decoder, own_cache
from torch import Tensor, nn

import tconv_swap
from tconv_swap import preparation
from tconv_swap.runtime import cores, host, jit, nvrtc
from tconv_swap.runtime.compiler import BuildError
from tconv_swap.runtime.nvrtc import CompileError
from tconv_swap.runtime.program import Kernel

__all__ = ["compiler", "own_cache"]


def test_an_empty_model_needs_no_kernels(compiler: Compiler) -> None:
    for inputs in (None, torch.randn(1, 3)):
        report = tconv_swap.prepare(nn.Sequential(nn.Linear(3, 3)), inputs, architecture="sm_90a")
        assert (report.layers, report.compiled, report.found) == (0, 0, 0)
    assert (compiler.sources, compiler.built) == ([], 0)


@pytest.mark.parametrize("inputs", [torch.randn(1, 4, 3, 3), None], ids=["observed", "usual"])
def test_a_layer_that_pytorch_computes_needs_no_kernels(inputs: Tensor | None, compiler: Compiler) -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(4, 4, 2)), backend="native")
    report = tconv_swap.prepare(model, inputs, architecture="sm_90a")
    assert (report.layers, report.compiled) == (1, 0)
    assert model[0].tconv_backend == "native"
    double = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(4, 4, 2))).double()
    wide = None if inputs is None else inputs.double()
    assert tconv_swap.prepare(double, wide, architecture="sm_90a").compiled == 0


def test_the_network_is_restored(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(fuse="blocks", backend="kernel")
    tconv_swap.freeze(model.eval())
    packed = model[0]._tconv_packed
    model[1].train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backends: list[str] = []
    real = tconv_swap.op.conv_transpose2d

    def seen(*arguments: Any) -> Tensor:
        backends.append(arguments[8] if len(arguments) > 8 else "auto")
        return real(*arguments)

    monkeypatch.setattr(tconv_swap.op, "conv_transpose2d", seen)
    tconv_swap.prepare(model, torch.randn(2, 64, 8, 8), architecture="sm_90a")
    assert backends == ["native", "native"], "nothing of ours runs"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [layer.tconv_backend for layer in (model[0], model[3])] == ["kernel", "kernel"]
    assert model[0]._tconv_packed is packed
    assert model[0].tconv_is_frozen()
    assert model[1].training
    assert not model[0].training


# Progress, errors


def test_progress_counts_the_kernels(compiler: Compiler) -> None:
    told: list[tuple[str, int | None, int | None]] = []
    model, x = decoder(), torch.randn(2, 64, 8, 8)
    report = tconv_swap.prepare(
        model,
        x,
        architecture="sm_90a",
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    counts = [(done, total) for what, done, total in told if what == "compiling kernels"]
    assert counts == [(one + 1, report.compiled) for one in range(report.compiled)]
    assert told[0] == ("planning", None, None)


def test_wrong_arguments_are_named(compiler: Compiler) -> None:
    model = decoder()
    with pytest.raises(ValueError, match="architecture: expected one of sm_75"):
        tconv_swap.prepare(model, architecture="sm_1")
    with pytest.raises(ValueError, match=r"dtypes: expected some of .*, got torch.int8"):
        tconv_swap.prepare(model, architecture="sm_80", dtypes=[torch.int8])
    with pytest.raises(ValueError, match=r"memory_formats: expected some of .*, got torch.preserve_format"):
        tconv_swap.prepare(model, architecture="sm_80", memory_formats=[torch.preserve_format])


def test_without_a_gpu_the_architecture_has_to_be_named(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU here; name one of sm_75"):
        tconv_swap.prepare(decoder())


def test_a_failing_kernel_raises_after_the_others_are_compiled(compiler: Compiler) -> None:
    model, x = decoder(fuse="blocks"), torch.randn(2, 64, 8, 8)
    compiler.fails = "norm_forward.cu"
    with pytest.raises(CompileError, match="it does not compile"):
        tconv_swap.prepare(model, x, architecture="sm_90a")
    compiler.fails = ""
    report = tconv_swap.prepare(model, x, architecture="sm_90a")
    assert (report.compiled, report.found > 2) == (1, True)


def test_a_launcher_that_cannot_be_built_is_an_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise BuildError("no compiler")

    monkeypatch.setattr(host, "build", refuse)
    with pytest.raises(BuildError, match="no compiler"):
        tconv_swap.prepare(decoder(), torch.randn(1, 64, 4, 4), architecture="sm_90a")


def test_an_interruption_cancels_kernels_that_have_not_started(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 1)
    begun = threading.Event()
    kernels = [Kernel("common/cast.cu", "cast", (("THREADS", count),)) for count in range(50)]

    def interrupt(done: int, total: int) -> None:
        begun.set()
        raise KeyboardInterrupt

    def slowly(*given: Any) -> tuple[bytes, str]:
        begun.wait(5 if compiler.sources else 0)
        return compiler.compile(*given)

    monkeypatch.setattr(nvrtc, "compile_cubin", slowly)
    with pytest.raises(KeyboardInterrupt):
        jit.compile_all(kernels, "sm_90a", interrupt)
    assert 1 <= len(compiler.sources) <= 4


# The command


def test_the_prepare_command(compiler: Compiler, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
    file, target = tmp_path / "m.pt", tmp_path / "r.json"
    torch.save(model, file)
    options = ("--arch", "sm_90a", "--input-shape", "2,8,5,5", "--autocast", "float16", "--training")
    result = run("prepare", file, *options, "--json", target)
    assert result.exit_code == 0, result.output
    assert "1 layers are ready for sm_90a" in result.stdout
    found = json.loads(target.read_text())
    assert (found["outcome"], found["layers"], found["compiled"]) == ("prepared", 1, len(compiler.sources))
    assert compiler.knows("norm_backward.cu", "using Element = Half;", "using Parameter = float;")
    again = run("prepare", file, *options)
    assert "0 kernels compiled" in again.stdout
    usual = run("prepare", file, "--arch", "sm_90a", "--dtype", "float16", "--channels-last", "--quiet")
    assert (usual.exit_code, usual.stdout) == (0, "")
    assert compiler.knows(
        "norm_forward.cu", "using Parameter = Half;", "constexpr bool CHANNELS_LAST = true;"
    )


def test_the_prepare_command_reports_errors(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3)), tmp_path / "none.pt")
    torch.save(nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), tmp_path / "m.pt")
    assert run("prepare", tmp_path / "none.pt", "--arch", "sm_80").exit_code == 4
    unknown = run("prepare", tmp_path / "m.pt", "--arch", "sm_1")
    assert (unknown.exit_code, "--arch sm_1: expected one of" in unknown.stderr) == (2, True)
    nowhere = run("prepare", tmp_path / "m.pt", "--device", "cpu")
    assert (nowhere.exit_code, "name its --arch" in nowhere.stderr) == (2, True)
    monkeypatch.setattr(preparation, "cache_problem", lambda: "the disk is full")
    full = run("prepare", tmp_path / "m.pt", "--arch", "sm_90a")
    assert (full.exit_code, "not kept: the disk is full" in full.stderr) == (5, True)


def test_an_interrupted_command_says_what_is_kept(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    torch.save(nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), tmp_path / "m.pt")
    monkeypatch.setattr("tconv_swap.cli.workflow.prepare", interrupted)
    result = run("prepare", tmp_path / "m.pt", "--arch", "sm_90a")
    assert result.exit_code == 130
    assert "interrupted; what was compiled until then is kept" in result.stderr
