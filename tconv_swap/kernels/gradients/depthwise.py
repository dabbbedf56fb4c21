"""Plans of the backward pass of depthwise layers (csrc/kernels/gradients/depthwise.cu): all gradients from one pass
over grad_output and the input. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.common.sizes import segment_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    workspace,
)

FAMILY = "depthwise"
WHY = "depthwise: every gradient from one pass over grad_output"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Bytes that one access of a thread moves at most.
WIDEST_ACCESS = 16
#: Taps times channels whose weights and sums a thread keeps in registers, and words of grad_output that it asks for.
MOST_SUMS, MOST_AHEAD = 32, 24
#: Threads of a block: of NCHW where each has all rows of grad_output, where several share them, and of channels_last.
THREADS, SHARING_THREADS, CHANNELS_LAST_THREADS = 128, 256, 384
MOST_THREADS = 512
#: Blocks of SHARING_THREADS that a multiprocessor runs at a time.
SHARING_BLOCKS = 2
#: Channels side by side in a block, in channels_last.
MOST_LANES = 64
#: Pixels of the input that a thread adds up one after the other in float32: rounding errors grow with the root of it.
LONGEST_CHAIN = 512
#: Registers of a thread, or a little less, and of a multiprocessor.
THREAD_REGISTERS, REGISTERS = 128, 65536
#: Rows of a walk at most, and what beginning and ending one takes, in steps.
MOST_ROWS, WALK_OVERHEAD = 64, 3
#: Kernels of a layer in NCHW, whatever its sizes, which differ in how wide walks and loads are.
MAX_SCHEDULES = 4
#: Partial sums of grad_weight, in bytes for each byte of grad_output and input: more, and they take their time.
MOST_PARTIAL = 1 / 4
SHARED_BYTES = 96 << 10


@dataclass(frozen=True, slots=True)
class Walk:
    """How gradients/depthwise.cu cuts a problem: the constants of its contract, in lower case, and the rows of a walk,
    which it is told at its launch."""

    own_w: int
    load: int
    lanes: int
    walkers: int
    phases: int
    phase_rows: int
    rows: int

    @property
    def threads(self) -> int:
        return self.lanes * self.walkers * self.phases

    def turns(self, geometry: Geometry) -> int:
        """Walks that a walker would take if a block took all of its channels'."""
        walks = geometry.batch * ceil_div(geometry.height, self.rows) * (geometry.width // self.own_w)
        return ceil_div(walks, self.walkers)

    def shared_bytes(self, problem: Problem, mask: tuple[bool, ...]) -> int:
        geometry = problem.geometry
        side_by_side = self.lanes * self.walkers
        taps = self.phase_rows * lags(geometry) * geometry.kernel[1]
        gathered = self.phases * (
            self.rows * self.own_w * side_by_side + (0 if problem.channels_last else taps)
        )
        sums = taps * mask[1] + mask[2]
        parts = self.walkers if problem.channels_last else ceil_div(self.walkers, 32)
        reduced = sums * parts * self.lanes * self.phases
        return 4 * max(gathered if mask[0] and self.phases > 1 else 0, reduced)


def lags(geometry: Geometry) -> int:
    """Rows of the input that a step's rows of grad_output meet."""
    return (geometry.kernel[0] - 1) * geometry.dilation[0] // geometry.stride[0] + 1


def columns(geometry: Geometry, own_w: int) -> int:
    """Of grad_output, that so many columns of the input meet."""
    return (own_w - 1) * geometry.stride[1] + (geometry.kernel[1] - 1) * geometry.dilation[1] + 1


def claims(problem: Problem) -> bool:
    """Whether a problem is the kernel's, if a thread can keep its taps."""
    g = problem.geometry
    if problem.dtype not in DTYPES or g.batch == 0 or g.batch * g.height * g.width >= INT32_LIMIT:
        return False
    return g.groups == g.in_channels == g.out_channels


def meets_all(geometry: Geometry) -> bool:
    """Whether the pass meets every element of grad_output."""
    return all(
        (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1 >= geometry.stride[axis]
        and geometry.output_padding[axis] <= geometry.padding[axis]
        for axis in (0, 1)
    )


def walk_of(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Walk | None:
    """The walk to take, or None where a thread cannot keep its taps."""
    walks = schedules(of_any_size(problem, False), output_mask, device)
    fitting = [walk for walk in walks if computes(problem, walk)]
    if not fitting:
        return None
    best = min(fitting, key=lambda walk: loads_of_a_pixel(problem, walk))
    height = problem.geometry.height
    rows = [n for n in range(min(height, MOST_ROWS), 0, -1) if ceil_div(height, ceil_div(height, n)) == n]
    cuts = [replace(best, rows=n) for n in rows]
    most = _most_shared(device)
    cuts = [walk for walk in cuts if walk.shared_bytes(problem, output_mask) <= most]
    return min(cuts, key=lambda walk: _steps(problem, walk, output_mask, device))


@lru_cache(maxsize=1024)
def schedules(layer: Problem, output_mask: tuple[bool, ...], device: Device) -> tuple[Walk, ...]:
    """The walks that a layer has, whatever its sizes, without their rows: all with as many threads at work on one."""
    phases: dict[int, list[Walk]] = {}
    for shape in _shapes(layer):
        if shape.shared_bytes(layer, output_mask) <= _most_shared(device):
            phases.setdefault(shape.phases, []).append(shape)
    if not phases:
        return ()
    shapes = phases[min(phases)]
    return select_schedules(
        layer,
        MAX_SCHEDULES,
        lambda problem: shapes,
        computes,
        loads_of_a_pixel,
        lambda walk: walk.own_w == walk.load == 1,
    )


def computes(problem: Problem, walk: Walk) -> bool:
    """Whether a walk's kernel computes the size: rows hold whole walks and loads."""
    return problem.geometry.width % walk.own_w == 0 and problem.geometry.out_width % walk.load == 0


def _most_shared(device: Device) -> int:
    return min(SHARED_BYTES, device.shared_memory_per_block)


def _steps(problem: Problem, walk: Walk, output_mask: tuple[bool, ...], device: Device) -> int:
    """Those that follow one another, if every block takes its walks at once."""
    g = problem.geometry
    blocks = walk.turns(g) * ceil_div(g.in_channels, walk.lanes)
    by_registers = REGISTERS // (THREAD_REGISTERS * walk.threads)
    by_memory = device.shared_memory_per_block // max(1, walk.shared_bytes(problem, output_mask))
    rounds = ceil_div(blocks, device.multiprocessors * max(1, min(by_registers, by_memory)))
    return rounds * (walk.rows + lags(g) - 1 + WALK_OVERHEAD)


def _shapes(problem: Problem) -> Iterator[Walk]:
    """Every shape of each number of phases, of one row."""
    g = problem.geometry
    for phases in (n for n in range(1, g.stride[0] + 1) if g.stride[0] % n == 0):
        phase_rows = g.stride[0] // phases
        sums = phase_rows * lags(g) * g.kernel[1]
        if sums > MOST_SUMS or (phases > 1 and g.dilation[0] > 1):
            continue
        if problem.channels_last:
            lanes = g.in_channels if g.in_channels <= MOST_LANES else MOST_LANES // 2
            walkers = 1
            while 2 * walkers * lanes * phases <= CHANNELS_LAST_THREADS:
                walkers *= 2
        else:
            lanes = 1
            walkers = THREADS if phases == 1 else max(32, SHARING_THREADS // phases // 32 * 32)
        if walkers * lanes * phases > MOST_THREADS:
            continue
        for own_w in (4, 2, 1) if problem.channels_last else (8, 4, 2, 1):
            # A thread asks for its part of grad_output ahead.
            if own_w > 1 and columns(g, own_w) * phase_rows > MOST_AHEAD:
                continue
            for load in (1,) if problem.channels_last else (1, 2, 4, 8):
                if load * problem.dtype.itemsize <= WIDEST_ACCESS and own_w * g.stride[1] % load == 0:
                    yield Walk(own_w, load, lanes, walkers, phases, phase_rows, 1)


def loads_of_a_pixel(problem: Problem, walk: Walk) -> float:
    """Of a row of grad_output, for each column of the input: neighbours share them."""
    across = columns(problem.geometry, walk.own_w)
    head = min(problem.geometry.padding[1] % walk.load, across)
    body = (across - head) // walk.load
    return (across - body * (walk.load - 1)) / walk.own_w


def _repeat(problem: Problem, walk: Walk, turns: int, slice_bytes: int) -> int:
    """Walks that a thread takes one after the other: so many that partial sums take hardly any time, as long as no sum
    gets long."""
    wanted = ceil_div(
        turns * slice_bytes, int(MOST_PARTIAL * problem.dtype.itemsize * problem.geometry.elements) + 1
    )
    if problem.dtype == torch.float32:
        wanted = min(wanted, LONGEST_CHAIN // (walk.rows * walk.own_w))
    return max(1, wanted, ceil_div(turns * slice_bytes, WORKSPACE_LIMIT_BYTES))


def plan_gradients(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Part | None:
    """Inputs: grad_output, input, weight (16-byte aligned). Outputs: the gradients that the mask asks for.

    None for what the kernel does not compute.

    Workspace: partial sums of the gradients of weight and bias, at most 64 MiB, or one copy of them if that is more.
    """
    if not claims(problem) or not (output_mask[0] or output_mask[1]):
        return None
    if output_mask[2] and not meets_all(problem.geometry):
        return None
    walk = walk_of(problem, output_mask, device)
    return None if walk is None else plan_with_walk(problem, walk, output_mask, device)


def plan_with_walk(problem: Problem, walk: Walk, output_mask: tuple[bool, ...], device: Device) -> Part:
    """``plan_gradients`` with a given walk."""
    g = problem.geometry
    wants_input, wants_weight, wants_bias = output_mask
    channel_blocks = ceil_div(g.in_channels, walk.lanes)
    turns = walk.turns(g)
    count = g.in_channels * g.taps
    slice_bytes = 4 * (count + g.out_channels) + WORKSPACE_ALIGNMENT
    repeat = _repeat(problem, walk, turns, slice_bytes) if wants_weight or wants_bias else 1
    slices = ceil_div(turns, repeat)
    split = slices > 1
    bias_at = round_up(4 * slices * count, WORKSPACE_ALIGNMENT) if wants_weight else 0
    weight_index, bias_index = int(wants_input), int(wants_input) + int(wants_weight)

    def place(wanted: bool, index: int, at: int) -> Argument:
        return output(index) if wanted and not split else workspace(at if wanted else 0)

    kernel = Kernel("gradients/depthwise.cu", "gradients_depthwise", _constants(problem, walk, output_mask))
    launches = [
        Launch(
            kernel,
            grid=channel_blocks * slices,
            block=walk.threads,
            arguments=(
                input_(0),
                input_(1),
                input_(2),
                output(0) if wants_input else workspace(0),
                place(wants_weight, weight_index, 0),
                place(wants_bias, bias_index, bias_at),
                struct(0),
            ),
            structs=(segment_sizes(g, (walk.rows, walk.own_w), repeat, split),),
            shared_bytes=walk.shared_bytes(problem, output_mask),
        )
    ]
    sums = []
    if split and wants_weight:
        sums.append(split_k_reduce(problem.dtype, count, slices, 0, weight_index))
    if split and wants_bias:
        sums.append(split_k_reduce(problem.dtype, g.out_channels, slices, bias_at, bias_index))
    launches += [replace(one, overlaps_previous=device.compute_capability >= 90) for one in sums]
    used = bias_at + 4 * slices * g.out_channels * wants_bias if sums else 0
    return Part(FAMILY, WHY, tuple(launches), used)


def _constants(
    problem: Problem, walk: Walk, output_mask: tuple[bool, ...]
) -> tuple[tuple[str, Constant], ...]:
    g = problem.geometry
    largest = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int" if largest < INT32_LIMIT else "long long"),
        *g.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("OWN_W", walk.own_w),
        ("LOAD", walk.load),
        ("LANES", walk.lanes),
        ("WALKERS", walk.walkers),
        ("PHASES", walk.phases),
        ("PHASE_ROWS", walk.phase_rows),
        ("THREADS", walk.threads),
        ("MIN_BLOCKS", SHARING_BLOCKS if walk.phases > 1 and not problem.channels_last else 1),
        ("WANTS_INPUT", output_mask[0]),
        ("WANTS_WEIGHT", output_mask[1]),
        ("WITH_BIAS", output_mask[2]),
    )
