"""What holds for all sizes of a layer: which powers of two divide its rows, and which sizes represent all others. Pure
functions of data.

A layer is a geometry whose batch, height and width do not matter (``of_any_size``).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, log2

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.schedules import ONE_PIXEL, RAGGED_SIZES, SINGLE, SIZES, SIZES_OF_ONE_ROW

_SIDE = 64
#: The elements of the input, the output and the weight of a usual size: 1 GiB of float32.
MAX_ELEMENTS = 1 << 28


@lru_cache(maxsize=4096)
def of_any_size(geometry: Geometry) -> Geometry:
    """Returns a geometry that is equal for all sizes of a layer."""
    return geometry._replace(batch=1, height=_SIDE, width=_SIDE)


@lru_cache(maxsize=1024)
def representative_sizes(layer: Geometry) -> tuple[tuple[Geometry, ...], tuple[float, ...]]:
    """Returns sizes that represent all sizes of a layer, and the weight of each."""
    found = {
        layer._replace(batch=batch, height=height, width=width): SINGLE if batch == 1 else 1.0
        for batch, height, width in (SIZES_OF_ONE_ROW if layer.one_row else SIZES)
    }
    found = {size: weight for size, weight in found.items() if min(size.out_height, size.out_width) > 0}
    usual = {size: weight for size, weight in found.items() if size.elements <= MAX_ELEMENTS} or found
    return tuple(usual), tuple(usual.values())


def usual_sizes(layer: Geometry) -> list[Geometry]:
    """Returns sizes whose plans have the kernels of a layer: those that represent all, also with odd columns, and of
    images of any size, and one pixel. Few sizes need another kernel."""
    sizes, _ = representative_sizes(of_any_size(layer))
    odd = [size._replace(width=size.width + 1) for size in sizes]
    further = ONE_PIXEL if layer.one_row else (*RAGGED_SIZES, *ONE_PIXEL)
    others = [layer._replace(batch=batch, height=height, width=width) for batch, height, width in further]
    return list(dict.fromkeys((*sizes, *odd, *filter(may_be_called, others))))


def may_be_called(size: Geometry) -> bool:
    """Returns whether a layer has an output of this size, and all of it together usual memory."""
    return min(size.out_height, size.out_width) > 0 and size.elements <= MAX_ELEMENTS


def other_sizes(size: Geometry) -> list[Geometry]:
    """Returns the sizes that a layer probably has beside this one: half and twice its batch, rows and columns; then the
    usual ones, the nearest first, by factors of the batch and of the map."""
    size = size._replace(batch=max(1, size.batch))  # an empty batch says nothing of the next one

    def distance(other: Geometry) -> float:
        batch = abs(log2(other.batch / size.batch))
        return batch + abs(log2(other.height * other.width / (size.height * size.width)))

    half, twice = (
        {name: max(1, round(factor * getattr(size, name))) for name in ("batch", "height", "width")}
        for factor in (0.5, 2.0)
    )
    changes = [{name: each[name]} for each in (half, twice) for name in each]
    changes += [{name: each[name] for name in ("height", "width")} for each in (half, twice)]
    near = [size._replace(**change) for change in changes]
    return list(dict.fromkeys((*filter(may_be_called, near), *sorted(usual_sizes(size), key=distance))))


def power_of_two_dividing(n: int, limit: int) -> int:
    """Returns the largest power of two that divides n and is at most ``limit``, itself a power of two."""
    return gcd(n, limit)


def out_row_multiple(layer: Geometry, row_multiple: int, limit: int) -> int:
    """Returns the largest power of two up to ``limit`` that divides the rows of the output for every size at which
    ``row_multiple``, a power of two up to 64, divides the rows of the input."""
    return gcd(layer.out_width, row_multiple * layer.stride[1], limit)
