"""Plans of the gradient of the input on tensor cores, a convolution of grad_output: at stride 1 by the forward's
kernels (plan_strips.py, plan_tile.py), else what the copy engine can bring by plan_grad_input_boxes.py (channels_last)
and plan_grad_input_unfolded.py (NCHW), and the rest by csrc/kernels/grad_input_wgmma.cu and grad_input_tile.cu. Pure
functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product, zip_longest

from tconv_swap.cuda.integers import INT32_LIMIT, ceil_div
from tconv_swap.cuda.plans import (
    plan_grad_input_boxes,
    plan_grad_input_unfolded,
    plan_strips,
    plan_tile,
    tile_choice,
)
from tconv_swap.cuda.plans.grad_input_layout import (
    StridedProblem,
    as_convolution,
    fill_registers,
    multiplying_threads,
    shared_bytes,
    slice_taps,
    tile_registers,
)
from tconv_swap.cuda.plans.plan_general import WORKSPACE_LIMIT_BYTES
from tconv_swap.cuda.plans.tile_classes import choose
from tconv_swap.cuda.plans.tile_layout import FILL_THREADS, Tile, TileProblem, block_count, make_problem
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import (
    Argument,
    Constant,
    Kernel,
    Launch,
    Part,
    Plan,
    input_,
    int64,
    output,
    with_operands,
    workspace,
)
from tconv_swap.geometry import Geometry

FAMILY = "halo tile"
#: Of one block: beyond it, one multiply for each tap and step is too much code.
MOST_TAPS = 64
#: Of a thread of grad_input_tile.cu, by the count of tile_registers: beyond it the compiler spills.
MOST_TILE_REGISTERS = 150
#: The same with three products, beyond which it was seen to spill.
MOST_IEEE_REGISTERS = 64
#: Of an axis: a place of the input has a bit for each.
MOST_PHASES = 16
#: Of grad_input_wgmma.cu: a place of the input has a bit for each.
MOST_SLICES = 16
#: With three products, more are more code than ptxas finds registers for: of a plan with 20 slices, which spilled 6 KB,
#: the result was wrong on an H200 (and right in emulation). Up to 4 all were right.
MOST_IEEE_SLICES = 4
#: Of a filling thread's registers of grad_input_wgmma.cu, those that carry no input.
FILL_OVERHEAD = 64
#: Of those that do, where finding the places takes registers as well: beyond it the compiler spills.
MOST_FILL_REGISTERS = 64
#: Of a multiplying thread's, those that are no sums.
SUM_OVERHEAD = 48


def plan_grad_input(problem: Problem, device: Device) -> Part | None:
    """The halo-tile part, or None for what it does not claim.

    Inputs: grad_output (16-byte aligned), input, weight. Output: the gradient of the input. Workspace: the packed
    weights (IEEE float32: both of their parts), their channels rounded up to whole tiles, and where the sum over
    channels is split, as many copies of the gradient in float32: for strides at most 64 MiB.
    """
    parts = part_candidates(problem, device, count=1)
    return parts[0] if parts else None


def part_candidates(problem: Problem, device: Device, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    convolution = as_convolution(problem)
    if convolution.step == (1, 1):
        posed = as_forward(problem)
        first: list[Plan | Part] = [*plan_strips.part_candidates(posed, device, count)]
        second: list[Plan | Part] = []
        if plan_tile.claims(posed, device):
            second = [plan_tile.plan_with_tile(*tile, device) for tile in choose(posed, device, count)]
        if not plan_strips.preferred(posed, device):
            first, second = second, first
        made = [one for both in zip_longest(first, second) for one in both if one is not None]
        return [
            Part(one.family, one.why, reading_backward(one.launches), one.workspace_bytes)
            for one in made[:count]
        ]
    copied = []
    # Not measured for a map of one pixel, which has no stride.
    if problem.geometry.stride != (1, 1):
        for family in (plan_grad_input_boxes, plan_grad_input_unfolded):
            copied += family.part_candidates(convolution, device, max(1, count // 2))
    count -= len(copied)
    if not claims(convolution, device):
        return copied
    tiles = islice(dict.fromkeys(candidates(convolution, device)), count)
    return [*copied, *(part_with_tile(convolution, tile, device.multiprocessors) for tile in tiles)]


def as_forward(problem: Problem) -> TileProblem:
    """At stride 1 the gradient is itself a transposed convolution: of grad_output, with the weight's channels
    exchanged and its taps backwards. Its padding may be negative, which the kernels allow."""
    geometry = problem.geometry
    padding = tuple(
        d * (k - 1) - p for d, k, p in zip(geometry.dilation, geometry.kernel, geometry.padding, strict=True)
    )
    swapped = Geometry(
        geometry.batch,
        geometry.out_channels,
        geometry.out_height,
        geometry.out_width,
        geometry.in_channels,
        geometry.kernel,
        padding=(padding[0], padding[1]),
        # What output_padding added has no part in the gradient.
        output_padding=(-geometry.output_padding[0], -geometry.output_padding[1]),
        dilation=geometry.dilation,
        groups=geometry.groups,
    )
    posed = make_problem(
        swapped,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias=False,
    )
    return replace(posed, of_grad_input=True)


def reading_backward(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Launches that read (input, weight, bias), made to read (grad_output, input, weight)."""

    def placed(argument: Argument) -> Argument:
        # The bias is never read: where a kernel expects it, it gets the weight.
        return input_(2) if argument == input_(1) else argument

    return tuple(with_operands(launch, placed) for launch in launches)


