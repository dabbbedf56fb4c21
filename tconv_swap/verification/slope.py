"""Measures the scale of a whole tensor: how many times the truth it is on average, and how exactly rounding lets that
be known.

The largest error and the L2 norm cannot see a factor of 1.001 in float16, where every element may be off by nearly as
much. Thousands of elements that are all off in the same direction show it.

A result y of n elements is y_i = b t_i + e_i with the truth t, a scale b that should be 1, and the rounding e_i. Least
squares through the origin give

    b = <y, t> / <t, t> = 1 + sum(e_i t_i) / sum(t_i^2).

Rounding to nearest has no preferred direction, and its errors are independent: E e_i = 0, and

    se(b) = sqrt(sum(t_i^2 var(e_i))) / sum(t_i^2),

which falls with sqrt(n). One rounding, uniform over [-u s_i, u s_i], has var(e_i) = (u s_i)^2 / 3, where u is its
largest relative error and s_i the size of the terms of element i (at least |t_i|). Kernels may round more often, which
is not known beforehand but shows in the residuals y_i - b t_i: they replace the standard deviations (White, 1980). The
larger of the two standard errors counts. A scale may differ from 1 by `DEVIATIONS` of them, and in addition:

- by as much as PyTorch's own result. Equal inputs make equal outputs with equal roundings, and under autocast a weight
  is rounded once for all pixels, so that errors are not independent; but PyTorch's errors have the same causes;
- by `TIES` u: in a tensor of few different numbers, one may lie close to the middle between two numbers of the dtype,
  and be rounded to one of them there and to the other here;
- by n 2^-24 for sums of n terms, but at most by `ONE_SIDED` u: accumulators of tensor cores truncate, in one direction,
  the digits that they cannot hold.

float32 and float64 are not judged in this way because of the last point: there the accumulator does all the rounding,
how often it truncates depends on the kernel, and the L2 norm alone finds a factor of 1 + 1e-5. TF32 is left out too:
hardware may truncate operands, which is a scale in itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVIATIONS = 6.0
TIES = 0.125
ONE_SIDED = 0.5
_DTYPES = (torch.float16, torch.bfloat16)


def is_judged(dtype: torch.dtype) -> bool:
    """Returns whether a tensor of this dtype is rounded once, to nearest, so that its scale can be judged."""
    return dtype in _DTYPES


class Slope:
    """The scale of one tensor, added up piece by piece."""

    def __init__(self) -> None:
        self._squares = 0.0  # of the truth t
        self._products = 0.0  # t d, of the difference d of value and truth
        self._spread = 0.0  # (t s)^2
        self._fourth = 0.0  # t^4, t^3 d and (t d)^2, of which the residuals are made
        self._third = 0.0
        self._second = 0.0

    def add(self, value: Tensor, truth: Tensor, size: Tensor) -> None:
        """Adds the next piece; elements that are not finite in one of the three do not count.

        Args:
            value, truth: float64 tensors of one shape.
            size: the size of the terms of each element, s_i above.
        """
        finite = value.isfinite() & truth.isfinite() & size.isfinite()
        if not bool(finite.all()):
            value, truth, size = value[finite], truth[finite], size[finite]
        products = truth * (value - truth)
        squares = truth * truth
        self._squares += float(squares.sum())
        self._products += float(products.sum())
        self._spread += float((truth * size).square().sum())
        self._fourth += float(squares.square().sum())
        self._third += float((squares * products).sum())
        self._second += float(products.square().sum())

    @property
    def off(self) -> float:
        """Returns b - 1; 0 if the truth is zero and has no scale."""
        return self._products / self._squares if self._squares > 0 else 0.0

    def allowed(self, unit: float, terms: int) -> float:
        """Returns how far b may differ from 1 by rounding alone.

        Args:
            unit: the largest relative error of one rounding, u above.
            terms: the number of terms in the sum of an element.
        """
        if self._squares <= 0:
            return math.inf
        residuals = self._second - 2 * self.off * self._third + self.off**2 * self._fourth
        variance = max(residuals, unit**2 / 3 * self._spread)
        one_sided = min(ONE_SIDED * unit, terms * 2.0**-24)
        return TIES * unit + one_sided + DEVIATIONS * math.sqrt(variance) / self._squares
