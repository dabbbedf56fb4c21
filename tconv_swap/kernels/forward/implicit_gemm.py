"""Plans of the forward implicit GEMM, csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu: which problems it
computes, and what it launches. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.nchw_to_nhwc import activation, transpose
from tconv_swap.kernels.common.pad_rows import Rows, copies_clocks, copies_fit
from tconv_swap.kernels.common.padded_channels import padded_channels, reading_copies
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import tile_sizes
from tconv_swap.kernels.forward.implicit_gemm_candidates import Schedule
from tconv_swap.kernels.forward.implicit_gemm_candidates import ranked as ranked_tiles
from tconv_swap.kernels.forward.implicit_gemm_choice import TRANSPOSER_REGISTERS
from tconv_swap.kernels.forward.implicit_gemm_fit import PRODUCER_REGISTERS, STAGING_REGISTERS
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    as_problem,
    block_count,
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
from tconv_swap.kernels.forward.split_k import reduce_launch
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
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

_PACK_THREADS = 256
#: The most phase groups; each is computed by blocks of its own.
MAX_PHASE_GROUPS = 8
#: The most positions by which a tile may extend beyond the last position.
MAX_TILE_POSITIONS = 1 << 16
#: The most tiles that a persistent block computes.
MAX_BLOCK_TILES = 32


def ranked(among: Iterable[Schedule], problem: TileProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size, the one that is expected to be the fastest first.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    seen_problem, copies = read_as(problem), copies_of(problem)
    if not supports(seen_problem, device) or not copies_fit(copies, problem.dtype):
        return []
    added = copies_clocks(copies, problem.dtype)
    return [
        Ranked(clocks + added, partial(_lower_reading, copies, seen, tile, device))
        for clocks, seen, tile in ranked_tiles(among, seen_problem, device)
    ]


def read_as(problem: TileProblem) -> TileProblem:
    """Returns the problem that the kernels compute: with more input channels where they read copies."""
    channels = _channels_of_copies(problem)
    if channels is None:
        return problem
    return problem._replace(geometry=problem.geometry._replace(in_channels=channels))


def copies_of(problem: TileProblem) -> tuple[Rows, ...]:
    """Returns the rows of input and weight that are copied to longer ones."""
    channels = _channels_of_copies(problem)
    if channels is None:
        return ()
    g = problem.geometry
    of_a_channel = g.out_channels * g.taps
    return (
        Rows(0, g.batch * g.height * g.width, g.in_channels, channels),
        Rows(1, 1, g.in_channels * of_a_channel, channels * of_a_channel),
    )


def _channels_of_copies(problem: TileProblem) -> int | None:
    if problem.of_grad_input:
        return None
    return padded_channels(as_problem(problem), problem.geometry.in_channels)


def _lower_reading(copies: tuple[Rows, ...], seen: TileProblem, tile: Tile, device: Device) -> Part:
    part = lower(seen, tile, device)
    if not copies:
        return part
    launches, workspace_bytes = reading_copies(part.launches, part.workspace_bytes, copies, seen.dtype)
    return Part(part.family, f"{part.why}, channels padded", launches, workspace_bytes)


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
        launches.append(copying._replace(overlaps_previous=bool(launches)))
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
