"""Plans of csrc/kernels/forward/col2im.cu: layers with few output channels, each tap multiplied once and folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    ElementKind,
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

#: The values are shared with csrc/kernels/common/mma.cuh.
_PRECISIONS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_KINDS = {
    torch.float16: ElementKind.FLOAT16,
    torch.bfloat16: ElementKind.BFLOAT16,
    torch.float32: ElementKind.FLOAT32,
}
#: Input channels: fewer leave most of a multiply of 16 empty, more are not brought by one box.
CHANNELS = (8, 256)
#: Products of a pixel that a thread's registers hold, and the fewest that are worth it.
MOST_PRODUCTS = 96
FEWEST_PRODUCTS = 16
#: The most that are worth it in channels_last with 16 bits and strides, where gathering is at its fastest.
GATHERED_PRODUCTS = 72
MOST_OUT_CHANNELS = 8
#: Of the input and its rows that are worth it: channels, and pixels.
FEWEST_COLUMNS = 16
#: Columns of the maps that the kernels of a layer are chosen for, each one's images and rows too.
COLUMNS = (32, 64, 128)
MOST_STRIPS = 64
#: Bytes of a block's shared memory that are not its own; registers of a multiprocessor.
RESERVED_BYTES = 1024
REGISTERS = 65536
MOST_REGISTERS = 255
WARP_PIXELS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes; the top of csrc/kernels/forward/col2im.cu says what each is."""

    panel_pixels: int
    step_panels: int
    step_rows: int
    buffers: int
    stages: int
    blocks_per_multiprocessor: int

    @property
    def columns(self) -> int:
        return self.panel_pixels * self.step_panels

    def __str__(self) -> str:
        return f"{self.step_rows}x{self.columns} pixels at a time"


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes the problem: the copy engine's layouts, and offsets of 32 bits."""
    geometry = problem.geometry
    if not _claims_layer(problem, device) or geometry.batch == 0:
        return False
    if not problem.channels_last and geometry.width * problem.dtype.itemsize % 16:
        return False
    image = geometry.out_channels * geometry.out_height * geometry.out_width
    tiles = geometry.batch * geometry.out_height * geometry.out_width
    strips = MOST_STRIPS * geometry.out_height
    return max(image, tiles, strips) < INT32_LIMIT // 2


