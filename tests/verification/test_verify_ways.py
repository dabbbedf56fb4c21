"""Wrong swaps that show only in another way of running a network, and wrong weights that no run shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv_swap
from tconv_swap import op


class Twice(torch.autograd.Function):
    """The number itself, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def wrong_when_served(*arguments: Any) -> Tensor:
    y = F.conv_transpose2d(*arguments[:8])
    return y if torch.is_grad_enabled() else 2 * y


def wrong_for_a_first_layer(x: Tensor, w: Tensor, *arguments: Any) -> Tensor:
    return F.conv_transpose2d(x, w if x.requires_grad else Twice.apply(w), *arguments[:6])


def decoder(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False), nn.ConvTranspose2d(6, 3, 4, 2, 1)
    return nn.Sequential(layers[0], *between, layers[1])


X = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        (wrong_when_served, "without gradients"),
        (wrong_for_a_first_layer, "inputs without gradients"),
    ],
)
def test_every_way_to_run_a_layer_is_tried(
    computed: Callable[..., Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = decoder(nn.ReLU())
    swapped = tconv_swap.swap_layers(original, inplace=False)
    assert tconv_swap.verify(original, swapped, X).passed
    monkeypatch.setattr(op, "conv_transpose2d", computed)
    report = tconv_swap.verify(original, swapped, X)
    assert not report.passed
    assert all(f"{said}; " in line or f"; {said}, " in line for line in report.failures), report.failures


def test_a_layer_that_is_wrong_only_without_gradients_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalisation hides its scale from all that is behind it."""
    original = decoder(nn.InstanceNorm2d(6, eps=0))
    swapped = tconv_swap.swap_layers(original, inplace=False)
    monkeypatch.setattr(op, "conv_transpose2d", lambda x, w, *more: wrong_when_served(x, w, *more))
    monkeypatch.setattr(swapped[2], "forward", nn.ConvTranspose2d.forward.__get__(swapped[2]))
    report = tconv_swap.verify(original, swapped, X)
    assert not report.passed
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("layer 0: eval: layer output of 0")
    assert "without gradients, call 1" in report.first_divergence


def test_networks_that_need_gradients_to_run_are_verified_with_them() -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(8, 3, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(self.up(x.requires_grad_()).square().sum(), x, create_graph=True)
            return force

    original = Energy()
    report = tconv_swap.verify(original, tconv_swap.swap_layers(original, inplace=False), X)
    assert report.passed, report.failures


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return self.other(x) if other else self.one(x)


def large_beside_small() -> nn.Sequential:
    made = decoder()
    with torch.no_grad():
        made[1].weight[:, 0] *= 1e7
    return made


@pytest.mark.parametrize(
    ("original", "spoil", "named"),
    [
        (Heads(), lambda net: net.other.weight.mul_(3), "other.weight"),
        (large_beside_small(), lambda net: net[1].weight[:, 1].neg_(), "1.weight"),
        (
            decoder(nn.InstanceNorm2d(6, eps=0)).requires_grad_(False),
            lambda net: net[0].weight.mul_(2),
            "0.weight",
        ),
    ],
    ids=["not reached", "beside a larger one", "in front of a normalisation"],
)
def test_weights_that_a_swap_changed_are_found(
    original: nn.Module, spoil: Callable[[Any], object], named: str
) -> None:
    swapped = tconv_swap.swap_layers(original, inplace=False)
    with torch.no_grad():
        spoil(swapped)
    report = tconv_swap.verify(original, swapped, X)
    assert f"parameter {named} has other values than the original's" in report.failures


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda net: net[0].register_parameter("bias", None), "parameter 0.bias is missing"),
        (
            lambda net: net.register_buffer("more", torch.ones(1)),
            "buffer more is one that the original does not",
        ),
        (lambda net: net[1].running_mean.add_(1), "buffer 1.running_mean has other values"),
        (
            lambda net: setattr(net[1], "running_var", torch.ones(3).double()),
            "buffer 1.running_var has dtype",
        ),
    ],
)
def test_differing_parameters_and_buffers_are_found(spoil: Callable[[Any], object], said: str) -> None:
    original = nn.Sequential(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.BatchNorm2d(3))
    swapped = tconv_swap.swap_layers(original, inplace=False)
    spoil(swapped)
    report = tconv_swap.verify(original, swapped, X)
    assert any(line.startswith(said) for line in report.failures), report.failures


def test_numpys_random_state_is_shared_and_restored() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(8, 3, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(x)
            return y + torch.from_numpy(np.random.randn(*y.shape)).to(y.dtype)

    original = Noisy()
    swapped = tconv_swap.swap_layers(original, inplace=False)
    np.random.seed(7)
    report = tconv_swap.verify(original, swapped, X)
    assert report.passed, report.failures
    assert report.notes == []
    drawn = np.random.randn()
    np.random.seed(7)
    assert drawn == np.random.randn()


def test_a_forward_set_on_a_layer_is_not_compared_with_itself() -> None:
    """As libraries wrap layers. A normalisation hides the scale from the network's output."""
    original = decoder(nn.InstanceNorm2d(6, eps=0))
    swapped = tconv_swap.swap_layers(original, inplace=False)
    inner = swapped[0].forward
    swapped[0].forward = inner
    assert tconv_swap.verify(original, swapped, X).passed
    swapped[0].forward = lambda *arguments: 2 * inner(*arguments)
    report = tconv_swap.verify(original, swapped, X)
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("layer 0: eval: layer output of 0")


class DropConnect(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.3, self.training)


class Stepping(nn.Module):
    """Another weight at every use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("uses", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.uses += 1
        return weight * (1 + self.uses)


@pytest.mark.parametrize("one_d", [False, True])
@pytest.mark.parametrize("made", [DropConnect, Stepping])
def test_a_layer_is_judged_with_the_weight_that_it_used(made: Callable[[], nn.Module], one_d: bool) -> None:
    layer = nn.ConvTranspose1d(8, 3, 4, 2, 1) if one_d else nn.ConvTranspose2d(8, 3, 4, 2, 1)
    original = nn.Sequential(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight", made())
    swapped = tconv_swap.swap_layers(original, inplace=False, include_1d=one_d)
    report = tconv_swap.verify(original, swapped, X[..., 0] if one_d else X)
    assert report.passed, report.failures
    assert report.notes == []
    assert "tconv_operands" not in vars(swapped[0])


def test_a_compiled_network_is_not_taken_for_another() -> None:
    original = decoder(nn.ReLU())
    compiled = torch.compile(tconv_swap.swap_layers(original, inplace=False), backend="eager")
    (failure,) = tconv_swap.verify(original, compiled, X).failures
    assert failure.endswith("verify before torch.compile")
