"""torch.utils.flop_counter counts our layers as it counts PyTorch's."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from forked import run_python
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tconv_swap
from tconv_swap import flops as flops_module
from tconv_swap import op

LAYERS = {
    "k4 s2": lambda: nn.ConvTranspose2d(6, 3, 4, 2, 1),
    "output_padding, dilation": lambda: nn.ConvTranspose2d(
        4, 5, 3, 2, 1, output_padding=1, dilation=2, bias=False
    ),
    "k = stride": lambda: nn.ConvTranspose2d(6, 3, 2, 2),
}


def flops(layer: nn.Module, image: Tensor, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        output = layer(image)
        if backward:
            output.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("needs_input_gradient", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_flops_are_counted_as_for_pytorchs_layer(
    name: str, needs_input_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "is_plain", lambda *_: False)  # which would leave them to PyTorch's operator
    theirs = LAYERS[name]()
    ours = tconv_swap.swap_layers(theirs, inplace=False)
    image = torch.randn(2, theirs.in_channels, 7, 5, requires_grad=needs_input_gradient)
    for backward in (False, True):
        expected = flops(theirs, image, backward)
        assert flops(ours, image, backward) == expected > 0


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
def test_every_gradient_of_a_grouped_layer_counts_its_products(mask: tuple[bool, ...]) -> None:
    """PyTorch's formula for the gradient of the weight ignores the groups."""
    tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(1, 1, 1)))
    image, weight = torch.randn(2, 6, 7, 5), torch.randn(6, 3, 4, 4)
    geometry = [2, 2, 0, 0, 0, 0, 3, 1, 1]
    backward = torch.ops.tconv_swap.conv_transpose2d_gradients
    with FlopCounterMode(display=False) as counter:
        backward(torch.randn(2, 9, 16, 12), image, weight, geometry, mask, "auto")
    assert counter.get_total_flops() == sum(mask[:2]) * 2 * 2 * 7 * 5 * 6 * 3 * 16


def test_an_exported_program_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(flops_module, "register", lambda: called.append(True))
    program = torch.export.export(nn.ConvTranspose2d(6, 3, 4, 2, 1), (torch.randn(2, 6, 7, 5),))
    tconv_swap.swap_program(program)
    assert called


def test_a_loaded_layer_is_counted_too(tmp_path: Path) -> None:
    """In a process that has swapped nothing."""
    ours = tconv_swap.swap_layers(nn.ConvTranspose2d(6, 3, 4, 2, 1))
    path = tmp_path / "layer.pt"
    torch.save(copy.deepcopy(ours), path)
    code = (
        "import sys, torch\n"
        "layer = torch.load(sys.argv[1], weights_only=False)\n"
        "from tconv_swap import op\n"
        "op.is_plain = lambda *_: False\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter: layer(torch.randn(2, 6, 7, 5))\n"
        "print(counter.get_total_flops())"
    )
    done = run_python("-c", code, str(path), env=os.environ)
    assert int(done.stdout) == 2 * 2 * 7 * 5 * 6 * 3 * 16