def _claims_layer(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes some sizes of the layer."""
    geometry = problem.geometry
    if problem.dtype not in _PRECISIONS or device.architecture != "sm_90a" or geometry.groups != 1:
        return False
    if problem.channels_last and geometry.in_channels * problem.dtype.itemsize % 16:
        return False
    if not CHANNELS[0] <= geometry.in_channels <= CHANNELS[1] or geometry.out_channels > MOST_OUT_CHANNELS:
        return False
    return products(geometry) <= MOST_PRODUCTS


def computes_some_size(problem: Problem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for some sizes of the layer."""
    return _claims_layer(problem, device) and _pays_off(problem)


def products(geometry: Geometry) -> int:
    """Of one input pixel: one for each tap and output channel."""
    return geometry.out_channels * geometry.taps


def _reach(geometry: Geometry, axis: int) -> int:
    extent = (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1
    return ceil_div(extent, geometry.stride[axis])


def _tile_groups(problem: Problem, tile: Tile) -> tuple[int, int]:
    """(groups of neighbouring outputs in a tile of columns, tiles); (0, 0) where the tile is narrower than its halo."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    stride, padding = geometry.stride[1], geometry.padding[1]
    cells = ceil_div(4, item * stride)
    groups = ceil_div(geometry.out_width, stride * cells)
    if geometry.width <= tile.columns:
        return groups, 1
    reach, shift = _reach(geometry, 1), padding // stride
    step = cells if problem.channels_last else 16 // item
    lead = (shift - reach + 1) % step
    in_tile = (tile.columns - lead - reach + shift - (padding - 1) // stride) // step * step // cells
    return (in_tile, ceil_div(groups, in_tile)) if in_tile > 0 else (0, 0)


@lru_cache(maxsize=4096)
def _groups_of_layer(layer: Problem, tile: Tile) -> int:
    geometry, item = layer.geometry, layer.dtype.itemsize
    step = geometry.stride[1] * ceil_div(4, item * geometry.stride[1])
    whole = replace(geometry, width=tile.columns).out_width
    long = replace(layer, geometry=replace(geometry, width=2 * tile.columns))
    return max(ceil_div(whole, step), _tile_groups(long, tile)[0], 1)


def _most_groups(problem: Problem, tile: Tile) -> int:
    """Groups of neighbouring outputs in a tile of columns, of any size of the layer."""
    return _groups_of_layer(replace(problem, geometry=of_any_size(problem.geometry)), tile)


def warps(tile: Tile) -> int:
    return tile.step_rows * tile.columns // WARP_PIXELS


def _columns(geometry: Geometry) -> int:
    """Of the product, padded."""
    return max(16, round_up(products(geometry), 8))


def _cell_rows(geometry: Geometry) -> int:
    stride, padding = geometry.stride[0], geometry.padding[0]
    return (geometry.out_height - 1 + padding) // stride + 1 - padding // stride


def _box(problem: Problem, tile: Tile) -> tuple[int, int]:
    """(bytes of a line of a box, elements of all channels of a pixel), as forward/col2im_input.cuh has them."""
    item = problem.dtype.itemsize
    k = round_up(problem.geometry.in_channels, 16)
    if not problem.channels_last:
        return tile.panel_pixels * item, k
    line = next((power for power in (32, 64) if k * item <= power), 128)
    return line, round_up(k * item, line) // item


def _parts(problem: Problem) -> int:
    """Numbers of 16 bits that an element is multiplied as."""
    return 1 if problem.dtype.itemsize == 2 else 3


@lru_cache(maxsize=4096)
def strips_of(problem: Problem, tile: Tile, device: Device) -> int:
    """Strips that an image is cut into, so that blocks are busy for about as long as one another: with the fewest steps
    that a block works through, all blocks being resident, and what it costs to begin a strip."""
    geometry = problem.geometry
    column_tiles = geometry.batch * _tile_groups(problem, tile)[1]
    blocks = device.multiprocessors * tile.blocks_per_multiprocessor
    cell_rows, reach = _cell_rows(geometry), _reach(geometry, 0)
    found, fewest = 1, INT32_LIMIT
    for strips in range(1, max(1, min(MOST_STRIPS, cell_rows // 4)) + 1):
        rows = min(geometry.height, ceil_div(cell_rows, strips) + reach - 1)
        steps = ceil_div(column_tiles * strips, blocks) * max(1, ceil_div(rows, tile.step_rows))
        if steps < fewest:
            found, fewest = strips, steps
    return found


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """As csrc/kernels/forward/col2im.cu lays it out; it asserts that they agree."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    m, k = products(geometry), round_up(geometry.in_channels, 16)
    stage = _box(problem, tile)[1] * tile.columns * tile.step_rows * item
    weights = _parts(problem) * k * _columns(geometry) * 2
    stride, padding = geometry.stride[1], geometry.padding[1]
    left = max(0, round_up(_reach(geometry, 1) - 1 - padding // stride, 2))
    last = _most_groups(problem, tile) * ceil_div(4, item * stride) + (padding - 1) // stride
    right = max(0, last - tile.columns + 1)
    pitch = round_up(left + tile.columns + right - 4, 16) + 4
    return tile.stages * (stage + 8) + weights + tile.buffers * tile.step_rows * m * pitch * 4


def plan_with_tile(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Plan:
    """The plan that computes the problem with this tile."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    shared = shared_bytes(problem, tile)
    warps_ = warps(tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "long long"),
        ("PRECISION", _PRECISIONS[problem.dtype]),
        ("PARTS", _parts(problem)),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        *bias_alone(has_bias),
        ("PANEL_PIXELS", tile.panel_pixels),
        ("STEP_PANELS", tile.step_panels),
        ("STEP_ROWS", tile.step_rows),
        ("MOST_GROUPS", _most_groups(problem, tile)),
        ("BUFFERS", tile.buffers),
        ("PARTIAL_SUMS", _partial_sums(problem, tile)),
        ("WARPS", warps_),
        ("STAGES", tile.stages),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
        ("SHARED_BYTES", shared),
    )
    line, channels = _box(problem, tile)
    c, h, w = geometry.in_channels, geometry.height, geometry.width
    sizes = (c, w, h) if problem.channels_last else (w, h, c)
    boxes = TensorMap(
        input_(0),
        _KINDS[problem.dtype],
        (*sizes, geometry.batch),
        (sizes[0] * item, sizes[0] * sizes[1] * item, c * h * w * item),
        (line // item, tile.panel_pixels, 1, 1)
        if problem.channels_last
        else (tile.panel_pixels, 1, channels, 1),
        (1, 1, 1, 1),
        line,
    )
    strips = strips_of(problem, tile, device)
    groups, column_tiles = _tile_groups(problem, tile)
    tiles = geometry.batch * strips * column_tiles
    launch = Launch(
        Kernel("forward/col2im.cu", "forward_col2im", constants),
        grid=min(tiles, device.multiprocessors * tile.blocks_per_multiprocessor),
        block=32 * warps_,
        arguments=(tensor_map(0), input_(1), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        tensor_maps=(boxes,),
        structs=(
            (
                *(geometry.height, geometry.out_height, geometry.out_width),
                *(tiles, _cell_rows(geometry), groups, int(geometry.width <= tile.columns)),
                *divisor(column_tiles),
                *divisor(strips),
            ),
        ),
    )
    return Plan(
        "col2im",
        f"{geometry.in_channels} channels to {products(geometry)} products a pixel, folded: {tile}",
        outputs=(Output(geometry.output_shape, problem.channels_last),),
        launches=(launch,),
    )


def pays(problem: Problem) -> bool:
    """Whether it is expected to be faster than gathering: little to fold, much to multiply."""
    return _pays_off(problem) and problem.geometry.width >= FEWEST_COLUMNS


def _pays_off(problem: Problem) -> bool:
    """The same of rows that are long enough."""
    geometry = problem.geometry
    fast_gather = problem.channels_last and problem.dtype.itemsize == 2 and max(geometry.stride) > 1
    most = GATHERED_PRODUCTS if fast_gather else MOST_PRODUCTS
    return FEWEST_PRODUCTS <= products(geometry) <= most and geometry.in_channels >= FEWEST_COLUMNS


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """The plan with the best tile, or None where the kernel does not pay.

    Inputs: input, weight (both 16-byte aligned), bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1) if pays(problem) else []
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """The ``count`` plans that are expected to be the fastest, the best first."""
    if not claims(problem, device):
        return []
    return [plan_with_tile(problem, has_bias, tile, device) for tile in choose(problem, device, count)]


def choose(problem: Problem, device: Device, count: int) -> list[Tile]:
    """The ``count`` tiles that are expected to be the fastest for this size, the best first: of the layer's, then, to
    be measured, of all."""
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    found = [tile for tile in schedules(layer, device) if _tile_groups(problem, tile)[1]]
    found.sort(key=lambda tile: (_tile_groups(problem, tile)[1] * tile.columns, -tile.columns))
    if len(found) < count:
        found = list(dict.fromkeys([*found, *rank(problem, device)]))
    return found[:count]


@lru_cache(maxsize=256)
def schedules(layer: Problem, device: Device) -> tuple[Tile, ...]:
    """The tiles for all sizes of a layer (``of_any_size``): the best of maps of so many columns."""
    found: dict[Tile, None] = {}
    for columns in COLUMNS:
        geometry = replace(layer.geometry, batch=columns, height=columns, width=columns)
        if min(geometry.out_height, geometry.out_width) > 0:
            found.update(dict.fromkeys(rank(replace(layer, geometry=geometry), device)[:1]))
    return tuple(found)


def rank(problem: Problem, device: Device) -> list[Tile]:
    """The tiles, the one that is expected to be the fastest first; empty where none fits.

    As measured: many blocks of few pixels where they are whole rows, of 128 columns where rows are long.
    """
    tiles: dict[Tile, None] = {}
    panels = _panels(problem)
    whole = problem.geometry.width <= 64
    sizes = ((64, 4), (64, 3), (128, 2), (64, 2)) if whole else ((128, 2), (128, 1), (64, 3), (64, 2))
    for pixels, blocks in (*sizes, (128, 1), (64, 1)):
        for (panel_pixels, step_panels), buffers, stages in product(panels, (2, 1), (4, 3, 2)):
            columns = panel_pixels * step_panels
            tile = Tile(panel_pixels, step_panels, max(1, pixels // columns), buffers, stages, blocks)
            if columns <= pixels and _fits(problem, tile, device):
                tiles[tile] = None
    return list(tiles)


def _panels(problem: Problem) -> list[tuple[int, int]]:
    """Pixels of a panel, and panels that make up at most 128 of a row: those first that multiply the fewest columns."""
    panels = [(16, 1), (32, 1), (64, 1), (128, 1)]
    if not problem.channels_last:
        lines = [line // problem.dtype.itemsize for line in (128, 64, 32)]
        panels = [(pixels, n) for pixels in lines for n in (1, 2, 3, 4) if pixels >= 16 and pixels * n <= 128]

    def multiplied(panel: tuple[int, int]) -> tuple[int, int, int]:
        columns = panel[0] * panel[1]
        return _tile_groups(problem, _with_panels(panel))[1] * columns, -columns, panel[1]

    return sorted((p for p in panels if _tile_groups(problem, _with_panels(p))[1]), key=multiplied)


def _with_panels(panel: tuple[int, int]) -> Tile:
    return Tile(*panel, step_rows=1, buffers=1, stages=2, blocks_per_multiprocessor=1)


def registers(problem: Problem, tile: Tile, partial_sums: int = 1) -> int:
    """What a thread needs without spilling, on the safe side."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    columns = _columns(geometry) // 2
    channels = 1 if problem.channels_last else geometry.out_channels
    items = _most_groups(problem, tile) * geometry.stride[0] * channels
    run = geometry.stride[1] * ceil_div(4, item * geometry.stride[1]) * geometry.out_channels // channels
    carried = ceil_div(items, 32 * warps(tile)) * (_reach(geometry, 0) - 1) * run
    if _parts(problem) == 1:
        return 44 + carried + run + columns + ceil_div(geometry.in_channels, 16) * 4
    return 72 + carried + run + (1 + partial_sums) * columns


def _partial_sums(problem: Problem, tile: Tile) -> int:
    """Two where registers allow it."""
    threads = tile.blocks_per_multiprocessor * warps(tile) * 32
    room = min(MOST_REGISTERS, REGISTERS // threads)
    return 2 if _parts(problem) > 1 and registers(problem, tile, 2) <= room else 1


def _fits(problem: Problem, tile: Tile, device: Device) -> bool:
    if _tile_groups(problem, tile)[1] == 0 or warps(tile) % 4 or not 4 <= warps(tile) <= 16:
        return False
    blocks = tile.blocks_per_multiprocessor
    if blocks * warps(tile) * 32 * registers(problem, tile) > REGISTERS:
        return False
    shared = shared_bytes(problem, tile) + RESERVED_BYTES
    return blocks * shared <= device.shared_memory_per_block + RESERVED_BYTES


def candidates(problem: Problem, device: Device) -> Iterator[Tile]:
    """Every kind of tile that the kernel computes right; ``rank`` has those worth measuring."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    panels = [(16, 1), (32, 1), (64, 1), (128, 1)]
    if not problem.channels_last:
        panels = [(line // item, count) for line in (32, 64, 128) for count in (1, 2, 3, 4)]
    for (panel_pixels, step_panels), step_rows in product(panels, (1, 2, 4, 8)):
        columns = panel_pixels * step_panels
        if panel_pixels < WARP_PIXELS or columns >= 2 * max(geometry.width, panels[0][0]):
            continue
        for blocks, buffers, stages in product((1, 2, 3, 4), (2, 1), (6, 4, 3, 2)):
            tile = Tile(panel_pixels, step_panels, step_rows, buffers, stages, blocks)
            if _fits(problem, tile, device):
                yield tile
