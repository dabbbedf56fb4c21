"""Plans of the forward implicit GEMM, csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu: which problems it
computes, and what it launches. Pure functions of data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.nchw_to_nhwc import activation, transpose
from tconv_swap.kernels.common.padded_channels import Rows, padded_channels, reading_copies
from tconv_swap.kernels.common.ranked import CLOCKS_OF_MICROSECOND, Ranked, in_turn
from tconv_swap.kernels.common.sizes import tile_sizes
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward.implicit_gemm_candidates import ranked as ranked_tiles
from tconv_swap.kernels.forward.implicit_gemm_choice import TRANSPOSER_REGISTERS
from tconv_swap.kernels.forward.implicit_gemm_fit import PRODUCER_REGISTERS, STAGING_REGISTERS
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    make_problem,
    of_any_size,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    STEP_WORDS,
    TAP_TILE_BYTES,
    shared_bytes,
    stores_lines,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import of_any_shape, shape_words
from tconv_swap.kernels.forward.implicit_gemm_tensor_maps import input_map, nchw_map, weight_map
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import TMA_PRODUCER_REGISTERS
from tconv_swap.kernels.forward.selection import Kernels, kernels_for, kernels_of
from tconv_swap.kernels.forward.split_k import reduce_launch
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Part,
    Plan,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

_PACK_THREADS = 256
#: The most phase groups; each is computed by blocks of its own.
MAX_PHASE_GROUPS = 8
#: The most positions by which a tile may extend beyond the last position.
MAX_TILE_POSITIONS = 1 << 16
#: The most tiles that a persistent block computes.
MAX_BLOCK_TILES = 32


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the best plan of a forward pass, or None for a problem that the kernels do not compute.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1)
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns ``count`` plans: the one that is expected to be the fastest, then the best of each family in turn; after
    the kernels of the layer those that it may have."""
    if (channels := padded_channels(problem, problem.geometry.in_channels)) is not None:
        return _of_more_channels(problem, channels, has_bias, device, count)
    outputs = (Output(problem.geometry.output_shape, problem.channels_last),)
    return [
        Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
        for part in part_candidates(_as_tiles(problem, has_bias), device, count)
    ]


def part_candidates(problem: TileProblem, device: Device, count: int) -> list[Part]:
    """Returns the same of a forward pass, or of a gradient of the input that is one."""
    if not supports(of_any_size(problem), device):
        return []
    found = ranked(problem, device)[:count]
    if len(found) < count:
        found += _ranked(kernels_for(problem, device), problem, device)
    parts = dict.fromkeys(one.make() for one in found[: 2 * count])
    return list(parts)[:count]


