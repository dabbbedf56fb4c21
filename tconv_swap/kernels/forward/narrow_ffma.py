"""Plans of csrc/kernels/forward/narrow_ffma.cu: few output channels, depthwise and narrow groups, phases with few
taps."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.forward_schedules import max_narrow_schedules
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.sizes import Words, divisor
from tconv_swap.kernels.forward.implicit_gemm_layout import MAX_PHASES
from tconv_swap.kernels.forward.narrow_ffma_choice import choose, terms
from tconv_swap.kernels.forward.narrow_ffma_cost import microseconds
from tconv_swap.kernels.forward.narrow_ffma_tile import (
    Tile,
    axes,
    columns_of_tiles,
    footprint,
    row_tiles,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, Output, Plan, input_, output, struct

#: With more multiply-adds for each element moved or for each output, FFMA bounds the time, and tensor cores are
#: faster.
MULTIPLY_ADDS_PER_ELEMENT = 84
MULTIPLY_ADDS_PER_OUTPUT = 96
#: The same limit of multiply-adds for each output, for layers of strides above MAX_PHASES, which implicit_gemm did not
#: support when this was measured. Apart from the narrow kernels only the general kernels and PyTorch's operator
#: computed such layers; they took 5.7 to 22 times as long (92 products for an output, on an H200).
MULTIPLY_ADDS_OF_WIDE_STRIDES = 128
#: With at most so many channels on one side, FFMA is faster even above these limits, because most of a tensor core's
#: tile would be padding.
NARROW_CHANNELS = 8
#: Batch, rows and columns of the nominal map by which a layer is judged, and of that of a layer whose maps have one
#: row.
NOMINAL_MAP, NOMINAL_ROW = (16, 64, 64), (16, 1, 1024)


def supports(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Whether the kernel is a candidate for the problem: memory bounds the problem, or no other kernel's tile fits
    it."""
    if dtype not in DTYPES or geometry.batch == 0:
        return False
    return _supports_layer(of_any_size(geometry))


@lru_cache(maxsize=1024)
def _supports_layer(layer: Geometry) -> bool:
    """Whether the kernel is a candidate for all sizes of a layer."""
    if min(layer.in_channels_per_group, layer.out_channels_per_group) <= NARROW_CHANNELS:
        return True
    if layer.stride[1] > MAX_PHASES:
        return terms(layer) <= MULTIPLY_ADDS_OF_WIDE_STRIDES
    one_row = layer.kernel[0] == layer.stride[0] == 1
    batch, height, width = NOMINAL_ROW if one_row else NOMINAL_MAP
    nominal = replace(layer, batch=batch, height=height, width=width)
    return (
        terms(layer) <= MULTIPLY_ADDS_PER_OUTPUT
        and nominal.macs <= MULTIPLY_ADDS_PER_ELEMENT * nominal.elements
    )


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the plan with the best tile, or None for a geometry for which the kernel is no candidate.

    The kernel computes in IEEE float32 even where the problem allows TF32. Inputs: input, weight, bias. Output: the
    output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1)
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns the ``count`` plans that are expected to be the fastest, the best first."""
    geometry, dtype, channels_last = problem.geometry, problem.dtype, problem.channels_last
    if not supports(geometry, dtype):
        return []
    plans = []
    for tile in choose(problem, device, max_narrow_schedules(problem, device), count):
        if columns_of_tiles(geometry, tile) * row_tiles(geometry, tile) >= INT32_LIMIT // 2:
            continue
        taken = footprint(geometry, tile, channels_last)
        time, repeat = microseconds(
            geometry, tile, taken, channels_last, dtype.itemsize, device.multiprocessors
        )
        channels = f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group"
        why = f"{channels}: float32 FFMA, about {time:.0f} us expected on an H200"
        plans.append(lower(problem, has_bias, tile, repeat, why))
    return plans


def _sizes(geometry: Geometry, tile: Tile, repeat: int) -> Words:
    """``NarrowFfmaSizes`` of csrc/kernels/common/sizes.cuh."""
    vertical, horizontal = axes(geometry)
    down = ceil_div(vertical.positions, tile.lanes_h * tile.thread_rows)
    all_tiles = row_tiles(geometry, tile)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(all_tiles, repeat),
        *divisor(down),
        *divisor(ceil_div(horizontal.positions, tile.lanes_w * tile.thread_columns)),
        *divisor(ceil_div(all_tiles, repeat)),
    )


def lower(problem: Problem, has_bias: bool, tile: Tile, repeat: int, why: str) -> Plan:
    """Returns the plan in which each block computes ``repeat`` tiles, one after another."""
    geometry, channels_last = problem.geometry, problem.channels_last
    taken = footprint(geometry, tile, channels_last)
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    kernel = Kernel(
        "forward/narrow_ffma.cu",
        "forward_narrow_ffma",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("Index", "int" if image * tile.block_images < INT32_LIMIT else "long long"),
            *geometry.layer_constants,
            ("CHANNELS_LAST", channels_last),
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            *bias_alone(has_bias),
            *tile.constants,
        ),
    )
    launch = Launch(
        kernel,
        grid=columns_of_tiles(geometry, tile) * ceil_div(row_tiles(geometry, tile), repeat),
        block=taken.threads,
        arguments=(input_(0), input_(1), input_(2), output(0), struct(0)),
        shared_bytes=taken.shared_bytes,
        structs=(_sizes(geometry, tile, repeat),),
    )
    return Plan(
        "narrow_ffma",
        why,
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(launch,) if geometry.batch else (),
    )
