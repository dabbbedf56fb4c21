"""``prepare``: the kernels that are compiled ahead, for which calls, and that their first run compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import run
from torch import Tensor, nn

import tconv_swap
from tconv_swap import preparation
from tconv_swap.cuda import call, choice, first_use
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.common.schedules import SIZES, SIZES_OF_ONE_ROW
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.runtime import host, jit, nvrtc
from tconv_swap.runtime.cache import cache_directory
from tconv_swap.runtime.compiler import BuildError
from tconv_swap.runtime.nvrtc import CompileError
from tconv_swap.runtime.program import Kernel

H200 = plan.Device("sm_90a", 132, 227 << 10)
ALL = (True, True, True)


class Compiler:
    """Replaces NVRTC; records what it has to compile, in order."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.options: list[tuple[str, ...]] = []
        self.fails = ""
        self.built = 0

    def compile(self, source: str, name: str, headers: Any, options: Any) -> tuple[bytes, str]:
        self.sources.append(source)
        self.options.append(tuple(options))
        if self.fails and self.fails in source:
            raise CompileError("it does not compile")
        return b"machine code", "log"

    def build(self) -> Path:
        self.built += 1
        return Path("tconv_swap.so")

    def knows(self, source: str, *constants: str) -> bool:
        return any(source in one and all(line in one for line in constants) for one in self.sources)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(tmp_path / "cache"))
    cache_directory.cache_clear()
    yield tmp_path / "cache"
    cache_directory.cache_clear()


