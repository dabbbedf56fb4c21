"""What timing a network leaves behind: nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bench_cases import prepared_generator, snapshot
from torch import Tensor, nn

from tconv_swap.measurement.bench import benchmark
from tconv_swap.measurement.state import preserved
from tconv_swap.surgery import swap_layers


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
