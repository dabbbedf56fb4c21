"""A block in a compiler's graph and in an exported program: the op of the layer, then PyTorch's operators.

A compiler fuses PyTorch's operators with those around them, which it could not do with an op of ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from pretended_norm import Pretended, pretended
from sampling import sampled
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import tconv_swap

OUTPUT = torch.ops.tconv_swap.conv_transpose2d_output.default
GRADIENTS = torch.ops.tconv_swap.conv_transpose2d_gradients.default


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    torch._dynamo.reset()
    with pretended(monkeypatch) as made:
        yield made


class InForward(nn.Module):
    """A block in a user's own ``forward``, and an activation that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.relu = nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.ReLU(True)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.up(x)))
        y: Tensor = self.relu(self.norm2(self.conv(x)))
        return y


def in_sequence() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 4, 4, 2, 1),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 4, 3),
        nn.InstanceNorm2d(4),
        nn.Tanh(),
    )


def swapped(make: Callable[[], nn.Module], fuse: Any, training: bool) -> nn.Module:
    torch.manual_seed(0)
    return tconv_swap.swap_layers(make().train(training), fuse=fuse)


def image() -> Tensor:
    return torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0))


def graphs_of(model: nn.Module, training: bool) -> tuple[list[list[str]], list[Tensor]]:
    """Returns the operators of every graph, and the result."""
    graphs: list[list[str]] = []

    def keep(made: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in made.graph.nodes if node.op == "call_function"])
        return make_boxed_func(made.forward)

    run = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with torch.set_grad_enabled(training):
        output = run(image())
        if training:
            output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    found = [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    return graphs, found


@pytest.mark.parametrize(
    ("make", "fuse", "training"),
    sampled(itertools.product((in_sequence, InForward), ("blocks", "all"), (True, False)), 3),
)
def test_a_compiled_graph_is_that_of_the_modules(
    make: Callable[[], nn.Module], fuse: str, training: bool, kernels: Pretended
) -> None:
    expected, values = graphs_of(swapped(make, None, training), training)
    model = swapped(make, fuse, training)
    found, ours = graphs_of(model, training)
    assert found == expected
    assert len(found) == 1 + training
    assert str(OUTPUT) in found[0]
    assert any("batch_norm" in name or "rsqrt" in name for name in found[0])
    if training:
        assert str(GRADIENTS) in found[1]
    assert not any("norm_activation" in name for names in found for name in names)
    for one, other in zip(ours, values, strict=True):
        torch.testing.assert_close(one, other)
    assert kernels.forwards == kernels.backwards == 0
    model(image())
    assert kernels.forwards == (1 if fuse == "blocks" else 2)  # as before the compilation


@pytest.mark.parametrize("fuse", ["blocks", "all"])
@pytest.mark.parametrize("make", [in_sequence, InForward])
def test_an_exported_program_is_that_of_the_modules(
    make: Callable[[], nn.Module], fuse: str, kernels: Pretended
) -> None:
    name = "x" if make is InForward else "input"
    batch = {name: {0: torch.export.Dim("batch", min=2, max=64)}}
    programs = [
        torch.export.export(swapped(make, one, False), (image(),), dynamic_shapes=batch)
        for one in (None, fuse)
    ]
    theirs, ours = ([str(node.target) for node in one.graph.nodes] for one in programs)
    assert ours == theirs
    assert "tconv_swap.conv_transpose2d.default" in ours or str(OUTPUT) in ours
    torch.testing.assert_close(programs[1].module()(image()), swapped(make, None, False)(image()))
    assert kernels.forwards == 0
