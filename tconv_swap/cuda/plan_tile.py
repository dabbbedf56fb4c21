"""Plans of csrc/kernels/forward_tile.cu and forward_wgmma.cu, the halo-tile implicit GEMM: what they claim, which
tiles. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Plan,
    input_,
    int64,
    output,
    workspace,
)
from tconv_swap.cuda.tile_layout import (
    STEP_WORDS,
    TAP_TILE_BYTES,
    Tile,
    TileProblem,
    block_count,
    fill_registers,
    fills_by_registers,
    group_taps,
    make_problem,
    shared_bytes,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PACK_THREADS = 256
_REDUCE_THREADS = 256
INT32_LIMIT = 2**31
#: Of one multiprocessor.
REGISTERS = 65536


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
    if not _claims(posed, device):
        return []
    tiles = islice(dict.fromkeys(candidates(posed, device)), count)
    return [plan_with_tile(*tile, device.multiprocessors) for tile in tiles]


def _claims(problem: TileProblem, device: Device) -> bool:
    geometry = problem.geometry
    if problem.dtype not in _DTYPES or device.compute_capability < 80 or geometry.batch == 0:
        return False
    # Offsets within an image, and cells of the whole batch, are counted in 32 bits.
    image = geometry.in_channels * geometry.height * geometry.width * problem.item
    if image * 32 >= INT32_LIMIT * 8 or geometry.batch * problem.cells[0] * problem.cells[1] >= INT32_LIMIT:
        return False
    # Copies are of 4 bytes or more.
    if problem.input_channels_last and geometry.in_channels_per_group * problem.item % 4:
        return False
    # Beyond these, code for each phase group is compiled apart, and most of a tile of channels is padding.
    groups = len(group_taps(problem))
    return geometry.stride[1] <= 8 and groups <= 8 and min(_channels(problem)) >= 8


def _channels(problem: TileProblem) -> tuple[int, int]:
    return problem.geometry.in_channels_per_group, problem.geometry.out_channels_per_group


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Tiles worth trying, the one expected to be fastest first (benchmarks/NOTES.md says what was measured)."""

    def fits(posed: TileProblem, tile: Tile) -> bool:
        blocks = tile.blocks_per_multiprocessor
        if tile.wgmma:
            if fill_registers(posed, tile) > _fill_share(posed, tile)[1]:
                return False
        return blocks * (shared_bytes(posed, tile) + 1024) <= device.shared_memory_per_block + 1024

    ranked: list[tuple[TileProblem, Tile]] = []
    if device.architecture == "sm_90a" and problem.precision != "IEEE":
        posed = _stacked(problem)
        ranked += [(posed, tile) for tile in _wgmma_tiles(posed)]
    ranked += [(problem, tile) for tile in _mma_tiles(problem)]
    ranked = [
        (posed, _split(posed, tile, device.multiprocessors)) for posed, tile in ranked if fits(posed, tile)
    ]

    # Where each multiprocessor has one block at most, it may have all the memory: more stages hide more latency.
    def deepened(posed: TileProblem, tile: Tile) -> tuple[TileProblem, Tile]:
        if block_count(posed, tile) <= device.multiprocessors:
            deeper = [replace(tile, blocks_per_multiprocessor=1, stages=stages) for stages in (6, 5, 4, 3)]
            tile = next((deep for deep in deeper if fits(posed, deep)), tile)
        return posed, tile

    # A tile that leaves device.multiprocessors idle comes last, however good it is when there is work for all.
    ranked.sort(key=lambda entry: 4 * block_count(*entry) < 3 * device.multiprocessors)
    yield from (deepened(*entry) for entry in ranked)


def _stacked(problem: TileProblem) -> TileProblem:
    """With at most 32 output channels, rows of the output fill up the 64 rows of a multiply."""
    channels, stride = problem.geometry.out_channels_per_group, problem.geometry.stride[0]
    rows = 64 // max(16, _power_above(channels))
    if rows <= 1 or rows % stride or problem.geometry.dilation[0] != 1:
        return problem
    return replace(problem, stack=rows)


