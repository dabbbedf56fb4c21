"""Plans the gradient of the input, strides above 1, from channels_last tensors that TMA loads
(csrc/kernels/grad_input/implicit_gemm_tma.cu). The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS
from tconv_swap.kernels.common.hardware import MAX_STEP, TMA_ALIGNMENT
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import map_sizes
from tconv_swap.kernels.forward.split_k import reduce_launch
from tconv_swap.kernels.grad_input import implicit_gemm_tma_shape as grad_input_tma_shape
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, layer_constants, of_any_size
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import Schedule
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import ranked as ranked_tiles
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.tma_gemm import may_load
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT
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

FAMILY = "implicit_gemm_tma"
#: The most taps of a kernel: a table of the kernel's constants has an entry for each.
MAX_TAPS = 64
#: The most positions of a tile along an axis.
MAX_TILE_SIDE = 512


def supports(problem: StridedProblem, device: Device) -> bool:
    """Returns whether the kernel computes the problem."""
    geometry = problem.geometry
    if not may_load(problem, device) or not grad_input_tma_shape.fills_chunks(problem):
        return False
    if not (problem.input_channels_last and problem.weight_channels_last):
        return False
    sizes = [geometry.in_channels_per_group]
    if problem.output_channels_last:
        sizes.append(geometry.out_channels_per_group)
    if any(size * problem.item % TMA_ALIGNMENT for size in sizes):
        return False
    pixels, (rows, cols) = geometry.batch * geometry.height * geometry.width, problem.positions
    # Tiles may reach beyond the last position, by less than a tile.
    positions = (geometry.batch * rows + MAX_TILE_SIDE) * (cols + MAX_TILE_SIDE)
    step_h, step_w = problem.step
    loaded = step_w <= MAX_STEP or grad_input_tma_tile.has_whole_strides(problem)
    return (
        loaded and step_h <= MAX_STEP and geometry.taps <= MAX_TAPS and max(pixels, positions) < INT32_LIMIT
    )


def ranked(among: Iterable[Schedule], problem: StridedProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size with their expected clocks, the one that is expected to
    be the fastest first."""
    if not supports(problem, device):
        return []
    return [
        Ranked(clocks, partial(lower, problem, tile, device.multiprocessors))
        for clocks, tile in ranked_tiles(among, problem, device)
    ]


def lower(
    problem: StridedProblem,
    tile: TmaTile,
    multiprocessors: int = 132,
    grad_output: Argument = input_(0),  # noqa: B008 - plain data
    weight: Argument = input_(2),  # noqa: B008
) -> Part:
    """Returns the part that computes the problem with this tile. ``grad_output``, ``weight``: the arguments that hold
    them in channels_last."""
    work_tiles = grad_input_tma_tile.work_count(problem, tile)
    split = tile.splits > 1
    layer = of_any_size(problem)
    kernel, shared = _compiled(layer, _of_any_shape(layer, tile))
    main = Launch(
        kernel,
        grid=min(work_tiles, multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            workspace(0) if split else output(0),
            struct(0),
            struct(1),
        ),
        shared_bytes=shared,
        tensor_maps=(
            _grad_output_map(problem, tile, grad_output),
            _weight_map(problem, tile, weight),
        ),
        structs=(
            map_sizes(
                problem.geometry,
                problem.positions,
                grad_input_tma_shape.tile_counts(problem, tile),
                tile.splits,
                grad_input_tma_shape.dense_map(problem) if tile.dense else None,
            ),
            grad_input_tma_shape.shape_words(problem, tile),
        ),
    )
    launches = [main]
    if split:
        launches.append(reduce_launch(problem, tile.splits, 0, problem.grad_input_elements))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        partial_bytes(problem, tile),
    )


