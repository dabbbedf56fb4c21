"""The expected time of the tiles of csrc/kernels/grad_weight/im2col_nchw.cu, and the best tile of a kernel for a size.
The functions are pure.

The constants are fitted to 1,883 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.14 (docs/selection.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    BOX_PIXELS,
    MAX_MULTIPLIES,
    MIN_STAGES,
    Im2colKernel,
    Stage,
    Tile,
    copied_bytes,
    copies_grad_output,
    input_read_in_place,
    output_rows,
    ring,
    stages_of,
    supports_stage,
    tiles_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div

#: Clocks of the launches; of a byte of both tensors, of partial sums, and of the gradient.
LAUNCH_CLOCKS, BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS, GRADIENT_BYTE_CLOCKS = 16100, 0.000164, 0.00166, 0.0048
#: Clocks of a stage beside its work; of a warpgroup's step, and for each column and tile of 64 rows; of a row of a box,
#: and of its bytes.
STAGE_CLOCKS, STEP_CLOCKS, COLUMN_CLOCKS, ROW_CLOCKS, LOADED_BYTE_CLOCKS = 164, 16.7, 0.174, 0.395, 0.0147
#: How many times as long a stage takes of which the ring holds only two, and one whose quads of pixels are of two rows,
#: which lie in the same banks of shared memory.
SHORT_RING, TWO_ROWS = 1.15, 1.41


def best_tiles(
    geometry: Geometry, kernels: Iterable[Im2colKernel], device: Device
) -> list[tuple[float, Tile] | None]:
    """Returns for each kernel the tile that is expected to be the fastest, and its clocks; None where it computes no
    stage of this size, or where the copies would be too large."""
    stages = [
        (stage, fixed_clocks(geometry, stage))
        for stage in stages_of(geometry)
        if copied_bytes(geometry, stage) <= MAX_COPY_BYTES
    ]
    found = []
    for kernel in kernels:
        best = None
        for stage, fixed in stages:
            if not supports_stage(geometry, kernel, stage, device):
                continue
            one = with_splits(geometry, kernel, stage, device)
            if one is not None and (best is None or fixed + one[0] < best[0]):
                best = fixed + one[0], one[1]
        found.append(best)
    return found


def with_splits(
    geometry: Geometry, kernel: Im2colKernel, stage: Stage, device: Device
) -> tuple[float, Tile] | None:
    """Returns the tile with the number of splits that is expected to be the fastest, and its clocks beside
    ``fixed_clocks``; None where more splits are needed, because the tensor cores truncate long sums, than the workspace
    holds."""
    g = geometry
    images, down, across = stage.counts(g)
    stages = images * down * across
    bytes_of_copy = weight_bytes(g)
    max_splits = max(1, min(PARTIAL_LIMIT_BYTES // bytes_of_copy, stages // 4))
    min_splits = ceil_div(stages * stage.steps(g), MAX_MULTIPLIES)
    blocks = tiles_of(g, kernel)
    choices = {
        max(1, min_splits, min(max_splits, waves * device.multiprocessors // blocks)) for waves in (1, 2, 3)
    }
    of_stage = stage_clocks(g, kernel, stage, device)
    best = None
    for splits in sorted(choices):
        if splits > 1 and splits * bytes_of_copy > PARTIAL_LIMIT_BYTES:
            continue
        clocks = ceil_div(blocks * splits, device.multiprocessors) * ceil_div(stages, splits) * of_stage
        clocks += PARTIAL_BYTE_CLOCKS * bytes_of_copy * splits if splits > 1 else 0
        if best is None or clocks < best[0]:
            best = clocks, splits
    return None if best is None else (best[0], Tile(kernel, stage, best[1]))


def stage_clocks(geometry: Geometry, kernel: Im2colKernel, stage: Stage, device: Device) -> float:
    """Returns the expected clocks of a stage."""
    steps = stage.steps(geometry) * kernel.warpgroups
    input_rows = stage.images * stage.run_boxes(geometry) * kernel.cols
    rows = output_rows(geometry, kernel, stage)
    loaded = 4 * (BOX_PIXELS * input_rows + kernel.out_box_cols * rows)
    clocks = (
        STAGE_CLOCKS
        + steps * (STEP_CLOCKS + COLUMN_CLOCKS * kernel.m_tiles * kernel.cols)
        + ROW_CLOCKS * (input_rows + rows)
        + LOADED_BYTE_CLOCKS * loaded
    )
    if ring(geometry, kernel, stage, device) == MIN_STAGES:
        clocks *= SHORT_RING
    return clocks * (TWO_ROWS if stage.rows > 1 and stage.cols % 4 else 1.0)


def fixed_clocks(geometry: Geometry, stage: Stage) -> float:
    """Returns the expected clocks beside those of the stages and of partial sums."""
    copies = copies_grad_output(geometry) + (not input_read_in_place(geometry, stage))
    return (
        LAUNCH_CLOCKS
        + BYTE_CLOCKS * tensor_bytes(geometry, 4)
        + GRADIENT_BYTE_CLOCKS * weight_bytes(geometry)
        + copy_clocks(2 * copied_bytes(geometry, stage), copies)
    )