def _split(problem: TileProblem, tile: Tile, multiprocessors: int) -> Tile:
    """The same tile, with the sum over input channels split over several blocks when there are few tiles."""
    chunks, blocks = -(-problem.words // tile.chunk_words), block_count(problem, tile)
    splits = 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while splits < 8 and 2 * splits * blocks <= room and chunks >= 16 * splits:
            splits *= 2
    return replace(tile, splits=splits)


def _power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _arrange(
    problem: TileProblem, fragments: int, warps: int, most_rows: int
) -> tuple[int, int, int, int, int, int]:
    """How the fragments of ``warps`` warps (or warpgroups) tile the map: images, rows, columns of cells of the
    tile; images, rows, columns of fragments of one warp."""
    if problem.flat:
        return 1, 1, 8 * fragments * warps, 1, 1, fragments
    height, width = (_power_above(cells) for cells in problem.cells)
    cols = min(8, width)
    rows = min(8 // cols, height)
    images = 8 // (cols * rows)
    high, wide = height // rows, width // cols
    warp_rows = min(high, fragments, most_rows)
    warp_cols = min(wide, fragments // warp_rows)
    warp_images = fragments // (warp_rows * warp_cols)
    across = min(warps, wide // warp_cols)
    down = min(warps // across, high // warp_rows)
    deep = warps // (across * down)
    return (
        images * warp_images * deep,
        rows * warp_rows * down,
        cols * warp_cols * across,
        warp_images,
        warp_rows,
        warp_cols,
    )


def _wgmma_tiles(problem: TileProblem) -> Iterator[Tile]:
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32 or (problem.input_channels_last and geometry.in_channels_per_group * problem.item % 16):
        return
    phases = problem.phases[0] * problem.phases[1]
    # Sums of 128 registers a thread leave room for one block of two warpgroups that multiply, or two of one.
    wide, narrow, single = (2, 1, 128, 1), (1, 2, 128, 1), (1, 1, 128, 2)
    wide_enough = channels > 64
    plain_copy = problem.input_channels_last and problem.item == 2
    if problem.flat and (wide_enough or not plain_copy):
        order = [wide, narrow, single]
    elif phases == 1:
        order = [single, wide, narrow]
    elif plain_copy:
        order = [single, narrow]
    else:
        order = [narrow, single]
    order = [shape for shape in order if wide_enough or shape != wide]
    order.append((1, 1, 64, 2))
    # Rows of 32 cells leave NCHW in longer runs; a wide kernel would make their halo cost more than that gains.
    short = geometry.kernel[1] <= 3
    most_rows = 8 if (not problem.output_channels_last if short else problem.stack > 1) else 16
    # Narrow maps: one multiply takes the same rows of many images.
    narrow_map = not problem.flat and problem.cells[1] <= 4
    if narrow_map:
        if problem.cells[1] < 2 or problem.cells[0] * problem.cells[1] < 8 or problem.cell_input_rows != 1:
            return
        order, most_rows = [narrow, single], 1
    for groups_m, groups_n, registers, blocks in order:
        fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
        if fragments < 4:
            continue
        arranged = _arrange(problem, fragments, groups_n, most_rows)
        run = arranged[3] if narrow_map else arranged[5] if arranged[4] == 1 else arranged[4]
        if run < 4:
            continue
        chunks = (32, 16, 8) if problem.flat and blocks == 1 else (16, 8) if phases > 1 else (8,)
        for stages in (3, 2):
            for chunk_words in chunks:
                if chunk_words <= max(8, problem.words):
                    yield Tile(4 * groups_m, 1, *arranged, chunk_words, stages, blocks, wgmma=True)


def _mma_tiles(problem: TileProblem) -> Iterator[Tile]:
    phases = problem.phases[0] * problem.phases[1]
    tiles_of_channels = -(-problem.geometry.out_channels_per_group // 16)
    # 32 fragments of sums are 128 registers; three products want some for themselves.
    ieee = problem.precision == "IEEE"
    budget = 16 if ieee else 32
    most_m = min(4 if phases == 1 else 1 if ieee and not problem.flat else 2, tiles_of_channels)
    for warp_m_tiles in (m for m in (4, 2, 1) if m <= most_m):
        fragments = min(16, 1 << max(1, budget // (phases * warp_m_tiles)).bit_length() - 1)
        for warps_m in (1,) if ieee or tiles_of_channels < 2 * warp_m_tiles else (2, 1):
            arranged = _arrange(problem, fragments, 4 // warps_m, 8)
            if arranged[2] < 2 and not problem.input_channels_last:
                continue
            for stages in (3, 2):
                for chunk_words in (16, 8) if phases > 1 or problem.flat else (8,):
                    yield Tile(warps_m, warp_m_tiles, *arranged, chunk_words, stages, 2)
    # Where every tap of many phases has its weights in shared memory, few blocks fit.
    yield Tile(1, 1, *_arrange(problem, min(fragments, 4), 4, 8), 8, 2, 1)


def _constants(problem: TileProblem, tile: Tile) -> tuple[tuple[str, Constant], ...]:
    """What forward_tile.cu and pack_weights.cu share."""
    geometry = problem.geometry
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16", "IEEE").index(problem.precision)),
        *geometry.layer_constants,
        ("PHASE_ROWS", problem.phases[0]),
        ("PHASE_COLS", problem.phases[1]),
        ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
        ("WARPS_M", tile.warps_m),
        ("WARP_M_TILES", tile.warp_m_tiles),
        ("CHUNK_WORDS", tile.chunk_words),
        ("PLANES", tile.wgmma),
        ("STACK", problem.stack),
    )


def _fill_share(problem: TileProblem, tile: Tile) -> tuple[int, int]:
    """Registers of a thread of forward_wgmma.cu that fills, and how many of them may hold what is on its way. One
    that multiplies gets what they leave, and needs 168."""
    if tile.blocks_per_multiprocessor == 1 and fills_by_registers(problem):
        return 152, 92
    return 88, 36


def _grid(problem: TileProblem, tile: Tile, multiprocessors: int) -> int:
    """Blocks of forward_wgmma.cu, whole clusters of them, stay and work on one tile after another."""
    blocks = block_count(problem, tile)
    if not tile.wgmma:
        return blocks
    kinds = len(group_taps(problem)) * tile.splits
    pieces = -(-blocks // (kinds * tile.cluster)) * kinds
    return min(pieces, max(1, multiprocessors * tile.blocks_per_multiprocessor // tile.cluster)) * tile.cluster


def plan_with_tile(problem: TileProblem, tile: Tile, multiprocessors: int = 132) -> Plan:
    """The plan that computes the problem with this tile."""
    geometry = problem.geometry
    common = _constants(problem, tile)
    m_tiles = -(-geometry.out_channels_per_group // problem.block_channels(tile)) * tile.block_m // 16
    steps = -(-problem.words // tile.chunk_words) * tile.chunk_words // STEP_WORDS
    packed_bytes = (
        m_tiles * geometry.groups * steps * sum(group_taps(problem)) * problem.parts * TAP_TILE_BYTES
    )
    pack = Launch(
        Kernel(
            "pack_weights.cu",
            "pack_weights",
            (*common, ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last), ("THREADS", _PACK_THREADS)),
        ),
        grid=-(-packed_bytes // problem.parts // (16 * _PACK_THREADS)),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    # A counter of turns follows the weights (forward_tile_taps.cuh).
    workspace_bytes = packed_bytes + 16
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    shared = shared_bytes(problem, tile)
    forward = Launch(
        Kernel(
            "forward_wgmma.cu" if tile.wgmma else "forward_tile.cu",
            "forward_wgmma" if tile.wgmma else "forward_tile",
            (
                *common,
                ("HEIGHT", geometry.height),
                ("WIDTH", geometry.width),
                ("OUT_HEIGHT", geometry.out_height),
                ("OUT_WIDTH", geometry.out_width),
                ("INPUT_CHANNELS_LAST", problem.input_channels_last),
                ("HAS_BIAS", problem.has_bias),
                ("FLAT", problem.flat),
                ("WARPS_N", tile.warps_n),
                ("TILE_N", tile.images),
                ("TILE_H", tile.rows),
                ("TILE_W", tile.cols),
                ("WARP_IMAGES", tile.warp_images),
                ("WARP_ROWS", tile.warp_rows),
                ("WARP_COLS", tile.warp_cols),
                ("STAGES", tile.stages),
                ("SPLITS", tile.splits),
                ("SHARED_BYTES", shared),
                ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
                *(
                    (
                        ("CLUSTER", tile.cluster),
                        ("FILL_REGISTERS", _fill_share(problem, tile)[0]),
                        ("FILL_BUDGET", _fill_share(problem, tile)[1]),
                    )
                    if tile.wgmma
                    else ()
                ),
            ),
            # Three products need registers of their own.
            spills=problem.precision == "IEEE",
        ),
        grid=_grid(problem, tile, multiprocessors),
        block=tile.threads,
        arguments=(
            input_(0),
            workspace(0),
            input_(2),
            output(0) if tile.splits == 1 else workspace(workspace_bytes),
            int64(geometry.batch),
        ),
        shared_bytes=shared,
        overlaps_previous=True,
    )
    launches = [pack, forward]
    if tile.splits > 1:
        launches.append(_reduce(problem, tile, workspace_bytes, outputs))
    return Plan(
        "halo tile",
        f"{problem.precision} tensor cores, {tile}",
        outputs=(Output(geometry.output_shape, problem.output_channels_last),),
        launches=tuple(launches),
        workspace_bytes=workspace_bytes + (outputs * 4 * tile.splits if tile.splits > 1 else 0),
    )


def _reduce(problem: TileProblem, tile: Tile, offset: int, count: int) -> Launch:
    vector = 4 if count % 4 == 0 else 1
    kernel = Kernel(
        "forward_tile_reduce.cu",
        "forward_tile_reduce",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("OUT_CHANNELS", problem.geometry.out_channels),
            ("OUT_PIXELS", problem.geometry.out_height * problem.geometry.out_width),
            ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
            ("HAS_BIAS", problem.has_bias),
            ("SPLITS", tile.splits),
            ("VECTOR", vector),
            ("THREADS", _REDUCE_THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=-(-count // (_REDUCE_THREADS * vector)),
        block=_REDUCE_THREADS,
        arguments=(workspace(offset), input_(2), output(0), int64(count)),
        overlaps_previous=True,
    )
