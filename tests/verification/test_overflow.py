"""A network whose own gradients overflow is verified with smaller ones, as strictly as any other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from verify_cases import WRONG, checks_of, swapped_copy, with_kernel

from tconv_swap.verification import verify
from tconv_swap.verification.overflow import MARGIN, SCALES

_GRADIENTS = ("grad_input", "grad_parameter")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _network(dtype: torch.dtype = torch.float16) -> tuple[nn.Module, Tensor]:
    """Returns a network whose outputs are of size 1 and whose gradient of the weight is beyond float16's range."""
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2, 2), nn.ConvTranspose2d(2, 2, 3, 1, 1)).to(dtype)
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    return model, torch.randn(1, 2, 64, 64).mul(2000).to(dtype)


def _notes_of_overflow(notes: list[str]) -> list[str]:
    return [note for note in notes if "gradients overflow" in note]


def test_gradients_that_overflow_are_compared_at_a_smaller_scale() -> None:
    model, image = _network()
    model[0](image).backward(torch.ones(1, 2, 128, 128, dtype=torch.float16).normal_())
    assert not model[0].weight.grad.isfinite().all()
    report = verify(model, swapped_copy(model), image, modes=("eval", "train"))
    assert report.passed, report.failures
    notes = _notes_of_overflow(report.notes)
    assert [note.partition(":")[0] for note in notes] == ["eval", "train"]
    assert all(f"{SCALES[0] * MARGIN:.1e} times" in note for note in notes)
    assert {check.name for check in checks_of(report, *_GRADIENTS, failed=False)} >= {"0.weight", "0.bias"}


def test_gradients_in_range_are_not_scaled() -> None:
    model, image = _network(torch.float32)
    report = verify(model, swapped_copy(model), image)
    assert report.passed
    assert not _notes_of_overflow(report.notes)


@pytest.mark.parametrize("what", ["grad_weight off", "grad_bias off"])
def test_a_wrong_gradient_is_caught_at_a_smaller_scale(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with_kernel(monkeypatch, WRONG[what][0])
    model, image = _network()
    report = verify(model, swapped_copy(model), image, modes=("eval",))
    assert _notes_of_overflow(report.notes)
    assert not report.passed
    assert checks_of(report, *_GRADIENTS)


def test_a_gradient_that_no_scale_makes_finite_is_compared_as_it_is() -> None:
    class Endless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 2, 2, 2)

        def forward(self, image: Tensor) -> Tensor:
            enlarged: Tensor = self.up(image)
            return enlarged * (image.sum() * 0).sqrt()  # the root's slope at 0 is infinite

    model = Endless()
    report = verify(model, swapped_copy(model), torch.randn(1, 2, 4, 4), modes=("eval",))
    assert not _notes_of_overflow(report.notes)
    gradients = checks_of(report, "grad_input", failed=False)
    assert gradients
    assert not any(math.isinf(check.error_swapped) for check in gradients)