def claims(problem: StridedProblem, device: Device) -> bool:
    """Whether the kernels for strides compute the problem, and better than the general ones."""
    return (
        plan_tile.claims(problem, device)
        and max(len(used) for used in problem.phases_used) <= MOST_PHASES
        and problem.geometry.taps <= MOST_TAPS
    )


def candidates(problem: StridedProblem, device: Device) -> Iterator[Tile]:
    """Tiles worth trying, the one expected to be fastest first (docs/kernels/grad_input.md says what was measured)."""

    geometry, (cells_h, cells_w) = problem.geometry, problem.cells
    image_bytes = geometry.in_channels * geometry.height * geometry.width * problem.item

    def fits(tile: Tile) -> bool:
        # Offsets from a tile's first image are counted in 32 bits.
        images = 1 + ceil_div(tile.cols, cells_h * cells_w) if problem.flat else tile.images
        if images * image_bytes >= INT32_LIMIT:
            return False
        if tile.wgmma and fill_registers(problem, tile, 1) > _fill_room(problem, tile):
            return False
        if not tile.wgmma and tile_registers(problem, tile) > MOST_TILE_REGISTERS:
            return False
        blocks = tile.blocks_per_multiprocessor
        return blocks * (shared_bytes(problem, tile) + 1024) <= device.shared_memory_per_block + 1024

    tiles: list[Tile] = []
    if device.architecture == "sm_90a":
        tiles += _wgmma_tiles(problem)
    tiles += _mma_tiles(problem)
    tiles = [_split(problem, tile, device.multiprocessors) for tile in tiles]
    tiles = [tile for tile in tiles if fits(tile)]
    # Three products of mma.sync in NCHW, where many registers spill (measured on Hopper alone).
    narrow = not any(tile.wgmma for tile in tiles) and not problem.input_channels_last
    crowds = narrow and problem.precision == "IEEE" and device.architecture == "sm_90a"
    # A tile that leaves multiprocessors idle comes last, however good it is when there is work for all. Of the others
    # those first that wgmma multiplies, and in NCHW those that need not be added up.
    tiles.sort(
        key=lambda tile: (
            4 * block_count(problem, tile) < 3 * device.multiprocessors,
            not tile.wgmma,
            crowds and tile_registers(problem, tile) > MOST_IEEE_REGISTERS,
            crowds and tile.splits == 1 and tile.blocks_per_multiprocessor == 1,
            0 if problem.input_channels_last else tile.splits,
        )
    )
    yield from dict.fromkeys(tiles)


