"""Timing networks: what is measured, on what, and what is said of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from bench_cases import prepared_generator, snapshot
from torch import Tensor, nn

from tconv_swap.freezing import freeze
from tconv_swap.layer import ConvTranspose2d
from tconv_swap.measurement.bench import BenchmarkReport, Comparison, LayerComparison, benchmark
from tconv_swap.measurement.environment import environment, machine_name
from tconv_swap.measurement.stages import NothingToDifferentiateError, sum_of_squares
from tconv_swap.measurement.timing import (
    Timing,
)
from tconv_swap.surgery import swap_layers

# --- what is measured ---------------------------------------------------------


SLEEP_MS = 20.0


class Slow(ConvTranspose2d):
    """A swapped layer that computes the right thing, late."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        time.sleep(SLEEP_MS / 1e3)
        return super().forward(x, output_size)


def comparison(report: BenchmarkReport, name: str, stage: str) -> Comparison:
    rows = [c for c in (*report.network, *report.layers) if (c.name, c.stage) == (name, stage)]
    assert len(rows) == 1
    return rows[0]


def test_a_slow_layer_shows_in_its_row_and_in_the_network() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.ConvTranspose2d(4, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3))
    swapped = swap_layers(original, inplace=False)
    swapped[2].__class__ = Slow
    report = benchmark(original, swapped, torch.randn(2, 4, 4, 4), warmup=1, iters=7)
    assert [(c.name, c.stage) for c in report.layers] == [
        ("0", "forward"), ("0", "backward"), ("2", "forward"), ("2", "backward"),
    ]  # fmt: skip
    assert [(c.name, c.stage) for c in report.network] == [
        ("network", "forward"), ("network", "backward"), ("network", "step"),
    ]  # fmt: skip
    for name, stage in (("2", "forward"), ("network", "forward"), ("network", "step")):
        slow = comparison(report, name, stage)
        assert slow.swapped.median_ms >= SLEEP_MS
        assert slow.speedup < 0.7
        assert slow.interval[1] < 1.0
    # Only the layer that is slow, and only in the pass in which it is.
    assert comparison(report, "0", "forward").swapped.median_ms < SLEEP_MS
    assert comparison(report, "2", "backward").swapped.median_ms < SLEEP_MS
    assert comparison(report, "network", "backward").swapped.median_ms < SLEEP_MS


