"""Verification compares outputs of any nesting, and notices what is missing, new or of another kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verify_cases import DTYPES, Pair, compare_outputs, generator, latent, swapped_copy, with_kernel

from tconv_swap.measurement.bench import benchmark
from tconv_swap.verification import verify
from tconv_swap.verification.compare import ErrorSum, Norms, Tolerance, difference, judge
from tconv_swap.verification.network import Standard
from tconv_swap.verification.runs import Outcome, Pass
from tconv_swap.verification.tree import flatten


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@dataclasses.dataclass
class Result:
    image: Tensor
    mask: Tensor | None = None


def beside(y: Tensor, value: float) -> Tensor:
    return torch.cat([y.flatten(), torch.full((2,), value)])


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda y: y, {""}),
        (lambda y: (y, [y * 2, {"a": y}]), {"0", "1.0", "1.1.a"}),
        (lambda y: Result(y), {"image"}),
        (lambda y: Pair(y, y > 0), {"image", "mask"}),
        (lambda y: torch.distributions.Normal(y, 1.0), {"loc", "scale"}),
        (lambda y: {"n": 3, "loss": y.mean().item(), "s": y.to_sparse()}, {"loss", "s"}),
        (lambda y: torch.complex(y, y * 2), {""}),
    ],
)
def test_any_nesting_is_compared(make: Callable[[Tensor], Any], paths: set[str]) -> None:
    report = compare_outputs(make, make)
    assert report.passed, report.failures
    assert {c.name for c in report.checks if c.kind == "output"} == paths


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (lambda y: (y, y * 2), lambda y: (y,), "output (whole) is tuple of 1, expected tuple of 2"),
        (lambda y: (y, y * 2), lambda y: [y, y * 2], "output (whole) is list of 2, expected tuple of 2"),
        (lambda y: {"a": y, "b": y}, lambda y: {"a": y}, "output b is missing"),
        (lambda y: {"a": y}, lambda y: {"a": y, "c": y}, "output c is one that the original does not have"),
        (lambda y: {"a": {"b": y}}, lambda y: {"a": y}, "output a is Tensor, expected dict of 1"),
        (lambda y: y, lambda y: None, "output (whole) is NoneType, expected a tensor"),
        (lambda y: y, lambda y: y.double(), "has dtype torch.float64, expected torch.float32"),
        (lambda y: y, lambda y: y[:1], "has shape [1, 4, 8, 8], expected [2, 4, 8, 8]"),
        (lambda y: y, lambda y: y.detach(), "output (whole) no longer requires grad"),
        (lambda y: {"a": y, "n": 3}, lambda y: {"a": y, "n": 4}, "output n is 4, expected 3"),
        (lambda y: y > 0, lambda y: y < 0, "output"),
        (lambda y: None, lambda y: None, "nothing compared"),
        (lambda y: {}, lambda y: {}, "nothing compared"),
        (lambda y: y * math.nan, lambda y: y * math.nan, "nothing compared"),
        (lambda y: y.log(), lambda y: y.log().nan_to_num(), "finite where the original is NaN or Inf"),
        (lambda y: y, lambda y: y / 0, "NaN or Inf where the original has none"),
        (lambda y: beside(y, -math.inf), lambda y: beside(y, math.inf), "inf, expected -inf"),
        (lambda y: beside(y, math.inf), lambda y: beside(y, math.nan), "nan, expected inf"),
        (lambda y: beside(y, math.nan), lambda y: beside(y, math.inf), "inf, expected nan"),
        (lambda y: beside(y, math.nan), lambda y: beside(y, math.inf), "2 of 514 not the NaN or Inf"),
    ],
)
def test_changed_outputs_fail(
    before: Callable[[Tensor], Any], after: Callable[[Tensor], Any], message: str
) -> None:
    report = compare_outputs(before, after)
    assert not report.passed
    assert any(message in failure for failure in report.failures), report.failures


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "truth", "original", "right", "right_on_cuda"),
    [
        (INF, INF, INF, True, True),
        (NAN, NAN, NAN, True, True),
        (-INF, INF, INF, False, False),
        (NAN, INF, INF, False, True),
        (INF, NAN, NAN, False, False),
        (0.0, INF, INF, False, False),
        # float64 and the original differ: either is right.
        (NAN, NAN, INF, True, True),
        (INF, NAN, INF, True, True),
        (-INF, NAN, INF, False, False),
        (-INF, INF, -INF, True, True),
        # The original overflows: whether the swapped network does is chance, in which direction is not.
        (7e4, 7e4, INF, True, True),
        (INF, 7e4, INF, True, True),
        (NAN, 7e4, INF, True, True),
        (-INF, 7e4, INF, False, False),
        (-INF, 0.0, INF, True, True),
        (INF, 7e4, NAN, True, True),
        # float64 alone is not finite, and tells nothing.
        (1.0, NAN, 2.0, True, True),
        (-INF, INF, 2.0, True, True),
        (NAN, 1.0, 1.0, False, False),
    ],
)
def test_which_infinity_and_which_nan_are_right(
    value: float, truth: float, original: float, right: bool, right_on_cuda: bool
) -> None:
    tensors = [torch.tensor([1.0, number], dtype=torch.float64) for number in (value, truth, original)]
    for cuda, expected in ((False, right), (True, right_on_cuda)):
        assert math.isfinite(difference(*tensors, cuda=cuda).norms.maximum) == expected
    assert difference(tensors[2], *tensors[1:]).norms == Norms()


def test_an_allowed_nan_is_noted() -> None:
    infinite, nan = (Outcome(flatten(torch.tensor([1.0, number]))) for number in (INF, NAN))
    for device, passed in (("cpu", False), ("cuda", True)):
        standard = Standard(
            "eval",
            Pass(),
            infinite,
            infinite,
            torch.float32,
            [torch.device("cpu"), torch.device(device)],
            None,
        )
        standard.roundoff = lambda tensor: 1e-7  # type: ignore[method-assign]
        (check,) = standard.checks(nan)
        assert check.passed == passed
        assert ("1 of 2 NaN where the original is infinite" in check.detail) == passed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_swap_passes_with_infinities_in_its_input(dtype: torch.dtype) -> None:
    model, x = generator(dtype), torch.randn(3, 8, 2, 2).to(dtype)
    del model[1]
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[2, 0, 0, 1] = INF, NAN, -INF
    x = torch.cat([x, latent(dtype)])
    report = verify(model, swapped_copy(model), x, modes=("eval",))
    assert report.passed, report.failures


def test_a_nan_error_fails() -> None:
    one = torch.ones(2, dtype=torch.float64)
    for scale in (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])):
        error = ErrorSum()
        error.add(one + 1e-9, one, one, scale.double(), one)
        error.add(one + 1e-3, one, one, 1.0, one)
        assert math.isnan(error.norms.maximum)
        assert not judge(Norms(), error.norms, Norms(1.0, 1.0)).passed
        assert not judge(Norms(), error.norms, Norms(1.0, 1.0), Tolerance(1.0, 0.0)).passed
    assert not judge(Norms(), Norms(0.5, NAN), Norms(1.0, 1.0)).passed


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda y: None, "is NoneType, expected a tensor"),
        (lambda y: y.half(), "has dtype torch.float16"),
        (lambda y: y[..., :-1], "has shape"),
    ],
)
def test_wrong_kind_of_layer_output_is_named(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[Tensor], Any], message: str
) -> None:
    with_kernel(monkeypatch, lambda *args: edit(F.conv_transpose2d(*args)))
    model = generator()
    report = verify(model, swapped_copy(model), latent(), modes=("eval",))
    assert not report.passed
    assert report.first_divergence is not None
    assert message in report.first_divergence


class PastHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up.forward(x)


def test_a_layer_called_without_hooks_is_not_reported_as_unreached() -> None:
    model, x = PastHooks(), torch.randn(1, 3, 4, 4)
    report = verify(model, swapped_copy(model), x)
    assert report.passed, report.failures
    (note,) = report.notes
    assert note.startswith("layer up: no call was seen (")
    assert "its forward is called without hooks" in note
    timing = benchmark(model, swapped_copy(model), x, warmup=0, iters=1)
    assert any("no call of theirs was seen" in line and "up" in line for line in timing.notes), timing.notes
