"""Verification in one mode or two, with and without float64, and no trace of it afterwards."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verify_cases import (
    Returns,
    checks_of,
    compare_outputs,
    edited,
    generator,
    latent,
    reordered,
    swapped_copy,
    with_kernel,
)

from tconv_swap.surgery import swap_layers
from tconv_swap.verification import Check, VerifyReport, verify


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_nothing_swapped_and_swapped_original() -> None:
    model = generator()
    assert "nothing is swapped" in verify(model, copy.deepcopy(model), latent()).failures[0]
    swap_layers(model)
    assert "the original holds swapped layers itself (0, 4, 7)" in verify(model, model, latent()).failures[0]


class OneMode(nn.Module):
    def __init__(self, *refused: bool) -> None:
        super().__init__()
        self.up, self.refused = nn.ConvTranspose2d(3, 4, 2, 2), refused

    def forward(self, x: Tensor) -> Tensor:
        if self.training in self.refused:
            raise NotImplementedError("not in this mode\nat all")
        return self.up(x)


def test_mode_that_the_original_cannot_run() -> None:
    model = OneMode(True)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert report.passed, report.failures
    assert {c.mode for c in report.checks} == {"eval"}
    assert "train: not verifiable, the original raises NotImplementedError: not in this mode" in report.notes
    model = OneMode(True, False)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert not report.passed
    assert "nothing compared: the original runs in none of ['eval', 'train']" in report.failures


def test_swapped_network_that_raises() -> None:
    model = OneMode()
    swapped = swapped_copy(model)
    swapped.refused = (True,)  # type: ignore[assignment]
    report = verify(model, swapped, torch.randn(2, 3, 4, 4))
    expected = (
        "train: the swapped network raises NotImplementedError: not in this mode; the original does not"
    )
    assert report.failures == [expected]


def test_original_without_backward_is_compared_forward() -> None:
    class Net(Returns):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            if torch.is_grad_enabled():
                raise RuntimeError("no gradients here")
            return y

    model = Net(lambda y: y)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert report.passed, report.failures
    assert any("no gradients here" in note for note in report.notes)
    assert checks_of(report, "layer_grad_weight", failed=False)
    forward = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4), backward=False)
    assert forward.passed
    assert {c.kind for c in forward.checks} == {"output", "layer_output"}


def test_non_deterministic_original_is_explained() -> None:
    class Net(Returns):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Net.calls += 1
            return self.up(x) + 1e-3 * Net.calls

    model = Net(lambda y: y)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4), modes=("eval",))
    assert any("not deterministic" in note for note in report.notes)
    assert next(c for c in report.checks if c.kind == "output").limit > 1e-3


def test_operator_without_float64_falls_back_to_the_original() -> None:
    class Net(Returns):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise NotImplementedError("no float64 here")
            return self.up(x)

    model = Net(lambda y: y)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert report.passed, report.failures
    assert report.reference == "original (in float64 it raises NotImplementedError: no float64 here)"
    assert all(c.error_original == 0 for c in report.checks if c.kind == "output")
    assert max(c.error_original for c in report.checks if c.kind == "layer_output") > 0
    strict = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4), reference="float64")
    assert any(f.startswith("no float64 reference") for f in strict.failures)


def test_too_little_memory_falls_back_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tconv_swap.verification.memory.free_bytes", lambda device: 1000)
    model = generator()
    report = verify(model, swapped_copy(model), latent())
    assert report.passed, report.failures
    assert report.reference.startswith("original (float64 needs about")


def test_chaotic_network_is_not_judged_by_float64() -> None:
    model = Returns(lambda y: y.add(1e7).sub(1e7))
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4) * 1e-3, modes=("eval",))
    assert report.passed, report.failures
    assert "not the same computation" in report.reference


def test_layer_that_no_input_reaches_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(Returns):
        def __init__(self) -> None:
            super().__init__(lambda y: y)
            self.unused = nn.ConvTranspose2d(2, 3, 5, 3, padding=9)
            self.empty = nn.ConvTranspose2d(4, 4, 2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            return y, self.empty(y[:0])

    model = Net()
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert report.passed, report.failures
    probed = {c.name for c in report.checks if c.mode == "probe" and c.kind == "layer_grad_weight"}
    assert probed == {"unused", "empty"}
    with_kernel(monkeypatch, lambda x, w, *r: F.conv_transpose2d(x, w, *r) * (1.05 if len(w) == 2 else 1))
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 4, 4))
    assert {c.name for c in checks_of(report, "layer_output")} == {"unused"}


def test_user_tolerance_overrides_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel(monkeypatch, edited(lambda y: y.mul_(1.001)))
    model, x = generator(), latent()
    assert not verify(model, swapped_copy(model), x).passed
    report = verify(model, swapped_copy(model), x, atol=1e-1, rtol=1e-1)
    assert report.passed, report.failures
    assert {(c.norm, c.limit) for c in report.checks} == {("allclose", 1.0)}
    assert verify(model, swapped_copy(model), x, atol=1e9).passed
    labels = compare_outputs(lambda y: y.argmax(1), lambda y: y.argmin(1), atol=0.5)
    assert checks_of(labels, "output")
    with_kernel(monkeypatch, reordered)
    assert not verify(model, swapped_copy(model), x, atol=0).passed
    with_kernel(monkeypatch, F.conv_transpose2d)
    exact = verify(model, swapped_copy(model), x, atol=0, reference="original")
    assert "output" not in {c.kind for c in exact.checks if not c.passed}


@pytest.mark.parametrize(
    "arguments",
    [
        {"modes": ()},
        {"modes": ("test",)},
        {"reference": "float32"},
        {"atol": -1.0},
        {"atol": math.nan},
        {"rtol": math.nan, "atol": 1.0},
        {"atol": math.inf},
        {"rtol": math.inf, "atol": 1.0},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    model = generator()
    with pytest.raises(ValueError):
        verify(model, swapped_copy(model), latent(), **arguments)


@pytest.mark.usefixtures("two_threads")
def test_same_seed_same_report() -> None:
    model, x = generator(), latent()
    first = verify(model, swapped_copy(model), x, seed=3).to_dict()
    torch.rand(5)
    assert verify(model, swapped_copy(model), x, seed=3).to_dict() == first
    assert verify(model, swapped_copy(model), x, seed=4).to_dict() != first


def state_of(*models: nn.Module) -> list[Any]:
    state: list[Any] = [torch.get_rng_state().tolist(), random.getstate(), torch.get_default_dtype()]
    for model in models:
        state += [(n, b.tolist(), id(b)) for n, b in model.named_buffers()]
        state += [
            (n, p.tolist(), None if p.grad is None else p.grad.tolist()) for n, p in model.named_parameters()
        ]
        state += [
            (n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
            for n, m in model.named_modules()
        ]
    return state


@pytest.mark.parametrize("interrupted", [False, True])
def test_verify_restores_everything(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    model = generator()
    model[3].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model.register_forward_hook(lambda *_: random.random() and None)
    swapped = swapped_copy(model)
    swapped.train(False)
    x = latent().requires_grad_()
    before = state_of(model, swapped)
    grad = model[0].weight.grad
    if interrupted:

        def interrupt(*args: Any) -> Tensor:
            torch.rand(3)
            raise KeyboardInterrupt

        with_kernel(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            verify(model, swapped, x)
    else:
        assert verify(model, swapped, x).passed
    assert state_of(model, swapped) == before
    assert model[0].weight.grad is grad
    assert x.grad is None


def test_state_is_restored_when_the_float64_run_is_interrupted() -> None:
    class Net(Returns):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise KeyboardInterrupt
            return self.up(x)

    model, x = Net(lambda y: y), torch.randn(2, 3, 4, 4)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        verify(model, swapped_copy(model), x)
    assert state_of(model) == before


def test_a_network_that_writes_to_its_input() -> None:
    class Net(Returns):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x.mul_(2))

    model, x = Net(lambda y: y), torch.randn(2, 3, 4, 4)
    kept = x.clone()
    assert verify(model, swapped_copy(model), x).passed
    assert torch.equal(x, kept)


def test_report_is_json_and_its_verdict_follows_from_the_checks() -> None:
    good = Check("eval", "output", "", 1e-7, 2e-7, 1e-6, True)
    bad = Check("eval", "layer_output", "up", 0.0, math.inf, 0.0, False, "is missing")
    assert VerifyReport(checks=[good]).passed
    assert VerifyReport(checks=[good]).margin == pytest.approx(5)
    assert not VerifyReport().passed
    report = VerifyReport(checks=[good, bad], failures=[bad.failure()])
    assert not report.passed
    assert report.failures == ["eval: layer output of up: is missing"]
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["checks"][1]["error_swapped"] == "inf"
    assert data["margin"] == 0.0
