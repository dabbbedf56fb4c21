"""Common uses of PyTorch's layer give the same result with our layer."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.utils import parametrizations, prune
from torchvision.models.feature_extraction import create_feature_extractor

import tconv_swap


def both(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    return model, tconv_swap.swap_layers(model, inplace=False, **options)


# --- written in place ---------------------------------------------------------------------------------------


def written_under_no_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model(x)
    y *= torch.full((), 2.0, requires_grad=True)
    return y  # type: ignore[no-any-return]


USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "an activation in place": lambda model, x: nn.ReLU(inplace=True)(model(x)),
    "unbatched": lambda model, x: nn.ReLU(inplace=True)(model(x[0])),
    "scaled afterwards": written_under_no_grad,
    "detached": lambda model, x: model(x).detach_().requires_grad_(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_an_output_may_be_written_in_place(dimensions: int, use: str) -> None:
    """The cases are the first layer of a generator, an input of one pixel, and layers whose output is a view."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(8, 6, 4) if dimensions == 1 else nn.ConvTranspose2d(8, 6, 4)
    for size in (1, 3):
        x = torch.randn(3, 8, *[size] * dimensions)
        for model in both(layer, include_1d=True):
            y = USES[use](model, x)
            y.sum().backward()
        expected, found = (USES[use](model, x) for model in both(layer, include_1d=True))
        torch.testing.assert_close(found, expected)


def test_gradients_may_be_written_in_place() -> None:
    layer = nn.ConvTranspose2d(8, 6, 4)
    x = torch.randn(3, 8, 1, 1, requires_grad=True)
    (_, ours) = both(layer)
    for gradient in torch.autograd.grad(ours(x).sum(), [x, *ours.parameters()]):
        assert not gradient._is_view()


# --- torch.fx -----------------------------------------------------------------------------------------------


def twice(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, y: 2 * y)
    return layer


def reads_numbers(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, given: (given[0] * float(given[0].mean()),))
    return layer


class Scaled(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return 2 * super().forward(input, output_size)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "a hook": lambda: twice(nn.ConvTranspose2d(3, 2, 2)),
    "a hook that reads numbers": lambda: reads_numbers(nn.ConvTranspose2d(3, 2, 2)),
    "a forward of its own": lambda: Scaled(3, 2, 2),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.ConvTranspose2d(3, 2, 2)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.ConvTranspose2d(3, 2, 2)),
    "pruned": lambda: prune.l1_unstructured(nn.ConvTranspose2d(3, 2, 2), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_traced_layer_runs_its_hooks_once(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 4, 4)
    _, ours = both(nn.Sequential(LAYERS[kind](), nn.Tanh()).eval(), filter_fn=lambda *_: True)
    with torch.no_grad():
        expected = ours(x)
        traced = fx.symbolic_trace(ours)
        assert [node.op for node in traced.graph.nodes] == ["placeholder", *["call_module"] * 2, "output"]
        torch.testing.assert_close(traced(x), expected)
        torch.testing.assert_close(create_feature_extractor(ours, ["1"])(x)["1"], expected)
    assert isinstance(ours[0].weight, Tensor)
    if "hook" not in kind:  # a lambda cannot be pickled
        pickle.dumps(ours)


def test_a_layer_called_by_name_is_traced_as_it_was_called() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(input=x, output_size=[9, 9])  # type: ignore[no-any-return]

    theirs, ours = both(Network())
    (node,) = (node for node in fx.symbolic_trace(ours).graph.nodes if node.op == "call_module")
    assert (node.args, set(node.kwargs)) == ((), {"input", "output_size"})
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(fx.symbolic_trace(ours)(x), theirs(x))


class NamesItsArguments(nn.ConvTranspose2d):
    def forward(self, input: Tensor, *, layer: float, call: float) -> Tensor:
        return super().forward(input) * layer * call


def test_a_forward_may_have_arguments_of_any_name() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = NamesItsArguments(3, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, layer=2.0, call=3.0)  # type: ignore[no-any-return]

    theirs, ours = both(Network(), filter_fn=lambda *_: True)
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(fx.symbolic_trace(ours)(x), theirs(x))


# --- torch.compile ------------------------------------------------------------------------------------------


def test_a_layer_has_the_call_method_of_every_module() -> None:
    layer = tconv_swap.ConvTranspose2d(3, 2, 2)
    assert layer._call_impl.__func__ is nn.Module._call_impl
    assert type(layer)._call_impl is nn.Module._call_impl


def test_a_compiled_call_has_no_guards_for_tracers() -> None:
    """Guards on the dictionaries of a layer's classes cost every compiled call microseconds."""
    theirs, ours = both(nn.Sequential(nn.ConvTranspose2d(3, 2, 2)))
    x = torch.randn(1, 3, 4, 4)

    def forward(x: Tensor) -> Tensor:
        return ours(x)  # type: ignore[no-any-return]

    torch.compiler.reset()
    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(forward)
    guards = str(entry.guard_manager)
    assert "_parameters['weight']" in guards  # that is what guards look like
    assert "_call_impl" not in guards
    assert "__call__" not in guards
    torch.compiler.reset()


# --- classes and attributes of the user's -------------------------------------------------------------------


class EqualLearningRate(nn.ConvTranspose2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.weight_orig = nn.Parameter(self.weight.detach())
        del self.weight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.weight_orig * 0.5


def test_a_weight_that_is_a_property_is_verified() -> None:
    theirs, ours = both(nn.Sequential(EqualLearningRate(4, 3, 2, 2), nn.Tanh()))
    assert isinstance(ours[0], tconv_swap.ConvTranspose2d)
    report = tconv_swap.verify(theirs, ours, torch.randn(1, 4, 3, 3))
    assert report.passed, report.failures
    with torch.no_grad():
        next(ours.parameters()).mul_(1.01)
    assert not tconv_swap.verify(theirs, ours, torch.randn(1, 4, 3, 3)).passed


@pytest.mark.parametrize(
    "name", ["operands", "is_frozen", "keep_packed", "let_packed_go", "forget_ours", "backend"]
)
def test_attributes_may_have_any_name(name: str) -> None:
    theirs, ours = both(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)))
    for model in (theirs, ours):
        setattr(model[0], name, True)
    x = torch.randn(1, 4, 3, 3)
    assert tconv_swap.verify(theirs, ours, x).passed
    ours.train().eval().load_state_dict(theirs.state_dict())
    torch.testing.assert_close(tconv_swap.unswap_layers(copy.deepcopy(ours))(x), theirs(x))


