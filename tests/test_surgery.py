"""The swap: it changes the class and nothing else, and it can be undone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from surgery_models import NAMES, Net, images, swapped_names, up
from torch import nn

from tconv_swap import op
from tconv_swap.cuda import expected
from tconv_swap.geometry import Geometry
from tconv_swap.runtime import ahead
from tconv_swap.surgery import plan_swap, swap_layers, unswap_layers

pytestmark = pytest.mark.filterwarnings("error::tconv_swap.surgery.SwapWarning")  # a test expects its own


# --- the swap -----------------------------------------------------------------------------------------------


def test_swaps_every_container_and_computes_the_same() -> None:
    model, x = Net().eval(), images()
    expected = model(x)
    assert swap_layers(model) is model
    assert swapped_names(model) == NAMES
    assert model.shared is model.decoder["up"] is model.alias[0]
    torch.testing.assert_close(model(x), expected)


def test_swapped_layers_run_on_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = swap_layers(Net())
    calls = []
    real = op.conv_transpose2d
    monkeypatch.setattr(op, "conv_transpose2d", lambda *args: calls.append(args) or real(*args))
    model(images())
    assert len(calls) == 5  # the shared layer runs twice


@pytest.mark.parametrize("make", [up, lambda: nn.Sequential(up()), lambda: nn.DataParallel(up())])
def test_root_and_wrappers(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert swap_layers(model) is model
    assert len(swapped_names(model)) == 1
    unswap_layers(model)
    assert not swapped_names(model)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_first_call_of_a_layer_on_a_gpu_is_prepared_for(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(ahead, "read_sources", lambda: loaded.append(1))
    monkeypatch.setattr(expected, "_layers", {})
    swap_layers(
        nn.Sequential(nn.ConvTranspose2d(4, 2, 2), nn.ConvTranspose1d(2, 6, 4, 2, 1, bias=False)),
        include_1d=True,
    )
    assert len(loaded) == on_gpu
    of_layers = [
        expected.ExpectedLayer(Geometry(1, 4, 1, 1, 2, (2, 2)), True),
        expected.ExpectedLayer(Geometry(1, 2, 1, 1, 6, (1, 4), (1, 2), (0, 1)), False),
    ]
    assert list(expected._layers) == (of_layers if on_gpu else [])
    swap_layers(nn.ConvTranspose2d(3, 2, 2), backend="native")
    wrong = nn.ConvTranspose2d(3, 2, 2)
    wrong.stride = "two"  # type: ignore[assignment]
    swap_layers(wrong)
    assert len(expected._layers) == 2 * on_gpu
    integers = nn.ConvTranspose2d(5, 2, 3)
    integers.stride = 2  # type: ignore[assignment]
    swap_layers(integers)
    of_integers = expected.ExpectedLayer(Geometry(1, 5, 1, 1, 2, (3, 3), (2, 2)), True)
    assert (of_integers in expected._layers) == on_gpu


def test_changes_nothing_but_the_class() -> None:
    model = Net()
    model.heads[0].eval()
    model.heads[1].weight.requires_grad_(False)
    model.heads[1].register_buffer("scale", torch.ones(1))
    model.heads[1].note = ["anything"]
    before = {name: (module, vars(module), dict(vars(module))) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    swap_layers(model)
    assert list(before) == [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        same_module, same_dict, contents = before[name]
        assert module is same_module
        assert vars(module) is same_dict
        assert same_dict == contents
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    assert not model.heads[0].training
    assert model.heads[1].training


def test_hooks_of_every_kind_still_run() -> None:
    model = nn.Sequential(up())
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[0].register_forward_hook(lambda *_: seen.append("after"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].weight.register_hook(lambda _: seen.append("weight"))
    handle = model[0].register_forward_hook(lambda *_: seen.append("removed"))
    swap_layers(model)
    handle.remove()
    model(torch.randn(1, 4, 2, 2, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["after", "backward", "before", "weight"]


def test_an_earlier_optimizer_keeps_its_momentum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(up(), nn.ReLU(), up(4, 1)).double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    for step in range(4):
        if step == 2:
            swap_layers(model)
        x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert swapped_names(model) == ["0", "2"]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tied_weights_of_two_layers_stay_tied() -> None:
    model = nn.Sequential(up(), up())
    model[1].weight = model[0].weight
    swap_layers(model)
    assert swapped_names(model) == ["0", "1"]
    assert model[1].weight is model[0].weight


def test_is_idempotent() -> None:
    model = swap_layers(Net())
    classes = [type(module) for module in model.modules()]
    assert swap_layers(model) is model
    assert [type(module) for module in model.modules()] == classes
    plan = plan_swap(model)
    assert [layer.names[0] for layer in plan.swapped] == NAMES
    assert all(layer.already for layer in plan.layers)
    assert swap_layers(swap_layers(up(), inplace=False))


def test_layers_that_are_ours_stay_ours_whatever_the_patterns() -> None:
    model = swap_layers(Net(), include="heads.*")
    swap_layers(model, exclude="heads.0")
    assert swapped_names(model) == NAMES


def test_swapping_a_copy_leaves_the_original() -> None:
    model = Net()
    result = swap_layers(model, inplace=False)
    assert result is not model
    assert swapped_names(model) == []
    assert swapped_names(result) == NAMES
    assert result.shared is result.decoder["up"] is result.alias[0]
    theirs, ours = dict(model.named_parameters()), dict(result.named_parameters())
    assert list(theirs) == list(ours)
    for name in theirs:
        assert ours[name] is not theirs[name]
        assert torch.equal(ours[name], theirs[name])


def test_filter_fn_sees_the_modules_of_the_model_given() -> None:
    model = Net()
    wanted = {model.heads[1]}
    result = swap_layers(model, filter_fn=lambda module, name: module in wanted, inplace=False)
    assert swapped_names(result) == ["heads.1"]


def test_an_error_while_planning_leaves_the_model_untouched() -> None:
    model = Net()
    asked: list[str] = []

    def third_fails(module: nn.Module, name: str) -> bool:
        asked.append(name)
        if len(asked) == 3:
            raise KeyError("third")
        return True

    with pytest.raises(KeyError, match="third"):
        swap_layers(model, filter_fn=third_fails)
    assert asked == ["decoder.up", "decoder.block.0", "heads.0"]
    assert swapped_names(model) == []


def test_an_error_while_copying_leaves_the_model_untouched() -> None:
    model = nn.Sequential(up(), up())
    model[1].handle = io.TextIOWrapper(io.BytesIO())  # cannot be copied
    with pytest.raises(TypeError):
        swap_layers(model, inplace=False)
    assert swapped_names(model) == []


class Frozen(nn.ConvTranspose2d):
    """Refuses to be changed after its construction."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "frozen" in vars(self):
            raise AttributeError(f"{name}: frozen")
        super().__setattr__(name, value)