def fill_share(tile: Tile) -> int:
    """Registers that grad_input_wgmma.cu leaves to a thread that fills: what those that multiply do without."""
    multiplying = multiplying_threads(tile)
    registers = tile_choice.REGISTERS // tile.blocks_per_multiprocessor
    spare = registers - multiplying * (4 * tile.warp_fragments * tile.m_parts + SUM_OVERHEAD)
    return min(255, registers // (FILL_THREADS + multiplying), max(24, spare // FILL_THREADS)) // 8 * 8


def _fill_room(problem: StridedProblem, tile: Tile) -> int:
    """Registers of a filling thread that may hold places and what is on its way there."""
    plain = problem.flat and len(slice_taps(problem)) <= 4
    return min(fill_share(tile) - FILL_OVERHEAD, 104 if plain else MOST_FILL_REGISTERS)


def _fill_ahead(problem: StridedProblem, tile: Tile) -> int:
    """Slices that grad_input_wgmma.cu has on their way: as many as registers hold, and as slices repeat by."""
    slices, room = len(slice_taps(problem)), _fill_room(problem, tile)
    return max(
        ahead
        for ahead in (1, 2, 3, 4)
        if ahead == 1 or (slices % ahead == 0 and fill_registers(problem, tile, ahead) <= room)
    )


def _split(problem: StridedProblem, tile: Tile, multiprocessors: int) -> Tile:
    """The same tile, with the sum over channels split over several blocks when there are few tiles."""
    geometry = problem.geometry
    chunks, blocks = ceil_div(problem.words, tile.chunk_words), block_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    most, splits = min(chunks, WORKSPACE_LIMIT_BYTES // (4 * count)), 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while 2 * splits * blocks <= room and 2 * splits <= most:
            splits *= 2
    return replace(tile, splits=splits)


def _wgmma_tiles(problem: StridedProblem) -> Iterator[Tile]:
    geometry = problem.geometry
    channels = geometry.out_channels_per_group
    if len(slice_taps(problem)) > (MOST_IEEE_SLICES if problem.precision == "IEEE" else MOST_SLICES):
        return
    if channels <= 32 or (problem.input_channels_last and geometry.in_channels_per_group * problem.item % 16):
        return
    # Warpgroups over channels and over cells, registers of sums for 64 channels, times 64 channels of a warpgroup.
    broad, wide, tall, long, short = (
        (4, 1, 64, 2),
        (2, 1, 128, 1),
        (2, 1, 64, 1),
        (1, 2, 128, 1),
        (1, 2, 64, 1),
    )
    narrow_map = not problem.flat and problem.cells[1] <= 4
    if channels <= 64:
        order = [long, short]
    elif problem.flat:
        order = [broad, wide, tall] if channels > 128 else [wide, tall]
    elif problem.input_channels_last:
        order = [broad, tall, wide] if channels > 128 and not narrow_map else [tall, wide]
    else:
        order = [wide, tall]
    if problem.precision == "IEEE":
        # Each sum has another beside it that collects three products.
        order = [shape for shape in order if shape[2] * shape[3] == 64]
    rows: tuple[int, ...] = (16, 8)
    if narrow_map:
        if problem.cells[1] < 2 or problem.cells[0] * problem.cells[1] < 8:
            return
        rows = (1,)
    for (groups_m, groups_n, registers, m_parts), most_rows in product(order, rows):
        arranged = tile_choice.arrange(problem, registers // 4, groups_n, most_rows)
        along_row = problem.flat or arranged[4] == 1
        run = arranged[3] if narrow_map else arranged[5] if along_row else arranged[4]
        if run < 4:
            continue
        for chunk_words, stages in product((16, 8), (8, 6, 4, 3, 2)):
            tile = Tile(
                4 * groups_m,
                1,
                *arranged,
                chunk_words,
                stages,
                1,
                wgmma=True,
                m_parts=m_parts,
                part_channels=16,
            )
            # Longer runs of channels pay only where two slices can be on their way, and hardly with three products.
            worth = problem.input_channels_last and problem.flat if problem.precision == "IEEE" else True
            if chunk_words == 8 or (
                worth and chunk_words <= problem.words and _fill_ahead(problem, tile) > 1
            ):
                yield tile


def _mma_tiles(problem: StridedProblem) -> Iterator[Tile]:
    tiles_of_channels = ceil_div(problem.geometry.out_channels_per_group, 16)
    # 32 fragments of sums are 128 registers; three products want some for themselves.
    ieee = problem.precision == "IEEE"
    budget = 16 if ieee else 32
    most_m = min(4, tiles_of_channels)
    for warp_m_tiles in (m for m in (4, 2, 1) if m <= most_m):
        fragments = min(16, budget // warp_m_tiles)
        for warps_m in (4, 2, 1):
            if warps_m > 1 and tiles_of_channels < 2 * warps_m * warp_m_tiles:
                continue
            for cells in (fragments, fragments // 2, fragments // 4, fragments // 8):
                if cells < 2:
                    continue
                arranged = tile_choice.arrange(problem, cells, 4 // warps_m, 4)
                for chunk_words in (16, 8):
                    if chunk_words > max(8, problem.words):
                        continue
                    for stages, blocks in ((3, 2), (2, 2), (3, 1), (2, 1)):
                        yield Tile(warps_m, warp_m_tiles, *arranged, chunk_words, stages, blocks)


def part_with_tile(problem: StridedProblem, tile: Tile, multiprocessors: int = 132) -> Part:
    """The part that computes the problem with this tile."""
    geometry = problem.geometry
    pack, packed_bytes = plan_tile.pack_launch(_as_packed(problem), tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    shared = shared_bytes(problem, tile)
    name = "grad_input_wgmma" if tile.wgmma else "grad_input_tile"
    constants: tuple[tuple[str, Constant], ...] = (
        *plan_tile.tile_constants(problem, tile),
        ("HEIGHT", problem.geometry.height),
        ("WIDTH", problem.geometry.width),
        ("OUT_HEIGHT", problem.geometry.out_height),
        ("OUT_WIDTH", problem.geometry.out_width),
        ("SPLITS", tile.splits),
        ("STEP_H", problem.step[0]),
        ("STEP_W", problem.step[1]),
        ("SHARED_BYTES", shared),
    )
    grid, block = block_count(problem, tile), multiplying_threads(tile)
    if tile.wgmma:
        constants += (
            ("FILL_WARPS", FILL_THREADS // 32),
            ("FILL_REGISTERS", fill_share(tile)),
            ("FILL_AHEAD", _fill_ahead(problem, tile)),
            ("M_PARTS", tile.m_parts),
        )
        # Blocks stay and work on one tile after another.
        grid, block = min(grid, multiprocessors * tile.blocks_per_multiprocessor), block + FILL_THREADS
    main = Launch(
        Kernel(f"{name}.cu", name, constants, spills=_spills(problem, tile)),
        grid=grid,
        block=block,
        arguments=(
            input_(0),
            workspace(0),
            output(0) if tile.splits == 1 else workspace(packed_bytes),
            int64(geometry.batch),
        ),
        shared_bytes=shared,
        overlaps_previous=True,
    )
    launches = [pack, main]
    if tile.splits > 1:
        launches.append(plan_tile.reduce_launch(problem, tile.splits, packed_bytes, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        reading_backward(tuple(launches)),
        packed_bytes + (count * 4 * tile.splits if tile.splits > 1 else 0),
    )


def _spills(problem: StridedProblem, tile: Tile) -> bool:
    """Three products need registers of their own, and so does rounding fragments to TF32; of a thread's 168 registers
    in grad_input_wgmma.cu 128 may be sums, or half of them on their way to a stage."""
    if problem.precision == "IEEE":
        return True
    if not tile.wgmma:
        return problem.precision == "TF32" or tile_registers(problem, tile) > 100
    carried = fill_registers(problem, tile, _fill_ahead(problem, tile))
    return 4 * tile.warp_fragments * tile.m_parts >= 128 or carried > 56


def _as_packed(problem: StridedProblem) -> TileProblem:
    """What pack_weights.cu is told: its phase groups are the slices."""
    return TileProblem(
        replace(problem.geometry, stride=problem.step, padding=(0, 0)),
        problem.dtype,
        problem.precision,
        problem.input_channels_last,
        problem.output_channels_last,
        problem.weight_channels_last,
        has_bias=False,
        block_phases=(1, 1 if problem.input_channels_last else problem.step[1]),
        of_grad_input=True,
    )
