"""Timing: the timer on a clock that the test turns, networks that come out as they were, what is measured."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tconv_swap.layer import ConvTranspose2d
from tconv_swap.measurement.bench import BenchmarkReport, Comparison, LayerComparison, benchmark
from tconv_swap.measurement.environment import environment, machine_name
from tconv_swap.measurement.stages import NothingToDifferentiateError, sum_of_squares
from tconv_swap.measurement.state import preserved
from tconv_swap.measurement.timing import (
    CudaClock,
    Timing,
    Variant,
    WallClock,
    balanced_order,
    clock_for,
    speedup_interval,
    time_interleaved,
)
from tconv_swap.surgery import swap_layers


class FakeTime:
    """A clock that moves only when a variant says that it took time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.seconds

    def taking(self, name: str, milliseconds: float | Callable[[int], float]) -> Callable[[], None]:
        calls = 0

        def run() -> None:
            nonlocal calls
            self.log.append(name)
            self.seconds += (milliseconds(calls) if callable(milliseconds) else milliseconds) / 1e3
            calls += 1

        return run


# --- the timer ----------------------------------------------------------------


def test_statistics_of_samples() -> None:
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.median_ms, timing.q1_ms, timing.q3_ms, timing.samples) == (3.0, 2.0, 4.0, 5)
    assert timing.samples_ms == (5.0, 1.0, 3.0, 2.0, 4.0)
    assert timing.spread == pytest.approx(1 / 3)
    assert timing.to_dict() == {"median_ms": 3.0, "q1_ms": 2.0, "q3_ms": 4.0, "samples": 5}
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1, (7.0,))


def test_variants_alternate_in_a_balanced_order() -> None:
    now = FakeTime()
    variants = {"A": now.taking("A", 1), "B": now.taking("B", 1)}
    time_interleaved(variants, warmup=0, iters=8, clock=WallClock(now))
    assert "".join(now.log) == "ABBABAABABBABAAB"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_variant_comes_first_equally_often(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = [balanced_order(names, index) for index in range(2 * count)]
    assert all(sorted(order) == names for order in rounds)
    for place in range(count):
        assert [sum(order[place] == name for order in rounds) for name in names] == [2] * count


def test_samples_are_measured_apart_and_warmup_is_not_among_them() -> None:
    now = FakeTime()
    slow_at_first = {
        "A": now.taking("A", lambda call: 1000 if call < 3 else 10 + call % 2),
        "B": now.taking("B", lambda call: 9999 if call < 3 else 30),
    }
    timings = time_interleaved(slow_at_first, warmup=3, iters=4, clock=WallClock(now))
    assert now.log.count("A") == now.log.count("B") == 7
    assert timings["A"].samples_ms == pytest.approx((11, 10, 11, 10))
    assert timings["A"].median_ms == pytest.approx(10.5)
    assert timings["B"] == Timing.of(timings["B"].samples_ms)
    assert timings["B"].median_ms == pytest.approx(30)


def test_preparation_precedes_every_run_and_is_not_timed() -> None:
    now = FakeTime()
    prepare, run = now.taking("prepare", 500), now.taking("run", 2)
    states: list[object] = []

    def fresh() -> object:
        prepare()
        return object()

    def timed(state: object) -> None:
        states.append(state)
        run()

    timings = time_interleaved({"A": Variant(timed, fresh)}, warmup=1, iters=5, clock=WallClock(now))
    assert now.log == ["prepare", "run"] * 6
    assert len({id(state) for state in states}) == 6
    assert timings["A"].samples_ms == pytest.approx([2.0] * 5)


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(4000, range(5, 6)), (10, range(40, 51)), (0.001, range(200, 201))],
    ids=["slow: the fewest", "as many as the budget holds", "fast: the most"],
)
def test_iterations_follow_the_budget(milliseconds: float, expected: range) -> None:
    now = FakeTime()
    variants = {"A": now.taking("A", milliseconds), "B": now.taking("B", milliseconds)}
    timings = time_interleaved(variants, budget_s=1.0, clock=WallClock(now))
    assert timings["A"].samples == timings["B"].samples
    assert timings["A"].samples in expected


