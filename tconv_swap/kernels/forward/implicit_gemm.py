"""Plans of csrc/kernels/forward/implicit_gemm_mma.cu, forward/implicit_gemm_wgmma.cu and
forward/implicit_gemm_tma.cu, the halo-tile implicit GEMM: what they
claim, what they launch. Pure functions of data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.nchw_to_nhwc import activation, transpose
from tconv_swap.kernels.common.sizes import divisor, tile_sizes
from tconv_swap.kernels.forward.implicit_gemm_choice import (
    BOX_REGISTERS,
    FILL_BUDGET,
    FILL_REGISTERS,
    TURN_REGISTERS,
)
from tconv_swap.kernels.forward.implicit_gemm_classes import choose, of_any_size
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    group_taps,
    make_problem,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    STEP_WORDS,
    TAP_TILE_BYTES,
    box_shape,
    raw_box,
    shared_bytes,
    stores_lines,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
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
    workspace,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PACK_THREADS = 256
_REDUCE_THREADS = 256
#: Most columns of phases, and most groups of phases that a block each computes.
MOST_PHASES = 8
#: What a tile may reach beyond the last cell.
MOST_TILE_CELLS = 1 << 16
#: Most tiles of one block of forward/implicit_gemm_wgmma.cu.
TURNS = 32


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """The halo-tile plan of a forward pass, or None for what it does not claim.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1)
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """The ``count`` plans that are expected to be the fastest, the best first."""
    posed = make_problem(
        problem.geometry,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias,
    )
    if not claims(posed, device):
        return []
    return [plan_with_tile(*tile, device) for tile in choose(posed, device, count)]


def claims(problem: TileProblem, device: Device) -> bool:
    """Whether the kernels compute the problem, and better than the general ones."""
    geometry = problem.geometry
    if problem.dtype not in _DTYPES or device.compute_capability < 80 or geometry.batch == 0:
        return False
    # Offsets within an image, and cells of the whole batch, are counted in 32 bits.
    image = geometry.in_channels * geometry.height * geometry.width * problem.item
    cells = geometry.batch * problem.cells[0] * problem.cells[1]
    if image * 32 >= INT32_LIMIT * 8 or cells >= INT32_LIMIT - MOST_TILE_CELLS:
        return False
    # So are the pixels of an output's image, and the elements of a row of it.
    if geometry.out_width * max(geometry.out_height, geometry.out_channels) >= INT32_LIMIT:
        return False
    # Copies are of 4 bytes or more.
    if problem.input_channels_last and geometry.in_channels_per_group * problem.item % 4:
        return False
    # Beyond these, code for each phase group is compiled apart, and most of a tile of channels is padding.
    if geometry.stride[1] > MOST_PHASES or min(_channels(problem)) < 8:
        return False
    return len(group_taps(problem)) <= MOST_PHASES


def _channels(problem: TileProblem) -> tuple[int, int]:
    return problem.geometry.in_channels_per_group, problem.geometry.out_channels_per_group


def _constants(problem: TileProblem, tile: Tile) -> tuple[tuple[str, Constant], ...]:
    """What forward/implicit_gemm_mma.cu and forward/implicit_gemm_pack.cu share."""
    geometry = problem.geometry
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16", "IEEE").index(problem.precision)),
        *geometry.layer_constants,
        ("PHASE_ROWS", problem.phases[0]),
        ("PHASE_COLS", problem.phases[1]),
        ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
        ("PAIRED_ROWS", _pairs_rows(problem, tile)),
        ("WARPS_M", tile.warps_m),
        ("WARP_M_TILES", tile.warp_m_tiles),
        ("CHUNK_WORDS", tile.chunk_words),
        ("PLANES", tile.wgmma),
        ("STACK", problem.stack),
    )


def _pairs_rows(problem: TileProblem, tile: Tile) -> bool:
    return problem.output_channels_last and not tile.weight_boxes and not stores_lines(problem, tile)


def _grid(problem: TileProblem, tile: Tile, multiprocessors: int) -> int:
    """Each block of forward/implicit_gemm_wgmma.cu works on as many tiles, one after another, as make as few rounds
    of blocks as
    ``TURNS`` allows: beginning costs a block some microseconds, but far apart they would share nothing in the L2."""
    blocks = block_count(problem, tile)
    if not tile.wgmma:
        return blocks
    room = multiprocessors * tile.blocks_per_multiprocessor
    rounds = ceil_div(blocks, room * TURNS)
    turns = ceil_div(blocks, room * rounds)
    return ceil_div(blocks, turns)


