"""Plans of the narrow gradients: few channels on a side of a group, depthwise, large kernels. sm_80 and up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, sqrt

import torch

from tconv_swap.cuda.gather_tile import (
    GatherTile,
    ceil_div,
    chunk_taps,
    chunks,
    columns,
    fitting,
    laid_out,
    load_width,
    loads,
    rows,
    sectors,
    side_by_side,
)
from tconv_swap.cuda.plan_general import WORKSPACE_LIMIT_BYTES, reduce_slices
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    int64,
    output,
    workspace,
)
from tconv_swap.geometry import Geometry

FAMILY = "narrow"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT32_MAX = 2**31 - 1
#: Where a side of a group has fewer channels, PyTorch computes in float32 even if TF32 is allowed; so do we.
TF32_CHANNELS = 8
#: Tiles are chosen for the largest of these not above the batch.
NOMINAL_BATCHES = (1, 8, 64)
#: Up to so many channels on one side of a group, most of a wide tile would be padding.
NARROW_CHANNELS = 8
#: From so many taps on, no wide tile holds the kernel; up to so many channels, this one does.
MANY_TAPS, MANY_TAPS_CHANNELS = 256, 64
#: A block's shared memory, in bytes.
SHARED_BYTES = 100 * 1024
#: Taps of a chunk: the steps of 8 are unrolled.
CHUNK_TAPS = 256
WEIGHT_REGISTERS = 96
#: Accesses with which a thread brings its part of a tile.
MAX_LOADS = 96
#: PLACES_KEPT and AHEAD of csrc/kernels/gather.cuh.
KEPT_PLACES = 12
AHEAD_BYTES = 64
#: m tiles times n tiles of a warp of grad_weight, without and with IEEE's products.
MOST_SUMS = {False: 24, True: 12}
REGISTERS = 65536
MULTIPROCESSOR_SHARED_BYTES = 227 * 1024
#: What the compiler may use on top of what it needs on average, so that it never spills.
REGISTER_MARGIN = 40
#: What a multiprocessor does in a cycle, measured or thereabouts; and the L2 cache.
MULTIPLY_CYCLES = 1.55
ISSUED_PER_CYCLE = 2.6
L2_BYTES_PER_CYCLE = 3000
#: Channels whose sums a block can keep beside the weight's.
BIAS_CHANNELS = 16
WORKSPACE_ALIGNMENT = 256
#: The values of ptx::TF32 and ptx::IEEE in csrc/kernels/mma.cuh.
TF32, IEEE = 0, 3


def claims(problem: Problem, device: Device) -> bool:
    """Whether the narrow gradients take a problem."""
    geometry = problem.geometry
    if problem.dtype not in DTYPES or device.compute_capability < 80 or geometry.batch == 0:
        return False
    if geometry.batch * geometry.height > INT32_MAX:
        return False
    channels = (geometry.in_channels_per_group, geometry.out_channels_per_group)
    return min(channels) <= NARROW_CHANNELS or (
        geometry.taps >= MANY_TAPS and max(channels) <= MANY_TAPS_CHANNELS
    )


def _nominal(problem: Problem) -> Problem:
    """The problem for which tiles are chosen: the kernels are compiled for few batch sizes only."""
    geometry = problem.geometry
    batch = max(batch for batch in NOMINAL_BATCHES if batch <= geometry.batch)
    return replace(problem, geometry=geometry.with_batch(batch))


def _input_bytes(geometry: Geometry) -> int:
    """Of one float32 copy of the input's gradient."""
    return 4 * geometry.batch * geometry.in_channels * geometry.height * geometry.width


def _is_ieee(problem: Problem) -> bool:
    if problem.dtype != torch.float32:
        return False
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    return problem.precision == "ieee" or channels < TF32_CHANNELS