class Witness(torch.autograd.Function):
    """Writes down what its backward pass is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any]) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.log.append(("backward", ctx.needs_input_grad[0]))
        return gradient, None


class Witnessed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 2, 2)
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(("forward", self.training, torch.is_grad_enabled(), torch.backends.cudnn.benchmark))
        return self.up(Witness.apply(x, self.log))


@pytest.mark.parametrize("callers_gradients", [False, True])
def test_stages_run_in_the_right_mode_and_backward_reaches_the_inputs(
    callers_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[float]] = []
    plain_step = torch.optim.SGD.step

    def step(self: torch.optim.SGD, closure: Any = None) -> Any:
        steps.append([float(p.grad.abs().sum()) for group in self.param_groups for p in group["params"]])
        return plain_step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    original = Witnessed()
    swapped = swap_layers(original, inplace=False)
    with torch.set_grad_enabled(callers_gradients):
        benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1, per_layer=False)
    # forward: one trial and one sample; the same for backward, and for step, which has no gradient
    # for the inputs, as in training.
    evaluating, training = ("forward", False, False, True), ("forward", True, True, True)
    expected = [evaluating] * 2 + [training, ("backward", True)] * 2 + [training] * 2
    assert original.log == expected
    assert swapped.log == expected
    assert len(steps) == 4
    assert all(gradient > 0 for gradients in steps for gradient in gradients)


@pytest.mark.parametrize("training", [False, True])
def test_both_sides_are_in_the_mode_of_the_stage(training: bool) -> None:
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.ConvTranspose2d(2, 2, 2)).train(training)
    swapped = swap_layers(original, inplace=False)
    swapped[0].train(not training)
    modes: dict[str, list[tuple[str, bool]]] = {}
    for side, model in (("original", original), ("swapped", swapped)):
        model[0].register_forward_pre_hook(
            lambda layer, _, side=side: list(modes.values())[-1].append((side, layer.training))
        )
    modes["before"] = []
    benchmark(
        original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1,
        progress=lambda what, *_: modes.update({what: []}),
    )  # fmt: skip
    for stage in ("forward", "backward"):
        expected = {(side, stage == "backward") for side in ("original", "swapped")}
        assert set(modes[f"0 {stage}"]) == expected
        assert set(modes[f"network {stage}"]) == expected
    assert [m.training for m in original.modules()] == [training] * 3
    assert [m.training for m in swapped.modules()] == [training, not training, training]


def test_a_frozen_network_is_frozen_in_every_forward_and_afterwards() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2)).eval()
    swapped = freeze(swap_layers(original, inplace=False))
    frozen: dict[str, list[bool]] = {}
    swapped[0].register_forward_pre_hook(
        lambda layer, _: list(frozen.values())[-1].append(layer.tconv_is_frozen())
    )
    for backward in (False, True):
        frozen.clear()
        benchmark(
            original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1, backward=backward,
            progress=lambda what, *_: frozen.update({what: []}),
        )  # fmt: skip
        assert set(frozen["0 forward"]) == set(frozen["network forward"]) == {True}
        assert swapped[0].tconv_is_frozen()
    assert set(frozen["0 backward"]) == set(frozen["network step"]) == {False}


def test_layers_are_measured_on_what_reaches_them() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.ConvTranspose2d(3, 3, 3, stride=2)
            self.alias = self.shared
            self.idle = nn.ConvTranspose2d(3, 3, 2)

        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            half = self.shared(x.contiguous(memory_format=torch.channels_last), output_size=[8, 8])
            again = self.alias(x.contiguous(memory_format=torch.channels_last), output_size=[8, 8])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                quarter = self.shared(half[:, :, ::2].contiguous())
            return [{"a": half + again, "b": (quarter, self.shared(half[:, :, ::2].contiguous()))}]

    original = Pyramid()
    report = benchmark(
        original,
        swap_layers(original, inplace=False),
        torch.randn(2, 3, 3, 3),
        warmup=0,
        iters=1,
        backward=False,
    )
    rows = [(c.name, c.input_shape, c.dtype, c.memory_format, c.calls) for c in report.layers]
    assert rows == [
        ("shared", (2, 3, 3, 3), "float32", "channels_last", 2),
        ("shared", (2, 3, 4, 8), "bfloat16", "contiguous", 1),
        ("shared", (2, 3, 4, 8), "float32", "contiguous", 1),
    ]
    assert {c.stage for c in (*report.layers, *report.network)} == {"forward"}
    assert [note for note in report.notes if note.startswith("not timed, no call")] == [
        "not timed, no call of theirs was seen in the forward pass: idle"
    ]


def test_the_network_may_be_the_layer_itself() -> None:
    original = nn.ConvTranspose2d(2, 2, 2)
    swapped = swap_layers(original, inplace=False)
    report = benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1)
    assert [(c.name, c.stage) for c in report.layers] == [("", "forward"), ("", "backward")]


class Detector(nn.Module):
    """As torchvision's: a list of images in; losses in training, which need targets, else detections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 2, 2, 2)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        maps = [self.up(image[None]) for image in images]
        if not self.training:
            return [{"scores": m.flatten(), "labels": m.flatten().argmax()} for m in maps]
        if targets is None:
            raise ValueError("targets should not be none when in training mode\nsecond line")
        return {"loss": sum((m - t["map"]).abs().mean() for m, t in zip(maps, targets, strict=True))}


def test_a_network_that_returns_losses_in_train_mode() -> None:
    original = Detector()
    inputs = ([torch.randn(3, 4, 4)], [{"map": torch.zeros(1, 2, 8, 8), "label": torch.zeros(1).long()}])
    report = benchmark(original, swap_layers(original, inplace=False), inputs, warmup=0, iters=1)
    assert [c.stage for c in report.network] == ["forward", "backward", "step"]


def test_stages_that_the_original_cannot_run_are_noted() -> None:
    original = Detector()
    report = benchmark(
        original, swap_layers(original, inplace=False), ([torch.randn(3, 4, 4)],), warmup=0, iters=7
    )
    assert [c.stage for c in report.network] == ["forward"]
    why = "the original network raises ValueError: targets should not be none when in training mode"
    assert report.notes == [f"network backward not timed: {why}", f"network step not timed: {why}"]

    frozen = nn.Sequential(nn.ConvTranspose2d(2, 2, 2)).requires_grad_(False)
    embedding = nn.Sequential(nn.Embedding(4, 2), nn.Unflatten(1, (2, 1)), *frozen).requires_grad_(False)
    report = benchmark(
        embedding, swap_layers(embedding, inplace=False), torch.zeros(1, 2).long(), warmup=0, iters=7
    )
    assert [c.stage for c in report.network] == ["forward"]
    assert [note.rpartition(": ")[2] for note in report.notes] == [
        "no gradient reaches the loss",
        "no parameter requires a gradient",
    ]


def test_a_network_that_runs_in_train_mode_only() -> None:
    class TrainOnly(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("train mode only")
            return super().forward(x)

    original = TrainOnly(nn.ConvTranspose2d(2, 2, 2))
    swapped = swap_layers(original, inplace=False)
    report = benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=7)
    assert [c.stage for c in report.network] == ["backward", "step"]
    assert [c.stage for c in report.layers] == ["forward", "backward"]
    assert report.notes == [
        "network forward not timed: the original network raises RuntimeError: train mode only"
    ]


