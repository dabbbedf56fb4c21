"""Verifies networks that hold compiled code: what is verified is that code, not a new version with hooks in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tconv_swap import swap_layers, verify
from tconv_swap.verification.runs import CHANGED


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def networks() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    original = nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))
    return original, swap_layers(copy.deepcopy(original)), torch.randn(2, 3, 6, 5)


def test_hooks_are_not_compiled() -> None:
    original, swapped, x = networks()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    swapped.compile(backend=backend)
    report = verify(original, swapped, x)
    assert report.passed, report
    # eval and train mode, with gradients of parameters and inputs and without any
    assert 0 < len(graphs) <= 4
    assert not counters["graph_break"]
    assert {check.name for check in report.checks if check.kind == "layer_output"} == {"0", "2"}


def test_compiled_code_that_keeps_old_weights_fails() -> None:
    original, swapped, x = networks()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        kept: dict[int, Tensor] = {}

        def run(*given: Tensor) -> object:
            for place, name in enumerate(names):
                if "weight" in name:
                    kept.setdefault(place, given[place].detach().clone())
            return graph.forward(*(kept.get(place, value) for place, value in enumerate(given)))

        return run

    swapped.compile(backend=backend)
    report = verify(original, swapped, x, modes=("eval",), backward=False)
    assert not report.passed
    assert any(CHANGED in failure for failure in report.failures), report