def test_a_class_that_overrides_output_padding_is_left() -> None:
    class Padded(nn.ConvTranspose2d):
        def _output_padding(self, *_: Any, **__: Any) -> list[int]:
            return [1, 1]

    theirs, ours = both(nn.Sequential(Padded(4, 3, 2, 2), nn.ConvTranspose2d(3, 3, 2)))
    assert type(ours[0]) is Padded
    torch.testing.assert_close(ours(torch.ones(1, 4, 3, 3)), theirs(torch.ones(1, 4, 3, 3)))


def test_a_class_whose_forward_was_replaced_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ConvTranspose2d, "forward", lambda self, x: x.sum())
    plan = tconv_swap.plan_swap(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)))
    assert not plan.swapped
    assert "forward of its own" in str(plan)


def test_groups_may_be_a_numpy_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = both(nn.ConvTranspose2d(4, 6, 3, 2, groups=np.int64(2)))  # type: ignore[arg-type]
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager")(x), theirs(x))
    with pytest.raises(TypeError):
        tconv_swap.conv_transpose2d(x, theirs.weight, groups=2.0)  # type: ignore[arg-type]


# --- undone -------------------------------------------------------------------------------------------------


def test_a_layer_whose_forward_was_wrapped_stays_swapped() -> None:
    """A wrapper that moves weights in and out of a GPU does this to every layer: the old forward is our method."""
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(4, 4, 2), nn.ConvTranspose2d(4, 4, 2)))
    inner = model[0].forward
    model[0].forward = lambda *args: inner(*args)
    x = torch.randn(1, 4, 3, 3)
    expected = model(x)
    with pytest.warns(
        tconv_swap.SwapWarning, match="^0 stays swapped: its forward was replaced on the instance"
    ):
        tconv_swap.unswap_layers(model)
    assert type(model[1]) is nn.ConvTranspose2d
    torch.testing.assert_close(model(x), expected)


# --- distributed --------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1
        )
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_distributed_tensor(mesh: DeviceMesh, compiled: bool) -> None:
    _, ours = both(nn.Sequential(nn.ConvTranspose2d(8, 6, 2, 2)), backend="kernel")
    ours = distribute_module(ours, mesh)
    x = distribute_tensor(torch.randn(2, 8, 4, 4), mesh, [Shard(0)])
    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    run(x).full_tensor().sum().backward()
    assert ours[0].weight.grad is not None


def test_a_parametrized_and_sharded_layer_is_left(mesh: DeviceMesh) -> None:
    """PyTorch puts the sharded class in front of the parametrized one: no class can be restored or swapped."""
    network = nn.Sequential(parametrizations.weight_norm(nn.ConvTranspose2d(8, 6, 4, 2, 1)))
    x = torch.randn(2, 8, 5, 5)
    swapped = tconv_swap.swap_layers(copy.deepcopy(network))
    fully_shard(swapped[0], mesh=mesh)
    expected = swapped(x)
    with pytest.warns(tconv_swap.SwapWarning, match="stays swapped: it is parametrized, and was sharded"):
        tconv_swap.unswap_layers(swapped)
    torch.testing.assert_close(swapped(x), expected)
    fully_shard(network[0], mesh=mesh)
    assert "swap before fully_shard" in str(tconv_swap.plan_swap(network))
