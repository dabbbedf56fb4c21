"""Plans the gradient of the input, strides above 1, from NCHW tensors without a layout conversion, and from
channels_last tensors of few channels (csrc/kernels/grad_input/im2col.cu). The functions are pure, and take problems as
they lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.pad_rows import Rows, copies_clocks, copies_fit, pad_rows, rows_of_images
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import Words, im2col_tile_shape, map_sizes
from tconv_swap.kernels.forward.split_k import reduce_launch
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input import im2col_tile as grad_input_im2col_tile
from tconv_swap.kernels.grad_input.im2col_choice import Schedule
from tconv_swap.kernels.grad_input.im2col_tile import Im2colKernel, Im2colShape, Im2colTile, as_read
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, layer_constants, of_any_size
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

FAMILY = "im2col"


def supports(problem: StridedProblem, device: Device) -> bool:
    """Returns whether the kernel computes the problem."""
    problem = as_read(problem)
    geometry = problem.geometry
    if not grad_input_im2col_choice.supports_some_size(problem, device):
        return False
    if not copies_fit(copied_rows(problem), problem.dtype):
        return False
    pixels = geometry.batch * max(
        geometry.height * geometry.width, problem.positions[0] * problem.positions[1]
    )
    return pixels < INT32_LIMIT and geometry.batch * geometry.in_channels < INT32_LIMIT


def copied_rows(problem: StridedProblem) -> list[Rows]:
    """Returns the rows of grad_output, and those of the weight, that are copied to longer ones where TMA cannot read
    them as they lie."""
    problem = as_read(problem)
    g = problem.geometry
    grad_output = rows_of_images(0, g.batch * g.in_channels, g.height, g.width, problem.item)
    weight = rows_of_images(2, g.out_channels, 1, _weight_row(problem), problem.item)
    return [rows for rows in (grad_output, weight) if rows is not None]


def candidates(
    layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device
) -> tuple[Schedule, ...]:
    """Returns every kernel of a layer (``of_any_size``), with the shapes that are the fastest for some map; ``sizes``
    are among these maps."""
    return grad_input_im2col_choice.candidates(as_read(layer), [as_read(size) for size in sizes], device)


def every_shape(layer: StridedProblem, device: Device) -> Iterator[Schedule]:
    """Yields every kernel of a layer (``of_any_size``) with each of its shapes, without conflicts of banks."""
    return grad_input_im2col_choice.every_shape(as_read(layer), device)


def ranked(among: Iterable[Schedule], problem: StridedProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size with their expected clocks, the one that is expected to
    be the fastest first."""
    return [
        Ranked(clocks, partial(lower, problem, tile, device.multiprocessors))
        for clocks, tile in ranked_tiles(among, problem, device)
    ]


def ranked_tiles(
    among: Iterable[Schedule], problem: StridedProblem, device: Device
) -> list[tuple[float, Im2colTile]]:
    """Returns the tiles of the kernels that compute this size and their expected clocks, the one that is expected to be
    the fastest first."""
    if not supports(problem, device):
        return []
    return grad_input_im2col_choice.ranked(among, as_read(problem), device, _copy_clocks(problem))


def best_clocks(among: Iterable[Schedule], problem: StridedProblem, device: Device) -> list[float]:
    """Returns the expected clocks of this size with the best tile of each of the kernels; infinitely many where it has
    none."""
    if not supports(problem, device):
        return [math.inf for _ in among]
    copied, read = _copy_clocks(problem), as_read(problem)
    return [
        min(
            (clocks for clocks, _ in grad_input_im2col_choice.ranked([one], read, device, copied)),
            default=math.inf,
        )
        for one in among
    ]


def _copy_clocks(problem: StridedProblem) -> float:
    """Returns the expected clocks of the copies with longer rows."""
    return copies_clocks(copied_rows(problem), problem.dtype)


