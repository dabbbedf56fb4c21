"""The verification finds a wrong block and names it: statistics, slope, momentum, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_norm import Pretended, pretended
from sampling import sampled
from torch import Tensor, nn

import tconv_swap


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(3, 6, 4, 2, 1),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(6, 4, 4, 2, 1),
        nn.InstanceNorm2d(4),
        nn.Tanh(),
    )


def verified() -> tconv_swap.VerifyReport:
    original = network()
    swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False)
    return tconv_swap.verify(original, swapped, torch.randn(4, 3, 6, 6))


def test_right_kernels_pass_and_every_block_is_compared(kernels: Pretended) -> None:
    report = verified()
    assert report.passed, report.failures
    compared = {(check.name, check.kind) for check in report.checks}
    for name in ("1", "4"):
        assert {(name, "layer_output"), (name, "layer_grad_input")} <= compared
    assert {("1", "layer_grad_weight"), ("1", "layer_grad_bias"), ("1.running_var", "buffer")} <= compared
    assert not any("not compared" in note for note in report.notes)


FAULTS = {
    "mean": lambda value: value + 1e-3,
    "variance": lambda value: value * 1.002,
    "slope": lambda value: value * 1.02,
    "momentum": lambda value: value * 1.01,
    "gradient": lambda value: value * 1.001,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_and_names_the_block(fault: str, kernels: Pretended) -> None:
    def spoil(name: str, value: Tensor) -> Tensor:
        return FAULTS[fault](value) if name == fault else value

    kernels.spoil = spoil
    report = verified()
    assert not report.passed
    failed = {check.name for check in report.checks if not check.passed and check.mode == "train"}
    assert failed & {"1", "1.running_mean", "1.running_var"}
    assert report.first_divergence is not None
    assert report.first_divergence.startswith(("layer 1", "layer 4"))  # a gradient comes from the end


EVALUATION_FAULTS = {
    "block mean": lambda value: value + 1e-3,
    "block variance": lambda value: value * 1.002,
    "block slope": lambda value: value * 1.02,
}


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("fault", [None, *EVALUATION_FAULTS])
def test_a_fault_of_evaluation_fails_and_names_the_norm(
    fault: str | None, backward: bool, kernels: Pretended
) -> None:
    def spoil(name: str, value: Tensor) -> Tensor:
        return EVALUATION_FAULTS[name](value) if name == fault else value

    original = network()
    with torch.no_grad():
        original(torch.randn(4, 3, 6, 6))
    swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False)
    for layer in (swapped[0], swapped[3]):
        layer.tconv_backend = "kernel"
    kernels.spoil = spoil
    report = tconv_swap.verify(original, swapped, torch.randn(4, 3, 6, 6), backward=backward)
    assert kernels.blocks > 0
    assert report.passed is (fault is None), report.failures
    failed = {(check.name, check.mode) for check in report.checks if not check.passed}
    assert ("1", "eval") in failed or fault is None


@pytest.mark.parametrize("seed", sampled(range(30, 50), 3))
def test_a_network_of_blocks_alone_is_verified(seed: int, kernels: Pretended) -> None:
    """The gradient of a bias in front of a norm is zero but for rounding, which differs from run to run."""
    torch.manual_seed(seed)
    original = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    report = tconv_swap.verify(original, swapped, torch.randn(4, 3, 6, 6))
    assert report.passed, report.failures
    assert not tconv_swap.verify(swapped, swapped, torch.randn(4, 3, 6, 6)).passed


class Residual(nn.Module):
    """Its first convolution takes the first four channels, its second one those that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 4, 1, bias=False) for _ in range(2))
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU()
        for at, one in enumerate((self.first, self.second)):
            one.weight.data = torch.eye(8)[4 * at : 4 * at + 4, :, None, None].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.relu(self.norm(self.first(x)) + self.second(x))
        return output


def next_to_the_kink() -> Tensor:
    """Returns the input of a residual block whose sum, in many elements, is positive and next to zero."""
    generator = torch.Generator().manual_seed(0)
    x, added = (torch.randn(8, 4, 16, 16, generator=generator) for _ in range(2))
    normed = nn.functional.batch_norm(x, None, None, training=True)
    exact = nn.functional.batch_norm(x.double(), None, None, training=True)
    opposite = 2e-7 - normed
    chosen = (normed > 0.5) & (normed < 1) & (exact + opposite > 1e-7) & (normed + opposite > 0)
    assert 0.05 < chosen.float().mean() < 0.3
    return torch.cat([x, torch.where(chosen, opposite, added)], 1)


@pytest.mark.parametrize("mode", ["right", "shifted", "missing"])
def test_rounding_next_to_a_kink_fails_no_block(mode: str, kernels: Pretended) -> None:
    """A mean that is rounded differently gives sums next to zero the other sign. A gradient that is missing
    elsewhere fails."""
    changed = []

    def spoil(name: str, value: Tensor) -> Tensor:
        if mode == "shifted" and name == "mean":
            return value + 4e-7
        if mode == "missing" and name == "grad_added":
            place = value.abs().flatten().argmax()
            changed.append(place)
            return value.flatten().index_fill(0, place, 0.0).view_as(value)
        return value

    kernels.spoil = spoil
    original = Residual()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    report = tconv_swap.verify(original, swapped, next_to_the_kink(), modes=("train",))
    blocks = [check for check in report.checks if check.kind.startswith("layer_grad")]
    assert blocks
    assert kernels.sum_backwards
    assert all(check.passed for check in blocks) is (mode != "missing"), report.failures
    assert bool(changed) is (mode == "missing")
