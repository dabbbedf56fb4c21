"""The work of planning: the tiles of a layer are ranked once, whatever its sizes. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tconv_swap.cuda import choice
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_input import selection as grad_input_selection
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.grad_weight import selection as grad_weight_selection
from tconv_swap.kernels.gradients import grad_output_tile as gradients_grad_output_tile

H200 = plan.Device("sm_90a", 132, 227 << 10)
#: A few output channels, in channels_last: the most tiles.
RGB = Geometry(4, 64, 256, 256, 3, (9, 9), (1, 1), (4, 4))
RANKED = ((grad_weight_narrow_mma, "grad_weight_tiles"), (grad_input_narrow_mma, "grad_input_tiles"))


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    plan.plan_backward.cache_clear()
    grad_input_implicit_gemm.plan_grad_input.cache_clear()
    grad_weight_implicit_gemm.plan_grad_weight.cache_clear()
    grad_weight_implicit_gemm.ranked.cache_clear()
    for selection in (grad_input_selection, grad_weight_selection):
        selection.kernels_of.cache_clear()
    gradients_grad_output_tile.with_pitches.cache_clear()


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
    other = replace(problem, geometry=replace(RGB, batch=3, height=77, width=130))
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