def partial_bytes(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the bytes of the workspace: the sums of all splits in float32."""
    return 4 * problem.grad_input_elements * tile.splits if tile.splits > 1 else 0


def _of_any_shape(layer: StridedProblem, tile: TmaTile) -> TmaTile:
    """Returns a tile that is the same for all shapes and splits that a kernel computes. 2 splits stand for any number
    of splits above 1, 4 and 8 columns for narrow tiles and others."""
    narrow = tile.narrow and not grad_input_tma_shape.narrow_alike(layer)
    cols = grad_input_tma_shape.NARROW_COLS if narrow else 8
    return tile._replace(
        images=1,
        rows=1,
        cols=cols,
        groups_along="",
        multiplies_along="",
        warpgroups_h=1,
        splits=min(tile.splits, 2),
    )


@lru_cache(maxsize=4096)
def _compiled(layer: StridedProblem, tile: TmaTile) -> tuple[Kernel, int]:
    """Returns the kernel that computes all sizes of a layer (``of_any_size``), and its bytes of shared memory.
    ``tile``: of ``_of_any_shape``."""
    shared, split = grad_input_tma_tile.shared_bytes(layer, tile), tile.splits > 1
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(layer, split),
        ("OUTPUT_CHANNELS_LAST", layer.output_channels_last),
        ("DENSE", tile.dense),
        ("NARROW", tile.narrow),
        ("M_TILES", tile.m_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("CONSUMERS", tile.consumers),
        ("BLOCK_CHANNELS", tile.channels),
        ("INPUT_BYTES", tile.box_pixels * grad_input_tma_shape.ROW_BYTES),
        ("INPUT_STAGES", tile.input_stages),
        ("WEIGHT_STAGES", tile.weight_stages),
        ("PARTIAL", split),
        ("PHASE_MAJOR", tile.phase_major),
        ("PHASE_DIMENSION", tile.phase_dimension),
        ("SHARED_BYTES", shared),
    )
    # Beside 128 accumulators, a thread lacks a few registers for the epilogue in some geometries.
    spills = tile.m_tiles * tile.channels >= 256
    return Kernel(
        "grad_input/implicit_gemm_tma.cu", "grad_input_implicit_gemm_tma", constants, spills
    ), shared


def _grad_output_map(problem: StridedProblem, tile: TmaTile, base: Argument) -> TensorMap:
    """Returns the tensor map of grad_output: channels, groups if there are several, columns, rows, images."""
    geometry = problem.geometry
    pixel = geometry.in_channels * problem.item
    images, rows = geometry.batch, geometry.height
    step_h, step_w = problem.step
    if tile.dense:
        return TensorMap(
            base,
            TF32_ELEMENT_KINDS[problem.dtype],
            (geometry.in_channels, geometry.width, rows, images),
            (pixel, geometry.width * pixel, rows * geometry.width * pixel),
            (grad_input_tma_shape.ROW_BYTES // problem.item, grad_input_tma_shape.box_pixels(problem, tile)),
            (1, step_w, step_h, 1),
            fetched_bytes=grad_input_tma_tile.fetched_bytes(problem),
            corners=grad_input_tma_shape.dense_corners(problem),
        )
    box_h, box_w = grad_input_tma_shape.box_size(problem, tile)
    if tile.phase_dimension:
        return TensorMap(
            base,
            TF32_ELEMENT_KINDS[problem.dtype],
            (geometry.in_channels, step_w, geometry.width // step_w, rows, images),
            (pixel, step_w * pixel, geometry.width * pixel, rows * geometry.width * pixel),
            (grad_input_tma_shape.ROW_BYTES // problem.item, 1, box_w, (box_h - 1) * step_h + 1, tile.images),
            (1, 1, 1, step_h, 1),
            fetched_bytes=grad_input_tma_tile.fetched_bytes(problem),
        )
    group = geometry.in_channels_per_group
    grouped = geometry.groups > 1
    sizes = (group, geometry.groups, geometry.width, rows, images)
    strides = (group * problem.item, pixel, geometry.width * pixel, rows * geometry.width * pixel)
    box = (
        grad_input_tma_shape.ROW_BYTES // problem.item,
        1,
        (box_w - 1) * step_w + 1,
        (box_h - 1) * step_h + 1,
        tile.images,
    )
    steps = (1, 1, step_w, step_h, 1)
    return TensorMap(
        base,
        TF32_ELEMENT_KINDS[problem.dtype],
        sizes if grouped else _without_groups(sizes),
        strides if grouped else strides[1:],
        box if grouped else _without_groups(box),
        steps if grouped else _without_groups(steps),
        fetched_bytes=grad_input_tma_tile.fetched_bytes(problem),
    )


def _without_groups(values: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the values without the dimension of the groups."""
    return values[:1] + values[2:]


def _weight_map(problem: StridedProblem, tile: TmaTile, base: Argument) -> TensorMap:
    """Returns the tensor map of the weight: channels of the output, taps, channels of the input, groups."""
    geometry = problem.geometry
    group = geometry.in_channels_per_group * problem.item
    channels = geometry.out_channels_per_group
    return TensorMap(
        base,
        TF32_ELEMENT_KINDS[problem.dtype],
        (geometry.in_channels_per_group, geometry.taps, channels, geometry.groups),
        (group, geometry.taps * group, channels * geometry.taps * group),
        (grad_input_tma_shape.ROW_BYTES // problem.item, 1, tile.channels, 1),
        (1, 1, 1, 1),
    )
