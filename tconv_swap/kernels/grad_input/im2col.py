"""Plans of the gradient of the input, strides above 1, from NCHW as it lies (csrc/kernels/grad_input/im2col.cu). Pure
functions of data."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES, WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.sizes import divisor, tile_count_sizes
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input import im2col_tile as grad_input_im2col_tile
from tconv_swap.kernels.grad_input.im2col_tile import UnfoldedTile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, layer_constants, of_any_size
from tconv_swap.kernels.grad_input.implicit_gemm_tma import ELEMENT_KINDS
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    Argument,
    Constant,
    Kernel,
    Launch,
    Part,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

FAMILY = "im2col"
#: Of a group, on either side: with fewer it was not measured.
LEAST_CHANNELS = 32
#: Multiply-adds for each element of grad_output from which copying grad_output to longer rows pays.
LEAST_MACS_PER_PADDED = 768
_PAD_THREADS = 256
#: Elements of a thread.
_PAD_EACH = 8


def claims(problem: StridedProblem, device: Device) -> bool:
    """Whether the kernel computes the problem."""
    geometry = problem.geometry
    if device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    if problem.dtype == torch.float64 or problem.precision not in ELEMENT_KINDS:
        return False
    if problem.input_channels_last or problem.output_channels_last or problem.weight_channels_last:
        return False
    weights = geometry.in_channels_per_group * geometry.taps
    if weights * problem.item % grad_input_im2col_tile.ALIGNMENT:
        return False
    if not aligned(problem) and (problem.item < 4 or _padded_bytes(problem) > MAX_COPY_BYTES):
        return False
    pixels = geometry.batch * max(geometry.height * geometry.width, problem.cells[0] * problem.cells[1])
    return pixels < INT32_LIMIT and geometry.batch * geometry.in_channels < INT32_LIMIT


def aligned(problem: StridedProblem) -> bool:
    """Whether the copy engine can read grad_output's rows as they lie."""
    return problem.geometry.width * problem.item % grad_input_im2col_tile.ALIGNMENT == 0


def part_candidates(problem: StridedProblem, device: Device, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    if channels < LEAST_CHANNELS or not claims(problem, device):
        return []
    grad_output_elements = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    if (
        not aligned(problem)
        and grad_input_im2col_tile.macs(problem) < LEAST_MACS_PER_PADDED * grad_output_elements
    ):
        return []
    tiles = grad_input_im2col_choice.choose(problem, device, count)
    return [part_with_tile(problem, tile, device.multiprocessors) for tile in tiles]


def part_with_tile(problem: StridedProblem, tile: UnfoldedTile, multiprocessors: int = 132) -> Part:
    """The part that computes the problem with this tile."""
    geometry = problem.geometry
    works = grad_input_im2col_tile.work_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    split = tile.splits > 1
    partial_bytes = round_up(4 * count * tile.splits, WORKSPACE_ALIGNMENT) if split else 0
    grad_output = input_(0) if aligned(problem) else workspace(partial_bytes)
    kernel, shared = _compiled(of_any_size(problem), replace(tile, splits=min(tile.splits, 2)))
    main = Launch(
        kernel,
        grid=min(works, multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            workspace(0) if split else output(0),
            struct(0),
        ),
        shared_bytes=shared,
        tensor_maps=(_grad_output_map(problem, tile, grad_output), _weight_map(problem, tile)),
        structs=(tile_count_sizes(problem, grad_input_im2col_tile.tile_counts(problem, tile), tile.splits),),
    )
    launches = [main]
    if not aligned(problem):
        launches = [_pad_rows(problem, partial_bytes), replace(main, overlaps_previous=True)]
    if split:
        launches.append(forward_implicit_gemm.reduce_launch(problem, tile.splits, 0, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        partial_bytes + (0 if aligned(problem) else _padded_bytes(problem)),
    )


@lru_cache(maxsize=4096)
def _compiled(layer: StridedProblem, tile: UnfoldedTile) -> tuple[Kernel, int]:
    """The kernel that computes a layer whatever its sizes (``of_any_size``), with any number of splits above 1, and the
    shared memory that it takes."""
    shared, split = grad_input_im2col_tile.shared_bytes(layer, tile), tile.splits > 1
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(layer, split),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("M_TILES", tile.m_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("BLOCK_CHANNELS", tile.channels),
        ("PAIRED", tile.paired),
        ("STAGE_CHANNELS", tile.stage_channels),
        ("BOX_H", grad_input_im2col_tile.box_h(layer, tile)),
        ("BOX_W", tile.box_w),
        ("LEAD", grad_input_im2col_tile.lead(layer, tile)),
        ("HALVES", grad_input_im2col_tile.halves(layer, tile)),
        ("FOLD_W", grad_input_im2col_tile.fold(layer, tile)),
        ("INPUT_STAGES", tile.input_stages),
        ("WEIGHT_STAGES", tile.weight_stages),
        ("PARTIAL", split),
        ("SHARED_BYTES", shared),
    )
    return Kernel("grad_input/im2col.cu", "grad_input_im2col", constants), shared


def _padded_width(problem: StridedProblem) -> int:
    align = grad_input_im2col_tile.ALIGNMENT // problem.item
    return round_up(problem.geometry.width, align)


def _padded_bytes(problem: StridedProblem) -> int:
    geometry = problem.geometry
    return geometry.batch * geometry.in_channels * geometry.height * _padded_width(problem) * problem.item


def _pad_rows(problem: StridedProblem, to: int) -> Launch:
    """grad_output (float32) with rows that the copy engine can read, in lines that are longer."""
    g = problem.geometry
    rows, padded = g.batch * g.in_channels * g.height, _padded_width(problem)
    constants = (("THREADS", _PAD_THREADS), ("EACH", _PAD_EACH))
    return Launch(
        Kernel("common/pad_rows.cu", "pad_rows", constants),
        grid=ceil_div(rows * padded, _PAD_THREADS * _PAD_EACH),
        block=_PAD_THREADS,
        arguments=(input_(0), workspace(to), struct(0)),
        structs=((rows, g.width, *divisor(padded)),),
    )


def _grad_output_map(problem: StridedProblem, tile: UnfoldedTile, base: Argument) -> TensorMap:
    """Columns (folded: so many, and the rest), rows, channels, images."""
    geometry, item = problem.geometry, problem.item
    fold = grad_input_im2col_tile.fold(problem, tile)
    row = (geometry.width if aligned(problem) else _padded_width(problem)) * item
    plane = geometry.height * row
    folded = (fold,) if fold > 1 else ()
    box = (tile.box_w // fold, grad_input_im2col_tile.box_h(problem, tile), tile.stage_channels, tile.images)
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        (*folded, geometry.width // fold, geometry.height, geometry.in_channels, geometry.batch),
        (*(size * item for size in folded), row, plane, geometry.in_channels * plane),
        (*folded, *box),
        (1,) * (len(folded) + len(box)),
        swizzle_bytes=0,
    )


def _weight_map(problem: StridedProblem, tile: UnfoldedTile) -> TensorMap:
    """Channels of the output with their taps, channels of the input, groups."""
    geometry = problem.geometry
    row = geometry.in_channels_per_group * geometry.taps
    channels = geometry.out_channels_per_group
    return TensorMap(
        input_(2),
        ELEMENT_KINDS[problem.precision],
        (row, channels, geometry.groups),
        (row * problem.item, channels * row * problem.item),
        (grad_input_im2col_tile.BOX_WORDS * grad_input_im2col_tile.word(problem), tile.channels, 1),
        (1, 1, 1),
    )
