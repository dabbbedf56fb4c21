"""Networks whose hooks compute `weight` before every forward: old-style weight_norm, spectral_norm, pruning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import tconv_swap
from tconv_swap.computed import computed_tensors

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


def storages(model: nn.Module) -> set[int]:
    plain = [t for m in model.modules() for t in computed_tensors(m).values()]
    return {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *plain)}


def run_before(model: nn.Module, x: Tensor, how: str) -> None:
    if how == "trained":
        model(x).sum().backward()
    elif how == "without gradients":
        with torch.no_grad():
            model(x)


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
