"""Random problems and tiles of csrc/kernels/forward/implicit_gemm_tma.cu."""

from __future__ import annotations

import random

import torch
from size_cases import random_output_padding

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_choice as forward_choice
from tconv_swap.kernels.forward import implicit_gemm_fit as forward_fit
from tconv_swap.kernels.forward import implicit_gemm_layout as forward_layout
from tconv_swap.kernels.forward import implicit_gemm_memory as forward_memory
from tconv_swap.kernels.forward import implicit_gemm_shape as forward_shape
from tconv_swap.kernels.forward import implicit_gemm_stagger as forward_stagger
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem

H200 = plan.Device("sm_90a", 132, 227 << 10)


def random_geometry(rng: random.Random, item: int) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        kernel = (rng.randint(1, 5), rng.randint(1, 5))
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        dilation = (rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2)))
        padding = (rng.randint(0, 2), rng.randint(0, 2))
        kind = rng.random()
        if kind < 0.5:
            kernel, stride, dilation = (rng.choice(((2, 2), (4, 4))), (2, 2), (1, 1))
        elif kind < 0.65:
            stride = (1, 1)
        if kernel == stride:
            padding = (0, 0)
        sizes = ((rng.randint(1, 40), rng.randint(1, 40)), (4, 4), (rng.randint(2, 9), rng.randint(2, 9)))
        geometry = Geometry(
            rng.randint(1, 9),
            groups * 16 // item * rng.randint(2, 12),
            *rng.choice((*sizes, (1, 1), (16, 16), (1, 64))),
            groups * rng.choice((16, 24, 33, 40, 64, 72, 100, 128)),
            kernel,
            stride,
            padding,
            (0, 0) if rng.random() < 0.5 else random_output_padding(rng, stride, dilation),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def random_case(rng: random.Random, dtype: torch.dtype, nhwc_copy: bool = False) -> tuple[TileProblem, Tile]:
    """Returns a random problem and one of its tiles; with ``nhwc_copy`` of NCHW, by way of a channels_last copy of the
    input."""
    while True:
        posed = forward_layout.make_problem(
            random_geometry(rng, dtype.itemsize),
            dtype,
            "tf32",
            True,
            rng.random() < 0.5,
            rng.random() < 0.5,
        )
        if nhwc_copy:
            posed = posed._replace(output_channels_last=False, nhwc_copy=True)
        if forward_implicit_gemm.supports(posed, H200):
            found = [entry for entry in forward_choice.candidates(posed, H200) if entry[1].tma]
            if found:
                return rng.choice(found)


def of_some_shape(rng: random.Random, posed: TileProblem, tile: Tile) -> Tile:
    """Returns the tile in one of the shapes that its kernel takes at its launch."""
    if not tile.shaped_pixels:
        return tile
    return rng.choice([one for one in forward_shape.shapes(posed, tile) if forward_shape.legal(posed, one)])


def vary(rng: random.Random, posed: TileProblem, tile: Tile) -> Tile:
    """Returns a tile that the planner would not choose for this problem, but that the kernel supports."""
    tile = of_some_shape(rng, posed, tile)
    if rng.random() < 0.3:
        tile = tile._replace(stages=2)
    tma_weights = rng.random() < 0.5 and forward_layout.supports_tma_weights(posed)
    other = tile._replace(tma_weights=tma_weights, whole_lines=tma_weights)
    blocks_of_weights = -(-posed.geometry.out_channels_per_group // posed.block_channels(tile)) * tile.splits
    if blocks_of_weights * posed.geometry.groups * len(posed.group_taps) == 1:
        other = other._replace(resident_weights=rng.random() < 0.5)
    if forward_stagger.can_stagger(posed, other):
        taps = forward_stagger.products(posed, other)
        other = other._replace(stagger=rng.choice((0, 1, taps, rng.randint(1, 2 * taps - 1))))
    fits = forward_memory.shared_bytes(posed, other) <= H200.shared_memory_per_block
    return other if fits and tile.blocks_per_multiprocessor == 1 else tile


def staggered_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """Returns a problem of stride 1 with several tiles for each block and few stages, whose second warpgroup
    begins some taps later."""
    while True:
        groups = rng.choice((1, 1, 2))
        geometry = Geometry(
            rng.randint(1, 4),
            groups * rng.choice((64, 72, 128)),
            rng.randint(60, 90),
            rng.randint(60, 200),
            groups * rng.choice((24, 40, 64, 100, 128)),
            (rng.randint(1, 3), rng.randint(2, 7)),
            (1, 1),
            (rng.randint(0, 1), rng.randint(0, 2)),
            groups=groups,
        )
        posed = forward_layout.make_problem(
            geometry, dtype, "tf32", True, rng.random() < 0.5, rng.random() < 0.5
        )
        found = [(p, t) for p, t in forward_choice.candidates(posed, H200) if t.tma]
        p, tile = rng.choice(found)
        tile = tile._replace(stages=rng.choice((2, 3)), stagger=0)
        if forward_stagger.can_stagger(p, tile):
            taps = forward_stagger.products(p, tile)
            staggered = tile._replace(stagger=rng.choice((1, taps // 2 + 1, taps, 2 * taps - 1)))
            if forward_fit.fits_device(p, staggered, H200):
                return p, staggered


def row_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """Returns a problem that reads a channels_last copy, with a tile of whole rows of any width and alignment."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice((2, 2, 3, 4))
        height, width = rng.randint(1, 9), rng.choice((2, 4, 8, 14, 28, 56) if kernel == 2 else range(45, 73))
        geometry = Geometry(
            rng.randint(1, 7),
            groups * 16 // dtype.itemsize * rng.randint(2, 9),
            height,
            width,
            groups * rng.choice((40, 64, 100)),
            (kernel, kernel),
            (2, 2),
            (0, 0) if kernel == 2 else (rng.randint(0, 1), rng.randint(0, 1)),
            (0, 0) if kernel == 2 else (rng.randint(0, 1), rng.randint(0, 1)),
            groups=groups,
        )
        posed = forward_layout.make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5)
        posed = posed._replace(input_channels_last=True, nhwc_copy=True)
        found = [entry for entry in forward_choice.candidates(posed, H200) if entry[1].by_rows]
        if found:
            return rng.choice(found)


def dense_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """Returns a problem that reads a channels_last copy, of any width, with a dense tile."""
    while True:
        groups, stride = rng.choice((1, 1, 2)), rng.choice(((2, 2), (2, 2), (1, 2), (3, 3), (4, 2)))
        kernel = tuple(rng.randint(step, 5) for step in stride)
        geometry = Geometry(
            rng.randint(1, 9),
            groups * 64 // dtype.itemsize * rng.randint(1, 4),
            rng.randint(3, 20),
            rng.randint(5, 40),
            groups * rng.choice((40, 64, 100)),
            (kernel[0], kernel[1]),
            stride,
            (rng.randint(0, 1), rng.randint(0, 1)),
            (rng.randint(0, stride[0] - 1), rng.randint(0, stride[1] - 1)),
            groups=groups,
        )
        posed = forward_layout.make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5)
        posed = posed._replace(input_channels_last=True, nhwc_copy=True)
        found = [
            (problem, shape)
            for problem, tile in forward_choice.candidates(posed, H200)
            if tile.shaped_pixels
            for shape in forward_shape.shapes(problem, tile)
            if shape.dense and forward_shape.legal(problem, shape)
        ]
        if found:
            return rng.choice(found)


def pixel_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """Returns a problem with an NCHW input in its own layout: kernel = stride, 16 bits, maps that tiles divide."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice(((2, 2), (1, 3), (2, 4), (3, 1)))
        geometry = Geometry(
            rng.randint(1, 5),
            groups * rng.choice((32, 64, 96) if groups > 1 else (9, 40, 72, 100)),
            *rng.choice(((16, 16), (8, 32), (12, 64), (3, 256), (1, 128))),
            groups * rng.choice((40, 64, 96, 150)),
            kernel,
            kernel,
            groups=groups,
        )
        posed = forward_layout.make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5)
        posed = posed._replace(aligned=forward_layout.can_be_aligned(posed))
        found = [entry for entry in forward_choice.candidates(posed, H200) if entry[1].pixel_major]
        if found:
            return rng.choice(found)


def split_case(rng: random.Random, dtype: torch.dtype, channels_last: bool) -> tuple[TileProblem, Tile]:
    """Returns a problem of few positions and many channels, with a tile whose sum over channels is split."""
    while True:
        kernel, stride, padding = rng.choice(((4, 2, 1), (3, 1, 1), (2, 2, 0), (1, 1, 0)))
        geometry = Geometry(
            rng.randint(1, 3),
            rng.choice((512, 640, 1024)),
            rng.randint(2, 9),
            rng.choice((2, 4, 5, 8)),
            rng.choice((16, 40, 64, 128)),
            (kernel, kernel),
            (stride, stride),
            (padding, padding),
        )
        posed = forward_layout.make_problem(
            geometry, dtype, "tf32", channels_last, channels_last, rng.random() < 0.5
        )
        posed = posed._replace(aligned=not channels_last and forward_layout.can_be_aligned(posed))
        found = [entry for entry in forward_choice.candidates(posed, H200) if entry[1].splits > 1]
        if found:
            problem, tile = rng.choice(found)
            tile = tile._replace(splits=rng.choice((2, 3, 4, 8)))
            return problem, of_some_shape(rng, problem, tile)
