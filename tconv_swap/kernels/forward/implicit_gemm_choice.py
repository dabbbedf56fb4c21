"""Which tiles of csrc/kernels/forward/implicit_gemm_tma.cu, forward/implicit_gemm_wgmma.cu and
forward/implicit_gemm_mma.cu are worth trying, the best
first: a short rule out of what was measured (docs/kernels/tile.md). Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    group_taps,
    supports_tma_weights,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    BOX_MOST,
    box_shape,
    fill_registers,
    shared_bytes,
    turns,
)
from tconv_swap.kernels.forward.implicit_gemm_stagger import staggered
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Sums that a thread may keep where four warps fill for eight that multiply.
MOST_SUMS = 156
#: Of one multiprocessor.
REGISTERS = 65536
#: Of a thread of forward/implicit_gemm_wgmma.cu that fills, and those of them that may hold places of the input and
#: what is on its
#: way there. A thread that multiplies gets what the others leave, and needs 168 for 128 sums.
FILL_REGISTERS = 96
FILL_BUDGET = 40
#: What threads that fill by loads leave of a multiprocessor's memory to its cache: a stage more was slower without.
LOADS_BYTES = 6144
#: Outputs for each weight from which packed weights are the faster in 16 bits, although packing takes time.
PACKING_PAYS = 8
#: Registers of a thread that turns boxes; stages of turned and of raw chunks, as many as fit.
TURN_REGISTERS = 72
TURNED_STAGES = ((4, 4), (3, 4), (3, 3), (2, 4), (2, 3), (2, 2))
#: Fragments of one multiply along a row of cells, of tiles of whole rows; the stages they must have room for; bytes of
#: a warp's part of their outputs.
ROW_FRAGMENTS = (9, 8, 7)
ROW_STAGES = 3
ROW_PART_BYTES = 16384
#: The latter where tiles of narrow maps want all the memory there is.
NARROW_PART_BYTES = 2048
#: Registers of a thread where one of them asks for boxes.
BOX_REGISTERS = 56


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Tiles worth trying, the one expected to be fastest first (docs/kernels/tile.md says what was measured)."""

    def fits(posed: TileProblem, tile: Tile) -> bool:
        return fits_device(posed, tile, device)

    ranked: list[tuple[TileProblem, Tile]] = []
    if device.architecture == "sm_90a" and problem.precision != "IEEE":
        posed = _stacked(problem)
        if problem.input_channels_last:
            ranked += tma_tiles(posed, device)
        else:
            deepest: dict[Tile, Tile] = {}
            for tile in (*_turned_tiles(posed), *_wgmma_tiles(posed)):
                if fits(posed, tile):
                    kind = replace(tile, stages=0, nchw_stages=int(tile.nchw_stages > 0), subtile_bytes=0)
                    deepest.setdefault(kind, tile)
            ranked += [(posed, tile) for tile in deepest.values()]
    ranked += [(problem, tile) for tile in _mma_tiles(problem)]
    ranked = [
        (posed, _split(posed, tile, device.multiprocessors)) for posed, tile in ranked if fits(posed, tile)
    ]

    # Where each multiprocessor has one block at most, it may have all the memory: more stages hide more latency.
    def deepened(posed: TileProblem, tile: Tile) -> tuple[TileProblem, Tile]:
        if block_count(posed, tile) <= device.multiprocessors and not tile.nchw_stages:
            deeper = [replace(tile, blocks_per_multiprocessor=1, stages=stages) for stages in (6, 5, 4, 3)]
            tile = next((deep for deep in deeper if fits(posed, deep)), tile)
        return posed, _staggered(posed, tile, device)

    # A tile that leaves device.multiprocessors idle comes last, however good it is when there is work for all.
    ranked.sort(key=lambda entry: 4 * block_count(*entry) < 3 * device.multiprocessors)
    yield from (deepened(*entry) for entry in ranked)


def fits_device(problem: TileProblem, tile: Tile, device: Device) -> bool:
    """Whether the tile finds room for its stages, its boxes and its registers."""
    if tile.tma and max(box_shape(problem, tile)) > BOX_MOST:
        return False
    room = device.shared_memory_per_block + 1024
    if tile.wgmma and not tile.tma:
        if fill_registers(problem, tile) > FILL_BUDGET:
            return False
        if tile.nchw_stages == 0:
            room -= LOADS_BYTES
    return tile.blocks_per_multiprocessor * (shared_bytes(problem, tile) + 1024) <= room


def _stacked(problem: TileProblem) -> TileProblem:
    """With at most 32 output channels, rows of the output fill up the 64 rows of a multiply."""
    channels, stride = problem.geometry.out_channels_per_group, problem.geometry.stride[0]
    rows = 64 // max(16, power_above(channels))
    if rows <= 1 or rows % stride or problem.geometry.dilation[0] != 1:
        return problem
    return replace(problem, stack=rows)


