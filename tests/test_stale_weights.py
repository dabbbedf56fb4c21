"""Weights are never stale: every way to change them shows in the next call, and unfreezes a layer if necessary."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv_swap
from tconv_swap import ConvTranspose2d, layer_state
from tconv_swap.cuda import call, packed
from tconv_swap.cuda.packed import PackedWeight
from tconv_swap.dispatch import needs_gradient
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime.program import ArgumentKind, input_, output

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: A layer that packs its weight on CUDA, one that does not, and one that is a matrix product on the CPU.
LAYERS: dict[str, dict[str, Any]] = {
    "implicit_gemm": {"arguments": (32, 32, 4, 2, 1), "input": (2, 32, 9, 10)},
    "narrow_mma": {"arguments": (16, 3, 4, 2, 1), "input": (2, 16, 9, 10)},
    "gemm": {"arguments": (32, 32, 4), "input": (2, 32, 1, 1)},
}


def in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(2).add_(1)


def slice_in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight[0, 0] = 7


def through_data(layer: nn.Module) -> None:
    layer.weight.data.mul_(2).add_(1)


def new_data(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data * 2 + 1


def another_parameter(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def optimizer_step(layer: nn.Module) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def load_state(layer: nn.Module) -> None:
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


def assign_state(layer: nn.Module) -> None:
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def load_into_the_parent(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def there_and_back(layer: nn.Module) -> None:
    layer.to(torch.float64)
    layer.weight.data.mul_(2)
    layer.to(torch.float32)


CHANGES = [
    in_place,
    slice_in_place,
    through_data,
    new_data,
    another_parameter,
    optimizer_step,
    load_state,
    assign_state,
    load_into_the_parent,
    there_and_back,
]
#: Changes that a frozen layer cannot see; the user has to call `unfreeze`.
UNSEEN = [through_data]


@pytest.fixture(autouse=True)
def _ieee():
    with MODES["fp32"].switched_on():
        yield


def expected(layer: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(x, layer.weight, layer.bias, layer.stride, layer.padding)


def check(layer: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(layer(x), expected(layer, x), rtol=1e-4, atol=1e-4)


def make(name: str, device: str) -> tuple[ConvTranspose2d, Tensor]:
    torch.manual_seed(0)
    layer = ConvTranspose2d(*LAYERS[name]["arguments"], device=device).eval()
    return layer, torch.randn(LAYERS[name]["input"], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_change_shows_in_the_next_call(
    change: Callable[[nn.Module], None], name: str, device: str, gradients: bool
) -> None:
    layer, x = make(name, device)
    with torch.set_grad_enabled(gradients):
        check(layer, x)
        before = layer(x)
        change(layer)
        check(layer, x)
        assert not torch.allclose(layer(x), before, atol=1e-2)


class Snapshot(PackedWeight):
    """A packed weight without a GPU: it computes with a copy of the weight."""

    kept: Tensor | None = None

    def forward(self, input: Tensor, bias: Tensor | None, arguments: Any, backend: str) -> Tensor:
        self.kept = self.weight.detach().clone() if self.kept is None else self.kept
        return F.conv_transpose2d(input, self.kept, bias, *arguments)


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a frozen layer on the CPU something that can become stale."""
    plain = layer_state.may_use_packed
    monkeypatch.setattr(
        layer_state,
        "may_use_packed",
        lambda x, w, b: plain(x, w, b) or (x.is_cpu and not needs_gradient(x, w, b)),
    )
    monkeypatch.setattr(
        layer_state, "PackedWeight", lambda weight: (PackedWeight if weight.is_cuda else Snapshot)(weight)
    )


@pytest.mark.usefixtures("snapshots")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_in_a_frozen_layer(
    change: Callable[[nn.Module], None], name: str, device: str
) -> None:
    layer, x = make(name, device)
    tconv_swap.freeze(layer)
    with torch.no_grad():
        check(layer, x)
        check(layer, x)
        change(layer)
        if change in UNSEEN:
            if device == "cpu" or name == "implicit_gemm":
                assert not torch.allclose(layer(x), expected(layer, x), atol=1e-2)
            tconv_swap.unfreeze(layer)
        check(layer, x)
        tconv_swap.freeze(layer)
        check(layer, x)


@pytest.mark.usefixtures("snapshots")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [False, True])
def test_functional_call_uses_the_weights_it_is_given(device: str, frozen: bool) -> None:
    layer, x = make("implicit_gemm", device)
    if frozen:
        tconv_swap.freeze(layer)
    other = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    with torch.no_grad():
        check(layer, x)
        found = torch.func.functional_call(layer, other, (x,))
        wanted = F.conv_transpose2d(x, other["weight"], other["bias"], 2, 1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        check(layer, x)
    assert (layer._tconv_packed is not None) == frozen


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [in_place, slice_in_place, through_data, optimizer_step, load_state])
@pytest.mark.parametrize("name", LAYERS)
def test_a_replayed_graph_sees_the_change(
    name: str, change: Callable[[nn.Module], None], frozen: bool
) -> None:
    layer, x = make(name, "cuda")
    if frozen:
        tconv_swap.freeze(layer)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        change(layer)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, expected(layer, x), rtol=1e-4, atol=1e-4)


# freeze and unfreeze


def test_freeze_requires_eval_mode() -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(2, 3, 2)))
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        tconv_swap.freeze(model)
    assert tconv_swap.freeze(model.eval()) is model
    assert model[0]._tconv_packed is not None