def test_a_layer_that_refuses_assignments_does_not_stop_the_swap_half_way() -> None:
    model = nn.Sequential(up(), Frozen(4, 4, 2), up())
    vars(model[1])["frozen"] = True
    swap_layers(model)
    assert swapped_names(model) == ["0", "1", "2"]
    unswap_layers(model)
    assert [type(layer) for layer in model] == [nn.ConvTranspose2d, Frozen, nn.ConvTranspose2d]


@pytest.mark.parametrize("function", [plan_swap, swap_layers, unswap_layers])
def test_anything_but_a_module_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got OrderedDict"):
        function(Net().state_dict())


# --- saving, copying, undoing -------------------------------------------------------------------------------


@pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_swapped_models_survive_copy_and_pickle(round_trip: Callable[[Any], Any]) -> None:
    model = swap_layers(Net()).eval()
    again = round_trip(model)
    assert swapped_names(again) == NAMES
    assert again.shared is again.decoder["up"]
    x = images()
    assert torch.equal(again(x), model(x))
    unswap_layers(again)
    assert swapped_names(model) == NAMES


def test_state_dict_goes_both_ways() -> None:
    plain, swapped = Net(), swap_layers(Net())
    assert list(plain.state_dict()) == list(swapped.state_dict())
    swapped.load_state_dict(plain.state_dict())
    fresh = Net()
    fresh.load_state_dict(swapped.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_unswap_is_the_inverse() -> None:
    model = Net()
    before = [(type(module), vars(module), dict(vars(module))) for module in model.modules()]
    assert unswap_layers(swap_layers(model)) is model
    for module, (cls, same_dict, contents) in zip(model.modules(), before, strict=True):
        assert type(module) is cls
        assert vars(module) is same_dict
        assert same_dict == contents
    unswap_layers(model)
    assert swapped_names(model) == []


def test_unswapping_a_copy_leaves_the_swapped_model() -> None:
    model = swap_layers(Net())
    plain = unswap_layers(model, inplace=False)
    assert swapped_names(plain) == []
    assert swapped_names(model) == NAMES


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_swapped_layer_can_change_its_dtype() -> None:
    model = swap_layers(nn.Sequential(up(), up(4, 2, kernel_size=3)))
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        model.to(dtype)
        x = torch.randn(1, 4, 3, 3, dtype=dtype)
        torch.testing.assert_close(model(x), unswap_layers(model, inplace=False)(x))
