"""Verification catches every kind of wrong kernel, and names the first layer that diverges."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn
from verify_cases import (
    DTYPES,
    WRONG,
    Edit,
    ScaleGradient,
    checks_of,
    edited,
    generator,
    latent,
    put,
    scaled_gradient,
    swapped_copy,
    with_kernel,
)

from tconv_swap.layer import ConvTranspose2d
from tconv_swap.surgery import swap_layers
from tconv_swap.verification import verify


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("what", "dtype"), sampled(itertools.product(WRONG, DTYPES), 3), ids=str)
def test_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch, what: str, dtype: torch.dtype) -> None:
    kernel, kind = WRONG[what]
    with_kernel(monkeypatch, kernel)
    model = generator(dtype)
    report = verify(model, swapped_copy(model), latent(dtype), modes=("eval",))
    assert not report.passed
    first = {"lost bias": "4", "grad_bias off": "4"}.get(what, "0")
    assert checks_of(report, kind)[0].name == first
    assert report.first_divergence is not None
    assert report.first_divergence.startswith(f"layer {first}: eval: ")
    assert all(check.failure() in report.failures for check in report.checks if not check.passed)
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("what", sorted(set(WRONG) - {"grad_weight missing"}))
def test_wrong_kernel_is_caught_without_float64(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with_kernel(monkeypatch, WRONG[what][0])
    model = generator()
    report = verify(model, swapped_copy(model), latent(), reference="original")
    assert report.reference == "original (as requested)"
    assert checks_of(report, "output", "grad_input", "grad_parameter")


def test_a_small_factor_in_a_coarse_dtype_is_caught_by_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element is within bfloat16's rounding, but all are off in the same direction."""
    with_kernel(monkeypatch, scaled_gradient(1, 1.012))
    layer = nn.ConvTranspose2d(32, 32, 4, 2, 1).bfloat16()
    report = verify(layer, swapped_copy(layer), torch.randn(2, 32, 8, 8).bfloat16(), modes=("eval",))
    assert [check.norm for check in checks_of(report, "layer_grad_weight")] == ["scale"]


def test_only_the_wrong_layer_is_named() -> None:
    class Broken(ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return super().forward(input, output_size) * 1.001

    model = generator()
    swapped = swapped_copy(model)
    swapped[4].__class__ = Broken  # type: ignore[index]
    report = verify(model, swapped, latent())
    assert {c.name for c in checks_of(report, "layer_output", "layer_grad_weight")} == {"4"}
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("layer 4: eval: layer output of 4: error ")


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(6, affine=False), nn.InstanceNorm2d(6)], ids=["batch", "instance"]
)
def test_wrong_scale_behind_a_normalisation_is_caught(
    monkeypatch: pytest.MonkeyPatch, norm: nn.Module
) -> None:
    with_kernel(monkeypatch, edited(lambda y: y.mul_(1.05)))
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), norm)
    x = torch.randn(4, 4, 8, 8) * 100
    report = verify(model, swapped_copy(model), x, modes=("train",))
    output = next(c for c in report.checks if c.kind == "output")
    assert output.error_swapped < 1e-5
    assert [c.name for c in checks_of(report, "layer_output")] == ["0"]
    assert not report.passed


def test_one_wrong_pixel_in_a_large_tensor_is_caught_by_the_network_alone() -> None:
    class Net(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 4, 2, 2)
            self.wrong = wrong

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return Edit.apply(y, lambda t: t[1, 2, 40, 7].mul_(0.9)) if self.wrong else y

    model, wrong = Net(False), Net(True)
    wrong.load_state_dict(model.state_dict())
    report = verify(model, swap_layers(wrong), torch.randn(2, 2, 32, 32))
    assert not checks_of(report, "layer_output")
    (check,) = [c for c in checks_of(report, "output") if c.mode == "eval"]
    assert check.norm == "max"
    assert "[1, 2, 40, 7]" in check.detail


def test_gradient_wrong_only_in_the_network_is_caught() -> None:
    class Net(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.up, self.factor = nn.ConvTranspose2d(4, 4, 4, 2, 1), factor

        def forward(self, x: Tensor) -> Tensor:
            return self.up(ScaleGradient.apply(x, self.factor))

    model, wrong = Net(1.0), Net(1.05)
    wrong.load_state_dict(model.state_dict())
    report = verify(model, swap_layers(wrong), torch.randn(2, 4, 6, 6))
    assert {c.kind for c in report.checks if not c.passed} == {"grad_input"}


@pytest.mark.parametrize("value", [math.nan, 0.0])
@pytest.mark.parametrize("which", [0, 1])
def test_a_fault_in_one_run_of_two_is_caught(value: float, which: int) -> None:
    class Net(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.up, self.wrong, self.calls = nn.ConvTranspose2d(2, 4, 2, 2), wrong, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            faulty = self.wrong and self.calls % 2 == which
            return Edit.apply(self.up(x), put(value)) if faulty else self.up(x)

    model, wrong = Net(False), Net(True)
    wrong.load_state_dict(model.state_dict())
    report = verify(model, swap_layers(wrong), torch.randn(2, 2, 8, 8), modes=("eval",))
    assert not report.passed
    assert any("two runs of the swapped network differ" in note for note in report.notes)


def test_buffers_are_compared() -> None:
    model = generator()
    swapped = swapped_copy(model)
    swapped[1].momentum = 0.2  # type: ignore[index]
    report = verify(model, swapped, latent())
    assert {c.name for c in checks_of(report, "buffer")} == {"1.running_mean", "1.running_var"}


def test_the_first_diverging_module_is_named_if_no_layer_is_wrong() -> None:
    model = generator()
    swapped = swapped_copy(model)
    swapped[5].negative_slope = 0.1  # type: ignore[index]
    report = verify(model, swapped, latent())
    assert not report.passed
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("eval: 5 (LeakyReLU): its output is ")