@pytest.fixture
def compiler(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(nvrtc, "compile_cubin", found.compile)
    monkeypatch.setattr(host, "build", found.build)
    return found


def decoder(**arguments: Any) -> nn.Sequential:
    model = nn.Sequential(
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    tconv_swap.swap_layers(model, **arguments)
    return model


def kernels_of(geometry: Geometry, dtype: torch.dtype, training: bool = False) -> list[Kernel]:
    """Returns the kernels that a call in NCHW launches, by the library's choice."""
    precision = "tf32" if dtype == torch.float32 and call.precision() == "tf32" else "ieee"
    posed = plan.Problem(geometry, dtype, precision, False, False)
    steps = [choice.choose_forward(posed, True, H200, "auto")]
    if training:
        steps += choice.choose_backward(posed, ALL, H200, "auto")
    return [one.kernel for step in steps if step.plan for one in step.plan.launches]


def is_kept(kernel: Kernel) -> bool:
    return jit.is_kept(kernel, "sm_90a")


# What is compiled


def test_a_fresh_process_compiles_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "build", lambda: None)
    model = decoder(fuse="blocks").half()
    inputs = [torch.randn(2, 64, size, size + 1).half() for size in (4, 9)]
    report = tconv_swap.prepare(model.train(), inputs, training=True, architecture="sm_90a")
    assert report.compiled > 6
    assert (report.layers, report.found, report.architecture) == (2, 0, "sm_90a")
    script = """
import json, torch
from tconv_swap.runtime import jit, nvrtc
from tconv_swap.kernels import plan
from tconv_swap.cuda import choice
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.norm import plan as norms
from tconv_swap.kernels.norm.shape import Activation, Norm
from tconv_swap.geometry import Geometry
asked = []
nvrtc.compile_cubin = lambda source, name, *_: (asked.append(name), (b"", ""))[1]
device = plan.Device("sm_90a", 132, 227 << 10)
plans = []
for size in (4, 9):
    for i, o, h, w in ((64, 32, size, size + 1), (32, 3, 2 * size, 2 * size + 2)):
        posed = plan.Problem(Geometry(2, i, h, w, o, (4, 4), (2, 2), (1, 1)), torch.float16, "ieee", False, False)
        plans.append(choice.choose_forward(posed, True, device, "auto").plan)
        if o == 3:
            plans.append(with_epilogue(plans[-1], Epilogue(False, Activation.TANH)))
        for mask in ((True, True, True), (False, True, True)):
            plans += [step.plan for step in choice.choose_backward(posed, mask, device, "auto")]
    norm = Norm((2, 32, 2 * size, 2 * size + 2), False, torch.float16, torch.float16, False, 1e-5, Activation.RELU)
    plans.append(norms.plan_forward(norm, trains=True, updates=True, momentum=0.1, saves=True, device=device))
    plans.append(norms.plan_backward(norm, trains=True, wants=(True, True), device=device))
launches = [launch for made in plans if made for launch in made.launches]
for launch in launches:
    jit.compile_kernel(launch.kernel, "sm_90a")
print(json.dumps([len({one.kernel for one in launches}), asked]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == [report.compiled, []]


def test_a_second_run_finds_every_kernel_on_disk(compiler: Compiler) -> None:
    model, x = decoder(fuse="blocks"), torch.randn(2, 64, 8, 8)
    first = tconv_swap.prepare(model, x, architecture="sm_90a")
    second = tconv_swap.prepare(model, x, architecture="sm_90a")
    assert (first.compiled, first.found) == (len(compiler.sources), 0)
    assert (second.compiled, second.found) == (0, first.compiled)
    assert first.compiled > 2
    assert str(second).startswith(
        f"2 layers are ready for sm_90a: 0 kernels compiled, {first.compiled} found"
    )
    assert compiler.built == 2
    assert json.loads(json.dumps(second.to_dict()))["found"] == first.compiled


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_prepared_if_requested(training: bool, compiler: Compiler) -> None:
    tconv_swap.prepare(decoder(), torch.randn(2, 64, 8, 8), training=training, architecture="sm_90a")
    for geometry in (
        Geometry(2, 64, 8, 8, 32, (4, 4), (2, 2), (1, 1)),
        Geometry(2, 32, 16, 16, 3, (4, 4), (2, 2), (1, 1)),
    ):
        assert all(map(is_kept, kernels_of(geometry, torch.float32)))
        assert all(map(is_kept, kernels_of(geometry, torch.float32, training=True))) == training


def test_inputs_of_several_sizes_and_kinds(compiler: Compiler) -> None:
    layer = tconv_swap.ConvTranspose2d(64, 3, 4, 2, 1)
    x = torch.empty(2, 64, 8, 8, device="meta")
    wide = torch.empty(5, 64, 40, 7, device="meta")
    for inputs in ([x, wide], [(x,), {"input": wide}], [tconv_swap.Inputs((x,)), wide]):
        report = tconv_swap.prepare(layer, inputs, architecture="sm_90a")
        for batch, height, width in ((2, 8, 8), (5, 40, 7)):
            geometry = Geometry(batch, 64, height, width, 3, (4, 4), (2, 2), (1, 1))
            assert all(map(is_kept, kernels_of(geometry, torch.float32)))
        assert report.layers == 1


def test_1d_layers_are_prepared(compiler: Compiler) -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose1d(64, 32, 16, 8, 4)), include_1d=True)
    report = tconv_swap.prepare(model, torch.randn(2, 64, 100), architecture="sm_90a")
    assert (report.layers, report.compiled > 0) == (1, True)
    row = Geometry(2, 64, 1, 100, 32, (1, 16), (1, 8), (0, 4))
    assert all(map(is_kept, kernels_of(row, torch.float32)))
    tconv_swap.prepare(model, architecture="sm_90a", memory_formats=[torch.channels_last])
    for batch, height, width in SIZES_OF_ONE_ROW:
        row = Geometry(batch, 64, height, width, 32, (1, 16), (1, 8), (0, 4))
        assert all(map(is_kept, kernels_of(row, torch.float32)))


@pytest.mark.parametrize("training", [False, True])
def test_without_inputs_representative_sizes_are_prepared(training: bool, compiler: Compiler) -> None:
    report = tconv_swap.prepare(decoder(fuse="blocks").half(), training=training, architecture="sm_90a")
    assert report.layers == 2
    for batch, height, width in SIZES:
        geometry = Geometry(batch, 64, height, width, 32, (4, 4), (2, 2), (1, 1))
        assert all(map(is_kept, kernels_of(geometry, torch.float16, training)))
    assert compiler.knows("norm_forward.cu", "using Element = Half;", "constexpr int ACTIVATION = 1;")
    assert compiler.knows("norm_backward.cu") == training


def test_kernels_for_given_dtypes_and_layouts_are_prepared(compiler: Compiler) -> None:
    model, x = decoder(fuse="blocks"), torch.randn(2, 64, 8, 8)
    tconv_swap.prepare(model, x, architecture="sm_90a", dtypes=[torch.bfloat16])
    assert compiler.knows("common/cast.cu", "using From = float;", "using To = BFloat16;")
    assert not compiler.knows("common/cast.cu", "using To = float;"), "no gradient is cast back"
    # An autocast casts the input of a norm, and none of its parameters.
    assert compiler.knows("norm_forward.cu", "using Element = BFloat16;", "using Parameter = float;")
    assert not compiler.knows("norm_forward.cu", "using Element = float;")
    geometry = Geometry(2, 64, 8, 8, 32, (4, 4), (2, 2), (1, 1))
    assert all(map(is_kept, kernels_of(geometry, torch.bfloat16)))
    count = len(compiler.sources)
    tconv_swap.prepare(
        model, x, architecture="sm_90a", dtypes=[torch.float16], memory_formats=preparation.FORMATS
    )
    assert len(compiler.sources) > count
    assert compiler.knows("norm_forward.cu", "using Element = Half;", "constexpr bool CHANNELS_LAST = true;")
    assert compiler.knows("norm_forward.cu", "using Element = Half;", "constexpr bool CHANNELS_LAST = false;")
    posed = plan.Problem(geometry, torch.float16, "ieee", True, True)
    made = choice.choose_forward(posed, True, H200, "auto").plan
    assert made is not None
    assert all(is_kept(one.kernel) for one in made.launches)
    tconv_swap.prepare(model, x, architecture="sm_90a", dtypes=[torch.bfloat16], training=True)
    assert compiler.knows("common/cast.cu", "using From = BFloat16;", "using To = float;")


@pytest.mark.parametrize("inputs", [torch.randn(2, 64, 8, 8), None], ids=["observed", "usual"])
@pytest.mark.parametrize("training", [False, True])
def test_layers_fused_with_norm_and_activation_in_evaluation(
    training: bool, inputs: Tensor | None, compiler: Compiler
) -> None:
    model = decoder(fuse="blocks").train(training)
    tconv_swap.prepare(model, inputs, architecture="sm_90a")
    behind = (
        (
            Geometry(2, 64, 8, 8, 32, (4, 4), (2, 2), (1, 1)),
            Epilogue(True, Activation.RELU, eps=1e-5),
            training,
        ),
        (Geometry(2, 32, 16, 16, 3, (4, 4), (2, 2), (1, 1)), Epilogue(False, Activation.TANH), False),
    )
    for geometry, epilogue, by_batch in behind:
        precision = "tf32" if call.precision() == "tf32" else "ieee"
        posed = plan.Problem(geometry, torch.float32, precision, False, False)
        made = choice.choose_forward(posed, True, H200, "auto").plan
        assert made is not None
        ended = with_epilogue(made, epilogue)
        assert ended is not None
        assert is_kept(ended.launches[-1].kernel) is not by_batch


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 8, 3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.up(x)) + x)


@pytest.mark.parametrize("inputs", [torch.randn(2, 8, 16, 16), None], ids=["observed", "usual"])
def test_a_sum_in_a_block(inputs: Tensor | None, compiler: Compiler) -> None:
    model = Residual()
    tconv_swap.swap_layers(model, fuse="all")
    tconv_swap.prepare(model, inputs, architecture="sm_90a")
    assert compiler.knows("norm_forward.cu", "constexpr bool ADDS = true;")


def test_candidates_of_a_first_use_are_compiled_on_an_unmeasured_gpu(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = tconv_swap.ConvTranspose2d(64, 32, 4, 2, 1).half(), torch.empty(8, 64, 16, 16).half()
    posed = plan.Problem(
        Geometry(8, 64, 16, 16, 32, (4, 4), (2, 2), (1, 1)), torch.float16, "ieee", False, False
    )
    device = plan.Device("sm_80", 108, 163 << 10)
    tried = {
        one.kernel
        for made in first_use.candidates_of(posed, (), True, device, first_use.CANDIDATES)
        for one in made.launches
    }
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "0")
    tconv_swap.prepare(layer, x, architecture="sm_80")
    assert not all(jit.is_kept(kernel, "sm_80") for kernel in tried)
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "1")
    tconv_swap.prepare(layer, x, architecture="sm_80")
    assert all(jit.is_kept(kernel, "sm_80") for kernel in tried)


# What is not


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
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
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