def lower(problem: StridedProblem, tile: Im2colTile, multiprocessors: int = 132) -> Part:
    """Returns the part that computes the problem with this tile."""
    problem = as_read(problem)
    work_tiles = grad_input_im2col_tile.work_count(problem, tile)
    count = problem.grad_input_elements
    split = tile.splits > 1
    memory = WorkspaceLayout()
    if split:
        memory.reserve(4 * count * tile.splits)
    copies = {
        rows.operand: (rows, memory.reserve(rows.bytes(problem.dtype))) for rows in copied_rows(problem)
    }
    layer, shape = of_any_size(problem), tile.shape
    counts = grad_input_im2col_tile.tile_counts(problem, shape)
    main = Launch(
        _compiled(layer, tile.kernel),
        grid=min(work_tiles, multiprocessors),
        block=tile.kernel.threads,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            workspace(0) if split else output(0),
            struct(0),
            struct(1),
        ),
        shared_bytes=grad_input_im2col_tile.shared_bytes(layer, tile),
        tensor_maps=(
            _grad_output_map(problem, tile, *_read(0, problem.geometry.width, copies)),
            _weight_map(problem, tile, *_read(2, _weight_row(problem), copies)),
        ),
        structs=(
            map_sizes(problem.geometry, problem.positions, counts, tile.splits),
            _shape_words(layer, tile.kernel, shape),
        ),
    )
    launches = [pad_rows(rows, place, problem.dtype) for rows, place in copies.values()]
    launches.append(main._replace(overlaps_previous=bool(copies)))
    if split:
        launches.append(reduce_launch(problem, tile.splits, 0, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        memory.bytes,
    )


def _read(operand: int, width: int, copies: Mapping[int, tuple[Rows, int]]) -> tuple[Argument, int]:
    """Returns what is read of an operand, itself or its copy, and the elements from one of its rows to the next."""
    if operand not in copies:
        return input_(operand), width
    rows, place = copies[operand]
    return workspace(place), rows.padded


def _weight_row(problem: StridedProblem) -> int:
    """Returns the elements of the weight of one channel of the output."""
    return problem.geometry.in_channels_per_group * problem.geometry.taps


@lru_cache(maxsize=4096)
def _compiled(layer: StridedProblem, kernel: Im2colKernel) -> Kernel:
    """Returns the kernel that computes all sizes of a layer (``of_any_size``)."""
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(layer, kernel.partial),
        ("M_TILES", kernel.m_tiles),
        ("WARPGROUPS", kernel.warpgroups),
        ("BLOCK_CHANNELS", kernel.channels),
        ("STAGE_CHANNELS", kernel.stage_channels),
        ("STEPS", kernel.steps),
        ("HALVES", grad_input_im2col_tile.halves(layer)),
        ("OUTPUT_CHANNELS_LAST", layer.output_channels_last),
        ("COLUMN_BLOCK", grad_input_im2col_tile.COLUMN_BLOCK),
        ("MAX_INPUT_STAGES", grad_input_im2col_tile.MAX_INPUT_STAGES),
        ("MAX_WEIGHT_STAGES", grad_input_im2col_tile.MAX_WEIGHT_STAGES),
        ("HEAD_BYTES", grad_input_im2col_tile.head_bytes(layer, kernel)),
        ("PARTIAL", kernel.partial),
    )
    return Kernel("grad_input/im2col.cu", "grad_input_im2col", constants)


@lru_cache(maxsize=4096)
def _shape_words(layer: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> Words:
    """Returns the words of ``Im2colTileShape``."""
    loaded = grad_input_im2col_tile.input_bytes(layer, kernel, shape)
    return im2col_tile_shape(
        (shape.images, shape.rows, shape.cols),
        (grad_input_im2col_tile.box_h(layer, shape), shape.box_w),
        grad_input_im2col_tile.alignment_columns(layer, shape.wide),
        shape.wide,
        shape.paired,
        (loaded, grad_input_im2col_tile.input_pitch(layer, kernel, shape)),
        (shape.input_stages, shape.weight_stages),
    )


def _grad_output_map(problem: StridedProblem, tile: Im2colTile, base: Argument, columns: int) -> TensorMap:
    """Returns the tensor map of grad_output, whose rows take ``columns`` elements: columns (two dimensions of them, if
    they are blocked), rows, channels, images."""
    geometry, item = problem.geometry, problem.item
    column_block, shape = tile.shape.column_block, tile.shape
    row = columns * item
    plane = geometry.height * row
    blocked = (column_block,) if column_block > 1 else ()
    box = (
        shape.box_w // column_block,
        grad_input_im2col_tile.box_h(problem, shape),
        tile.kernel.stage_channels,
        shape.images,
    )
    return TensorMap(
        base,
        TF32_ELEMENT_KINDS[problem.dtype],
        (*blocked, geometry.width // column_block, geometry.height, geometry.in_channels, geometry.batch),
        (*(size * item for size in blocked), row, plane, geometry.in_channels * plane),
        (*blocked, *box),
        (1,) * (len(blocked) + len(box)),
        swizzle_bytes=0,
    )


def _weight_map(problem: StridedProblem, tile: Im2colTile, base: Argument, row: int) -> TensorMap:
    """Returns the tensor map of the weight, whose rows take ``row`` elements: channels of the output with their taps,
    channels of the input, groups."""
    geometry = problem.geometry
    channels = geometry.out_channels_per_group
    return TensorMap(
        base,
        TF32_ELEMENT_KINDS[problem.dtype],
        (_weight_row(problem), channels, geometry.groups),
        (row * problem.item, channels * row * problem.item),
        (grad_input_im2col_tile.BOX_WORDS * grad_input_im2col_tile.word(problem), tile.kernel.channels, 1),
        (1, 1, 1),
    )
