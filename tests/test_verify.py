"""Verification: it catches every kind of wrong kernel, passes every right one, and leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tconv_swap import op
from tconv_swap.inputs import Inputs
from tconv_swap.layer import ConvTranspose2d
from tconv_swap.surgery import swap_layers
from tconv_swap.verify import Check, VerifyReport, verify

Kernel = Callable[..., Tensor]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Pair = namedtuple("Pair", ["image", "mask"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def generator(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 12, 4, 1, 0, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.2),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, 1),
        nn.Tanh(),
    ).to(dtype)


def latent(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 8, 2, 2).to(dtype)


class SegmentationNet(nn.Module):
    """Skip connection, one layer under two names and called twice, a dict with an argmax and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, 2, 1)
        self.deeper = nn.Conv2d(6, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.again = self.up
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, image: Tensor, *, weight: Tensor | None = None) -> dict[str, Any]:
        a = F.relu(self.down(image))
        b = F.relu(self.deeper(a))
        c = self.norm(self.up(b)) + a
        logits = self.head(F.relu(self.again(c)))
        logits = logits if weight is None else logits * weight
        return {"logits": logits, "extra": [logits.argmax(1), (logits.float().square().mean(), "v1", 3)]}


def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """Every swapped layer computes with this instead of the operator."""
    monkeypatch.setattr(op, "conv_transpose2d", kernel)


def checks_of(report: VerifyReport, *kinds: str, failed: bool = True) -> list[Check]:
    return [c for c in report.checks if c.kind in kinds and c.passed != failed]


def swapped_copy(model: nn.Module) -> nn.Module:
    return swap_layers(model, inplace=False)


