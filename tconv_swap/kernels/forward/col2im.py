"""Plans of csrc/kernels/forward/col2im.cu: layers with few output channels, whose products are multiplied once and then
added up (col2im). Pure functions of data."""

from __future__ import annotations

from tconv_swap.kernels.common.dtypes import ELEMENT_KINDS, PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.forward.col2im_choice import choose
from tconv_swap.kernels.forward.col2im_tile import (
    MAX_ROW_TILES,
    Tile,
    box,
    column_tiles,
    max_groups,
    partial_sums,
    parts,
    position_rows,
    products,
    row_tiles,
    shared_bytes,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Plan,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
)

#: The fewest and the most input channels: fewer leave most of a multiply of 16 empty, more do not fit one box.
CHANNELS = (8, 256)
#: The most products of a pixel that a thread's registers hold.
MAX_PRODUCTS = 96
#: The most products with which it is faster for 16 bits in channels_last with strides, where the narrow_mma kernel is
#: at its fastest.
MAX_PRODUCTS_16_BIT_CHANNELS_LAST = 72
MAX_OUT_CHANNELS = 8
#: The fewest columns and input channels with which it is faster.
MIN_COLUMNS = 16
MIN_IN_CHANNELS = 16


def supports(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes the problem: a layout that the copy engine can load, and offsets of 32 bits."""
    geometry = problem.geometry
    if not _supports_layer(problem, device) or geometry.batch == 0:
        return False
    if not problem.channels_last and geometry.width * problem.dtype.itemsize % 16:
        return False
    image = geometry.out_channels * geometry.out_height * geometry.out_width
    tiles = geometry.batch * geometry.out_height * geometry.out_width
    return max(image, tiles, MAX_ROW_TILES * geometry.out_height) < INT32_LIMIT // 2


def _supports_layer(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes some sizes of the layer."""
    geometry = problem.geometry
    if problem.dtype not in PRECISIONS or device.architecture != "sm_90a" or geometry.groups != 1:
        return False
    if problem.channels_last and geometry.in_channels * problem.dtype.itemsize % 16:
        return False
    if not CHANNELS[0] <= geometry.in_channels <= CHANNELS[1] or geometry.out_channels > MAX_OUT_CHANNELS:
        return False
    return products(geometry) <= MAX_PRODUCTS


def supports_some_size(problem: Problem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for some sizes of the layer."""
    return _supports_layer(problem, device) and _pays_for_long_rows(problem)


def pays(problem: Problem) -> bool:
    """Whether the kernel is expected to be faster than one that gathers the taps of each output: few products to
    add up, many channels to multiply."""
    return _pays_for_long_rows(problem) and problem.geometry.width >= MIN_COLUMNS


def _pays_for_long_rows(problem: Problem) -> bool:
    """Whether the kernel is expected to be faster for sizes whose rows are long enough."""
    geometry = problem.geometry
    gathers_fast = problem.channels_last and problem.dtype.itemsize == 2 and max(geometry.stride) > 1
    limit = MAX_PRODUCTS_16_BIT_CHANNELS_LAST if gathers_fast else MAX_PRODUCTS
    return products(geometry) <= limit and geometry.in_channels >= MIN_IN_CHANNELS


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the plan with the best tile, or None where another kernel is expected to be faster.

    Inputs: input, weight (both 16-byte aligned), bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1) if pays(problem) else []
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns the ``count`` plans that are expected to be the fastest, the best first."""
    if not supports(problem, device):
        return []
    return [lower(problem, has_bias, tile, device) for tile in choose(problem, device, count)]


def lower(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Plan:
    """Returns the plan that computes the problem with this tile."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    shared = shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "long long"),
        ("PRECISION", PRECISIONS[problem.dtype]),
        ("PARTS", parts(problem)),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        *bias_alone(has_bias),
        ("PANEL_PIXELS", tile.panel_pixels),
        ("STEP_PANELS", tile.step_panels),
        ("STEP_ROWS", tile.step_rows),
        ("MAX_GROUPS", max_groups(problem, tile)),
        ("BUFFERS", tile.buffers),
        ("PARTIAL_SUMS", partial_sums(problem, tile)),
        ("WARPS", tile.warps),
        ("STAGES", tile.stages),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
        ("SHARED_BYTES", shared),
    )
    line, channels = box(problem, tile)
    c, h, w = geometry.in_channels, geometry.height, geometry.width
    sizes = (c, w, h) if problem.channels_last else (w, h, c)
    input_map = TensorMap(
        input_(0),
        ELEMENT_KINDS[problem.dtype],
        (*sizes, geometry.batch),
        (sizes[0] * item, sizes[0] * sizes[1] * item, c * h * w * item),
        (line // item, tile.panel_pixels, 1, 1)
        if problem.channels_last
        else (tile.panel_pixels, 1, channels, 1),
        (1, 1, 1, 1),
        line,
    )
    tiles_h = row_tiles(problem, tile, device)
    groups, tiles_w = column_tiles(problem, tile)
    tiles = geometry.batch * tiles_h * tiles_w
    launch = Launch(
        Kernel("forward/col2im.cu", "forward_col2im", constants),
        grid=min(tiles, device.multiprocessors * tile.blocks_per_multiprocessor),
        block=32 * tile.warps,
        arguments=(tensor_map(0), input_(1), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        tensor_maps=(input_map,),
        structs=(
            (
                *(geometry.height, geometry.out_height, geometry.out_width),
                *(tiles, position_rows(geometry), groups, int(geometry.width <= tile.columns)),
                *divisor(tiles_w),
                *divisor(tiles_h),
            ),
        ),
    )
    return Plan(
        "col2im",
        f"{geometry.in_channels} channels to {products(geometry)} products a pixel, col2im: {tile}",
        outputs=(Output(geometry.output_shape, problem.channels_last),),
        launches=(launch,),
    )
