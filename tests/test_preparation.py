"""``prepare``: the kernels that are compiled ahead, for which calls, and that their first run compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from preparation_cases import H200, Compiler, compiler, decoder, is_kept, kernels_of, own_cache
from torch import Tensor, nn

import tconv_swap
from tconv_swap import preparation
from tconv_swap.cuda import call, choice, first_use
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.common.schedules import SIZES, SIZES_OF_ONE_ROW
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.kernels.pad import reflection_pad
from tconv_swap.runtime import jit

__all__ = ["compiler", "own_cache"]


def test_a_fresh_process_compiles_nothing(compiler: Compiler) -> None:
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


@pytest.mark.parametrize("inputs", [torch.randn(2, 8, 16, 16), None], ids=["observed", "usual"])
@pytest.mark.parametrize("training", [False, True])
def test_a_padding(training: bool, inputs: Tensor | None, compiler: Compiler) -> None:
    model = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3))
    tconv_swap.swap_layers(model, fuse="all")
    tconv_swap.prepare(
        model, inputs, architecture="sm_90a", training=training, memory_formats=[torch.channels_last]
    )
    pad = reflection_pad.Pad((2, 8, 16, 16), True, torch.float32, (1, 1, 1, 1))
    forward, backward = (reflection_pad.plan_forward(pad, H200), reflection_pad.plan_backward(pad, H200))
    assert forward is not None
    assert backward is not None
    assert is_kept(forward.launches[0].kernel)
    assert is_kept(backward.launches[0].kernel) is training


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
