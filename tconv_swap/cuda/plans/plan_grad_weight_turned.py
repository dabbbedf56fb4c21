"""Plans of csrc/kernels/grad_weight_turned.cu: the gradient of the weight in TF32 and channels_last (sm_90a)."""

from __future__ import annotations

from tconv_swap.cuda.integers import INT32_LIMIT, ceil_div
from tconv_swap.cuda.plans.grad_weight_rows_reduction import reduce
from tconv_swap.cuda.plans.grad_weight_rows_tile import (
    EXTRA_BYTES,
    NOBODY,
    STAGE_PIXELS,
    Tile,
    blocks_of,
    candidates,
    expected_clocks,
    weight_bytes,
)
from tconv_swap.cuda.plans.plan_general import reduce_slices
from tconv_swap.cuda.plans.room import Room
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import Kernel, Launch, Part, input_, int64, output, workspace
from tconv_swap.geometry import Geometry

_FAMILY = "turned weight rows"
_THREADS = 384
_FILLING_WARPS = 4
_MOST_STAGES_IN_RING = 6


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first.

    Inputs: grad_output, input. Outputs: the gradient of the weight, and with ``with_bias`` that of the bias. Empty for
    what this family does not claim.

    Workspace: at most 64 MiB of partial sums, or one copy of the gradient if that is more, or up to
    ``MOST_ARRANGED_BYTES`` where sums have to be short; and 16 bytes for each slice, tap and output channel for the
    bias.
    """
    g = problem.geometry
    if not claims(problem, device) or (with_bias and not reads_all_of_grad_output(g)):
        return []
    stages = stages_of(g)
    tiles = sorted(
        candidates(g, stages, device, sharing=(NOBODY,)),
        key=lambda tile: expected_clocks(g, stages, tile, device),
    )
    return [plan_with_tile(problem, tile, device, with_bias) for tile in tiles[:count]]


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernel can do it."""
    g = problem.geometry
    if device.architecture != "sm_90a" or not problem.is_tf32:
        return False
    pixels = max(g.height * g.width, g.out_height * g.out_width) * g.batch
    return problem.channels_last and 0 < pixels < INT32_LIMIT


def stages_of(geometry: Geometry) -> int:
    """Of 32 pixels each."""
    return ceil_div(geometry.batch * geometry.height * geometry.width, STAGE_PIXELS)


def reads_all_of_grad_output(geometry: Geometry) -> bool:
    """Whether the taps whose offset lies in [0, stride) read every pixel of grad_output, and each once."""
    g = geometry
    return all(
        out <= stride * size and set(range(stride)) <= {k * dilation - padding for k in range(kernel)}
        for out, size, stride, padding, dilation, kernel in zip(
            (g.out_height, g.out_width),
            (g.height, g.width),
            g.stride,
            g.padding,
            g.dilation,
            g.kernel,
            strict=True,
        )
    )


def plan_with_tile(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """The plan that computes the problem with this tile."""
    g = problem.geometry
    room = Room()
    direct = tile.slices == 1 and problem.weight_channels_last
    partial_at = 0 if direct else room.take(tile.slices * weight_bytes(g))
    bias_rows = tile.slices * _FILLING_WARPS * g.taps
    bias_at = room.take(4 * bias_rows * g.out_channels) if with_bias else 0
    ring = min(_MOST_STAGES_IN_RING, (device.shared_memory_per_block - EXTRA_BYTES) // tile.stage_bytes)
    launches = [
        Launch(
            Kernel(
                "grad_weight_turned.cu",
                "grad_weight_turned",
                (
                    *g.constants,
                    ("TILE_COLS", tile.cols),
                    ("SWAPPED", tile.swapped),
                    ("CHUNK", tile.chunk),
                    ("SHARES", NOBODY),
                    ("STAGES", ring),
                    ("WITH_BIAS", with_bias),
                ),
                # A few words, where a warp reads several taps.
                spills=tile.cols > 128 and tile.chunk < 256,
            ),
            grid=blocks_of(g, tile),
            block=_THREADS,
            arguments=(
                input_(1),
                input_(0),
                output(0) if direct else workspace(partial_at),
                workspace(bias_at),
                int64(g.batch),
                int64(tile.slices),
            ),
            shared_bytes=ring * tile.stage_bytes + EXTRA_BYTES,
        )
    ]
    if not direct:
        launches.append(reduce(problem, tile.slices, partial_at))
    if with_bias:
        launches.append(reduce_slices(problem.dtype, g.out_channels, bias_rows, bias_at, 1))
    return Part(_FAMILY, f"wgmma, {tile}, turned on the way", tuple(launches), room.bytes)
