"""Measures how far a tensor is from the truth, and how far rounding alone may move it.

There are two norms, and both are always used. The largest single error finds one wrong pixel in a large tensor; the L2
norm finds an error that is small everywhere, such as a gradient with a wrong factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The error of the swapped network may be this many times the original's: two correct kernels that add in different
# orders differ by more in float32, where only the order matters, than where one rounding dominates.
FACTORS = {torch.float64: 16.0, torch.float32: 8.0}
REDUCED_PRECISION_FACTOR = 4.0

# A piece and the values computed from it fit into a CPU's cache.
_PIECE_ELEMENTS = {"cpu": 1 << 17}
_PIECE_ELEMENTS_ELSEWHERE = 1 << 24


@dataclass(frozen=True)
class Norms:
    """Errors relative to the tensor's scale: the largest, and the root mean square."""

    maximum: float = 0.0
    l2: float = 0.0

    def larger(self, other: Norms) -> Norms:
        return Norms(max(self.maximum, other.maximum), max(self.l2, other.l2))

    def times(self, factor: float) -> Norms:
        return Norms(self.maximum * factor, self.l2 * factor)


@dataclass(frozen=True)
class Tolerance:
    """The error that the user allows instead of the automatic limit: `atol + rtol * |reference|`."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison, in the norm that came closest to its limit."""

    norm: str
    error_original: float
    error_swapped: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error_swapped <= self.limit


def judge(
    original: Norms,
    swapped: Norms,
    limit: Norms,
    tolerance: Tolerance | None = None,
    scale: Verdict | None = None,
) -> Verdict:
    """Returns the verdict in the norm that uses most of its limit; with a tolerance, errors are in units of it.

    Args:
        scale: a verdict on the scale of the whole tensor, if there is one.
    """
    if tolerance is not None:
        return Verdict("allclose", original.maximum, swapped.maximum, 1.0)
    verdicts = [
        Verdict("max", original.maximum, swapped.maximum, limit.maximum),
        Verdict("L2", original.l2, swapped.l2, limit.l2),
    ]
    if scale is not None:
        verdicts.append(scale)
    return max(verdicts, key=lambda v: _ratio(v.error_swapped, v.limit))


def _ratio(error: float, limit: float) -> float:
    if math.isnan(error) or math.isnan(limit):
        return math.inf  # otherwise the other norm, which does not show this error, would give the verdict
    return error / limit if limit > 0 else (math.inf if error > 0 else 0.0)


