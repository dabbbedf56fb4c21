"""The arithmetic of csrc/kernels/pad/reflection_pad.cu in PyTorch, from the words that a launch passes to the kernel.

It computes all threads at once, with the kernel's own division, offsets and order of additions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tconv_swap.runtime.program import Plan

NONE = -1


def emulate(made: Plan, given: Tensor) -> Tensor:
    """Returns what the kernel writes, in the layout of the plan's output. Every element of the output is written once,
    and nothing outside the tensors is accessed."""
    (launch,) = made.launches
    (output,) = made.outputs
    constants, words = dict(launch.kernel.constants), iter(launch.structs[0])
    values, at_once = int(constants["VALUES"]), int(constants["PLANES"])
    planes = next(words)
    rows, columns, (plane_items, row_items, pixel_items) = _three(words), _three(words), _divisors(words)
    form = torch.channels_last if output.channels_last else torch.contiguous_format
    assert given.is_contiguous(memory_format=form)
    read = given.permute(0, 2, 3, 1).reshape(-1) if output.channels_last else given.reshape(-1)
    read = read.view(-1, values)
    thread = torch.arange(launch.grid * launch.block)
    group, in_plane = _divided(thread, plane_items)
    row, in_row = _divided(in_plane, row_items)
    col, item = _divided(in_row, pixel_items)
    backward = launch.kernel.entry == "reflection_pad_backward"
    width, height = (axis[1] if backward else axis[0] for axis in (columns, rows))
    read_plane, read_row = height * width * pixel_items[0], width * pixel_items[0]
    written = torch.full((planes * plane_items[0], values), float("nan"), dtype=given.dtype)
    count = torch.zeros(len(written), dtype=torch.int64)
    for i in range(at_once):
        plane = group * at_once + i
        found = torch.zeros((len(thread), values), dtype=torch.promote_types(given.dtype, torch.float32))
        for at_row in _sources(row, rows, backward):
            for at_col in _sources(col, columns, backward):
                exists = (plane < planes) & (at_row != NONE) & (at_col != NONE)
                at = plane * read_plane + at_row * read_row + at_col * pixel_items[0] + item
                assert bool(((at >= 0) & (at < len(read)))[exists].all())
                found[exists] += read[at[exists]].to(found.dtype)
        place = (plane * plane_items[0] + in_plane)[plane < planes]
        written[place] = found[plane < planes].to(given.dtype)
        count += torch.bincount(place, minlength=len(count))
    assert bool((count == 1).all())
    if not output.channels_last:
        return written.view(output.shape)
    batch, channels, *sizes = output.shape
    return written.view(batch, *sizes, channels).permute(0, 3, 1, 2)


def _three(words: Iterator[int]) -> tuple[int, int, int]:
    return next(words), next(words), next(words)


def _divisors(words: Iterator[int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(_three(words) for _ in range(3))


def _divided(numbers: Tensor, by: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Returns quotients and remainders as ``Divisor`` of common/sizes.cuh computes them."""
    value, magic, shift = by
    quotient = numbers * 2 * (magic % 2**32) >> 32 + shift
    return quotient, numbers - quotient * value


def _sources(place: Tensor, axis: tuple[int, int, int], backward: bool) -> list[Tensor]:
    size, padded_size, padding = axis
    if not backward:
        last = size - 1
        return [last - (last - (place - padding).abs()).abs()]
    mirrored = 2 * (size - 1) - place + padding
    before = torch.where((place >= 1) & (place <= padding), padding - place, NONE)
    behind = torch.where((place < size - 1) & (mirrored < padded_size), mirrored, NONE)
    has = before != NONE
    return [place + padding, torch.where(has, before, behind), torch.where(has, behind, NONE)]
