"""What timing a network leaves behind: nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bench_cases import prepared_generator, snapshot
from torch import Tensor, nn

from tconv_swap.freezing import freeze
from tconv_swap.measurement.bench import benchmark
from tconv_swap.preserving import preserved
from tconv_swap.surgery import swap_layers


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


@pytest.mark.parametrize("fails_in", [None, "forward", "training"])
def test_benchmark_restores_everything(fails_in: str | None) -> None:
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
        weight = model.up1.weight
        del model.up1.weight
        model.up1.weight = weight  # behind the bias now
        model.up2.weight = nn.Parameter(torch.zeros(1))
        model.up2.register_buffer("late", torch.zeros(1))
        model.train()
        torch.rand(3)
        random.random()
        raise KeyboardInterrupt
    assert (snapshot(model), random_state()) == frozen


def test_a_network_overwrites_only_copies_of_its_inputs() -> None:
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


def test_a_loss_computed_before_can_still_be_differentiated() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.BatchNorm2d(2), nn.ConvTranspose2d(2, 2, 2))
    x = torch.randn(2, 2, 3, 3)
    expected = torch.autograd.grad(original.eval()(x).sum(), list(original.parameters()))
    loss = original(x).sum()
    # Its steps write to the parameters, its forward passes in training mode to the buffers.
    benchmark(original, swap_layers(original, inplace=False), x, warmup=0, iters=1)
    found = torch.autograd.grad(loss, list(original.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_unchanged_tensors_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.BatchNorm2d(2))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    written: list[Tensor] = []
    plain = Tensor.copy_

    def copy(self: Tensor, *args: Any) -> Tensor:
        written.append(self)
        return plain(self, *args)

    monkeypatch.setattr(Tensor, "copy_", copy)
    with preserved(model), torch.no_grad():
        model[1].bias.add_(1.0)
        model[1].running_mean.neg_()  # from 0 to -0
    assert {id(tensor) for tensor in written} == {id(model[1].bias), id(model[1].running_mean)}
    assert not model[1].running_mean.signbit().any()


def test_networks_made_in_inference_mode() -> None:
    with torch.inference_mode():
        original = nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.BatchNorm2d(2))
        before = snapshot(original)
    swapped = swap_layers(original, inplace=False)
    report = benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1)
    assert [c.stage for c in report.network] == ["forward"]
    with preserved(original), torch.inference_mode():
        original[1].running_mean.add_(1.0)
    assert snapshot(original) == before


class Restless(nn.Module):
    """Changes what it consists of whenever it is called, in every way but in place."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = nn.Parameter(torch.ones(2))
        self.scaled = nn.Parameter(torch.ones(2))
        self.moved = nn.Parameter(torch.ones(2))
        self.up = nn.ConvTranspose2d(2, 2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("sparse", torch.eye(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = nn.Parameter(self.replaced.detach() + 1)
        self.scaled.data.mul_(2)
        self.moved.data = self.moved.data.double()
        self.mean = None
        self.sparse.mul_(2)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(2), persistent=False)
            self.register_parameter("later", nn.Parameter(torch.zeros(2)))
        return self.up(x) + (self.replaced + self.scaled + self.late + self.later).sum()


def test_networks_that_replace_and_register_in_their_forward() -> None:
    original = Restless()
    swapped = swap_layers(original, inplace=False)

    def state(model: nn.Module) -> list[Any]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return [
            [(name, id(t), t.dtype, t.to_dense().tolist()) for name, t in tensors.items()],
            [(name, t.data_ptr()) for name, t in model.named_parameters()],
            set(model._non_persistent_buffers_set),
        ]

    before = state(original), state(swapped)
    report = benchmark(original, swapped, torch.randn(1, 2, 3, 3), warmup=0, iters=1)
    assert [c.stage for c in report.network] == ["forward", "backward", "step"]
    assert (state(original), state(swapped)) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_parts() -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm2d(2)), nn.ConvTranspose2d(2, 2, 2))
    before = snapshot(model)
    with preserved(model):
        model(torch.randn(2, 2, 3, 3))
    assert snapshot(model) == before


@pytest.mark.parametrize("write", [False, True])
def test_frozen_layers_are_frozen_again(write: bool) -> None:
    model = swap_layers(nn.Sequential(*(nn.ConvTranspose2d(2, 2, 2) for _ in range(3)))).eval()
    freeze(model)
    stale, unfrozen = model[1], model[2]
    with torch.no_grad():
        stale.weight.add_(1.0)
    unfrozen.tconv_release_packed()
    packed = model[0]._tconv_packed
    with preserved(model), torch.no_grad():
        if write:
            model.train()
            model[0].weight.add_(1.0)
            model[0].weight = nn.Parameter(torch.zeros(1))
    assert [layer.tconv_is_frozen() for layer in model] == [True, False, False]
    assert (model[0]._tconv_packed is packed) == (not write)