def test_warmup_goes_on_for_a_fifth_of_the_budget_not_counting_the_first_round() -> None:
    now = FakeTime()
    run = now.taking("A", lambda call: 5000 if call == 0 else 10)
    time_interleaved({"A": run}, iters=1, budget_s=1.0, clock=WallClock(now))
    assert len(now.log) in (21 + 1, 22 + 1)  # 200 ms of 10 ms after the first, up to rounding, and one sample


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        ({}, {}, "variants is empty"),
        ({"A": lambda: None}, {"iters": 0}, "iters must be at least 1, got 0"),
        ({"A": lambda: None}, {"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"A": lambda: None}, {"budget_s": 0.0}, "budget_s must be positive, got 0.0"),
        ({"A": lambda: None}, {"device": "meta"}, "cannot time on device='meta'"),
    ],
)
def test_bad_arguments_are_named(variants: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        time_interleaved(variants, **options)


def test_the_cuda_clock_wants_a_cuda_device() -> None:
    assert isinstance(clock_for("cpu"), WallClock)
    with pytest.raises(ValueError, match="device='cpu'"):
        CudaClock("cpu")


@pytest.mark.parametrize(("launch_ms", "flushes"), [(0.01, 1), (1.0, 25), (1000.0, 100)])
def test_flushes_outlast_the_launches_up_to_a_limit(
    launch_ms: float, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = object.__new__(CudaClock)  # without a GPU
    clock._launches, clock._flushes = "hidden", 1
    monkeypatch.setattr(clock, "_flush_ms", lambda: 0.05)
    monkeypatch.setattr(clock, "_launch_ms", lambda variant: launch_ms * variant.prepare())
    clock.calibrate([Variant(lambda _: None, lambda share=share: share) for share in (0.5, 1.0)])
    assert clock._flushes == flushes


def test_interval_is_of_the_pairs_and_drift_cancels() -> None:
    drifting = [float(i) for i in range(1, 41)]
    low, high = speedup_interval(Timing.of([2 * ms for ms in drifting]), Timing.of(drifting))
    assert (low, high) == (2.0, 2.0)


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    source = random.Random(0)
    ones = Timing.of([1.0] * 15)
    hits = 0
    for _ in range(2000):
        low, high = speedup_interval(Timing.of([source.expovariate(1.0) for _ in range(15)]), ones)
        hits += low <= 0.693147 <= high
    assert 0.95 <= hits / 2000 <= 0.985  # exact coverage for 15 samples: 0.965


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_interval_takes_the_ranks_of_the_sign_test(count: int, low: int, high: int) -> None:
    ratios = Timing.of([float(i) for i in range(count, 0, -1)])
    assert speedup_interval(ratios, Timing.of([1.0] * count)) == (low, high)


def test_interval_of_few_samples_is_their_range_and_of_unpaired_ones_from_the_quartiles() -> None:
    assert speedup_interval(Timing.of([1.0, 2.0, 4.0]), Timing.of([1.0] * 3)) == (1.0, 4.0)
    assert speedup_interval(Timing(2.0, 1.0, 4.0, 9), Timing(1.0, 0.5, 2.0, 9)) == (0.5, 8.0)


# --- networks come out as they went in ----------------------------------------


class Generator(nn.Module):
    """Small, with all that has state: BatchNorm, dropout, in-place activation, frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up1 = nn.ConvTranspose2d(6, 8, 4)
        self.norm = nn.BatchNorm2d(8)
        self.up2 = nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("spread", torch.arange(3.0)[None].expand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # a buffer that is replaced, not written to
        random.random()
        return torch.tanh(self.drop(self.up2(torch.relu_(self.norm(self.up1(x))))))


def prepared_generator() -> Generator:
    torch.manual_seed(0)
    model = Generator()
    model.norm.eval()
    model.up1.bias.requires_grad_(False)
    model.up2(torch.randn(1, 8, 4, 4)).sum().backward()
    return model


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state: list[tuple[Any, ...]] = [
        (
            name,
            id(t),
            t.requires_grad,
            id(t.grad),
            t.tolist(),
            None if t.grad is None else t.grad.tolist(),
        )
        for name, t in tensors
    ]
    return [*state, *((name, module.training) for name, module in model.named_modules())]


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


@pytest.mark.parametrize("fails_in", [None, "forward", "training"])
def test_benchmark_leaves_everything_as_it_was(fails_in: str | None) -> None:
    original = prepared_generator()
    swapped = swap_layers(original, inplace=False)

    def fail(module: nn.Module, _: Any) -> None:
        if fails_in == "forward" or (fails_in == "training" and module.training):
            raise ArithmeticError("broken on purpose")

    swapped.up2.register_forward_pre_hook(fail)
    inputs = torch.randn(2, 6, 1, 1)
    before = snapshot(original), snapshot(swapped), random_state(), inputs.tolist()
    cudnn_benchmark = torch.backends.cudnn.benchmark
    if fails_in:
        with pytest.raises(ArithmeticError, match="on purpose"):
            benchmark(original, swapped, inputs, warmup=0, iters=1)
    else:
        benchmark(original, swapped, inputs, warmup=0, iters=1)
    assert (snapshot(original), snapshot(swapped), random_state(), inputs.tolist()) == before
    assert not inputs.requires_grad
    assert torch.backends.cudnn.benchmark == cudnn_benchmark


def test_preserved_undoes_whatever_happens_inside() -> None:
    model = prepared_generator()
    frozen = snapshot(model), random_state()
    with pytest.raises(KeyboardInterrupt), preserved(model, model.up1):  # noqa: PT012 - the block is the test
        assert all(p.grad is None for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.up1.weight.requires_grad_(False)
        model.up2.weight = nn.Parameter(torch.zeros(1))
        model.up2.register_buffer("late", torch.zeros(1))
        model.train()
        torch.rand(3)
        random.random()
        raise KeyboardInterrupt
    assert (snapshot(model), random_state()) == frozen


def test_inputs_that_the_network_overwrites_are_not_the_users() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 2, 2)

        def forward(self, images: list[Tensor]) -> Tensor:
            with torch.no_grad():
                images[0].mul_(2.0)
            return self.up(images[0])

    original = Overwriting()
    image = torch.ones(1, 2, 3, 3)
    benchmark(original, swap_layers(original, inplace=False), ([image],), warmup=1, iters=2)
    assert torch.equal(image, torch.ones(1, 2, 3, 3))


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


def test_a_slow_layer_shows_as_slower_where_it_is_and_in_the_network() -> None:
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
    assert [note for note in report.notes if "not reach" in note] == [
        "not timed, the forward pass does not reach them: idle"
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


def test_stages_that_the_original_cannot_run_are_left_out_and_said_why() -> None:
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


def test_what_cannot_be_compared_is_refused() -> None:
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


def test_a_loss_of_the_users_own() -> None:
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


def test_share_counts_every_call_and_is_a_share() -> None:
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


# --- on a GPU -----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("side_stream", [False, True])
def test_cuda_clock_hides_or_includes_launches(side_stream: bool) -> None:
    x = torch.zeros(1 << 10, device="cuda")

    def launches_slowly() -> None:
        x.add_(1.0)
        time.sleep(0.001)
        x.add_(1.0)

    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        hidden = time_interleaved({"A": launches_slowly}, device="cuda", launches="hidden", iters=20)["A"]
        included = time_interleaved({"A": launches_slowly}, device="cuda", launches="included", iters=20)["A"]
    assert hidden.median_ms < 0.1
    assert 1.0 <= included.median_ms < 5.0


@pytest.mark.gpu
def test_cuda_clock_flushes_more_than_the_cache_before_the_time_begins() -> None:
    clock = CudaClock("cuda")
    properties = torch.cuda.get_device_properties("cuda")
    assert clock._scratch.numel() > properties.L2_cache_size
    clock._scratch.fill_(1)
    # The scratch is zero when the timed part runs, and only since the preparation.
    seen: list[Tensor] = []
    variant = Variant(lambda _: seen.append(clock._scratch.max()), lambda: seen.append(clock._scratch.max()))
    milliseconds = clock.measure(variant)
    clock.synchronize()
    assert [int(value) for value in seen] == [1, 0]
    assert milliseconds() > 0


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