class ErrorSum:
    """The error of one tensor against the truth, added up piece by piece, so that no whole float64 copy exists.

    An element counts if truth and original are finite. There a value that is not finite is an infinite error. If
    neither is finite, a finite value is an infinite error (an overflow or a NaN was hidden), and so is a value that
    neither of them has: NaN instead of an infinity, or the other infinity. If only float64 is finite, the original has
    overflowed, and rounding decides whether another result does too; but it must not overflow to the other sign. If
    only the original is finite, float64 says nothing.

    If CUDA kernels computed the value, NaN is allowed instead of an infinity: ours multiply values beyond the taps of a
    kernel by zero, and split float32 into parts, whose difference does not exist for an infinity.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self.cuda = cuda
        self.elements = 0
        self.not_finite = 0
        self.hidden = 0
        self.another = 0
        self.allowed_nan = 0
        self.worst = (0.0, -1, 0.0, 0.0)  # ratio, flat index, value, truth
        self._squares = 0.0
        self._energy = 0.0

    def add(
        self, value: Tensor, truth: Tensor, original: Tensor, scale: Tensor | float, energy: Tensor
    ) -> None:
        """Adds the next piece.

        Args:
            value, truth, original: float64 tensors of one shape.
            scale: the unit of the largest error, per element or for all; 0 only where truth is 0.
            energy: the root of the squares that the squared errors are compared with, summed over the piece.
        """
        if value.numel() == 0:
            return
        error = (value - truth).abs_()
        if not _all_finite(error, original):
            expected = truth.isfinite() & original.isfinite()
            finite = value.isfinite()
            self.not_finite += int((expected & ~finite).sum())
            self.hidden += int((finite & ~truth.isfinite() & ~original.isfinite()).sum())
            another = self._find_wrong_non_finite(value, truth, original)
            energy = torch.where(expected, energy, 0.0)
            error = torch.where(expected & finite, error, 0.0)
            wrong = (expected & ~finite) | another
            self._keep_worst(torch.where(wrong, math.inf, 0.0), value, truth)
        self._squares += float(error.square().sum())
        self._energy += float(energy.square().sum())
        self._keep_worst(torch.where(error > 0, error / scale, 0.0), value, truth)
        self.elements += value.numel()

    def _find_wrong_non_finite(self, value: Tensor, truth: Tensor, original: Tensor) -> Tensor:
        """Returns where the value is NaN or an infinity, but not the one that it has to be."""
        neither = ~truth.isfinite() & ~original.isfinite() & ~value.isfinite()
        for other in (truth, original):
            neither &= ~((value == other) | (value.isnan() & other.isnan()))
        if self.cuda or value.device.type == "cuda":
            self.allowed_nan += int((neither & value.isnan()).sum())
            neither &= ~value.isnan()
        # The product is NaN where the truth is zero, so there neither sign is wrong.
        same_sign = truth.isfinite() & original.isinf() & (truth * original > 0)
        another = neither | (same_sign & (value == -original))
        self.another += int(another.sum())
        return another

    def _keep_worst(self, ratio: Tensor, value: Tensor, truth: Tensor) -> None:
        # `max` and `argmax` treat NaN as the largest, so later comparisons have to do the same.
        largest = float(ratio.max())
        if largest > self.worst[0] or (math.isnan(largest) and not math.isnan(self.worst[0])):
            at = int(ratio.argmax())
            self.worst = (largest, self.elements + at, float(value[at]), float(truth[at]))

    @property
    def norms(self) -> Norms:
        if self.not_finite or self.hidden or self.another:
            return Norms(math.inf, math.inf)
        if self._squares == 0.0:
            return Norms(self.worst[0], 0.0)
        l2 = math.sqrt(self._squares / self._energy) if self._energy != 0 else math.inf
        return Norms(self.worst[0], l2)

    def describe(self, shape: torch.Size) -> str:
        """Says where the largest error is and what is wrong there; empty if all elements are equal."""
        parts = []
        if self.not_finite:
            parts.append(f"{self.not_finite} of {self.elements} NaN or Inf where the original has none")
        if self.hidden:
            parts.append(f"{self.hidden} of {self.elements} finite where the original is NaN or Inf")
        if self.another:
            parts.append(f"{self.another} of {self.elements} not the NaN or Inf that the original has")
        _, index, value, truth = self.worst
        if index >= 0:
            parts.append(f"worst at {_unravel(index, shape)}: {value:.6g}, expected {truth:.6g}")
        return "; ".join(parts)


def mismatch(value: Any, original: Any) -> str:
    """Returns what is wrong with the value apart from its numbers; empty if nothing is."""
    if not isinstance(value, Tensor):
        return f"is {type(value).__name__}, expected a tensor"
    if value.shape != original.shape:
        return f"has shape {list(value.shape)}, expected {list(original.shape)}"
    if value.dtype != original.dtype:
        return f"has dtype {value.dtype}, expected {original.dtype}"
    if value.device != original.device:
        return f"is on {value.device}, expected {original.device}"
    return ""


def layout_mismatch(value: Tensor, original: Tensor) -> str:
    """Returns how its memory layout differs from the original's; empty if it does not, or if this cannot be seen."""
    if value.layout != torch.strided or original.layout != torch.strided or not original.numel():
        return ""
    strides = [
        tuple(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
        for t in (value, original)
    ]
    if strides[0] == strides[1]:
        return ""
    return f"has strides {list(value.stride())}, expected {list(original.stride())}"


def difference(
    value: Tensor,
    truth: Tensor,
    original: Tensor,
    tolerance: Tolerance | None = None,
    *,
    cuda: bool = False,
) -> ErrorSum:
    """Returns the error of `value` against `truth`, relative to the largest |truth| and to its L2 norm.

    Args:
        value, truth, original: tensors of one shape and any dtype. Integers and booleans are equal or not: the error is
            then the fraction that differs, in both norms.
        cuda: whether CUDA kernels computed the value, wherever it is now.
    """
    result = ErrorSum(cuda=cuda)
    if not (value.is_floating_point() or value.is_complex()) and tolerance is None:
        for piece, exact, _ in _pieces(value, truth, original):
            apart = (piece != exact).double()
            zero = torch.zeros_like(apart)
            result.add(apart, zero, zero, 1.0, zero + 1)
        return _as_fraction(result)
    # A gradient that is exactly zero in float64 has as its unit what rounding left of it.
    largest, _ = _scale(truth, original)
    from_truth = largest > 0
    if not from_truth:
        largest, _ = _scale(original, original)
    for piece, exact, mine in _pieces(value, truth, original):
        scale = largest if tolerance is None else tolerance.atol + tolerance.rtol * exact.abs()
        result.add(piece, exact, mine, scale, exact if from_truth else mine)
    return result


def distance(value: Tensor, other: Tensor, scale: Tensor, tolerance: Tolerance | None = None) -> Norms:
    """Returns how far two tensors are apart on the scale of a third; elements that are not finite do not count."""
    if value.dtype == other.dtype and value.device == other.device and torch.equal(value, other):
        return Norms()
    if not (value.is_floating_point() or value.is_complex()) and tolerance is None:
        return difference(value, other, other).norms
    largest, energy = _scale(scale, other)
    if largest == 0:
        largest, energy = _scale(other, other)
    maximum = squares = 0.0
    for piece, against, exact in _pieces(value, other, scale):
        error = (piece - against).abs_()
        if not _all_finite(error):
            error = torch.where(piece.isfinite() & against.isfinite(), error, 0.0)
        squares += float(error.square().sum())
        if tolerance is not None:
            error = (error / (tolerance.atol + tolerance.rtol * exact.abs())).nan_to_num_(0.0, math.inf)
        maximum = max(maximum, float(error.max()))
    if tolerance is None:
        maximum = maximum / largest if largest else (math.inf if maximum else 0.0)
    l2 = math.sqrt(squares / energy) if energy else (math.inf if squares else 0.0)
    return Norms(maximum, l2)


def _scale(tensor: Tensor, original: Tensor) -> tuple[float, float]:
    """Returns the largest magnitude and the sum of squares of the elements that are finite in both."""
    largest = energy = 0.0
    for piece, mine, _ in _pieces(tensor, original, original):
        if not _all_finite(piece, mine):
            piece = torch.where(piece.isfinite() & mine.isfinite(), piece, 0.0)
        largest = max(largest, float(torch.linalg.vector_norm(piece, math.inf)))
        energy += float(torch.linalg.vector_norm(piece)) ** 2
    return largest, energy


def _all_finite(*pieces: Tensor) -> bool:
    """Returns False if any element is not finite; also if the sum overflows, which only makes the check slower."""
    return all(math.isfinite(float(piece.sum())) for piece in pieces)


def _as_fraction(result: ErrorSum) -> ErrorSum:
    """Turns both norms into the fraction of elements that differ, each of which was added with the error 1."""
    fraction = result._squares / result.elements if result.elements else 0.0
    result.worst = (fraction, *result.worst[1:])
    result._squares, result._energy = fraction**2, 1.0
    return result


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields pieces of three tensors in float64, of a limited number of elements, on the device of the first."""
    flat = [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1) for t in tensors]
    device = flat[0].device if flat[0].device.type != "mps" else torch.device("cpu")
    step = _PIECE_ELEMENTS.get(device.type, _PIECE_ELEMENTS_ELSEWHERE)
    for start in range(0, flat[0].numel(), step):
        a, b, c = (t[start : start + step].to(device).double() for t in flat)
        yield a, b, c


def _unravel(index: int, shape: torch.Size) -> list[int]:
    position = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        position.append(at)
    return position[::-1]


def roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest relative error with which a convolution in `dtype` rounds an operand or its result.

    float32 obeys PyTorch's switches: 2^-11 if they allow TF32 on this device, otherwise 2^-24.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return roundoff(torch.float32, device)
    real = dtype.to_real() if dtype.is_complex else dtype
    unit = torch.finfo(real).eps / 2
    if real is torch.float32:
        return max(unit, {"tf32": 2.0**-11, "bf16": 2.0**-9}.get(_float32_precision(device), 0.0))
    return unit


def _float32_precision(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        backend: Any = torch.backends.cudnn
    elif device.type == "cpu":
        backend = torch.backends.mkldnn
    else:
        return "ieee"
    # A switch that is not set on the operator is inherited from the backend, and so on.
    chosen = (backend.conv.fp32_precision, backend.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return next((str(setting) for setting in chosen if setting != "none"), "ieee")


def factor(dtype: torch.dtype, device: torch.device) -> float:
    """Returns how many times the original's error the swapped network's may be, for a tensor of this dtype."""
    reduced = roundoff(dtype, device) > 2.0**-23
    return REDUCED_PRECISION_FACTOR if reduced else FACTORS.get(dtype, FACTORS[torch.float32])


def excused(original: Norms, dtype: torch.dtype, device: torch.device, most: float) -> Norms:
    """Returns the error that the original's own error excuses: a factor times it, but at most `most`.

    If the original itself is worse than `most`, twice its error is excused.
    """
    times = factor(dtype, device)
    return Norms(
        *(max(min(times * error, most), 2 * error) for error in (original.maximum, original.l2)),
    )


def allowed_without_error(unit: float, elements: int) -> Norms:
    """Returns the error that a correct result may have even if the original happens to be exact.

    That is two roundings on average, and eight for the largest of many elements; the average over a few elements varies
    as a single element does.
    """
    return Norms(8 * unit, 2 * unit * (1 + 3 / math.sqrt(max(elements, 1))))
