"""What the planners of the two families that load both operands through TMA share: grad_input/implicit_gemm_tma.py and
grad_input/im2col.py. Their kernels share csrc/kernels/grad_input/tma_gemm.cuh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.grad_input.im2col_tile import Im2colTile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.problem import Device

#: The numbers of splits. More splits were never faster.
SPLITS = (2, 4)

_Tile = TypeVar("_Tile", TmaTile, Im2colTile)


def may_load(problem: StridedProblem, device: Device) -> bool:
    """Returns whether the device has TMA and wgmma (sm_90a), and they take the problem's elements."""
    return (
        device.architecture == "sm_90a"
        and problem.geometry.batch > 0
        and problem.dtype in DTYPES
        and problem.precision != "IEEE"
    )


def for_size(
    tile: _Tile, problem: StridedProblem, legal: Callable[[StridedProblem, _Tile], bool]
) -> Iterator[_Tile]:
    """Yields the tile with each number of splits that this size allows."""
    if tile.splits == 1:
        if legal(problem, tile):
            yield tile
        return
    count = problem.grad_input_elements
    for splits in SPLITS:
        if 4 * count * splits <= WORKSPACE_LIMIT_BYTES:
            one = tile._replace(splits=splits) if splits != tile.splits else tile
            if legal(problem, one):
                yield one
