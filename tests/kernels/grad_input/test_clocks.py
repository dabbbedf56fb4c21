"""The expected clocks by which the families of the gradient of the input in NCHW are ranked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.im2col_clocks import BYTE_CLOCKS, MEASURED, STAGE_CLOCKS, stage_clocks
from tconv_swap.kernels.grad_input.implicit_gemm_choice import choose
from tconv_swap.kernels.grad_input.implicit_gemm_clocks import LAUNCH_CLOCKS, PARTIAL_BYTE_CLOCKS, clocks
from tconv_swap.kernels.grad_input.implicit_gemm_layout import as_convolution

H200 = plan.Device("sm_90a", 132, 227 << 10)
LAYER = Geometry(330, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1))
MODES = ((torch.float32, "tf32"), (torch.float16, "ieee"))


def problem(geometry: Geometry, mode: tuple[torch.dtype, str] = MODES[1]) -> plan.Problem:
    return plan.Problem(geometry, *mode, False, False)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_family_with_the_fewest_clocks_comes_first(mode: tuple[torch.dtype, str]) -> None:
    rng = random.Random(3)
    taken = set()
    for _ in range(60):
        channels = [rng.choice((64, 128, 256)) for _ in range(2)]
        kernel, stride, padding, output_padding = rng.choice(((4, 2, 1, 0), (3, 2, 1, 1), (2, 2, 0, 0)))
        side = rng.choice((4, 7, 10, 14, 20, 32, 37, 64))
        posed = problem(
            Geometry(
                max(1, 16384 // side**2),
                channels[0],
                side,
                side,
                channels[1],
                (kernel, kernel),
                (stride, stride),
                (padding, padding),
                (output_padding, output_padding),
            ),
            mode,
        )
        convolution = as_convolution(posed)
        found = grad_input_implicit_gemm.ranked(posed, H200, 4)
        problem_and_tile = choose(convolution, H200)
        best = [clocks(*one, H200) for one in problem_and_tile]
        best += [one.clocks for one in grad_input_im2col.ranked(convolution, H200, 1)]
        best += [one.clocks for one in grad_input_nchw_to_nhwc.ranked(posed, H200, 1)]
        assert found[0].clocks == min(best)
        made = grad_input_implicit_gemm.part_candidates(posed, H200, 1)[0]
        assert made == found[0].make()
        taken.add(made.family)
    copies = {grad_input_nchw_to_nhwc.FAMILY} if mode[0] == torch.float16 else set()
    assert taken == {"im2col", "implicit_gemm"} | copies


def test_the_clocks_of_the_implicit_gemm_grow_with_rounds_copies_and_splits() -> None:
    posed = as_convolution(problem(LAYER))
    ((_, tile),) = choose(posed, H200)
    tile = replace(tile, splits=1)
    plain = replace(posed, aligned=False)
    twice = replace(plain, geometry=replace(plain.geometry, batch=2 * LAYER.batch))
    once = clocks(plain, tile, H200) - LAUNCH_CLOCKS
    assert 1.9 * once < clocks(twice, tile, H200) - LAUNCH_CLOCKS < 2.1 * once
    assert clocks(replace(plain, aligned=True), tile, H200) < clocks(plain, tile, H200)
    partial_bytes = 2 * 4 * posed.grad_input_elements
    more = clocks(plain, replace(tile, splits=2), H200) - clocks(plain, tile, H200)
    # Two rounds of half the sum take as long as one of all of it.
    assert more == pytest.approx(PARTIAL_BYTE_CLOCKS * partial_bytes, rel=0.1)


def test_the_clocks_of_im2col_are_its_tiles_or_its_bytes_and_the_padding_of_rows() -> None:
    posed = as_convolution(problem(LAYER, MODES[0]))
    memory = BYTE_CLOCKS * posed.moved_bytes
    assert stage_clocks(posed, 0.0, 0) == STAGE_CLOCKS + memory
    assert stage_clocks(posed, 2 * memory / MEASURED, 0) == pytest.approx(STAGE_CLOCKS + 2 * memory)
    assert stage_clocks(posed, 0.0, 1 << 20) > STAGE_CLOCKS + memory