def ranked(problem: TileProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the layer's kernels with their expected clocks: the one that is expected to be the fastest,
    then the best of each family in turn."""
    return _ranked(kernels_of(of_any_size(problem), device), problem, device)


def _ranked(kernels: Kernels, problem: TileProblem, device: Device) -> list[Ranked]:
    """Returns the parts of those kernels that compute this size: the one that is expected to be the fastest, then the
    best of each family in turn."""
    # stride1 also computes images of more bytes.
    tiles = ranked_tiles(kernels.implicit_gemm, problem, device) if supports(problem, device) else []
    families = [
        [Ranked(clocks, partial(lower, seen, tile, device)) for clocks, seen, tile in tiles],
        forward_stride1.ranked(kernels.stride1, problem, device),
    ]
    return in_turn(*sorted(filter(None, families), key=lambda family: family[0].clocks))


def _as_tiles(problem: Problem, has_bias: bool) -> TileProblem:
    return make_problem(
        problem.geometry,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias,
    )


def expected_time(problem: Problem, device: Device) -> float | None:
    """Returns the expected microseconds of the best plan on an H100, if wgmma multiplies; None for other problems."""
    posed = _as_tiles(problem, has_bias=False)
    if not supports(posed, device):
        return None
    kernels = kernels_of(of_any_size(posed), device)
    times = [
        (clocks, tile.wgmma) for clocks, _, tile in ranked_tiles(kernels.implicit_gemm, posed, device)[:1]
    ]
    times += [(one.clocks, True) for one in forward_stride1.ranked(kernels.stride1, posed, device)[:1]]
    clocks, by_wgmma = min(times)
    return clocks / CLOCKS_OF_MICROSECOND if by_wgmma else None


def _of_more_channels(
    problem: Problem, channels: int, has_bias: bool, device: Device, count: int
) -> list[Plan]:
    """Returns the plans of the problem with so many input channels, reading copies of input and weight."""
    g = problem.geometry
    of_a_channel = g.out_channels * g.taps
    copied = (
        Rows(0, g.batch * g.height * g.width, g.in_channels, channels),
        Rows(1, 1, g.in_channels * of_a_channel, channels * of_a_channel),
    )
    plans = []
    wider = replace(problem, geometry=replace(g, in_channels=channels))
    for plan in plan_candidates(wider, has_bias, device, count):
        made = reading_copies(plan.launches, plan.workspace_bytes, copied, problem.dtype)
        if made is not None:
            launches, workspace_bytes = made
            why = f"{plan.why}, channels padded"
            plans.append(replace(plan, why=why, launches=launches, workspace_bytes=workspace_bytes))
    return plans


def supports(problem: TileProblem, device: Device) -> bool:
    """Whether the kernels compute the problem, and are faster than the general ones."""
    geometry = problem.geometry
    if problem.dtype not in DTYPES or device.compute_capability < 80 or geometry.batch == 0:
        return False
    # Offsets within an image and positions of the whole batch are 32-bit integers.
    image = geometry.in_channels * geometry.height * geometry.width * problem.item
    positions = geometry.batch * problem.positions[0] * problem.positions[1]
    if image * 32 >= INT32_LIMIT * 8 or positions >= INT32_LIMIT - MAX_TILE_POSITIONS:
        return False
    # So are the pixels of an image of the output, and the elements of its rows.
    if geometry.out_width * max(geometry.out_height, geometry.out_channels) >= INT32_LIMIT:
        return False
    # A copy has at least 4 bytes.
    if problem.input_channels_last and geometry.in_channels_per_group * problem.item % 4:
        return False
    # The code of each phase group is compiled separately, and with few channels most of a tile is padding.
    if min(_channels(problem)) < 8:
        return False
    return len(problem.group_taps) <= MAX_PHASE_GROUPS


def _channels(problem: TileProblem) -> tuple[int, int]:
    return problem.geometry.in_channels_per_group, problem.geometry.out_channels_per_group


def _constants(problem: TileProblem, tile: Tile) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants that the multiplying kernels and forward/implicit_gemm_pack.cu share."""
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
    return problem.output_channels_last and not tile.tma_weights and not stores_lines(problem, tile)


def _grid(problem: TileProblem, tile: Tile, multiprocessors: int) -> int:
    """Returns the number of blocks. With wgmma each block computes several neighbouring tiles, one after another: as
    many as give the fewest waves that ``MAX_BLOCK_TILES`` allows, because a block takes some microseconds to begin. If
    a block had more tiles, the tiles that run at the same time would be so far apart that they share nothing in the L2
    cache."""
    tiles = block_count(problem, tile)
    if not tile.wgmma:
        return tiles
    room = multiprocessors * tile.blocks_per_multiprocessor
    waves = ceil_div(tiles, room * MAX_BLOCK_TILES)
    return ceil_div(tiles, ceil_div(tiles, room * waves))


def pack_launch(problem: TileProblem, tile: Tile) -> tuple[Launch, int]:
    """Returns the launch that packs the weight, input 1, at the beginning of the workspace, and the packed bytes."""
    geometry = problem.geometry
    m_tiles = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile)) * tile.block_m // 16
    steps = round_up(problem.words, tile.chunk_words) // STEP_WORDS
    packed_bytes = (
        m_tiles * geometry.groups * steps * sum(problem.group_taps) * problem.parts * TAP_TILE_BYTES
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
    """Returns the constants of a kernel that computes the problem with this tile. None of them depends on a size."""
    return (
        *_constants(problem, tile),
        ("INPUT_CHANNELS_LAST", problem.input_channels_last),
        *bias_alone(problem.has_bias),
        ("FLAT", problem.flat),
        ("WARPS_N", tile.warps_n),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("SHAPED_PIXELS", tile.shaped_pixels),
        ("WARP_IMAGES", tile.warp_images),
        ("WARP_ROWS", tile.warp_rows),
        ("WARP_COLS", tile.warp_cols),
        ("STAGES", tile.stages),
        ("PARTIAL", tile.splits > 1),
        ("ROW_MULTIPLE", problem.row_multiple),
        ("OUT_ROW_MULTIPLE", problem.out_row_multiple),
        ("EVEN_COLUMNS", problem.even_columns),
        ("SUBTILE_BYTES", tile.subtile_bytes),
        ("SUBTILE_CHANNELS", tile.subtile_channels),
        ("BY_ROWS", tile.by_rows),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """The parts of a plan that are the same for every size of a layer: its kernels and their memory. ``packed_bytes``
    is 0 where nothing is packed."""

    forward: Kernel
    shared_bytes: int
    pack: Launch | None
    packed_bytes: int


@lru_cache(maxsize=4096)
def _compiled(layer: TileProblem, tile: Tile) -> Compiled:
    """Returns the kernels of ``layer``, which ``of_any_size`` made. ``tile`` has 1 split, or 2 for any number above
    1."""
    shared = shared_bytes(layer, tile)
    entry = (
        "forward_implicit_gemm_tma"
        if tile.tma
        else "forward_implicit_gemm_wgmma"
        if tile.wgmma
        else "forward_implicit_gemm_mma"
    )
    if tile.nchw_stages:
        entry = "forward_implicit_gemm_tma_nchw"
    producers: tuple[tuple[str, Constant], ...] = ()
    if tile.tma:
        taps = layer.geometry.taps if len(layer.group_taps) == 1 else 1
        producers = (
            ("PRODUCER_REGISTERS", TMA_PRODUCER_REGISTERS),
            ("BOX_TAPS", taps),
        )
    elif tile.nchw_stages:
        producers = (("PRODUCER_WARPS", tile.producer_warps), ("PRODUCER_REGISTERS", TRANSPOSER_REGISTERS))
    elif tile.wgmma:
        producers = (
            ("PRODUCER_WARPS", tile.producer_warps),
            ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
            ("STAGING_REGISTERS", STAGING_REGISTERS),
        )
    kernel = Kernel(
        f"forward/{entry.removeprefix('forward_')}.cu",
        entry,
        (
            *tile_constants(layer, tile),
            ("TMA_INPUT", tile.tma),
            ("NHWC_COPY", layer.nhwc_copy),
            ("PIXEL_MAJOR", tile.pixel_major),
            ("NCHW_STAGES", tile.nchw_stages),
            ("RESIDENT_WEIGHTS", tile.resident_weights),
            ("TMA_WEIGHTS", tile.tma_weights),
            ("STAGGER", tile.stagger),
            ("WHOLE_LINES", stores_lines(layer, tile)),
            ("SHARED_BYTES", shared),
            *producers,
        ),
        # The three products of IEEE need registers of their own. In some geometries the store phase lacks a few
        # registers: where 128 sums leave a thread 32 registers, or where the positions of many images form one row.
        spills=layer.precision == "IEEE" or (tile.wgmma and (not tile.tma or layer.flat)),
    )
    pack, packed_bytes = (None, 0) if tile.tma_weights else pack_launch(layer, tile)
    return Compiled(kernel, shared, pack, packed_bytes)


def lower(problem: TileProblem, tile: Tile, device: Device) -> Part:
    """Returns the part that computes the problem with this tile. Its workspace holds the packed weights, the
    channels_last copy of the input, and the partial sums of the splits."""
    geometry = problem.geometry
    compiled = _compiled(of_any_size(problem), of_any_shape(tile)._replace(splits=min(tile.splits, 2)))
    launches: list[Launch] = [] if compiled.pack is None else [compiled.pack]
    used = compiled.packed_bytes
    source = input_(0)
    if problem.nhwc_copy:
        given = activation(geometry.input_shape, problem.dtype)
        source, used = workspace(used), used + round_up(given.bytes, 16)
        copying = transpose(given, input_(0), source, device)
        launches.append(replace(copying, overlaps_previous=bool(launches)))
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    maps: tuple[TensorMap, ...] = (input_map(problem, tile, source),) if tile.tma else ()
    if tile.nchw_stages:
        maps = (nchw_map(problem, tile),)
    if tile.tma_weights:
        maps += (weight_map(problem, tile),)
    forward = Launch(
        compiled.forward,
        grid=_grid(problem, tile, device.multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0) if maps else input_(0),
            tensor_map(1) if tile.tma_weights else workspace(0),
            input_(2),
            output(0) if tile.splits == 1 else workspace(used),
            struct(0),
        ),
        shared_bytes=compiled.shared_bytes,
        overlaps_previous=bool(launches),
        tensor_maps=maps,
        structs=(tile_sizes(problem, tile) + (shape_words(problem, tile) if tile.shaped_pixels else ()),),
    )
    launches.append(forward)
    if tile.splits > 1:
        launches.append(reduce_launch(problem, tile.splits, used, outputs))
    return Part(
        "implicit_gemm",
        f"{problem.precision} tensor cores, {tile}"
        + (", input copied to channels_last" if problem.nhwc_copy else ""),
        tuple(launches),
        used + (outputs * 4 * tile.splits if tile.splits > 1 else 0),
    )
