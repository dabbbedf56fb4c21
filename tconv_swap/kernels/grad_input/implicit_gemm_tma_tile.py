"""The tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu: the shared memory that each takes, and the shapes of each
kernel. grad_input/implicit_gemm_tma_choice.py chooses among them."""

from __future__ import annotations

from collections.abc import Iterator

from tconv_swap.kernels.common.dense_map import are_legal
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_STEP
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import (
    NARROW_COLS,
    ROW_BYTES,
    TmaTile,
    box_pixels,
    box_size,
    dense_corners,
    dense_shape,
    mapped_shapes,
    max_dense_pixels,
    narrow_alike,
    tile_counts,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

MAX_INPUT_STAGES = 8
MAX_WEIGHT_STAGES = 12
#: A kernel has the shapes with whose boxes its stages hold at least this share of the taps that they hold with the
#: smallest box.
MIN_TAPS_AHEAD = 0.75
#: Of equals, tiles with long rows were faster (columns of taps overlap), but not those with longer ones.
LONG_ROW = 64


def fetched_bytes(problem: StridedProblem) -> int:
    """Returns how many bytes of grad_output the L2 fetches at a time (docs/kernels/grad_input/implicit_gemm_tma.md).

    It is 256 only where the other 128 bytes are read soon: as the next chunk of a phase, or as the next column, whose
    phase has taps.
    """
    all_columns = len(problem.phases_used[1]) == problem.step[1]
    return 256 if phase_major(problem) or (chunks(problem) == 1 and all_columns) else 128


def phase_major(problem: StridedProblem) -> bool:
    """Returns whether the chunks of a phase follow each other: both chunks of a pixel are one fetch from memory."""
    return problem.max_shift == (0, 0) and chunks(problem) == 2


def phase_count(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns how many stages of the input a chunk has: phases that have taps, in a narrow map times columns of
    taps."""
    rows, cols = problem.phases_used
    return len(rows) * (problem.geometry.kernel[1] if tile.narrow else len(cols))


def chunks(problem: StridedProblem) -> int:
    """Returns how many chunks of channels the sum over k has."""
    return ceil_div(problem.geometry.in_channels_per_group * problem.item, ROW_BYTES)


def shared_bytes(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the bytes of shared memory of one block; the kernel asserts that it agrees."""
    fixed, one_input, one_weight = _bytes_of(tile)
    return fixed + tile.input_stages * one_input + tile.weight_stages * one_weight


def _bytes_of(tile: TmaTile) -> tuple[int, int, int]:
    """Returns the bytes of shared memory beside the stages, of a stage of the input, and of one of the weights."""
    return (
        1024 + tile.consumers * (tile.warpgroups * 64 * ROW_BYTES + 8),
        round_up(tile.box_pixels * ROW_BYTES, 1024) + 16,
        tile.channels * ROW_BYTES + 16,
    )


def work_count(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns how many work tiles all blocks have together."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = ceil_div(geometry.out_channels_per_group, tile.channels)
    return images * rows * cols * blocks * geometry.groups * tile.splits


def legal(problem: StridedProblem, tile: TmaTile) -> bool:
    """Returns whether the kernel computes this size correctly."""
    if tile.dense and not _is_dense(problem, tile):
        return False
    if tile.splits > 1 and (problem.geometry.groups > 1 or tile.splits > chunks(problem)):
        return False
    return not tile.phase_dimension or may_have_phase_dimension(problem, tile)


def _is_dense(problem: StridedProblem, tile: TmaTile) -> bool:
    """Returns whether a stage has room for the pixels of a dense tile of this size, and the copy engine takes the
    corners of its map."""
    return box_pixels(problem, tile) <= tile.box_pixels and are_legal(dense_corners(problem))


def may_have_phase_dimension(problem: StridedProblem, tile: TmaTile) -> bool:
    """Returns whether grad_output's columns are whole strides, and the tile reads boxes of one phase of them."""
    return not (tile.narrow or tile.dense) and has_whole_strides(problem)


def has_whole_strides(problem: StridedProblem) -> bool:
    """Returns whether the phases of grad_output's columns can be a dimension of its tensor map."""
    return problem.geometry.groups == 1 and problem.geometry.width % problem.step[1] == 0


def tiles(problem: StridedProblem, device: Device) -> Iterator[TmaTile]:
    """Yields a tile of each kernel that computes sizes of this layer, whatever its size, in no order; 2 splits stand
    for any number of them above 1."""
    for kernel in dict.fromkeys(_kernels(problem)):
        for splits in (1, 2):
            if splits > 1 and (problem.geometry.groups > 1 or kernel.consumers > 1 or chunks(problem) == 1):
                continue
            ordered = kernel._replace(splits=splits, phase_major=phase_major(problem))
            staged = _with_stages(problem, ordered, device)
            if staged is not None:
                yield staged


def shapes(problem: StridedProblem, tile: TmaTile) -> list[TmaTile]:
    """Returns the tile in each of its kernel's shapes, those with the smallest boxes first, of equals the longest rows
    up to ``LONG_ROW``, then the fewest images."""
    if tile.dense:
        return [tile]
    found: dict[tuple[int, int, int], TmaTile] = {}
    for shape in _all_shapes(problem, tile):
        one = tile._replace(
            images=shape.images,
            rows=shape.rows,
            cols=shape.cols,
            groups_along=shape.groups_along,
            multiplies_along=shape.multiplies_along,
            warpgroups_h=shape.warpgroups_h,
        )
        if box_pixels(problem, one) <= tile.box_pixels:
            found.setdefault((one.images, one.rows, one.cols), one)
    return sorted(
        found.values(), key=lambda one: (box_pixels(problem, one), one.cols > LONG_ROW, -one.cols, one.images)
    )


def _all_shapes(problem: StridedProblem, tile: TmaTile) -> list[TmaTile]:
    """Returns the shapes whose boxes TMA can load."""
    widths = [NARROW_COLS] if tile.narrow else [8]
    if narrow_alike(problem) and not tile.phase_dimension:
        widths = [8, NARROW_COLS]
    of = [one for width in widths for one in mapped_shapes(tile.warpgroups, tile.m_tiles, width)]
    return [one for one in of if _is_loaded(problem, one, tile.phase_dimension)]


def _is_loaded(problem: StridedProblem, shape: TmaTile, phase_dimension: bool) -> bool:
    (step_h, step_w), (box_h, box_w) = problem.step, box_size(problem, shape)
    if not phase_dimension and step_w > MAX_STEP:
        return False
    pixels = box_w if phase_dimension else (box_w - 1) * step_w + 1
    return max((box_h - 1) * step_h + 1, pixels, shape.images) <= MAX_BOX


def _kernels(problem: StridedProblem) -> Iterator[TmaTile]:
    """Yields a tile of each kernel, without stages."""
    channels = problem.geometry.out_channels_per_group
    for warpgroups, m_tiles in ((2, 2), (2, 1), (3, 1), (1, 2), (1, 1)):
        # A thread has 168 registers; with three warpgroups it has 144.
        max_accumulators = 64 if warpgroups == 3 else 128
        widths = [n for n in (64, 96, 128, 192, 256) if n // 2 * m_tiles <= max_accumulators]
        widths = [n for n in widths if n % 64 == 0 or n >= channels]
        # The smallest width that holds all channels, and the large ones that do not.
        enough = [n for n in widths if n >= channels][:1]
        kinds = list(_kinds(problem, warpgroups, m_tiles))
        for width in enough + [n for n in widths if n < channels and n in (128, 256)]:
            for kind in kinds:
                yield kind._replace(channels=width)
                if warpgroups == 1 and m_tiles * width == 256:
                    yield kind._replace(channels=width, consumers=2)


def _kinds(problem: StridedProblem, warpgroups: int, m_tiles: int) -> Iterator[TmaTile]:
    """Yields a tile of each kind of box: dense, of maps, of narrow maps if they differ, and of maps whose phases of
    columns are a dimension, where boxes would have too many columns otherwise."""
    group_bytes = problem.geometry.in_channels_per_group * problem.item
    if problem.step[1] <= MAX_STEP and (problem.geometry.groups == 1 or group_bytes % ROW_BYTES == 0):
        yield dense_shape(warpgroups, m_tiles)
    for width in (8,) if narrow_alike(problem) else (8, NARROW_COLS):
        of_width = list(mapped_shapes(warpgroups, m_tiles, width))
        if any(_is_loaded(problem, one, False) for one in of_width):
            yield of_width[0]
        if width == 8 and problem.geometry.groups == 1 and not _are_loaded(problem, of_width):
            yield of_width[0]._replace(phase_dimension=True)


def _are_loaded(problem: StridedProblem, of: list[TmaTile]) -> bool:
    return all(_is_loaded(problem, one, False) for one in of)


def _with_stages(problem: StridedProblem, tile: TmaTile, device: Device) -> TmaTile | None:
    """Returns the tile with the stages that hold the most taps, and with room in each for the boxes of the kernel's
    shapes; or None if two of each stage do not fit."""
    if tile.dense:
        boxes = [max_dense_pixels(problem, tile)]
    else:
        boxes = sorted(box_pixels(problem, one) for one in _all_shapes(problem, tile))
    staged = [(_stages(problem, tile._replace(box_pixels=pixels), device), pixels) for pixels in boxes]
    fitting = [(ahead, inputs, weights, pixels) for (ahead, inputs, weights), pixels in staged if ahead > 0]
    if not fitting:
        return None
    _, inputs, weights, pixels = [one for one in fitting if one[0] >= MIN_TAPS_AHEAD * fitting[0][0]][-1]
    made = tile._replace(box_pixels=pixels, input_stages=inputs, weight_stages=weights)
    return shapes(problem, made)[0]


def _stages(problem: StridedProblem, tile: TmaTile, device: Device) -> tuple[float, int, int]:
    """Returns the stages of the input and of the weights that hold the most taps, after a measure of these taps; 0 if
    two of each do not fit."""
    taps = problem.geometry.taps / phase_count(problem, tile)
    fixed, one_input, one_weight = _bytes_of(tile)
    room = device.shared_memory_per_block - fixed
    best = (0.0, 0, 0)
    for inputs in range(2, MAX_INPUT_STAGES + 1):
        weights = min(MAX_WEIGHT_STAGES, (room - inputs * one_input) // one_weight)
        if weights < 2:
            break
        taps_ahead = min(inputs * taps, weights) + 0.01 * min(inputs, weights)
        if taps_ahead > best[0]:
            best = (taps_ahead, inputs, weights)
    return best
