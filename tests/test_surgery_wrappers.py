"""Networks inside wrappers: DataParallel, DistributedDataParallel, FSDP2, torch.compile; subclasses with own
forwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from surgery_models import swapped_names, up
from torch import Tensor, fx, nn

from tconv_swap import op, verify
from tconv_swap.surgery import plan_swap, swap_layers, unswap_layers

pytestmark = pytest.mark.filterwarnings("error::tconv_swap.surgery.SwapWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(up(4, 6), nn.ReLU(), up(6, 3, kernel_size=3))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def graphs_of(model: nn.Module) -> tuple[Any, list[list[str]]]:
    """Returns the compiled network, and the functions in each graph that it was compiled to."""
    graphs: list[list[str]] = []

    def backend(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    return torch.compile(model, backend=backend, fullgraph=True), graphs


def test_a_network_that_is_compiled_already_sees_the_swap() -> None:
    model = net()
    compiled, graphs = graphs_of(model)
    x = torch.randn(2, 4, 3, 3)
    expected = compiled(x)
    swap_layers(compiled)
    assert swapped_names(compiled) == ["_orig_mod.0", "_orig_mod.2"]
    torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 2
    assert not [target for target in graphs[0] if "tconv_swap" in target]
    assert len([target for target in graphs[1] if "tconv_swap" in target]) == 2
    unswap_layers(compiled)
    torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 2  # the first one fits again


def test_ddp_before_and_after(process_group: None) -> None:
    x, reference = torch.randn(2, 4, 3, 3), net()
    reference(x).sum().backward()
    for wrapped in (
        swap_layers(nn.parallel.DistributedDataParallel(net())),
        nn.parallel.DistributedDataParallel(swap_layers(net())),
    ):
        assert swapped_names(wrapped) == ["module.0", "module.2"]
        wrapped(x).sum().backward()
        for mine, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("swap_first", [False, True])
def test_fsdp2_before_and_after(process_group: None, swap_first: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    x, reference, model = torch.randn(2, 4, 3, 3), net(), net()
    mesh = init_device_mesh("cpu", (1,))
    if swap_first:
        swap_layers(model)
    for module in (model[0], model):  # one layer sharded by itself, one with the network
        fully_shard(module, mesh=mesh)
    if not swap_first:
        swap_layers(model)
    assert swapped_names(model) == ["0", "2"]
    assert isinstance(model[0], FSDPModule)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, reference)]
    for _ in range(2):
        torch.testing.assert_close(model(x), reference(x))
        for network, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model[0].weight.full_tensor(), reference[0].weight)
    unswap_layers(model)
    assert swapped_names(model) == []
    assert isinstance(model[0], FSDPModule)
    torch.testing.assert_close(model(x), reference(x))


# --- subclasses with a forward of their own -----------------------------------------------------------------


class Scaled(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size) * 2


def test_filter_fn_insists_on_a_subclass_with_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(up(), Scaled(4, 4, 2))
    x = torch.randn(1, 4, 3, 3)
    expected = model(x)
    assert [layer.reason for layer in plan_swap(model).skipped] == ["Scaled has a forward of its own"]
    swap_layers(model, filter_fn=lambda module, name: True)
    assert swapped_names(model) == ["0", "1"]
    calls = []
    real = op.conv_transpose2d
    monkeypatch.setattr(op, "conv_transpose2d", lambda *args: calls.append(args) or real(*args))
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        torch.testing.assert_close(again(x), expected)
        assert len(calls) == 2
    report = verify(unswap_layers(model, inplace=False), model, x)
    assert report.passed, report.failures
    note = "layer 1 has a forward of its own (Scaled): it is compared within the network only"
    assert report.notes.count(note) == 1
    assert {c.name for c in report.checks if c.kind == "layer_output"} == {"0"}
    unswap_layers(model)
    assert [type(layer) for layer in model] == [nn.ConvTranspose2d, Scaled]


@pytest.mark.parametrize("cls", [nn.LazyConvTranspose1d, nn.LazyConvTranspose3d])
def test_lazy_of_other_dimensions(cls: Any) -> None:
    model = nn.Sequential(cls(4, 2), up())
    assert [layer.kind for layer in plan_swap(model, include_1d=True).skipped] == [cls.__name__]
    swap_layers(model, include_1d=True)
    assert type(model[0]) is cls
