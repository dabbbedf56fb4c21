"""The benchmark of the layers: its suite, its roof, its float64 truth, its measurements; all on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmark_layers import CEILINGS, H200, SUITE, TARGETS, small
from oracle import conv_transpose2d_reference
from sampling import sampled
from torch import Tensor

from benchmarks import kernels, measure, truth
from benchmarks.kernels import STAGE_MASKS, steps_of
from benchmarks.measure import Effort, Machine, make_data
from benchmarks.results import Row
from benchmarks.truth import Error, errors
from tconv_swap.cuda import call
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.modes import LAYOUTS, MODES, Mode
from tconv_swap.measurement.roof import Ceilings, Work, work_of
from tconv_swap.measurement.suite import SUITE_FILE, Layer, load_suite
from tconv_swap.runtime.nvrtc import CompileError
from tconv_swap.runtime.program import Kernel

SMALL = [small(layer) for layer in SUITE.layers]
BY_NAME = {layer.name: layer for layer in SUITE.layers}
SMALL_BY_NAME = {layer.name: layer for layer in SMALL}

# The suite


def test_the_suite_holds_its_baseline_and_ten_more() -> None:
    baseline = [layer.name for layer in SUITE.layers if layer.baseline]
    assert len(baseline) == 19
    assert len(SUITE.layers) >= 29
    assert all(layer.network for layer in SUITE.layers)


@pytest.mark.parametrize("layer", SUITE.layers, ids=lambda layer: layer.name)
def test_pytorch_takes_every_geometry(layer: Layer) -> None:
    g = layer.geometry
    input, weight = (torch.empty(shape, device="meta") for shape in (g.input_shape, g.weight_shape))
    bias = torch.empty(g.out_channels, device="meta") if layer.bias else None
    output = torch.nn.functional.conv_transpose2d(
        input, weight, bias, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    assert tuple(output.shape) == g.output_shape
    # fold and unfold, which the float64 truth is made of, know no output padding beyond the stride.
    assert all(extra < stride for extra, stride in zip(g.output_padding, g.stride, strict=True))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('name = "kb65"', 'name = "kb57"'), "two layers have the name kb57"),
        (("out_channels = 64", "out_chanels = 64"), "out_channels"),
        (("padding = [1, 3]", "pading = [1, 3]"), "layer kb78: unknown pading"),
        (("groups = 4", "groups = 5"), "layer kb75: 64 output channels"),
        (("output_padding = 3", "output_padding = 4"), "output padding must be smaller"),
    ],
)
def test_a_mistake_in_the_suite_is_named(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    path = tmp_path / "layers.toml"
    text = SUITE_FILE.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises((ValueError, KeyError, RuntimeError), match=complaint):
        load_suite(path)


def test_layers_are_selected_by_name_in_the_order_of_the_suite() -> None:
    assert [layer.name for layer in SUITE.select(["unet1", "kb57"])] == ["kb57", "unet1"]
    with pytest.raises(ValueError, match="no such layer: kb58, x"):
        SUITE.select(["x", "kb57", "kb58"])


# The roof


def test_the_roof_is_the_slower_of_arithmetic_and_memory() -> None:
    work = work_of(BY_NAME["kb57"].geometry, "forward", 4)
    assert work.flops == 2 * 8 * 64 * 64 * 9 * 1024 * 1024
    assert work.bytes == 4 * (8 * 64 * 1024 * 1024 + 64 * 64 * 9 + 8 * 64 * 1026 * 1026)
    compute, memory = 1e3 * work.flops / 100e12, 1e3 * work.bytes / 2000e9
    for ceilings, roof in (
        (Ceilings(2000, {"tf32": 100}), compute),
        (Ceilings(20, {"tf32": 100}), 100 * memory),
    ):
        assert work.roof_ms(ceilings, "tf32") == pytest.approx(roof)
    assert work.compute_ms(Ceilings(2000, {"tf32": 100}), "tf32") == pytest.approx(compute)
    backward = work_of(BY_NAME["kb57"].geometry, "backward", 4)
    assert backward.roof_ms(Ceilings(2000, {"tf32": 100}), "tf32") == pytest.approx(2 * compute)


def test_the_gradient_of_the_bias_reads_the_gradient_of_the_output() -> None:
    g = BY_NAME["unet4"].geometry
    assert work_of(g, "grad_bias", 2) == Work(4 * 64 * 512 * 512, 2 * 4 * 64 * 512 * 512)
    assert work_of(g, "grad_input", 2) == work_of(g, "grad_weight", 2) == work_of(g, "forward", 2)


# The truth


@pytest.mark.parametrize("together", [1, 1 << 40], ids=["image by image", "all images at once"])
@pytest.mark.parametrize("layer", SMALL, ids=lambda layer: layer.name)
def test_the_truth_equals_the_oracle(layer: Layer, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "COLUMN_BYTES", together)
    g = layer.geometry
    data = make_data(layer, MODES["fp32"], "channels_last", torch.device("cpu"))
    leaves = [t.double().requires_grad_() for t in data[:3] if t is not None]
    arguments = (g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    output = conv_transpose2d_reference(leaves[0], leaves[1], leaves[2] if layer.bias else None, *arguments)
    gradients = torch.autograd.grad(output, leaves, data.grad_output.double())
    for name, expected in zip(("output", *truth.GRADIENTS), (output.detach(), *gradients), strict=False):
        spoiled = expected.clone(memory_format=torch.contiguous_format)
        spoiled.view(-1)[-1] += expected.abs().max()
        found = errors(name, {"exact": expected, "spoiled": spoiled}, g, data)
        assert found["exact"].l2 < 1e-14, name
        assert found["exact"].largest < 1e-14, name
        assert found["spoiled"].largest == pytest.approx(1), name
        assert found["spoiled"].l2 == pytest.approx(float(expected.abs().max() / expected.norm())), name


def test_errors_of_nan_zeros_and_wrong_shapes() -> None:
    layer = SMALL_BY_NAME["unet1"]
    g = layer.geometry
    data = make_data(layer, MODES["fp32"], "nchw", torch.device("cpu"))
    zero = data._replace(input=torch.zeros_like(data.input), bias=torch.zeros(g.out_channels))
    output = torch.zeros(g.output_shape)
    assert errors("output", {"ours": output}, g, zero)["ours"] == Error(0, 0)
    assert errors("output", {"ours": output + 1}, g, zero)["ours"].l2 == math.inf
    output[-1, -1, -1, -1] = math.nan
    assert math.isnan(errors("output", {"ours": output}, g, data)["ours"].l2)
    with pytest.raises(ValueError, match="output of ours has the shape"):
        errors("output", {"ours": output[:1]}, g, data)


# The measurement


def measured(direction: str, layer: str = "cyclegan1", mode: str = "fp32", layout: str = "nchw") -> list[Row]:
    machine = Machine(torch.device("cpu"), H200, CEILINGS)
    return measure.measure(
        SMALL_BY_NAME[layer], MODES[mode], layout, direction, machine, Effort(seconds=0.01, iters=5)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_forward_row_holds_both_sides(mode: str, layout: str) -> None:
    (row,) = measured("forward", mode=mode, layout=layout)
    assert (row.layer, row.mode, row.layout, row.stage) == ("cyclegan1", mode, layout, "forward")
    assert row.pytorch.samples == row.ours.samples == 5
    assert row.speedup == row.pytorch.median_ms / row.ours.median_ms
    assert 0 < row.errors_ours["output"].l2 < 4 * MODES[mode].roundoff
    assert row.repeatable_ours
    assert row.accurate(TARGETS)


def test_backward_rows_are_all_gradients_together_and_each_alone() -> None:
    rows = measured("backward")
    assert [row.stage for row in rows] == ["backward", *truth.GRADIENTS]
    assert [list(row.errors_ours) for row in rows] == [
        list(truth.GRADIENTS),
        *([name] for name in truth.GRADIENTS),
    ]
    assert all(0 < error.l2 < 1e-6 for row in rows for error in row.errors_ours.values())
    assert [row.stage for row in measured("backward", "dcgan2")] == ["backward", "grad_input", "grad_weight"]


def test_only_wanted_tensors_need_gradients_and_switches_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = measure.conv_transpose2d
    seen = []

    def watched(*arguments: Tensor) -> Tensor:
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        seen.append(([tensor.requires_grad for tensor in arguments[:3]], precision))
        return right(*arguments)

    monkeypatch.setattr(measure, "conv_transpose2d", watched)
    for mode, precision in (("tf32", "tf32"), ("fp32", "ieee")):
        seen.clear()
        measured("backward", mode=mode)
        masks = ([True, True, True], [True, False, False], [False, True, False], [False, False, True])
        assert seen == [(mask, precision) for mask in masks]


def doubled(output: Tensor) -> Tensor:
    return output * 2


def one_pixel_lost(output: Tensor) -> Tensor:
    output = output.clone()
    output[-1, -1, -1, -1] = math.nan
    return output


@pytest.mark.parametrize("wrong", [doubled, one_pixel_lost])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_kernel_of_ours_is_found(
    wrong: Callable[[Tensor], Tensor], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measure.conv_transpose2d
    monkeypatch.setattr(measure, "conv_transpose2d", lambda *arguments: wrong(right(*arguments)))
    row = measured(direction)[0]
    assert not row.accurate(TARGETS)
    assert not row.error_ratio <= TARGETS.error_factor


def test_an_output_in_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.conv_transpose2d
    monkeypatch.setattr(measure, "conv_transpose2d", lambda *arguments: right(*arguments).contiguous())
    with pytest.raises(ValueError, match="not channels_last"):
        measured("forward", layout="channels_last")


def test_unwritten_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.empty(SMALL_BY_NAME["cyclegan1"].geometry.output_shape)
    right = measure.conv_transpose2d
    calls = []

    def lazy(*arguments: Tensor) -> Tensor:
        """Writes its output the first time only, as if the memory still held it."""
        if not calls:
            kept.copy_(right(*arguments))
        calls.append(1)
        return kept

    monkeypatch.setattr(measure, "conv_transpose2d", lazy)
    assert not measured("forward")[0].accurate(TARGETS)


def test_results_that_change_between_calls_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.conv_transpose2d
    noise = iter(range(1, 100))
    monkeypatch.setattr(
        measure, "conv_transpose2d", lambda *arguments: right(*arguments) * (1 + next(noise) * 1e-6)
    )
    assert not measured("forward")[0].repeatable_ours


def test_data_is_the_same_for_every_layout_and_mode() -> None:
    device = torch.device("cpu")
    layer = SMALL_BY_NAME["kb75"]
    plain = make_data(layer, MODES["fp32"], "nchw", device)
    for mode in MODES.values():
        for layout, memory_format in LAYOUTS.items():
            data = make_data(layer, mode, layout, device)
            assert data.input.is_contiguous(memory_format=memory_format)
            assert data.weight.is_contiguous(memory_format=memory_format)
            assert torch.equal(data.input, plain.input.to(mode.dtype))
            assert data.bias is None


def test_modes_restore_the_switches() -> None:
    switch = torch.backends.cudnn.conv
    before = switch.fp32_precision
    for mode in MODES.values():
        with mode.switched_on():
            assert switch.fp32_precision == mode.precision
        assert switch.fp32_precision == before


def test_ceilings_of_a_machine() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), copy_bytes=1 << 20, matrix=64, iters=3)
    assert set(ceilings.tflops) == set(MODES)
    assert all(0 < rate < 10 for rate in ceilings.tflops.values())
    assert 0.01 < ceilings.copy_gbps < 10000


# The kernels


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize(
    ("layer", "mode"),
    sampled(itertools.product(SUITE.layers, MODES.values()), 3),
    ids=lambda one: one.name,
)
def test_every_layer_has_a_plan_in_every_mode(
    layer: Layer, mode: Mode, request: pytest.FixtureRequest
) -> None:
    """On each commit, half of the modes of a layer are in one layout and half in the other, in turn."""
    place = SUITE.layers.index(layer) + list(MODES.values()).index(mode)
    every = request.config.getoption("all_architectures")
    for layout in LAYOUTS if every else [list(LAYOUTS)[place % len(LAYOUTS)]]:
        (step,) = steps_of(layer, mode, layout, "forward", H200, "kernel")
        (output,) = step.plan.outputs
        assert (output.shape, output.channels_last) == (
            layer.geometry.output_shape,
            layout == "channels_last",
        )
        for stage, mask in STAGE_MASKS.items():
            wanted = sum(mask) - (mask[2] and not layer.bias)
            ours = steps_of(layer, mode, layout, stage, H200, "kernel")
            assert [len(step.plan.outputs) for step in ours] == [wanted] * bool(wanted)
            assert sum(sum(step.mask) for step in steps_of(layer, mode, layout, stage, H200)) == wanted


def test_every_kernel_is_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_kernel(kernel: Kernel, architecture: str) -> bytes:
        compiled.append(kernel)
        if len(compiled) == 2:
            raise CompileError("no")
        return architecture.encode()

    monkeypatch.setattr(kernels.jit, "is_kept", lambda kernel, architecture: False)
    monkeypatch.setattr(kernels.jit, "compile_kernel", compile_kernel)
    steps = [steps_of(layer, MODES["bf16"], "nchw", "forward", H200, "kernel") for layer in SUITE.layers]
    plans = [step.plan for (step,) in steps]
    wanted = {launch.kernel for made in plans for launch in made.launches}
    assert kernels.compile_ahead(plans * 2, "sm_90") == len(wanted) - 1
    assert len(compiled) == len(wanted)
    assert set(compiled) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@pytest.mark.parametrize("layer", SMALL, ids=lambda layer: layer.name)
def test_the_named_plan_is_the_one_that_runs(layer: Layer, mode: Mode, layout: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    g = layer.geometry
    with mode.switched_on():
        data = make_data(layer, mode, layout, device)
        arguments = (g.stride, g.padding, g.output_padding, g.groups, g.dilation)
        runs = call.step_for(data.input, data.weight, data.bias, arguments)
    assert steps_of(layer, mode, layout, "forward", call.device_facts(device.index)) == (runs,)