def _split(problem: TileProblem, tile: Tile, multiprocessors: int) -> Tile:
    """The same tile, with the sum over input channels split over several blocks when there are few tiles."""
    chunks, blocks = ceil_div(problem.words, tile.chunk_words), block_count(problem, tile)
    splits = 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while splits < 8 and 2 * splits * blocks <= room and chunks >= 16 * splits:
            splits *= 2
    return replace(tile, splits=splits)


def _staggered(problem: TileProblem, tile: Tile, device: Device) -> Tile:
    late = staggered(problem, tile, device.multiprocessors)
    return late if fits_device(problem, late, device) else tile


def power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tile_fragments(
    problem: TileProblem, fragments: int, warps: int, most_rows: int
) -> tuple[int, int, int, int, int, int]:
    """How the fragments of ``warps`` warps (or warpgroups) tile the map: images, rows, columns of cells of the
    tile; images, rows, columns of fragments of one warp."""
    if problem.flat:
        return 1, 1, 8 * fragments * warps, 1, 1, fragments
    height, width = (power_above(cells) for cells in problem.positions)
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


def tma_tiles(problem: TileProblem, device: Device) -> list[tuple[TileProblem, Tile]]:
    """Tiles of forward/implicit_gemm_tma.cu (inputs in channels_last), those whose sum over channels is not split
    first."""
    multiprocessors = device.multiprocessors
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32 or geometry.in_channels_per_group * problem.item % 16:
        return []
    narrow_map = not problem.flat and problem.positions[1] <= 4
    if narrow_map and (
        problem.positions[1] < 2
        or problem.positions[0] * problem.positions[1] < 8
        or problem.cell_input_rows != 1
    ):
        return []
    # Half of the phases a block: where all of them are too much for the cells that there are.
    posings = [problem]
    if problem.phases == (2, 2):
        posings.append(replace(problem, block_phases=(1, 2)))
    wide, narrow, single = (2, 1, 1), (1, 2, 1), (1, 1, 2)
    stride_1 = problem.phases == (1, 1)
    found = [(problem, _split(problem, tile, multiprocessors)) for tile in _row_tiles(problem, device)]
    for groups_m, groups_n, blocks in (wide, narrow, single) if stride_1 else (narrow, wide, single):
        if groups_m == 2 and channels <= 64:
            continue
        for posed in posings:
            phases = posed.phases[0] * posed.phases[1]
            most_rows = 1 if narrow_map else 16 if phases <= 2 else 8
            for registers in (128, 64) if posed is posings[-1] else (128,):
                fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
                arranged = tile_fragments(posed, max(4, fragments), groups_n, most_rows)
                run = arranged[3] if narrow_map else arranged[5] if arranged[4] == 1 else arranged[4]
                if fragments < 4 or run < 4:
                    continue
                tile = Tile(4 * groups_m, 1, *arranged, 8, 2, blocks, wgmma=True, tma=True)
                for fitted in _fit_rows(posed, tile):
                    deep = deepest_stages(posed, fitted, device)
                    if deep is not None:
                        found.append((posed, _split(posed, deep, multiprocessors)))
    return sorted(found, key=lambda entry: entry[1].splits)


def _row_tiles(problem: TileProblem, device: Device) -> Iterator[Tile]:
    """A tile of whole rows of cells: in NCHW, whose outputs leave in long runs then, where it covers the map as well as
    others, else where it covers it better."""
    height, width = problem.positions
    if problem.phases != (2, 2):
        return
    if problem.flat:
        # Several rows of a narrow map for each warp.
        fragments = next((n for n in (8, 7) if 8 * n % width == 0), 0)
        rows, cols = 1, 16 * fragments
        pays = not problem.output_channels_last and width % 2 == 0 and (width < 16 or fragments == 7)
    else:
        fragments = min(ROW_FRAGMENTS, key=lambda n: ceil_div(width, 8 * n) * n)
        rows, cols = 2, 8 * fragments
        covered = round_up(height, rows) * round_up(width, cols)
        others = round_up(height, 8) * round_up(width, 16)
        pays = 20 * covered <= 19 * others if problem.output_channels_last else covered <= others
    if fragments and pays:
        tile = Tile(4, 1, 1, rows, cols, 1, 1, fragments, 8, 2, 1, wgmma=True, tma=True)
        if not problem.output_channels_last:
            tile = replace(tile, subtile_bytes=ROW_PART_BYTES, by_rows=True)
        deep = deepest_stages(problem, tile, device)
        if deep is not None and deep.stages >= ROW_STAGES:
            yield deep