def test_networks_that_cannot_be_compared_are_refused() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2))
    with pytest.raises(ValueError, match="same object"):
        benchmark(model, model, torch.randn(1, 2, 3, 3))
    other = nn.Sequential(nn.Sequential(nn.ConvTranspose2d(2, 2, 2)))
    with pytest.raises(ValueError, match=r"'0\.0' that original has not"):
        benchmark(model, swap_layers(other), torch.randn(1, 2, 3, 3))


def test_progress_and_few_samples() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2))
    told: list[tuple[str, int, int]] = []
    report = benchmark(
        original,
        swap_layers(original, inplace=False),
        torch.randn(1, 2, 3, 3),
        warmup=0,
        iters=2,
        progress=lambda *step: told.append(step),
    )
    assert told == [
        ("0 forward", 0, 5),
        ("0 backward", 1, 5),
        ("network forward", 2, 5),
        ("network backward", 3, 5),
        ("network step", 4, 5),
        ("done", 5, 5),
    ]
    assert report.notes == ["2 samples per timing are too few to tell a difference from noise"]


def test_loss_reaches_every_output_and_stays_in_range_in_float16() -> None:
    big = torch.full((1000, 1000), 2.0, dtype=torch.float16, requires_grad=True)
    small = torch.tensor(3.0, requires_grad=True)
    loss = sum_of_squares({"a": [big, torch.zeros(2).long()], "b": (small,)})
    loss.backward()
    assert loss.item() == pytest.approx(4e3 + 9)  # a sum over float16 would be infinite
    assert big.grad is not None
    assert big.grad.unique().tolist() == pytest.approx([4e-3], rel=1e-3)
    assert small.grad == 6.0
    with pytest.raises(NothingToDifferentiateError, match="no floating-point tensor"):
        sum_of_squares([torch.zeros(1).long()])


def test_a_given_loss() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2))
    seen: list[torch.Size] = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output.mean()

    benchmark(
        original,
        swap_layers(original, inplace=False),
        torch.randn(1, 2, 3, 3),
        warmup=0,
        iters=1,
        per_layer=False,
        loss=loss,
    )
    assert seen
    assert set(seen) == {torch.Size((1, 2, 4, 4))}


def test_the_share_counts_every_call_and_is_at_most_1() -> None:
    def took(ms: float) -> Timing:
        return Timing(ms, ms, ms, 9)

    report = BenchmarkReport(
        network=[Comparison("network", "forward", took(10), took(5))],
        layers=[
            LayerComparison("a", "forward", took(2), took(1), calls=3),
            LayerComparison("b", "forward", took(1), took(1)),
            LayerComparison("a", "backward", took(9), took(9)),
        ],
    )
    assert report.transposed_share("forward") == pytest.approx(0.7)
    assert report.transposed_share("backward") is None
    report.layers.append(LayerComparison("c", "forward", took(99), took(1)))
    assert report.transposed_share("forward") == 1.0


def test_report_round_trips_through_json() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2))
    swapped = swap_layers(original, inplace=False)
    report = benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=2)
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["peak_memory"] is None  # the CPU does not count
    assert data["layers"][0]["input_shape"] == [1, 2, 3, 3]
    assert data["network"][0]["speedup"] == report.network[0].speedup
    assert data["environment"]["device"] == "cpu"
    assert data["method"]["clock"] == "wall clock"
    assert data["method"]["iters"] == 2


def test_environment_says_which_machine() -> None:
    facts = environment("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["cpu"]
    assert facts["cpu"] in machine_name(facts)
    assert f"torch {torch.__version__}" in machine_name(facts)


def test_machine_name_of_a_gpu() -> None:
    facts = {
        "gpu": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.65.06", "cuda": "13.0",
        "cudnn": "9.19.0", "torch": "2.11.0",
    }  # fmt: skip
    expected = "NVIDIA H200 (sm_90), driver 580.65.06, CUDA 13.0, cuDNN 9.19.0, torch 2.11.0"
    assert machine_name(facts) == expected
    assert "driver" not in machine_name(facts | {"driver": None})


@pytest.mark.gpu
def test_benchmark_on_cuda() -> None:
    original = prepared_generator().cuda()
    swapped = swap_layers(original, inplace=False)
    latent = torch.randn(2, 6, 1, 1, device="cuda")
    before = snapshot(original), snapshot(swapped), torch.cuda.get_rng_state().tolist()
    report = benchmark(original, swapped, latent, warmup=1, iters=6)
    assert (snapshot(original), snapshot(swapped), torch.cuda.get_rng_state().tolist()) == before
    assert [c.stage for c in report.network] == ["forward", "backward", "step"]
    assert report.peak_memory is not None
    assert [peak.stage for peak in report.peak_memory] == ["forward", "step"]
    assert all(peak.original > 0 and peak.swapped > 0 for peak in report.peak_memory)
    assert report.environment["gpu"] == torch.cuda.get_device_name()
    assert report.environment["cudnn_benchmark"] is True
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
