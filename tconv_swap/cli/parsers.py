"""Parses the text of options. Every parser raises a ValueError for a text that it does not take."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tconv_swap import op
from tconv_swap.blocks.modules import Fuse
from tconv_swap.ways.way import parse_way

#: PyTorch counts the bytes of a tensor in signed 64 bits, and the largest element type, float64, has eight bytes.
MAX_ELEMENTS = (2**63 - 1) // 8
KEEP, AUTO = "keep", "auto"


def parse_shape(text: str) -> tuple[int, ...]:
    """Returns `2,3,64,64` (or `2x3x64x64`) as a tuple.

    Raises:
        ValueError: it is not a list of positive integers, or no tensor can be as large.
    """
    sizes = text.lower().replace("x", ",").split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r} is not a shape such as 2,3,64,64")
    shape = tuple(int(size) for size in sizes)
    if math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"{text!r} is more than a tensor can hold")
    return shape


def parse_dtype(text: str) -> torch.dtype:
    """Returns `float16`, `half` or `torch.float16` as a dtype.

    Raises:
        ValueError: there is no dtype of this name in which networks run.
    """
    found = getattr(torch, text.removeprefix("torch."), None)
    # Only these: float8 and others are storage formats, for which PyTorch has no layers.
    if not isinstance(found, torch.dtype) or found not in op.SUPPORTED_DTYPES:
        raise ValueError(f"{text!r} is not one of the dtypes float64, float32, float16 and bfloat16")
    return found


def check_seed(seed: int) -> int:
    """Returns `seed`, if PyTorch's generators take it and the next few seeds.

    Raises:
        ValueError: they do not.
    """
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{seed} is not a whole number of 64 bits")
    return seed


def check_finite(number: float) -> float:
    """Returns `number`, which must be finite: with an infinite tolerance every comparison would pass.

    Raises:
        ValueError: it is infinite or NaN.
    """
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def check_way(text: str) -> str:
    """Returns `text`, if it is `keep`, `auto` or the name of a way.

    Raises:
        ValueError: it is not.
    """
    if text not in (KEEP, AUTO):
        parse_way(text)
    return text


def parse_fuse(text: str) -> Fuse:
    """Returns the choice of blocks that a word names; None for `none`."""
    choices: dict[str, Fuse] = {"blocks": "blocks", "all": "all", "none": None}
    return choices[text]


def if_valid(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a parser that keeps a text which `parse` takes."""

    def check(text: str) -> str:
        parse(text)
        return text

    return check
