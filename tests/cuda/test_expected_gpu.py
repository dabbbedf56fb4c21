"""The first training steps of a network on a GPU: the layers behind the first one are planned and compiled in the
background."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import nn

import tconv_swap
from tconv_swap.cuda import call, expected
from tconv_swap.kernels.common.layer_sizes import other_sizes
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import ahead, jit

pytestmark = pytest.mark.gpu

FOLLOWERS = expected.followers


def test_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "_layers", {})
    monkeypatch.setattr(expected, "followers", FOLLOWERS)
    monkeypatch.setattr(call, "other_sizes", lambda size: other_sizes(size)[:2])
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel, architecture: False)  # whatever ran before
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.ConvTranspose2d(24, 40, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(40, 28, 4, 2, 1, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(28, 3, 3, 2, 1, 1),
    ).cuda()
    begun: list[object] = []
    begin = ahead.begin

    def recording(key: Hashable, *arguments: Any, **named: Any) -> None:
        begun.append(key)
        begin(key, *arguments, **named)

    monkeypatch.setattr(ahead, "begin", recording)
    ours = tconv_swap.swap_layers(copy.deepcopy(theirs))
    assert len(expected._layers) == 3
    with MODES["fp32"].switched_on():
        for batch in (5, 2):  # the second one while other sizes are compiled
            x = torch.randn(batch, 24, 9, 7, device="cuda")
            outputs = [network(x) for network in (theirs, ours)]
            for output in outputs:
                output.square().sum().backward()
            torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert our.grad is not None
            assert their.grad is not None
            torch.testing.assert_close(
                our.grad, their.grad, rtol=1e-3, atol=1e-3 * their.grad.abs().max().item()
            )
    kinds = [key[0] for key in begun if isinstance(key, tuple) and isinstance(key[0], call.CallKind)]
    assert {40, 28} <= {kind.problem.geometry.in_channels for kind in kinds if not kind.mask}
