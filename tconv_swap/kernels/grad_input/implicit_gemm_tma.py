"""Plans of the gradient of the input, strides above 1, by boxes of the copy engine
(csrc/kernels/grad_input/implicit_gemm_tma.cu). Pure functions of data."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tconv_swap.kernels.common.sizes import tile_count_sizes
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, layer_constants, of_any_size
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import choose
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import BoxTile
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import (
    Argument,
    Constant,
    ElementKind,
    Kernel,
    Launch,
    Part,
    TensorMap,
    input_,
    int64,
    output,
    struct,
    tensor_map,
    workspace,
)

FAMILY = "implicit_gemm_tma"
#: The kernel's code does not depend on it, but a table of its constants does.
MOST_TAPS = 64
#: Of a group, on either side: with fewer it was not measured, and most of a chunk or of a multiply is padding. (The
#: halo tile was the faster where the output's leave half of a chunk empty.)
LEAST_CHANNELS = 32
ELEMENT_KINDS = {
    "TF32": ElementKind.TFLOAT32,
    "FP16": ElementKind.FLOAT16,
    "BF16": ElementKind.BFLOAT16,
}
#: Cells of a tile along an axis.
MOST_TILE_ROWS = 512
_ALIGNMENT = 16


def claims(problem: StridedProblem, device: Device) -> bool:
    """Whether the kernel computes the problem."""
    geometry = problem.geometry
    if device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    if problem.dtype == torch.float64 or problem.precision not in ELEMENT_KINDS:
        return False
    if not (problem.input_channels_last and problem.weight_channels_last):
        return False
    sizes = [geometry.in_channels_per_group]
    if problem.output_channels_last:
        sizes.append(geometry.out_channels_per_group)
    if any(size * problem.item % _ALIGNMENT for size in sizes):
        return False
    pixels, (rows, cols) = geometry.batch * geometry.height * geometry.width, problem.cells
    # Tiles reach beyond the last cell, by rows at most.
    cells = (geometry.batch * rows + MOST_TILE_ROWS) * (cols + MOST_TILE_ROWS)
    return (
        max(problem.step) <= grad_input_tma_tile.MOST_STEP
        and geometry.taps <= MOST_TAPS
        and max(pixels, cells) < INT32_LIMIT
    )


def part_candidates(problem: StridedProblem, device: Device, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    half_empty = 2 * geometry.in_channels_per_group * problem.item <= grad_input_tma_tile.ROW_BYTES
    if channels < LEAST_CHANNELS or half_empty or not claims(problem, device):
        return []
    return [part_with_tile(problem, tile, device.multiprocessors) for tile in choose(problem, device, count)]


def part_with_tile(
    problem: StridedProblem,
    tile: BoxTile,
    multiprocessors: int = 132,
    grad_output: Argument = input_(0),  # noqa: B008 - plain data
    weight: Argument = input_(2),  # noqa: B008
) -> Part:
    """The part that computes the problem with this tile. ``grad_output``, ``weight``: where they lie, channels_last."""
    geometry = problem.geometry
    works = grad_input_tma_tile.work_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    split = tile.splits > 1
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
            int64(grad_input_tma_tile.box_bytes(problem, tile)),
        ),
        shared_bytes=shared,
        tensor_maps=(
            _grad_output_map(problem, tile, grad_output),
            _weight_map(problem, tile, weight),
        ),
        structs=(tile_count_sizes(problem, grad_input_tma_tile.tile_counts(problem, tile), tile.splits),),
    )
    launches = [main]
    if split:
        launches.append(forward_implicit_gemm.reduce_launch(problem, tile.splits, 0, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        4 * count * tile.splits if split else 0,
    )


@lru_cache(maxsize=4096)
def _compiled(layer: StridedProblem, tile: BoxTile) -> tuple[Kernel, int]:
    """The kernel that computes a layer whatever its sizes (``of_any_size``), with any number of splits above 1, and the
    shared memory that it takes."""
    shared, split = grad_input_tma_tile.shared_bytes(layer, tile), tile.splits > 1
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(layer, split),
        ("OUTPUT_CHANNELS_LAST", layer.output_channels_last),
        ("FLAT", tile.flat),
        ("DENSE", tile.dense),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("M_TILES", tile.m_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("TEAMS", tile.teams),
        ("WARPGROUPS_H", tile.warpgroups_h),
        ("BLOCK_CHANNELS", tile.channels),
        *grad_input_tma_tile.pitches(layer, tile).items(),
        ("INPUT_BYTES", grad_input_tma_tile.input_bytes(layer, tile)),
        ("INPUT_STAGES", tile.input_stages),
        ("WEIGHT_STAGES", tile.weight_stages),
        ("PARTIAL", split),
        ("SLICES_FIRST", tile.slices_first),
        ("PHASED", tile.phased),
        ("SHARED_BYTES", shared),
    )
    # With 128 sums, a thread's other registers are in some geometries a few words too little to store them by.
    spills = tile.m_tiles * tile.channels >= 256
    return Kernel(
        "grad_input/implicit_gemm_tma.cu", "grad_input_implicit_gemm_tma", constants, spills
    ), shared


def _grad_output_map(problem: StridedProblem, tile: BoxTile, base: Argument) -> TensorMap:
    """Channels, groups if there are several, columns, rows, images."""
    geometry = problem.geometry
    pixel = geometry.in_channels * problem.item
    images, rows = geometry.batch, geometry.height
    if tile.flat:
        images, rows = 1, images * rows
    box_h, box_w = grad_input_tma_tile.box_size(problem, tile)
    step_h, step_w = problem.step
    if tile.phased:
        return TensorMap(
            base,
            ELEMENT_KINDS[problem.precision],
            (geometry.in_channels, step_w, geometry.width // step_w, rows, images),
            (pixel, step_w * pixel, geometry.width * pixel, rows * geometry.width * pixel),
            (grad_input_tma_tile.ROW_BYTES // problem.item, 1, box_w, (box_h - 1) * step_h + 1, tile.images),
            (1, 1, 1, step_h, 1),
            fetched_bytes=grad_input_tma_tile.fetched_bytes(problem),
        )
    group = geometry.in_channels_per_group
    grouped = geometry.groups > 1
    sizes = (group, geometry.groups, geometry.width, rows, images)
    strides = (group * problem.item, pixel, geometry.width * pixel, rows * geometry.width * pixel)
    box = (
        grad_input_tma_tile.ROW_BYTES // problem.item,
        1,
        (box_w - 1) * step_w + 1,
        (box_h - 1) * step_h + 1,
        tile.images,
    )
    steps = (1, 1, step_w, step_h, 1)
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        sizes if grouped else _without_groups(sizes),
        strides if grouped else strides[1:],
        box if grouped else _without_groups(box),
        steps if grouped else _without_groups(steps),
        fetched_bytes=grad_input_tma_tile.fetched_bytes(problem),
    )


def _without_groups(values: tuple[int, ...]) -> tuple[int, ...]:
    return values[:1] + values[2:]


def _weight_map(problem: StridedProblem, tile: BoxTile, base: Argument) -> TensorMap:
    """Channels of the output, taps, channels of the input, groups."""
    geometry = problem.geometry
    group = geometry.in_channels_per_group * problem.item
    channels = geometry.out_channels_per_group
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        (geometry.in_channels_per_group, geometry.taps, channels, geometry.groups),
        (group, geometry.taps * group, channels * geometry.taps * group),
        (grad_input_tma_tile.ROW_BYTES // problem.item, 1, tile.channels, 1),
        (1, 1, 1, 1),
    )