def deepest_stages(problem: TileProblem, tile: Tile, device: Device) -> Tile | None:
    """A tile of forward/implicit_gemm_tma.cu with the stages that are worth most among those it has room for, or
    None."""
    staged = _box_stages(problem, tile, device.multiprocessors)
    return next((deep for deep in staged if fits_device(problem, deep, device)), None)


def _box_stages(problem: TileProblem, tile: Tile, multiprocessors: int) -> Iterator[Tile]:
    """The tile with as much of the weights and of the input in shared memory as may be worth it, the most first."""
    geometry = problem.geometry
    out_channels, in_channels = geometry.out_channels_per_group, geometry.in_channels_per_group
    weights = in_channels * geometry.out_channels * geometry.kernel[0] * geometry.kernel[1]
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    # As they lie, rows of a multiply are channels in their order, whose sums take longer to leave.
    boxed = supports_tma_weights(problem) and PACKING_PAYS * weights >= outputs
    blocks = block_count(problem, tile)
    m_blocks = ceil_div(out_channels, problem.block_channels(tile))
    one_weight = m_blocks * geometry.groups * len(group_taps(problem)) == 1
    many_turns = blocks >= 2 * multiprocessors * tile.blocks_per_multiprocessor
    # Narrow maps come once for each shift: in longer rows, though fewer at a time.
    narrow = not problem.flat and tile.cols < 8
    if narrow:
        tile = replace(tile, subtile_bytes=NARROW_PART_BYTES)
    for words, least in ((16, 3 if narrow else 4), (8, 2)):
        for stages in range(6, least - 1, -1) if words <= max(8, problem.words) else ():
            # Weights that stay are worth less than a stage.
            for stays in (True, False) if one_weight and many_turns else (False,):
                yield replace(
                    tile,
                    chunk_words=words,
                    stages=stages,
                    resident_weights=stays,
                    tma_weights=boxed,
                    whole_lines=boxed,
                )


