"""The work of planning: the tiles of a layer are ranked once, whatever its sizes. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from remembered import forget

from tconv_swap.cuda import choice
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.gradients import grad_output_tile as gradients_grad_output_tile
from tconv_swap.runtime.program import Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
#: A few output channels, in channels_last: the most tiles.
RGB = Geometry(4, 64, 256, 256, 3, (9, 9), (1, 1), (4, 4))
RANKED = ((grad_weight_narrow_mma, "grad_weight_tiles"), (grad_input_narrow_mma, "grad_input_tiles"))


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    forget()


def test_the_narrow_tiles_of_a_layer_are_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[str] = []

    def counted(module: Any, name: str) -> None:
        tiles = getattr(module, name)

        def found(*arguments: Any) -> Iterator[Any]:
            ranked.append(name)
            return tiles(*arguments)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, name, found)

    for module, name in RANKED:
        counted(module, name)
    problem = plan.Problem(RGB, torch.float32, "tf32", True, True)
    choice.choose_backward(problem, (True, True, True), H200, "auto")
    choice.choose_backward(problem, (False, True, False), H200, "kernel")
    first = list(ranked)
    assert set(first) == {"grad_input_tiles", "grad_weight_tiles"}
    # Another size of the layer ranks nothing.
    other = problem._replace(geometry=RGB._replace(batch=3, height=77, width=130))
    choice.choose_backward(other, (True, True, True), H200, "auto")
    choice.choose_backward(other, (False, True, False), H200, "kernel")
    assert ranked == first


def test_a_layout_makes_one_tile_however_many_pitches_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    replace = gradients_grad_output_tile.replace

    def counted(tile: Any, **changes: Any) -> Any:
        made.append(changes)
        return replace(tile, **changes)

    monkeypatch.setattr(gradients_grad_output_tile, "replace", counted)
    tile = gradients_grad_output_tile.GradOutputTile(4, 16, 1, 3, 9, 1, True, 128)
    laid, passes = gradients_grad_output_tile.with_pitches(RGB, tile, True, (0, 1, 2, 3), True)
    assert len(made) == 1
    assert laid.pixel_pitch >= 1
    assert laid.row_pitch > 0
    assert laid.plane > 0
    assert passes >= 1


def test_a_new_size_makes_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether PyTorch's operator computes a gradient is decided by expected clocks, without further plans."""
    made: list[tuple[bool, ...]] = []
    plan_of = plan._of_larger_families

    def counted(problem: plan.Problem, output_mask: tuple[bool, ...], device: plan.Device) -> Plan:
        made.append(output_mask)
        return plan_of(problem, output_mask, device)

    monkeypatch.setattr(plan, "_of_larger_families", counted)
    dcgan = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
    for dtype, channels_last in ((torch.float32, False), (torch.float16, True)):
        problem = plan.Problem(dcgan, dtype, "tf32", channels_last, channels_last)
        made.clear()
        (step,) = choice.choose_backward(problem, (True, True, True), H200, "auto")
        assert step.plan is not None
        assert made == [(True, True, True)]