# ---------------------------------------------------------------------------------------------------------
# Right swaps pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_swap_passes_in_every_dtype(dtype: torch.dtype) -> None:
    model = generator(dtype)
    report = verify(model, swapped_copy(model), latent(dtype))
    assert report.passed, report.failures
    assert report.reference == "float64"
    assert report.margin >= 1
    assert report.first_divergence is None
    assert {c.mode for c in report.checks} == {"eval", "train"}
    kinds = {c.kind for c in report.checks}
    assert kinds == {
        *("output", "grad_input", "grad_parameter", "buffer"),
        *("layer_output", "layer_grad_input", "layer_grad_weight", "layer_grad_bias"),
    }
    named = {c.name for c in report.checks if c.kind == "layer_output"}
    assert named == {"0", "4", "7"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_swap_of_shared_layers_and_nested_outputs_passes(dtype: torch.dtype) -> None:
    model = SegmentationNet().to(dtype)
    inputs = Inputs((torch.randn(2, 3, 16, 16).to(dtype),), {"weight": torch.rand(4, 1, 1).to(dtype)})
    report = verify(model, swapped_copy(model), inputs)
    assert report.passed, report.failures
    outputs = {c.name for c in report.checks if c.kind == "output"}
    assert outputs == {"logits", "extra.0", "extra.1.0"}
    assert {c.name for c in report.checks if c.kind == "grad_input"} == {"0", "weight"}
    calls = [c.detail for c in report.checks if c.kind == "layer_output" and c.mode == "eval"]
    assert len(calls) == 2
    assert "2x6x4x4" in calls[0]
    assert "2x6x8x8" in calls[1]


def reordered(x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, g: int, d: Any) -> Tensor:
    """Right, but adds up in another order."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    x = x[:, order].contiguous(memory_format=torch.channels_last)
    return F.conv_transpose2d(x, w[order], b, s, p, o, g, d)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_another_order_of_summation_passes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int
) -> None:
    with_kernel(monkeypatch, reordered)
    torch.manual_seed(seed)
    model = SegmentationNet().to(dtype)
    report = verify(model, swapped_copy(model), torch.randn(2, 3, 16, 16).to(dtype), seed=seed)
    assert report.passed, report.failures
    if dtype in (torch.float32, torch.float64):  # the others round the difference away
        assert any(c.error_original != c.error_swapped for c in report.checks)


class RoundToTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_tf32_passes_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
        return F.conv_transpose2d(RoundToTF32.apply(x), RoundToTF32.apply(w), *rest)

    with_kernel(monkeypatch, kernel)
    model = generator()
    assert not verify(model, swapped_copy(model), latent()).passed
    before = torch.backends.mkldnn.conv.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = "tf32"
    try:
        report = verify(model, swapped_copy(model), latent())
    finally:
        torch.backends.mkldnn.conv.fp32_precision = before
    assert report.passed, report.failures


def test_networks_that_share_their_parameters() -> None:
    model = generator()
    swapped = copy.deepcopy(model)
    for mine, theirs in zip(swapped.modules(), model.modules(), strict=True):
        mine._parameters, mine._buffers = theirs._parameters, theirs._buffers
    swap_layers(swapped)
    report = verify(model, swapped, latent())
    assert report.passed, report.failures


def test_under_autocast() -> None:
    model = generator()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = verify(model, swapped_copy(model), latent())
    assert report.passed, report.failures
    assert max(c.error_original for c in checks_of(report, "layer_output", failed=False)) > 1e-4


def test_spectral_norm_and_output_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.utils.parametrizations.spectral_norm(nn.ConvTranspose2d(4, 4, 3, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[10, 9])

    model = Net()
    report = verify(model, swapped_copy(model), torch.randn(2, 4, 5, 5))
    assert report.passed, report.failures
    assert {c.name for c in report.checks if c.kind == "layer_grad_weight"} == {"up"}


def test_root_unbatched_frozen_and_no_grad() -> None:
    layer = nn.ConvTranspose2d(3, 4, 3, 2).requires_grad_(False)
    report = verify(layer, swapped_copy(layer), torch.randn(3, 5, 5))
    assert report.passed, report.failures
    kinds = {c.kind for c in report.checks}
    assert {"grad_input", "layer_grad_input", "layer_grad_weight", "layer_grad_bias"} <= kinds
    assert "grad_parameter" not in kinds

    class Generate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 3, 2)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    model = Generate()
    with torch.inference_mode():
        report = verify(model, swapped_copy(model), torch.randn(2, 3, 5, 5))
    assert report.passed, report.failures
    assert any("no output depends" in note for note in report.notes)
    assert checks_of(report, "layer_grad_weight", failed=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 4, 4, 2, 1)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda t: self.drop(self.up(t)), x, use_reentrant=reentrant)

    model = Net()
    report = verify(model, swapped_copy(model), torch.randn(2, 4, 4, 4))
    assert report.passed, report.failures
    assert {"grad_input", "grad_parameter"} <= {c.kind for c in report.checks}
    assert all(p.grad is None for p in model.parameters())


class Noisy(nn.Module):
    """Draws random numbers of its own, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = x + torch.randn_like(x) * 0.5 + torch.rand(x.shape[-1]) + torch.empty_like(x).normal_()
        return self.up(F.dropout(z, 0.5))


def test_float64_draws_the_same_random_numbers() -> None:
    model = Noisy()
    report = verify(model, swapped_copy(model), torch.randn(2, 4, 4, 4))
    assert report.passed, report.failures
    assert report.reference == "float64"
    assert max(c.error_original for c in report.checks) < 1e-5


def test_kinks_do_not_fail_a_right_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ReLU whose input is zero but for rounding: its gradient jumps, in the swapped network alone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(6, 2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return F.relu(y - y.detach() * (1 - 1e-9)) + y

    with_kernel(monkeypatch, lambda x, w, *rest: F.conv_transpose2d(x, w, *rest) * (1 + 6e-8))
    model = Net()
    assert verify(model, swapped_copy(model), torch.randn(2, 6, 8, 8)).passed


# ---------------------------------------------------------------------------------------------------------
# Wrong kernels fail


def flipped_tap(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    wrong = w.clone()
    wrong[..., 0, 0], wrong[..., -1, -1] = w[..., -1, -1], w[..., 0, 0]
    return F.conv_transpose2d(x, wrong, *rest)


class Edit(torch.autograd.Function):
    """Changes the output, and passes the gradient as if nothing had happened."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, edit: Callable[[Tensor], None]) -> Tensor:
        y = y.clone()
        edit(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def edited(edit: Callable[[Tensor], None]) -> Kernel:
    return lambda *args: Edit.apply(F.conv_transpose2d(*args), edit)


def put(value: float) -> Callable[[Tensor], None]:
    def edit(y: Tensor) -> None:
        y[-1, -1, -1, -1] = value

    return edit


def scaled_gradient(which: int, factor: float) -> Kernel:
    def kernel(*args: Any) -> Tensor:
        changed = list(args)
        if changed[which] is not None:
            changed[which] = ScaleGradient.apply(changed[which], factor)
        return F.conv_transpose2d(*changed)

    return kernel


WRONG: dict[str, tuple[Kernel, str]] = {
    "flipped tap": (flipped_tap, "layer_output"),
    "unwritten pixel, poisoned": (edited(put(math.nan)), "layer_output"),
    "infinite pixel": (edited(put(math.inf)), "layer_output"),
    "unwritten pixel, zero": (edited(put(0.0)), "layer_output"),
    "lost bias": (lambda x, w, b, *rest: F.conv_transpose2d(x, w, None, *rest), "layer_output"),
    "scale": (edited(lambda y: y.mul_(1.05)), "layer_output"),
    "grad_input off": (scaled_gradient(0, 1.05), "layer_grad_input"),
    "grad_weight off": (scaled_gradient(1, 1.05), "layer_grad_weight"),
    "grad_bias off": (scaled_gradient(2, 1.05), "layer_grad_bias"),
    "grad_weight zero": (scaled_gradient(1, 0.0), "layer_grad_weight"),
    "grad_input NaN": (scaled_gradient(0, math.nan), "layer_grad_input"),
    "grad_weight missing": (lambda x, w, *r: F.conv_transpose2d(x, w.detach(), *r), "layer_grad_weight"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch, what: str, dtype: torch.dtype) -> None:
    kernel, kind = WRONG[what]
    with_kernel(monkeypatch, kernel)
    model = generator(dtype)
    report = verify(model, swapped_copy(model), latent(dtype), modes=("eval",))
    assert not report.passed
    # What comes after a NaN is not comparable: backward, layer 7 is the first.
    first = {"lost bias": "4", "grad_bias off": "4", "grad_input NaN": "7"}.get(what, "0")
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
    assert report.reference == "original (as asked)"
    assert checks_of(report, "output", "grad_input", "grad_parameter")


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


def test_buffers_are_compared() -> None:
    model = generator()
    swapped = swapped_copy(model)
    swapped[1].momentum = 0.2  # type: ignore[index]
    report = verify(model, swapped, latent())
    assert {c.name for c in checks_of(report, "buffer")} == {"1.running_mean", "1.running_var"}


def test_the_first_module_that_parts_is_named_where_no_swapped_layer_is_wrong() -> None:
    model = generator()
    swapped = swapped_copy(model)
    swapped[5].negative_slope = 0.1  # type: ignore[index]
    report = verify(model, swapped, latent())
    assert not report.passed
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("eval: 5 (LeakyReLU): its output is ")


# ---------------------------------------------------------------------------------------------------------
# Outputs


@dataclasses.dataclass
class Result:
    image: Tensor
    mask: Tensor | None = None


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.make = nn.ConvTranspose2d(3, 4, 2, 2), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.up(x))


def compare_outputs(before: Callable[[Tensor], Any], after: Callable[[Tensor], Any]) -> VerifyReport:
    model, swapped = Returns(before), Returns(after)
    swapped.load_state_dict(model.state_dict())
    return verify(model, swap_layers(swapped), torch.randn(2, 3, 4, 4), modes=("eval",))


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
    ],
)
def test_changed_outputs_fail(
    before: Callable[[Tensor], Any], after: Callable[[Tensor], Any], message: str
) -> None:
    report = compare_outputs(before, after)
    assert not report.passed
    assert any(message in failure for failure in report.failures), report.failures


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


# ---------------------------------------------------------------------------------------------------------
# Modes, references, tolerances


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
    monkeypatch.setattr("tconv_swap.verify_memory._free_bytes", lambda device: 1000)
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
    with_kernel(monkeypatch, reordered)
    assert not verify(model, swapped_copy(model), x, atol=0).passed
    with_kernel(monkeypatch, F.conv_transpose2d)
    exact = verify(model, swapped_copy(model), x, atol=0, reference="original")
    assert "output" not in {c.kind for c in exact.checks if not c.passed}


@pytest.mark.parametrize(
    "arguments", [{"modes": ()}, {"modes": ("test",)}, {"reference": "float32"}, {"atol": -1.0}]
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    model = generator()
    with pytest.raises(ValueError):
        verify(model, swapped_copy(model), latent(), **arguments)


def test_same_seed_same_report() -> None:
    model, x = generator(), latent()
    first = verify(model, swapped_copy(model), x, seed=3).to_dict()
    torch.rand(5)
    assert verify(model, swapped_copy(model), x, seed=3).to_dict() == first
    assert verify(model, swapped_copy(model), x, seed=4).to_dict() != first


# ---------------------------------------------------------------------------------------------------------
# No trace


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
def test_everything_is_as_before(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_cuda(dtype: torch.dtype) -> None:
    model = generator(dtype).cuda()
    state = torch.cuda.get_rng_state()
    report = verify(model, swapped_copy(model), latent(dtype).cuda())
    assert report.passed, report.failures
    assert report.reference == "float64"
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernel_is_caught_on_cuda(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kernel, kind = WRONG[what]
    with_kernel(monkeypatch, kernel)
    model = generator().cuda()
    report = verify(model, swapped_copy(model), latent().cuda(), modes=("train",))
    assert checks_of(report, kind)