def _turned_tiles(problem: TileProblem) -> Iterator[Tile]:
    """Tiles of forward/implicit_gemm_tma_nchw.cu, where it was the faster of the two (docs/kernels/tile_turned.md)."""
    geometry = problem.geometry
    channels, phases = geometry.out_channels_per_group * problem.stack, problem.phases[0] * problem.phases[1]
    narrow, wide_kernel = problem.item == 2, geometry.kernel[1] > 3
    if channels <= 32:
        return
    chunk_words = 8
    if problem.flat:
        # In 16 bits the multiplier reads NCHW as it lies (forward/implicit_gemm_nchw.py).
        if narrow or phases == 1:
            return
        arranged, chunk_words = tile_fragments(problem, 1 << (32 // phases).bit_length() - 1, 2, 1), 16
        producer_warps = 8
    elif phases > 1:
        # Whole rows of cells: their outputs leave in runs of 128 and more.
        arranged = tile_fragments(problem, 1 << (32 // phases).bit_length() - 1, 2, 1)
        covered = round_up(problem.positions[1], arranged[2])
        if not (narrow or problem.stack > 1) or arranged[5] < 8 or 10 * covered > 11 * problem.positions[1]:
            return
        producer_warps = 4 if narrow else 8
        if arranged[1] == 1:
            chunk_words, producer_warps = 16, 8
    elif problem.stack > 1 and wide_kernel:
        arranged, producer_warps = (
            tile_fragments(problem, 16, 1, 1) if narrow else tile_fragments(problem, 32, 1, 8),
            8,
        )
    elif problem.stack == 1 and not narrow and channels <= 64 and not wide_kernel:
        arranged, producer_warps = tile_fragments(problem, 32, 2, 8), 8
    elif problem.stack == 1 and narrow and channels > 64 and wide_kernel:
        arranged, producer_warps = tile_fragments(problem, 32, 1, 8), 12
    else:
        return
    run = arranged[5] if arranged[4] == 1 else arranged[4]
    if run < 8 or chunk_words > max(8, problem.words):
        return
    for stages, nchw_stages in TURNED_STAGES:
        tile = Tile(
            4,
            1,
            *arranged,
            chunk_words,
            stages,
            1,
            wgmma=True,
            producer_warps=producer_warps,
            nchw_stages=nchw_stages,
        )
        if turns(problem, tile):
            yield tile


def _wgmma_tiles(problem: TileProblem) -> Iterator[Tile]:
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32:
        return
    phases = problem.phases[0] * problem.phases[1]
    # The fill brings no copy of a narrow map for each shift, as boxes do.
    if not problem.flat and problem.positions[1] <= 4:
        return
    # Few output channels, few taps: filling bounds, so more warps fill, and whole rows come in runs of 256 pixels.
    if problem.stack > 1 and phases == 1 and geometry.kernel[1] <= 3 and not problem.flat:
        arranged = tile_fragments(problem, 16, 2, 1)
        if arranged[5] == 16:
            for stages in range(5, 1, -1):
                yield Tile(4, 1, *arranged, 8, stages, 1, wgmma=True, producer_warps=12)
    # Rows of 32 cells leave NCHW in longer runs; a wide kernel would make their halo cost more than that gains.
    short_rows = problem.item == 4 or geometry.kernel[1] > 3
    most_rows = 16 if phases == 1 and short_rows else 8
    for (groups_m, groups_n, blocks), chunk_words in _wgmma_shapes(problem):
        if groups_m == 2 and channels <= 64:
            continue
        for registers in (128, 64) if groups_m == groups_n == 1 else (128,):
            fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
            if fragments < 4:
                continue
            arranged = tile_fragments(problem, fragments, groups_n, most_rows)
            run = arranged[5] if arranged[4] == 1 else arranged[4]
            if run < 4 or chunk_words > max(8, problem.words):
                continue
            tile = Tile(
                4 * groups_m, 1, *arranged, chunk_words, 2, blocks, wgmma=True, producer_warps=8 // blocks
            )
            # A large chunk pays only where enough of them are under way.
            least_stages = 3 if chunk_words > 8 else 2
            for fitted in _fit_rows(problem, tile):
                for stages in range(5, least_stages - 1, -1):
                    yield replace(fitted, stages=stages)
                if least_stages == 2:
                    yield replace(fitted, subtile_bytes=2048)


def _wgmma_shapes(problem: TileProblem) -> list[tuple[tuple[int, int, int], int]]:
    """Warpgroups that share the output channels, warpgroups that share the cells, blocks of a multiprocessor; and
    words of a chunk. The fastest first, as measured. Sums of 128 registers a thread leave room for one block of two
    warpgroups that multiply, or two of one."""
    wide, narrow, single = (2, 1, 1), (1, 2, 1), (1, 1, 2)
    if problem.flat:
        # Pixels that come one by one are few for a block of many channels.
        shapes = (narrow, wide, single) if problem.aligned else (wide, narrow, single)
        return [(shape, words) for shape in shapes for words in (16, 8)]
    if problem.phases[0] * problem.phases[1] == 1:
        return [(shape, 8) for shape in (narrow, wide, single)]
    return [(narrow, 8), (single, 8)] if problem.item == 2 else [(narrow, 16), (narrow, 8), (single, 8)]


def _fit_rows(problem: TileProblem, tile: Tile) -> Iterator[Tile]:
    """The tile with another number of rows first, where 16 would waste a sixteenth of its cells or more."""
    height = problem.positions[0]
    phases = problem.phases[0] * problem.phases[1]

    def covered(rows: int) -> int:
        return round_up(height, rows)

    if tile.warp_rows == tile.rows == 16 and height > 16:
        rows = min(range(15, 7, -1), key=covered)
        if 16 * covered(rows) <= 15 * covered(16):
            lower = replace(tile, rows=rows, warp_rows=rows)
            # What they leave of the registers may be another column; that takes some from those that fill.
            if problem.input_channels_last and tile.warps_m == 8 and rows * 12 * phases <= MOST_SUMS:
                cols = tile.cols // tile.warp_cols * 3
                yield replace(lower, cols=cols, warp_cols=3)
            yield lower
    yield tile


def _mma_tiles(problem: TileProblem) -> Iterator[Tile]:
    phases = problem.phases[0] * problem.phases[1]
    tiles_of_channels = ceil_div(problem.geometry.out_channels_per_group, 16)
    # 32 fragments of sums are 128 registers; three products want some for themselves.
    ieee = problem.precision == "IEEE"
    budget = 16 if ieee else 32
    most_m = min(4 if phases == 1 else 1 if ieee and not problem.flat else 2, tiles_of_channels)
    for warp_m_tiles in (m for m in (4, 2, 1) if m <= most_m):
        fragments = min(16, 1 << max(1, budget // (phases * warp_m_tiles)).bit_length() - 1)
        for warps_m in (1,) if ieee or tiles_of_channels < 2 * warp_m_tiles else (2, 1):
            arranged = tile_fragments(problem, fragments, 4 // warps_m, 8)
            if arranged[2] < 2 and not problem.input_channels_last:
                continue
            for stages in (3, 2):
                for chunk_words in (16, 8) if phases > 1 or problem.flat else (8,):
                    yield Tile(warps_m, warp_m_tiles, *arranged, chunk_words, stages, 2)
    # Where every tap of many phases has its weights in shared memory, few blocks fit.
    yield Tile(1, 1, *tile_fragments(problem, min(fragments, 4), 4, 8), 8, 2, 1)