@pytest.mark.parametrize(
    "undo",
    [
        tconv_swap.unfreeze,
        lambda model: model.train(),
        lambda model: model[0].train(),
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model[0].load_state_dict(model[0].state_dict(), assign=True),
        tconv_swap.unswap_layers,
    ],
)
def test_operations_that_unfreeze(undo: Callable[[nn.Module], Any]) -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(2, 3, 2))).eval()
    tconv_swap.freeze(model).eval()
    assert "_tconv_packed" in vars(model[0])
    undo(model)
    assert "_tconv_packed" not in vars(model[0])


class Subclass(nn.ConvTranspose2d):
    """Defined in this module so that the unpickler finds it."""


@pytest.mark.parametrize("cls", [nn.ConvTranspose2d, Subclass])
def test_copies_pickles_and_state_dicts_are_not_frozen(cls: type[nn.ConvTranspose2d]) -> None:
    layer = tconv_swap.freeze(tconv_swap.swap_layers(cls(2, 3, 2)).eval())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert type(again) is type(layer)
        assert "_tconv_packed" not in vars(again)
    assert "_tconv_packed" in vars(layer)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_a_parametrized_weight_is_never_frozen() -> None:
    layer = tconv_swap.swap_layers(nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 2))).eval()
    tconv_swap.freeze(layer)
    assert "_tconv_packed" not in vars(layer)
    with torch.inference_mode():
        unseen = ConvTranspose2d(2, 3, 2).eval()
    assert "_tconv_packed" not in vars(tconv_swap.freeze(unseen))


def test_changes_of_a_weight_are_noticed() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 2, 2))
    kept = PackedWeight(weight)
    assert kept.is_unchanged()
    with torch.no_grad():
        weight.add_(1)
    assert not kept.is_unchanged()
    kept = PackedWeight(weight)
    weight.data = weight.data.clone()
    assert not kept.is_unchanged()


# The plan without its packing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plan_without_its_packing_launch(dtype: torch.dtype) -> None:
    splits = 0
    narrow = Geometry(16, 32, 128, 256, 64, (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), 4)
    for geometry in (DCGAN, narrow, Geometry(8, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))):
        whole = plan.plan_forward(plan.Problem(geometry, dtype, "tf32", False, False), True, H200)
        packing, going_on = whole.without_packing(dtype.itemsize)
        assert [one.kernel for one in (*packing.launches, *going_on.launches)] == [
            one.kernel for one in whole.launches
        ]
        (kept,) = packing.outputs
        kept_bytes = kept.shape[0] * dtype.itemsize
        assert kept_bytes + going_on.workspace_bytes == whole.workspace_bytes
        assert packing.workspace_bytes == 0
        assert packing.launches[0].arguments == (input_(1), output(0))
        first = going_on.launches[0]
        assert any(input_(1) in one.arguments for one in going_on.launches)
        # It may not begin before the computation of its input has ended.
        assert not first.overlaps_previous
        for one in going_on.launches:
            for argument in one.arguments:
                if argument.kind == ArgumentKind.WORKSPACE:
                    assert 0 <= argument.value < going_on.workspace_bytes
                    splits += 1
    assert splits, "no plan with partial sums among these"


def test_plans_without_packing_are_not_frozen() -> None:
    rgb = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
    depthwise = Geometry(2, 21, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)
    for geometry, dtype in ((rgb, torch.float64), (depthwise, torch.float32)):
        whole = plan.plan_forward(plan.Problem(geometry, dtype, "ieee", False, False), True, H200)
        assert whole.without_packing(dtype.itemsize) is None


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("arguments", [(128, 64, 4, 2, 1), (512, 256, 4, 2, 1), (64, 64, 3, 1, 1)], ids=str)
def test_a_frozen_layer_gives_the_same_bits(
    dtype: torch.dtype, channels_last: bool, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    layer = ConvTranspose2d(*arguments, device="cuda", dtype=dtype).eval().to(memory_format=layout)
    layer.tconv_backend = "kernel"
    entries: list[list[str]] = []
    real = packed.launch.add_plan

    def spy(made: Any, *rest: Any) -> int:
        entries.append([one.kernel.entry for one in made.launches])
        return real(made, *rest)

    with torch.no_grad():
        for batch in (8, 3):
            x = torch.randn(batch, arguments[0], 7, 8, device="cuda", dtype=dtype).to(memory_format=layout)
            usual = layer(x)
            tconv_swap.freeze(layer)
            with monkeypatch.context() as patched:
                patched.setattr(packed.launch, "add_plan", spy)
                assert torch.equal(layer(x), usual)
                # The layer that computes the input runs just before: no kernel may begin too early.
                for _ in range(20):
                    torch.full_like(usual, float("nan"))
                    assert torch.equal(layer(x * 1), usual)
            input, weight, bias, *rest = layer.tconv_operands(x)
            posed = call.problem_of(input, weight, bias, tuple(rest))
            whole = plan.plan_forward(posed, True, call.device_facts(0))
            if whole.without_packing(x.element_size()) is None:
                assert entries == []  # the kernels read the weight as it lies: nothing to keep
            else:
                assert [entry[:1] for entry in entries] == [["forward_implicit_gemm_pack"], entries[1][:1]]
                assert "forward_implicit_gemm_pack" not in entries[1]
            entries.clear()
            tconv_swap.unfreeze(layer)


@pytest.mark.gpu
def test_a_frozen_layer_still_differentiates() -> None:
    layer, x = make("implicit_gemm", "cuda")
    tconv_swap.freeze(layer)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer._tconv_packed is not None
    image = layer(x[0])
    torch.testing.assert_close(image, expected(layer, x[0]), rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    call.forget()
