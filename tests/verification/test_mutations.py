"""Every fault of a table is found by verification, and nothing is found where there is none."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import FAULTS, NETWORK_FAULTS, right, scaled_inside
from sampling import sampled
from torch import Tensor, nn
from verify_cases import checks_of, scaled_gradient, swapped_copy, with_kernel

import tconv_swap
from tconv_swap.verification import verify

MODES: Any = ("eval",)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.InstanceNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 4, 2, 1)
    ).to(dtype)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    model = network(fault.dtype)
    swapped = swapped_copy(model)
    with_kernel(monkeypatch, fault.make())
    report = verify(model, swapped, images(fault.dtype), modes=MODES, **fault.options)
    assert not report.passed
    assert any(fault.said in line for line in report.failures), report.failures


@pytest.mark.parametrize("name", NETWORK_FAULTS)
def test_fault_of_a_network_is_found(name: str) -> None:
    cls, said = NETWORK_FAULTS[name]
    torch.manual_seed(0)
    model = cls()
    swapped = swapped_copy(model)
    assert verify(model, swapped, images(), modes=MODES).passed
    swapped = swapped_copy(model)
    swapped.wrong = True
    report = verify(model, swapped, images(), modes=MODES)
    assert not report.passed
    assert any(said in line for line in report.failures), report.failures


@pytest.mark.parametrize(
    ("dtype", "options"),
    sampled(
        itertools.product(
            (torch.float32, torch.float64, torch.float16, torch.bfloat16),
            ({}, {"autocast": torch.float16}, {"autocast": torch.bfloat16}),
        ),
        2,
    ),
    ids=str,
)
def test_nothing_is_found_where_there_is_no_fault(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(dtype)
    report = verify(model, swapped_copy(model), images(dtype), **options)
    assert report.passed, report.failures
    with_kernel(monkeypatch, right)
    report = verify(model, swapped_copy(model), images(dtype), **options)
    assert report.passed, report.failures
    assert report.notes == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rounding_once_is_not_a_wrong_scale(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs with few different numbers, whose outputs round alike, too."""
    with_kernel(monkeypatch, scaled_inside(1.0))
    torch.manual_seed(seed)
    model = nn.ConvTranspose2d(16, 8, 4, 2, 1).to(dtype)
    for x in (
        torch.randn(2, 16, 9, 9),
        torch.ones(2, 16, 9, 9),
        torch.randn(2, 16, 9, 9).sign(),
        torch.zeros(1, 16, 4, 4),
    ):
        report = verify(model, swapped_copy(model), x.to(dtype), modes=MODES)
        assert report.passed, report.failures


class Quantised(nn.Module):
    """The nearest code, of which no gradient comes back; with `zero` one comes, and is zero everywhere."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.up, self.zero = nn.ConvTranspose2d(8, 3, 4, 2, 1), zero
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return y.argmax(1) * self.scale + (y * 0 if self.zero else y.detach() * 0).sum()


@pytest.mark.parametrize("zero", [False, True])
def test_a_gradient_that_no_loss_reaches_is_compared(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Quantised(zero)
    report = verify(model, swapped_copy(model), images(), modes=MODES)
    assert report.passed, report.failures
    # Of a gradient that is zero there would be no error.
    assert [check.error_original > 0 for check in checks_of(report, "layer_grad_weight", failed=False)] == [
        True
    ]
    with_kernel(monkeypatch, scaled_gradient(1, 1.05))
    report = verify(model, swapped_copy(model), images(), modes=MODES)
    assert [check.name for check in checks_of(report, "layer_grad_weight")] == ["up"]


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.vmap(lambda sample: F.relu(self.up(sample)))(x))


@pytest.mark.parametrize("options", [{}, {"autocast": torch.bfloat16}], ids=str)
def test_a_forward_that_uses_vmap(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Mapped()
    report = verify(model, swapped_copy(model), images(), **options)
    assert report.passed, report.failures
    assert any("layer up is called inside torch.vmap" in note for note in report.notes)
    assert {check.name for check in checks_of(report, "layer_grad_weight", failed=False)} == {"up", "last"}
    with_kernel(monkeypatch, lambda *arguments: right(*arguments) * 1.01)
    assert not verify(model, swapped_copy(model), images()).passed


def bits(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone().view(torch.int32) for t in model.parameters()]


def test_changed_weights_are_restored_bit_for_bit() -> None:
    """Arithmetic could not restore a NaN with a payload or a negative zero."""
    model = network()
    with torch.no_grad():
        model[0].bias.view(torch.int32)[0] = 0x7FC00123
        model[3].weight.view(-1)[0] = -0.0
    swapped = swapped_copy(model)
    shared = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    before, versions = bits(model), [p._version for p in model.parameters()]
    for each in (swapped, tconv_swap.swap_layers(shared)):
        verify(model, each, images())
        for found in (model, each):
            assert all(torch.equal(a, b) for a, b in zip(bits(found), before, strict=True))
    assert [p._version for p in model.parameters()] == versions


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_frozen_network_is_not_a_fault(device: str) -> None:
    """`freeze` promises to see an ordinary write, not one through `.data`; it packs weights on CUDA alone."""
    model = network().to(device).eval()
    swapped = tconv_swap.freeze(swapped_copy(model))
    report = verify(model, swapped, images().to(device), modes=MODES)
    assert report.passed, report.failures
    assert all(m.tconv_is_frozen() for m in swapped if isinstance(m, tconv_swap.ConvTranspose2d))


def test_the_report_says_what_was_tried() -> None:
    model = network()
    report = verify(model, swapped_copy(model), images())
    ways = ["without gradients", "under inference_mode", "with changed weights"]
    turn = "32 calls of each layer in turn"
    assert report.tried == ["eval mode", "train mode", "gradients", *ways, turn]
    assert report.not_tried == ["under autocast"]
    report = verify(model, swapped_copy(model), images(), autocast=torch.float16)
    assert report.tried[-1] == "under float16 autocast"
    assert report.not_tried == []
    assert {check.mode for check in report.checks} == {
        *("eval", "train", "eval under float16 autocast", "train under float16 autocast")
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = verify(model, swapped_copy(model), images(), modes=MODES, backward=False)
    assert report.tried[-1] == "under the caller's bfloat16 autocast"
    assert report.tried[:2] == ["eval mode", "without gradients"]
    assert report.not_tried == ["train mode", "gradients"]


def test_autocast_in_another_dtype_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="autocast must be"):
        verify(model, swapped_copy(model), images(), autocast=torch.float32)