def _common(problem: Problem) -> tuple[tuple[str, Constant], ...]:
    geometry = problem.geometry
    largest = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
        geometry.in_channels * geometry.out_channels_per_group * geometry.taps,
    )
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int" if largest <= INT32_MAX else "long long"),
        *geometry.constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("PRECISION", IEEE if _is_ieee(problem) else TF32),
    )


def _chunks(geometry: Geometry, block_groups: int, most: int) -> Iterator[tuple[int, int]]:
    """(channels, rows of the kernel) of a chunk of the taps: as many as fit, and about a quarter of that."""
    channels, kernel_w = geometry.out_channels_per_group, geometry.kernel[1]
    found = set()
    for kernel_rows in sorted({geometry.kernel[0], 1}, reverse=True):
        for limit in (most, most // 4):

            def taps(count: int, kernel_rows: int = kernel_rows) -> int:
                return count * kernel_rows * kernel_w

            count = channels if block_groups > 1 else fitting(channels, limit, taps)
            if count is not None and taps(count) <= limit and (count, kernel_rows) not in found:
                found.add((count, kernel_rows))
                yield count, kernel_rows


def _loader_registers(problem: Problem, gather: GatherTile) -> int:
    count = loads(problem.geometry, gather, problem.channels_last)
    kept = 3 * count if count <= KEPT_PLACES else 10
    if gather.async_:
        return kept
    pack = gather.load * problem.dtype.itemsize
    return kept + ceil_div(pack, 4) * count + 15 if count * pack <= AHEAD_BYTES else 45 + 2 * pack


def _blocks(registers: int, gather: GatherTile, shared_bytes: int) -> int:
    """Blocks of a multiprocessor, with so many registers a thread."""
    by_shared_memory = MULTIPROCESSOR_SHARED_BYTES // (shared_bytes + 1024)
    return max(1, min(REGISTERS // (registers * gather.threads), by_shared_memory, 2048 // gather.threads))


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


# ---- grad_input ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradInputTile:
    """The constants of csrc/kernels/grad_input_narrow.cu, and what a tile costs."""

    gather: GatherTile
    m_tiles: int
    n_tiles: int
    warps_m: int
    warps_p: int
    store: int
    splits: int
    chunks_here: int
    weights_in_registers: bool
    registers: int
    shared_bytes: int
    passes: float

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor runs at a time."""
        return _blocks(self.registers, self.gather, self.shared_bytes)

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return (
            *self.gather.constants,
            ("M_TILES", self.m_tiles),
            ("N_TILES", self.n_tiles),
            ("WARPS_M", self.warps_m),
            ("WARPS_P", self.warps_p),
            ("STORE", self.store),
            ("SPLITS", self.splits),
            ("CHUNKS_HERE", self.chunks_here),
            ("WEIGHTS_IN_REGISTERS", self.weights_in_registers),
            ("MIN_BLOCKS", _blocks(self.registers + REGISTER_MARGIN, self.gather, self.shared_bytes)),
        )


def plan_grad_input(problem: Problem, device: Device) -> Part | None:
    """Inputs: grad_output, input, weight. Output: the gradient of the input. None for what is not the family's own.

    Workspace: at most 64 MiB, where the taps are split.
    """
    if not claims(problem, device):
        return None
    nominal = _nominal(problem)
    candidates = [
        tile
        for tile in grad_input_tiles(nominal, device)
        if tile.splits == 1 or _input_bytes(problem.geometry) * tile.splits <= WORKSPACE_LIMIT_BYTES
    ]
    if not candidates:
        return None
    tile = min(candidates, key=lambda one: _grad_input_cost(nominal, one, device))
    return build_grad_input(problem, tile, device)


def build_grad_input(problem: Problem, tile: GradInputTile, device: Device) -> Part:
    """The part that runs ``tile``."""
    geometry = problem.geometry
    down = geometry.batch * ceil_div(geometry.height, tile.gather.tile_h)
    across = _grad_input_across(geometry, tile)
    repeat = _repeat(down, across, device.multiprocessors * tile.resident, 2)
    kernel = Kernel("grad_input_narrow.cu", "grad_input_narrow", (*_common(problem), *tile.constants))
    split = tile.splits > 1
    launch = Launch(
        kernel,
        grid=across * ceil_div(down, repeat),
        block=tile.gather.threads,
        arguments=(
            input_(0),
            input_(2),
            workspace(0) if split else output(0),
            int64(geometry.batch),
            int64(repeat),
        ),
        shared_bytes=tile.shared_bytes,
    )
    why = f"{_channels(geometry)}: gathered taps on the tensor cores"
    if not split:
        return Part(FAMILY, why, (launch,))
    count = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    launches = (launch, reduce_slices(problem.dtype, count, tile.splits))
    return Part(FAMILY, why, _overlapping(launches, device), 4 * count * tile.splits)


def _channels(geometry: Geometry) -> str:
    return f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group"


def _repeat(down: int, across: int, blocks: int, rounds: int) -> int:
    """Tiles that a block walks down: as many as leave ``rounds`` blocks for each that runs at a time."""
    return max(1, down * across // (blocks * rounds))


def _grad_input_across(geometry: Geometry, tile: GradInputTile) -> int:
    m_blocks = ceil_div(geometry.in_channels_per_group, 16 * tile.m_tiles * tile.warps_m)
    tiles_w = ceil_div(geometry.width, tile.gather.tile_w)
    return m_blocks * (geometry.groups // tile.gather.block_groups) * tiles_w * tile.splits


def grad_input_tiles(problem: Problem, device: Device) -> Iterator[GradInputTile]:
    """The tiles worth a thought."""
    geometry, element_bytes = problem.geometry, problem.dtype.itemsize
    asynchronous = problem.dtype == torch.float32
    m_total = ceil_div(geometry.in_channels_per_group, 16)
    for m_tiles, groups in product(
        sorted({min(2, m_total), min(4, m_total)}),
        side_by_side(geometry, problem.channels_last, element_bytes, 8),
    ):
        warps_m = min(4, ceil_div(m_total, m_tiles))
        if groups > 1 and warps_m * m_tiles < m_total:
            continue
        most_p = max(1, 8 // (warps_m * groups))
        for chunk in _chunks(geometry, groups, CHUNK_TAPS):
            load = load_width(geometry, groups * chunk[0], problem.channels_last, element_bytes, asynchronous)
            for warps_p, store, n_tiles in product(_powers(most_p), (1, 2), (2, 4, 8)):
                if m_tiles * n_tiles > (8 if _is_ieee(problem) else 16):
                    continue
                if warps_p * warps_m * groups < 4 and warps_p * 2 <= most_p:
                    continue
                units = n_tiles // store
                for units_across in _powers(units * warps_p):
                    if units % units_across and units_across % units:
                        continue
                    tile_w = units_across * 8 * store
                    if units_across > 1 and tile_w >= 2 * geometry.width:
                        continue
                    gather = GatherTile(
                        tile_h=units * warps_p // units_across,
                        tile_w=tile_w,
                        block_groups=groups,
                        chunk_co=chunk[0],
                        chunk_kh=chunk[1],
                        load=load,
                        async_=asynchronous,
                        threads=32 * warps_p * warps_m * groups,
                    )
                    if not _loadable(problem, gather):
                        continue
                    pixels = [4 * (g // 2) + g % 2 if store == 2 else g for g in range(8)]
                    gather, passes = laid_out(geometry, gather, problem.channels_last, pixels, False)
                    made = _with_splits(
                        problem, device, gather, m_tiles, n_tiles, warps_m, warps_p, store, passes
                    )
                    if made is not None:
                        yield made


def _loadable(problem: Problem, gather: GatherTile) -> bool:
    geometry = problem.geometry
    return (
        loads(geometry, gather, problem.channels_last) <= MAX_LOADS
        and rows(geometry, gather) * geometry.stride[0] < 4096
    )


def _with_splits(
    problem: Problem,
    device: Device,
    gather: GatherTile,
    m_tiles: int,
    n_tiles: int,
    warps_m: int,
    warps_p: int,
    store: int,
    passes: float,
) -> GradInputTile | None:
    """The tile with as many splits of the taps as it needs to fit, or to fill the GPU."""
    geometry = problem.geometry
    channels_last = problem.channels_last
    staged = channels_last and gather.block_groups > 1
    block_m = 16 * m_tiles * warps_m
    k_steps = ceil_div(chunk_taps(geometry, gather), 8)
    neighbours = channels_last and not staged and geometry.in_channels_per_group > 8
    whole = neighbours or block_m < geometry.in_channels_per_group
    weight_rows = block_m if whole else geometry.in_channels_per_group
    weights = gather.block_groups * weight_rows * (8 * k_steps + 4)
    stage = 0
    if staged:
        stage = gather.tile_h * gather.tile_w * (gather.block_groups * geometry.in_channels_per_group | 1)
    budget = (
        min(SHARED_BYTES, device.shared_memory_per_block) // 4 - gather.shared_words - stage - 8 * k_steps
    )
    if budget < weights:
        return None
    all_chunks = chunks(geometry, gather)
    here = min(all_chunks, budget // weights)
    m_blocks = ceil_div(geometry.in_channels_per_group, block_m)
    blocks = (
        m_blocks
        * (geometry.groups // gather.block_groups)
        * ceil_div(geometry.width, gather.tile_w)
        * ceil_div(geometry.height, gather.tile_h)
        * geometry.batch
    )
    wanted = 2 * device.multiprocessors
    if blocks < wanted:
        here = min(here, max(1, all_chunks * blocks // wanted))
    splits = ceil_div(all_chunks, here)
    if splits > 1 and _input_bytes(geometry) * splits > WORKSPACE_LIMIT_BYTES:
        return None
    in_registers = here == 1 and splits == 1 and weight_rows == block_m
    ieee = _is_ieee(problem)
    # IEEE keeps two parts of each.
    weight_registers = k_steps * m_tiles * (8 if ieee else 4)
    in_registers = in_registers and weight_registers <= WEIGHT_REGISTERS * (2 / 3 if ieee else 1)
    needed = (
        (110 if ieee else 60)
        + m_tiles * n_tiles * 4
        + (weight_registers if in_registers else 0)
        + 2 * n_tiles * (4 if ieee else 1)
        + _loader_registers(problem, gather)
    )
    if needed > 250 or needed * gather.threads > REGISTERS:
        return None
    shared = 4 * (gather.shared_words + here * weights + stage + 8 * k_steps)
    return GradInputTile(
        gather,
        m_tiles,
        n_tiles,
        warps_m,
        warps_p,
        store,
        splits,
        here,
        in_registers,
        needed,
        shared,
        passes,
    )


def _grad_input_cost(problem: Problem, tile: GradInputTile, device: Device) -> float:
    """Cycles of a multiprocessor, roughly: what its pipes have to do, and what waits for nobody."""
    geometry, gather = problem.geometry, tile.gather
    down = geometry.batch * ceil_div(geometry.height, gather.tile_h)
    blocks = _grad_input_across(geometry, tile) * down
    warps = gather.threads // 32
    steps = warps * ceil_div(chunk_taps(geometry, gather), 8)
    weight_reads = 0 if tile.weights_in_registers else (2 if geometry.in_channels_per_group <= 8 else 4)
    elements = gather.channels * rows(geometry, gather) * columns(geometry, gather, problem.channels_last)
    few = max(1.0, 16 / (warps * tile.resident))
    per_chunk = steps * _multiply_cycles(problem, tile.m_tiles, tile.n_tiles, tile.passes, weight_reads)
    per_chunk += elements / 32 * (1 + 4 / gather.load) + 100 * few
    stored = gather.tile_h * gather.tile_w * 16 * tile.m_tiles * tile.warps_m * gather.block_groups / 32
    stored *= (1 if problem.channels_last else 1 / tile.store) + 0.5
    cycles = blocks * (tile.chunks_here * per_chunk + stored) / device.multiprocessors
    moved = sectors(geometry, gather, problem.channels_last, problem.dtype.itemsize)
    loaded = blocks * tile.chunks_here * moved / L2_BYTES_PER_CYCLE
    return cycles * sqrt(few) + loaded + (3000 if tile.splits > 1 else 0)


def _multiply_cycles(
    problem: Problem, m_tiles: int, n_tiles: int, passes: float, other_reads: float
) -> float:
    """Of a multiprocessor, for a warp's step of 8 k: the pipes of shared memory, multiplies and instructions, which
    overlap in part."""
    stacked = problem.geometry.in_channels_per_group <= 8
    products, additions, splitting = 1, 0, 1 if problem.dtype == torch.float32 else 0
    if _is_ieee(problem):
        products, additions, splitting = (2, 2, 3) if stacked else (3, 4, 3)
    reads = 2 * n_tiles * passes + other_reads * m_tiles
    multiplies = MULTIPLY_CYCLES * m_tiles * n_tiles * products
    issued = n_tiles * 2 * (1 + splitting) + 2 + m_tiles * (other_reads * (1 + splitting) + 2)
    issued += m_tiles * n_tiles * (products + additions)
    pipes = (reads, multiplies, issued / ISSUED_PER_CYCLE)
    return max(pipes) + 0.2 * (sum(pipes) - max(pipes))


# ---- grad_weight ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradWeightTile:
    """The constants of csrc/kernels/grad_weight_narrow.cu, and what a tile costs."""

    gather: GatherTile
    m_tiles: int
    n_tiles: int
    warps_m: int
    warps_n: int
    warps_k: int
    input_vector: int
    registers: int
    shared_bytes: int
    passes: float

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor runs at a time."""
        return _blocks(self.registers, self.gather, self.shared_bytes)

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return (
            *self.gather.constants,
            ("M_TILES", self.m_tiles),
            ("N_TILES", self.n_tiles),
            ("WARPS_M", self.warps_m),
            ("WARPS_N", self.warps_n),
            ("WARPS_K", self.warps_k),
            ("INPUT_VECTOR", self.input_vector),
            ("MIN_BLOCKS", _blocks(self.registers + REGISTER_MARGIN, self.gather, self.shared_bytes)),
        )


def plan_grad_weight(problem: Problem, device: Device, with_bias: bool = False) -> Part | None:
    """Inputs: grad_output, input, weight. Outputs: the gradient of the weight, and ``with_bias`` of the bias. None for
    what is not the family's own.

    Workspace: at most 64 MiB.
    """
    if not claims(problem, device):
        return None
    nominal = _nominal(problem)
    candidates = [
        tile
        for tile in grad_weight_tiles(nominal, device)
        if not with_bias or _holds_the_output(problem.geometry, tile.gather)
    ]
    if not candidates:
        return None
    tile = min(candidates, key=lambda one: _grad_weight_cost(nominal, one, device))
    return build_grad_weight(problem, tile, device, with_bias)


def _holds_the_output(geometry: Geometry, gather: GatherTile) -> bool:
    """Whether the tiles hold every pixel of the output, and a block the sums of its channels."""
    if gather.channels > BIAS_CHANNELS or gather.chunk_kh < geometry.kernel[0]:
        return False
    gaps = gather.chunk_kh > 1 and gcd(geometry.stride[0], geometry.dilation[0]) > 1
    gaps = gaps or (gather.chunk_kh == 1 and geometry.stride[0] > 1)
    return not gaps and all(
        dilation * (kernel - 1) + 1 >= stride and output_padding <= padding
        for kernel, stride, dilation, padding, output_padding in zip(
            geometry.kernel,
            geometry.stride,
            geometry.dilation,
            geometry.padding,
            geometry.output_padding,
            strict=True,
        )
    )


def build_grad_weight(
    problem: Problem, tile: GradWeightTile, device: Device, with_bias: bool = False
) -> Part:
    """The part that runs ``tile``."""
    geometry = problem.geometry
    repeat, slices = _slices(geometry, tile, device)
    across = _grad_weight_across(geometry, tile)
    down = geometry.batch * ceil_div(geometry.height, tile.gather.tile_h)
    kernel = Kernel(
        "grad_weight_narrow.cu",
        "grad_weight_narrow",
        (
            *_common(problem),
            *tile.constants,
            ("SLICES", min(slices, 2)),
            ("WITH_BIAS", with_bias),
        ),
    )
    count = geometry.in_channels * geometry.out_channels_per_group * geometry.taps
    bias_at = ceil_div(4 * count * slices, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    bias = output(1 if with_bias else 0)
    shared = tile.shared_bytes
    if with_bias:
        shared = max(shared, 4 * tile.gather.channels * tile.gather.threads)
    launch = Launch(
        kernel,
        grid=across * ceil_div(down, repeat),
        block=tile.gather.threads,
        arguments=(
            input_(1),
            input_(0),
            workspace(0) if slices > 1 else output(0),
            workspace(bias_at if with_bias else 0) if slices > 1 else bias,
            int64(geometry.batch),
            int64(repeat),
        ),
        shared_bytes=shared,
    )
    why = f"{_channels(geometry)}: gathered taps on the tensor cores"
    if slices == 1:
        return Part(FAMILY, why, (launch,))
    launches = [launch, reduce_slices(problem.dtype, count, slices)]
    if with_bias:
        launches.append(reduce_slices(problem.dtype, geometry.out_channels, slices, bias_at, 1))
    bytes_ = bias_at + 4 * geometry.out_channels * slices if with_bias else 4 * count * slices
    return Part(FAMILY, why, _overlapping(launches, device), bytes_)


def _overlapping(launches: Sequence[Launch], device: Device) -> tuple[Launch, ...]:
    """All but the first start while the one before ends, and wait for it."""
    overlaps = device.compute_capability >= 90
    return (launches[0], *(replace(launch, overlaps_previous=overlaps) for launch in launches[1:]))


def _grad_weight_across(geometry: Geometry, tile: GradWeightTile) -> int:
    m_blocks = ceil_div(geometry.in_channels_per_group, 16 * tile.m_tiles * tile.warps_m)
    tiles_w = ceil_div(geometry.width, tile.gather.tile_w)
    return m_blocks * chunks(geometry, tile.gather) * (geometry.groups // tile.gather.block_groups) * tiles_w


def _slices(geometry: Geometry, tile: GradWeightTile, device: Device) -> tuple[int, int]:
    """(tiles that a block walks down, partial sums of the gradient): enough blocks to fill the GPU once."""
    down = geometry.batch * ceil_div(geometry.height, tile.gather.tile_h)
    across = _grad_weight_across(geometry, tile)
    tiles_w = ceil_div(geometry.width, tile.gather.tile_w)
    count = 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps
    walks = min(down, max(1, device.multiprocessors * tile.resident // across))
    walks = max(1, min(walks, WORKSPACE_LIMIT_BYTES // (count * tiles_w)))
    repeat = ceil_div(down, walks)
    return repeat, tiles_w * ceil_div(down, repeat)


def grad_weight_tiles(problem: Problem, device: Device) -> Iterator[GradWeightTile]:
    """The tiles worth a thought."""
    geometry, element_bytes = problem.geometry, problem.dtype.itemsize
    channels_last, asynchronous = problem.channels_last, problem.dtype == torch.float32
    if 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps > WORKSPACE_LIMIT_BYTES:
        return
    m_total = ceil_div(geometry.in_channels_per_group, 16)
    for m_tiles, groups in product(
        sorted({min(2, m_total), min(4, m_total)}),
        side_by_side(geometry, channels_last, element_bytes, 8),
    ):
        warps_m = min(4, ceil_div(m_total, m_tiles))
        if groups > 1 and warps_m * m_tiles < m_total:
            continue
        for chunk in _chunks(geometry, groups, CHUNK_TAPS):
            n_total = ceil_div(chunk[0] * chunk[1] * geometry.kernel[1], 8)
            warps_n = ceil_div(n_total, MOST_SUMS[_is_ieee(problem)] // m_tiles)
            n_tiles = ceil_div(n_total, warps_n)
            load = load_width(geometry, groups * chunk[0], channels_last, element_bytes, asynchronous)
            for warps_k, tile_w, tile_h in product(_powers(8), (16, 32, 64, 128), _powers(16)):
                warps = warps_k * warps_n * warps_m * groups
                if warps > 16 or (warps > 8 and warps_k > 1) or (warps < 4 and warps_k < 8):
                    continue
                if (tile_w > 16 and tile_w >= 2 * geometry.width) or (
                    tile_h > 1 and tile_h >= 2 * geometry.height
                ):
                    continue
                if tile_h * tile_w // 16 % warps_k:
                    continue
                for vector in (1, 2, 4):
                    gather = GatherTile(
                        tile_h=tile_h,
                        tile_w=tile_w,
                        block_groups=groups,
                        chunk_co=chunk[0],
                        chunk_kh=chunk[1],
                        load=load,
                        async_=asynchronous,
                        threads=32 * warps,
                    )
                    if geometry.width % vector or not _loadable(problem, gather):
                        continue
                    gather, passes = laid_out(
                        geometry, gather, channels_last, [vector * t for t in range(4)], True
                    )
                    sums = m_tiles * n_tiles * 4
                    exchange = warps // warps_k * (warps_k // 2) * sums * 32
                    shared = 4 * max(gather.shared_words, exchange)
                    needed = (
                        (70 if _is_ieee(problem) else 45)
                        + sums
                        + 16 * m_tiles
                        + n_tiles * (7 if _is_ieee(problem) else 3)
                        + _loader_registers(problem, gather)
                    )
                    if shared > min(SHARED_BYTES, device.shared_memory_per_block) or needed > 250:
                        continue
                    if needed * gather.threads > REGISTERS:
                        continue
                    yield GradWeightTile(
                        gather, m_tiles, n_tiles, warps_m, warps_n, warps_k, vector, needed, shared, passes
                    )


def _grad_weight_cost(problem: Problem, tile: GradWeightTile, device: Device) -> float:
    """Cycles of a multiprocessor, roughly, as for grad_input."""
    geometry, gather = problem.geometry, tile.gather
    repeat, slices = _slices(geometry, tile, device)
    down = geometry.batch * ceil_div(geometry.height, gather.tile_h)
    blocks = _grad_weight_across(geometry, tile) * ceil_div(down, repeat)
    warps = gather.threads // 32
    steps = warps * gather.tile_h * gather.tile_w // 8 // tile.warps_k
    vectors = tile.input_vector if not problem.channels_last else 2 * tile.m_tiles
    inputs = 4 / vectors * (8 if geometry.in_channels_per_group > 1 else 2)
    elements = gather.channels * rows(geometry, gather) * columns(geometry, gather, problem.channels_last)
    few = max(1.0, 16 / (warps * tile.resident))
    per_tile = steps * _multiply_cycles(problem, tile.m_tiles, tile.n_tiles, tile.passes, inputs / 2)
    per_tile += elements / 32 * (1 + 4 / gather.load) + 150 * few
    cycles = ceil_div(blocks, device.multiprocessors) * repeat * per_tile
    moved = sectors(geometry, gather, problem.channels_last, problem.dtype.itemsize)
    loaded = blocks * repeat * moved / L2_BYTES_PER_CYCLE
    exchanged = geometry.in_channels * geometry.out_channels_per_group * geometry.taps * slices / 500
    return cycles * sqrt(few) + loaded + exchanged
