"""Verification passes every right swap, whatever the network, the dtype and the order of summation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verify_cases import (
    DTYPES,
    WRONG,
    SegmentationNet,
    checks_of,
    generator,
    latent,
    reordered,
    swapped_copy,
    with_kernel,
)

from tconv_swap.inputs import Inputs
from tconv_swap.surgery import swap_layers
from tconv_swap.verification import verify


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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
        z = z[torch.randperm(len(z))] + torch.randint(3, z.shape) + torch.rand(4, dtype=z.dtype).mean()
        z = F.rrelu(z, training=True) * torch.bernoulli(torch.full_like(z, 0.5))
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
