"""Layers that are not plain nn.ConvTranspose2d: subclasses, parametrizations, norms by hook, pruning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from surgery_models import swapped_names, up
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tconv_swap.surgery import plan_swap, swap_layers, unswap_layers

pytestmark = pytest.mark.filterwarnings("error::tconv_swap.surgery.SwapWarning")  # a test expects its own


# --- subclasses that keep PyTorch's forward -----------------------------------------------------------------


class Named(nn.ConvTranspose2d):
    """Overrides everything except forward."""

    def __init__(self, *args: Any, label: str) -> None:
        super().__init__(*args)
        self.label = label

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.5)

    def describe(self) -> str:
        return f"{self.label}: {super().extra_repr()}"


def test_subclass_keeps_its_own_methods() -> None:
    model = nn.Sequential(Named(2, 3, 2, label="first"), Named(3, 3, 2, label="second"))
    x = torch.randn(1, 2, 3, 3)
    expected, text = model(x), repr(model)
    description = model[0].describe()
    swap_layers(model)
    assert swapped_names(model) == ["0", "1"]
    assert type(model[0]) is type(model[1])
    assert isinstance(model[0], Named)
    assert model[0].describe() == description
    model[0].reset_parameters()
    assert bool((model[0].weight == 1).all())
    assert repr(model) == text
    assert plan_swap(model).layers[0].kind == "Named"
    torch.testing.assert_close(model(x), expected)
    unswap_layers(model)
    assert [type(layer) for layer in model] == [Named, Named]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_swapped_subclass_survives_pickle(protocol: int) -> None:
    model = swap_layers(nn.Sequential(Named(2, 3, 2, label="first")))
    again = pickle.loads(pickle.dumps(model, protocol))
    assert type(again[0]) is type(model[0])
    assert again[0].label == "first"
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(again(x), model(x))


def test_swapped_subclass_survives_deepcopy_and_torch_save() -> None:
    model = swap_layers(nn.Sequential(Named(2, 3, 2, label="first")))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(again[0]) is type(model[0])
        assert again[0].label == "first"
        assert torch.equal(again[0].weight, model[0].weight)
        assert again[0].weight is not model[0].weight


# --- reparametrized layers ----------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


def halved(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Halved())
    return parametrize.register_parametrization(layer, "bias", Halved())


PARAMETRIZATIONS = [spectral_norm, weight_norm, halved, lambda layer: halved(weight_norm(layer))]


@pytest.mark.parametrize("apply", PARAMETRIZATIONS)
@pytest.mark.parametrize("make", [up, lambda: Named(4, 4, 2, label="a")])
def test_parametrized_stays_parametrized(
    apply: Callable[[nn.Module], nn.Module], make: Callable[[], nn.ConvTranspose2d]
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(apply(make())).double()
    original_class = parametrize.type_before_parametrizations(model[0])
    twin = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert "bias" in plan_swap(model).layers[0].geometry
    assert plan_swap(model).layers[0].kind == original_class.__name__
    swap_layers(model)
    assert swapped_names(model) == ["0"]
    assert parametrize.is_parametrized(model[0])
    assert type(model[0]).__name__ == type(twin[0]).__name__
    for name, value in state.items():  # planning and swapping has not run a power iteration
        assert torch.equal(model.state_dict()[name], value), name

    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
    for _ in range(2):
        x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
        outputs = []
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(net(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(outputs[0], outputs[1])

    for tensor_name in list(model[0].parametrizations):
        for net in (model, twin):
            parametrize.remove_parametrizations(net[0], tensor_name)
    assert swapped_names(model) == ["0"]
    assert type(twin[0]) is original_class
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    unswap_layers(model)
    assert type(model[0]) is original_class


class Counting(nn.Module):
    calls = 0

    def forward(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return tensor


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_swap_computes_no_parametrization_and_a_forward_computes_each_once() -> None:
    layer, counts = up(), {"weight": Counting(), "bias": Counting()}
    for name, counting in counts.items():
        parametrize.register_parametrization(layer, name, counting)
    for dtype in (torch.float32, torch.complex64):
        layer.to(dtype)
        for counting in counts.values():
            counting.calls = 0
        swap_layers(layer)
        assert [counting.calls for counting in counts.values()] == [0, 0]
        layer(torch.randn(1, 4, 2, 2, dtype=dtype))
        assert [counting.calls for counting in counts.values()] == [1, 1]


def test_parametrized_unswaps_while_parametrized() -> None:
    model = nn.Sequential(halved(up()))
    x = torch.randn(1, 4, 3, 3)
    expected, names = model(x), [cls.__name__ for cls in type(model[0]).__mro__]
    unswap_layers(swap_layers(model))
    assert swapped_names(model) == []
    assert [cls.__name__ for cls in type(model[0]).__mro__] == names
    assert torch.equal(model(x), expected)
    parametrize.remove_parametrizations(model[0], "bias")
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.ConvTranspose2d


def test_swapping_a_copy_leaves_the_parametrized_original() -> None:
    model = nn.Sequential(halved(up()))
    cls = type(model[0])
    result = swap_layers(model, inplace=False)
    assert type(model[0]) is cls
    assert not swapped_names(model)
    assert swapped_names(result) == ["0"]
    parametrize.remove_parametrizations(result[0], "weight")
    assert parametrize.is_parametrized(model[0], "weight")
    model(torch.randn(1, 4, 2, 2))
    assert swapped_names(copy.deepcopy(result)) == ["0"]


def test_parametrizing_after_the_swap() -> None:
    model = swap_layers(nn.Sequential(up()))
    halved(model[0])
    assert plan_swap(model).layers[0].already
    unswap_layers(model)
    assert parametrize.type_before_parametrizations(model[0]) is nn.ConvTranspose2d


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    ("apply", "remove"),
    [
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
    ],
)
def test_hook_based_norms_and_pruning(apply: Callable[[Any], Any], remove: Callable[[Any], Any]) -> None:
    def make() -> nn.Sequential:  # instead of a deep copy, which PyTorch refuses for some of these
        torch.manual_seed(1)
        model = nn.Sequential(up())
        apply(model[0])
        return model

    model, twin = make(), make()
    swap_layers(model)
    assert swapped_names(model) == ["0"]
    x = torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(model(x), twin(x))
    for net in (model, twin):
        net(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for net in (model, twin):
        remove(net[0])
    torch.testing.assert_close(model[0].weight, twin[0].weight)
    assert isinstance(model[0].weight, nn.Parameter)