def pack_launch(problem: TileProblem, tile: Tile) -> tuple[Launch, int]:
    """The launch that packs the weight, input 1, at the beginning of the workspace, and how many bytes that takes."""
    geometry = problem.geometry
    m_tiles = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile)) * tile.block_m // 16
    steps = round_up(problem.words, tile.chunk_words) // STEP_WORDS
    packed_bytes = (
        m_tiles * geometry.groups * steps * sum(group_taps(problem)) * problem.parts * TAP_TILE_BYTES
    )
    pack = Launch(
        Kernel(
            "forward/implicit_gemm_pack.cu",
            "forward_implicit_gemm_pack",
            (
                *_constants(problem, tile),
                ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
                ("OF_GRAD_INPUT", problem.of_grad_input),
                ("THREADS", _PACK_THREADS),
            ),
        ),
        grid=ceil_div(packed_bytes // problem.parts, 16 * _PACK_THREADS),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    return pack, packed_bytes


def tile_constants(problem: TileProblem, tile: Tile) -> tuple[tuple[str, Constant], ...]:
    """What a kernel that computes the problem with this tile must know when it is compiled: no size."""
    return (
        *_constants(problem, tile),
        ("INPUT_CHANNELS_LAST", problem.input_channels_last),
        *bias_alone(problem.has_bias),
        ("FLAT", problem.flat),
        ("WARPS_N", tile.warps_n),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("WARP_IMAGES", tile.warp_images),
        ("WARP_ROWS", tile.warp_rows),
        ("WARP_COLS", tile.warp_cols),
        ("STAGES", tile.stages),
        ("PARTIAL", tile.splits > 1),
        ("ROW_MULTIPLE", problem.row_multiple),
        ("OUT_ROW_MULTIPLE", problem.out_row_multiple),
        ("EVEN_COLUMNS", problem.even_columns),
        ("PART_BYTES", tile.part_bytes),
        ("PART_CHANNELS", tile.part_channels),
        ("BY_ROWS", tile.by_rows),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """What of a plan no size changes: the kernels, and what they take of memory; ``packed_bytes`` is 0 where nothing is
    packed."""

    forward: Kernel
    shared_bytes: int
    pack: Launch | None
    packed_bytes: int


@lru_cache(maxsize=4096)
def _compiled(layer: TileProblem, tile: Tile) -> Compiled:
    """Of a layer whatever its sizes (``of_any_size``), with any number of splits above 1."""
    shared = shared_bytes(layer, tile)
    entry = (
        "forward_implicit_gemm_tma"
        if tile.boxes
        else "forward_implicit_gemm_wgmma"
        if tile.wgmma
        else "forward_implicit_gemm_mma"
    )
    if tile.raw_stages:
        entry = "forward_implicit_gemm_tma_nchw"
    fill: tuple[tuple[str, Constant], ...] = ()
    if tile.boxes:
        taps = layer.geometry.taps if len(group_taps(layer)) == 1 else 1
        fill = (
            ("FILL_REGISTERS", BOX_REGISTERS),
            ("TAPS_OF_BOX", taps),
        )
    elif tile.raw_stages:
        fill = (("FILL_WARPS", tile.fill_warps), ("FILL_REGISTERS", TURN_REGISTERS))
    elif tile.wgmma:
        fill = (
            ("FILL_WARPS", tile.fill_warps),
            ("FILL_REGISTERS", FILL_REGISTERS),
            ("FILL_BUDGET", FILL_BUDGET),
        )
    kernel = Kernel(
        f"forward/{entry.removeprefix('forward_')}.cu",
        entry,
        (
            *tile_constants(layer, tile),
            ("BOXES", tile.boxes),
            ("ARRANGED", layer.arranged),
            ("PIXEL_BOXES", tile.pixel_boxes),
            ("RAW_STAGES", tile.raw_stages),
            ("WEIGHTS_STAY", tile.weights_stay),
            ("WEIGHT_BOXES", tile.weight_boxes),
            ("STAGGER", tile.stagger),
            ("WHOLE_LINES", stores_lines(layer, tile)),
            ("SHARED_BYTES", shared),
            *fill,
        ),
        # Three products need registers of their own. Where 128 sums leave a thread 32 registers, or cells of many
        # images stand in a row, that is in some geometries a few words too little to store them by.
        spills=layer.precision == "IEEE" or (tile.wgmma and (not tile.boxes or layer.flat)),
    )
    pack, packed_bytes = (None, 0) if tile.weight_boxes else pack_launch(layer, tile)
    return Compiled(kernel, shared, pack, packed_bytes)


def plan_with_tile(problem: TileProblem, tile: Tile, device: Device) -> Plan:
    """The plan that computes the problem with this tile. The workspace: packed weights, the input as it is arranged,
    partial sums of splits."""
    geometry = problem.geometry
    compiled = _compiled(of_any_size(problem), replace(tile, splits=min(tile.splits, 2)))
    launches: list[Launch] = [] if compiled.pack is None else [compiled.pack]
    used = compiled.packed_bytes
    source = input_(0)
    if problem.arranged:
        given = activation(geometry.input_shape, problem.dtype)
        source, used = workspace(used), used + round_up(given.bytes, 16)
        arranging = transpose(given, input_(0), source, device)
        launches.append(replace(arranging, overlaps_previous=bool(launches)))
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    maps: tuple[TensorMap, ...] = (_input_map(problem, tile, source),) if tile.boxes else ()
    if tile.raw_stages:
        maps = (_raw_map(problem, tile),)
    if tile.weight_boxes:
        maps += (_weight_map(problem, tile),)
    forward = Launch(
        compiled.forward,
        grid=_grid(problem, tile, device.multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0) if maps else input_(0),
            tensor_map(1) if tile.weight_boxes else workspace(0),
            input_(2),
            output(0) if tile.splits == 1 else workspace(used),
            struct(0),
        ),
        shared_bytes=compiled.shared_bytes,
        overlaps_previous=bool(launches),
        tensor_maps=maps,
        structs=(tile_sizes(problem, tile),),
    )
    launches.append(forward)
    if tile.splits > 1:
        launches.append(reduce_launch(problem, tile.splits, used, outputs))
    return Plan(
        "implicit_gemm",
        f"{problem.precision} tensor cores, {tile}" + (", input arranged" if problem.arranged else ""),
        outputs=(Output(geometry.output_shape, problem.output_channels_last),),
        launches=tuple(launches),
        workspace_bytes=used + (outputs * 4 * tile.splits if tile.splits > 1 else 0),
    )


def _input_map(problem: TileProblem, tile: Tile, source: Argument) -> TensorMap:
    """The input as forward/implicit_gemm_tma_producer.cuh names its elements."""
    geometry, item = problem.geometry, problem.item
    channels, pixel = geometry.in_channels_per_group, geometry.in_channels * item
    chunk = tile.chunk_words * 4 // item
    if tile.pixel_boxes:
        image = geometry.height * geometry.width
        sizes: tuple[int, ...] = (image, geometry.in_channels, geometry.batch)
        strides: tuple[int, ...] = (image * item, geometry.in_channels * image * item)
        return TensorMap(source, _element(problem), sizes, strides, (64, chunk, 1), (1, 1, 1))
    cols, rows, images = box_shape(problem, tile)
    if problem.flat:
        pixels = geometry.batch * geometry.height * geometry.width
        sizes = (channels, pixels, geometry.groups)
        strides = (pixel, channels * item)
        box: tuple[int, ...] = (chunk, cols, 1)
    else:
        row = geometry.width * pixel
        sizes = (channels, geometry.width, geometry.height, geometry.batch, geometry.groups)
        strides = (pixel, row, geometry.height * row, channels * item)
        box = (chunk, cols, rows, images, 1)
    return TensorMap(
        source, _element(problem), sizes, strides, box, (1,) * len(box), swizzle_bytes=4 * tile.chunk_words
    )


def _raw_map(problem: TileProblem, tile: Tile) -> TensorMap:
    """The NCHW input as forward/implicit_gemm_tma_nchw_producer.cuh names its elements: column, channel, row, image."""
    geometry, item = problem.geometry, problem.item
    height, width = geometry.height, geometry.width
    if problem.flat:
        height, width = 1, height * width
    row = width * item
    plane = height * row
    return TensorMap(
        input_(0),
        _element(problem),
        sizes=(width, geometry.in_channels, height, geometry.batch),
        strides=(plane, row, geometry.in_channels * plane),
        box=(*raw_box(problem, tile), 1),
        steps=(1, 1, 1, 1),
        swizzle_bytes=0,
    )


def _weight_map(problem: TileProblem, tile: Tile) -> TensorMap:
    """The weight in channels_last as forward/implicit_gemm_tma.cu names its elements."""
    geometry, item = problem.geometry, problem.item
    taps = geometry.kernel[0] * geometry.kernel[1]
    channels, tap = geometry.in_channels_per_group, geometry.out_channels_per_group * item
    return TensorMap(
        input_(1),
        _element(problem),
        sizes=(geometry.out_channels_per_group, channels, taps, geometry.groups),
        strides=(taps * tap, tap, channels * taps * tap),
        box=(64, tile.chunk_words * 4 // item, taps if len(group_taps(problem)) == 1 else 1, 1),
        steps=(1, 1, 1, 1),
    )


def _element(problem: TileProblem) -> ElementKind:
    kinds = {"FP16": ElementKind.FLOAT16, "BF16": ElementKind.BFLOAT16}
    return kinds.get(problem.precision, ElementKind.TFLOAT32)


def reduce_launch(problem: TileProblem, splits: int, offset: int, count: int) -> Launch:
    """The launch that adds up the ``count`` outputs of every split, which begin ``offset`` bytes into the workspace."""
    geometry = problem.geometry
    vector = 4 if geometry.out_channels % 4 == 0 else 1
    kernel = Kernel(
        "forward/implicit_gemm_split_k.cu",
        "forward_implicit_gemm_split_k",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("OUT_CHANNELS", geometry.out_channels),
            ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
            *bias_alone(problem.has_bias),
            ("VECTOR", vector),
            ("THREADS", _REDUCE_THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=ceil_div(count, _REDUCE_THREADS * vector),
        block=_REDUCE_THREADS,
        arguments=(workspace(offset), input_(2), output(0), struct(0)),
        overlaps_previous=True,
        structs=((count, splits, *divisor(geometry.out_height * geometry.out_width)),),
    )
