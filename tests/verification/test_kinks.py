"""An activation's input next to a kink may lie on either side of it."""

from __future__ import annotations

import pytest
import torch

from tconv_swap.blocks.form import activate
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.verification.kinks import KINKS, chosen_sides, moved, next_to_kinks

SLOPE = 0.2
CASES = [(activation, kink) for activation, kinks in KINKS.items() for kink in kinks]


def gradient(x: torch.Tensor, activation: Activation, across: torch.Tensor | None = None) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    given = leaf if across is None else moved(leaf, across, activation)
    (found,) = torch.autograd.grad(activate(given, activation, SLOPE).sum(), leaf)
    return found


@pytest.mark.parametrize(("activation", "kink"), CASES)
@pytest.mark.parametrize("step", [-1e-9, 1e-9])
def test_the_other_side_has_the_other_slope(activation: Activation, kink: float, step: float) -> None:
    x = torch.tensor([kink + step, kink + step, kink - 1, kink + 1], dtype=torch.float64)
    across = torch.tensor([True, False, False, False])
    exact, other = gradient(x, activation), gradient(x, activation, across)
    assert exact[0] != other[0]
    assert other[0] == gradient(x - 2 * step, activation)[0]
    assert torch.equal(exact[1:], other[1:])
    assert torch.allclose(moved(x, across, activation), x, rtol=0, atol=2e-9)


@pytest.mark.parametrize(("activation", "kink"), CASES)
def test_only_rounding_puts_an_input_next_to_a_kink(activation: Activation, kink: float) -> None:
    error, eps = 1e-7, torch.finfo(torch.float32).eps
    added = torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64)
    normed = kink - added + torch.tensor([0.0, 2e-7, 1e-4], dtype=torch.float64)
    near = next_to_kinks(normed, added, error, torch.float32, activation)
    assert near.tolist() == [True, True, False]
    room = 2 * error + 2 * eps * (normed.abs() + added)
    beside = kink - added + room * torch.tensor([0.99, -0.99, 1.01], dtype=torch.float64)
    assert next_to_kinks(beside, added, error, torch.float32, activation).tolist() == [True, True, False]


def test_a_side_is_chosen_only_where_rounding_decides() -> None:
    near = torch.tensor([True, True, False])
    exact, other = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert chosen_sides(near, torch.tensor([0.9, 0.1, 0.9]), exact, other).tolist() == [True, False, False]
