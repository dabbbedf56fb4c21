"""Networks whose hooks compute `weight` before every forward: old-style weight_norm, spectral_norm, pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from verify_cases import flipped_tap, with_kernel

import tconv_swap
from tconv_swap.cli.request import Request
from tconv_swap.cli.workflow import run
from tconv_swap.computed import computed_tensors, deep_copy
from tconv_swap.inputs import Inputs
from tconv_swap.preserving import preserved
from tconv_swap.verification.memory import float64_does_not_fit

Norm = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-any-return,no-untyped-call]


NORMS = [nn.utils.weight_norm, nn.utils.spectral_norm, pruned]
# `torch.nn.utils.weight_norm` is deprecated, and is what many networks use.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def image_generator(norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        norm(nn.ConvTranspose2d(8, 6, 4, 1, 0, bias=False)),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        norm(nn.ConvTranspose2d(6, 4, 4, 2, 1)),
        nn.LeakyReLU(0.1),
        norm(nn.Conv2d(4, 3, 3, 1, 1)),
        nn.Tanh(),
    )


def vocoder(norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        norm(nn.Conv1d(8, 6, 7, 1, 3)),
        nn.LeakyReLU(0.1),
        norm(nn.ConvTranspose1d(6, 4, 8, 4, 2)),
        nn.LeakyReLU(0.1),
        norm(nn.ConvTranspose1d(4, 2, 4, 2, 1)),
        nn.Tanh(),
    )


CASES = {"2d": (image_generator, (2, 8, 3, 3)), "1d": (vocoder, (2, 8, 12))}


@pytest.fixture(params=NORMS, ids=lambda norm: str(norm.__name__))
def norm(request: pytest.FixtureRequest) -> Norm:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, norm: Norm) -> tuple[nn.Module, Tensor]:
    build, shape = CASES[request.param]
    return build(norm), torch.randn(shape)


def swapped(model: nn.Module) -> nn.Module:
    return tconv_swap.swap_layers(model, inplace=False, include_1d=True)


def held(model: nn.Module) -> list[tuple[int, Any]]:
    return [(id(t), t.tolist()) for m in model.modules() for t in computed_tensors(m).values()]


def storages(model: nn.Module) -> set[int]:
    plain = [t for m in model.modules() for t in computed_tensors(m).values()]
    return {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *plain)}


def run_before(model: nn.Module, x: Tensor, how: str) -> None:
    if how == "trained":
        model(x).sum().backward()
    elif how == "without gradients":
        with torch.no_grad():
            model(x)


@pytest.mark.parametrize("how", ["never run", "trained", "without gradients"])
def test_verified_against_float64_and_restored(case: tuple[nn.Module, Tensor], how: str) -> None:
    model, x = case
    run_before(model, x, how)
    ours = swapped(model)
    before = held(model), held(ours)
    report = tconv_swap.verify(model, ours, x, reference="float64")
    assert report.passed, report.failures
    assert report.reference == "float64"
    assert len(before[0]) == 3
    assert (held(model), held(ours)) == before
    kinds = {check.kind for check in report.checks}
    assert {"output", "grad_input", "grad_parameter", "layer_output", "layer_grad_weight"} <= kinds


@pytest.mark.parametrize("how", ["never run", "trained"])
def test_wrong_swap_is_caught(
    case: tuple[nn.Module, Tensor], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    run_before(model, x, how)
    ours = swapped(model)
    with_kernel(monkeypatch, flipped_tap)
    report = tconv_swap.verify(model, ours, x)
    assert not report.passed
    assert report.reference == "float64"
    assert any(check.kind == "layer_output" and not check.passed for check in report.checks)


def test_a_wrong_computed_weight_is_caught(case: tuple[nn.Module, Tensor]) -> None:
    """One layer is wrong by a hundredth. The weight that the swapped network's hook computes counts, not the stored
    one."""
    model, x = case
    ours = swapped(model)
    layer = next(m for m in ours.modules() if isinstance(m, nn.ConvTranspose1d | nn.ConvTranspose2d))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("weight_g", "weight_orig"):
                parameter.view(-1)[:2].mul_(1.01)
                parameter.view(-1)[2:].mul_(0.99)
    assert not tconv_swap.verify(model, ours, x).passed


def test_networks_that_can_be_copied_are_verified_and_copied(norm: Norm) -> None:
    model, x = image_generator(norm), torch.randn(2, 8, 3, 3)
    run_before(model, x, "without gradients")  # after which PyTorch copies all of them
    ours = swapped(model)
    tconv_swap.verify(model, ours, x)
    tconv_swap.benchmark(model, ours, x, warmup=0, iters=1)
    tconv_swap.explain(ours, x)
    for network in (model, ours):
        copy.deepcopy(network)


def test_benchmark_and_explain_restore_computed_weights(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    ours = swapped(model)
    before = held(model), held(ours)
    tconv_swap.benchmark(model, ours, x, warmup=0, iters=1)
    tconv_swap.explain(ours, x)
    assert (held(model), held(ours)) == before


def test_explain_sees_the_weight_that_the_hook_computes(norm: Norm) -> None:
    """`Module.to` leaves the stored weight as it is."""
    model = swapped(nn.Sequential(norm(nn.ConvTranspose2d(8, 8, 4, 2, 1)))).to(torch.bfloat16)
    explained = tconv_swap.explain(model, torch.randn(2, 8, 4, 4).bfloat16(), architecture="sm_90a")
    assert [layer.dtype for layer in explained.layers] == ["bfloat16"]


@pytest.mark.parametrize("how", ["never run", "trained"])
def test_swapping_and_unswapping_a_copy(case: tuple[nn.Module, Tensor], how: str) -> None:
    model, x = case
    model.eval()
    run_before(model, x, how)
    ours = swapped(model)
    back = tconv_swap.unswap_layers(ours, inplace=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        assert torch.equal(back(x), model(x))
    assert not storages(model) & storages(ours)


def test_swapped_from_file_to_file(norm: Norm, tmp_path: Path) -> None:
    source, target = tmp_path / "model.pt", tmp_path / "fast.pt"
    model, x = image_generator(norm).eval(), torch.randn(2, 8, 3, 3)
    model(x).sum().backward()
    torch.save(model, source)
    request = Request(
        model=source,
        out=target,
        input_shapes=((2, 8, 3, 3),),
        device=torch.device("cpu"),
        unsafe_pickle=norm is pruned,
        warmup=0,
        iters=1,
    )
    result = run(request, lambda text, done=None, total=None: None)
    assert result.verification is not None
    assert result.verification.passed, result.verification.failures
    assert result.verification.reference == "float64"
    torch.testing.assert_close(torch.load(target, weights_only=False).eval()(x), model(x))


def test_weights_are_loaded_into_a_network_that_a_factory_builds(tmp_path: Path) -> None:
    """The weight has never been plain data from a pickle, so PyTorch refuses to copy it."""
    net, weights = tmp_path / "net.py", tmp_path / "weights.pt"
    net.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.utils.weight_norm(nn.ConvTranspose2d(3, 2, 4, 2, 1)))\n"
    )
    torch.save(nn.Sequential(nn.utils.weight_norm(nn.ConvTranspose2d(3, 2, 4, 2, 1))).state_dict(), weights)
    request = Request(
        model=weights,
        input_shapes=((1, 3, 4, 4),),
        device=torch.device("cpu"),
        factory=f"{net}:build",
        benchmark=False,
    )
    result = run(request, lambda text, done=None, total=None: None)
    assert result.verification is not None
    assert result.verification.passed, result.verification.failures
    assert result.verification.reference == "float64"


class Recurrent(nn.Module):
    """An LSTM holds its weights in a list too."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.lstm = norm(nn.LSTM(6, 6, batch_first=True), "weight_hh_l0")
        self.up = norm(nn.ConvTranspose1d(6, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.lstm(x)[0].transpose(1, 2))
        return y


@pytest.mark.parametrize("how", ["never run", "without gradients"])
@pytest.mark.parametrize("norm", NORMS[:2], ids=["weight_norm", "spectral_norm"])
def test_weights_of_an_lstm(norm: Callable[..., nn.Module], how: str) -> None:
    model, x = Recurrent(norm), torch.randn(2, 5, 6)
    run_before(model, x, how)
    report = tconv_swap.verify(model, swapped(model), x, reference="float64")
    assert report.passed, report.failures
    assert any(weight is model.lstm.weight_hh_l0 for weight in model.lstm._flat_weights)
    copy.deepcopy(deep_copy(model))


class Cache(nn.Module):
    """Keeps its result and a flag that says so, and its last output with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 3, 2, 2)
        self.grid = torch.empty(0)
        self.size = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.size != x.shape[-1]:
            self.grid, self.size = torch.linspace(0, 1, 2 * x.shape[-1]), x.shape[-1]
        self.last = self.up(x)
        return self.last * self.grid


def test_other_attributes_are_not_restored() -> None:
    model = Cache()
    with preserved(model):
        model(torch.randn(1, 3, 4, 4))
    assert (model.size, model.grid.numel()) == (4, 8)
    assert not hasattr(model, "last")
    report = tconv_swap.verify(model, swapped(model), torch.randn(1, 3, 5, 5), reference="float64")
    assert report.passed, report.failures
    assert model.size == 5
    copy.deepcopy(model)


def test_float64_copy_computes_in_float64_where_no_hook_has_run(norm: Norm) -> None:
    model = norm(nn.ConvTranspose2d(3, 3, 2, 2))
    model(torch.randn(1, 3, 4, 4))
    made = deep_copy(model, dtype=torch.float64).double()
    assert [t.dtype for t in computed_tensors(made).values()] == [torch.float64]
    assert made.forward(torch.randn(1, 3, 4, 4).double()).dtype == torch.float64


def test_the_memory_estimate_counts_computed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.utils.spectral_norm(nn.ConvTranspose2d(64, 64, 4))
    weight = 64 * 64 * 16 * 8
    monkeypatch.setattr("tconv_swap.verification.memory.free_bytes", lambda device: 1.5 * weight)
    assert "float64 needs" in float64_does_not_fit(model, Inputs.of(torch.randn(1, 64, 1, 1)), 0, False)
