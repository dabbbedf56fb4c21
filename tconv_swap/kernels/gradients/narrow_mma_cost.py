"""The expected time of a tile of the narrow kernels: a sum of parts, fitted to measurements.

1,600 tiles of 7 layers were measured on an H200 (docs/kernels/grad_input/narrow_mma.md); of the about 29 tiles of a
problem, the one of grad_weight that is expected to be the fastest took on average 1.10 times as long as the fastest.
The prices of grad_input are near those of the 1,600 tiles, as far as 875 later times do not contradict them: the
standard deviation of the logarithm is 0.20 of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from tconv_swap.kernels.gradients.grad_output_tile import GradOutputTile, columns, loaded_bytes, loads, rows
from tconv_swap.kernels.gradients.narrow_mma import (
    MAX_KEPT_SOURCES,
    MAX_PREFETCHED_BYTES,
    rounds_nothing,
)
from tconv_swap.kernels.problem import Device, Problem

#: Loads of a batch (BATCH of csrc/kernels/gradients/grad_output_tile.cuh).
BATCH = 8

#: Microseconds of a unit, and the microseconds to add times 8 / warps, because few warps do not hide each other's
#: waits.
Price = tuple[float, float]


class Prices(NamedTuple):
    """The prices of one unit of each amount of :class:`Work`, in its order, on an H200."""

    read: Price
    multiply: Price
    instruction: Price
    copy: Price
    place: Price
    put: Price
    weight: Price
    input: Price
    byte: Price
    tensor_byte: Price
    partial_byte: Price
    sector: Price
    wait: Price
    step: Price
    round: Price
    start: Price


GRAD_INPUT = Prices(
    read=(6.35e-4, 0),
    multiply=(2.43e-4, 1.2e-3),
    instruction=(0, 0),
    copy=(7.2e-4, 0),
    place=(2.1e-3, 0),
    put=(2.0e-4, 3.2e-4),
    weight=(3.7e-3, 0),
    input=(0, 0),
    byte=(7.8e-6, 0),
    tensor_byte=(2.1e-6, 0),
    partial_byte=(8.3e-5, 0),
    sector=(8.7e-4, 0),
    wait=(0.16, 0),
    step=(0.16, 0),
    round=(0.31, 0),
    start=(9.5, 0),
)
GRAD_WEIGHT = Prices(
    read=(1.15e-4, 5.1e-4),
    multiply=(9.3e-4, 0),
    instruction=(4.0e-5, 0),
    copy=(0, 1.73e-3),
    place=(4.6e-3, 0),
    put=(0, 9.2e-4),
    weight=(0, 0),
    input=(2.1e-3, 0),
    byte=(5.6e-6, 0),
    tensor_byte=(5.9e-6, 0),
    partial_byte=(2.0e-4, 0),
    sector=(0, 0),
    wait=(0, 0),
    step=(0.183, 0),
    round=(0, 0),
    start=(12.5, 0),
)


class Work(NamedTuple):
    """The work of one multiprocessor. Instructions are counted for each warp."""

    #: Passes over the banks of shared memory.
    reads: float
    multiplies: float
    #: Instructions beside the copies.
    instructions: float
    #: Copies to shared memory, copies whose addresses are computed anew, and elements that go through registers.
    copies: float
    places: float
    puts: float
    #: Loads of weights, and of vectors of the input.
    weights: float
    inputs: float
    #: Bytes of grad_output that tiles load, with halos; bytes of the problem's tensors; bytes of partial sums.
    loaded: float
    tensors: float
    partials: float
    #: Sectors of memory that stores touch, once for each store, beyond those that are stored, and that loads of weights
    #: touch; batches of loads through registers that are waited for one after the other.
    sectors: float
    waits: float
    #: Chunks of tiles that a block computes one after another; waves of blocks; the launch.
    steps: float
    rounds: float
    start: float = 1.0


@dataclass(frozen=True, slots=True)
class Multiplies:
    """The steps of 8 k of all warps of a block for one tile and chunk, and the contents of a step."""

    steps: float
    m_tiles: int
    n_tiles: int
    passes: float
    #: Reads of shared memory for each m tile, beside those of grad_output.
    other_reads: int


def microseconds(work: Work, prices: Prices, warps: float) -> float:
    """Returns the expected microseconds if ``warps`` warps are resident on a multiprocessor."""
    lone = 8 / warps
    total = 0.0
    for amount, (alone, waiting) in zip(work, prices, strict=True):
        total += amount * (alone + waiting * lone)
    return total


class TileWork(NamedTuple):
    """The work of one chunk of a tile, which is the same for all sizes of a layer."""

    multiplies: Multiplies
    #: Passes over the banks, products and instructions of a step.
    reads: float
    products: int
    instructions: int
    #: Elements of grad_output for each thread of a warp, whether they go through registers, how many a load has, and
    #: whether the addresses of loads are computed anew.
    elements: float
    through_registers: bool
    load: int
    places: bool
    #: Batches of loads that go to shared memory through registers at once; none where they are issued a tile ahead.
    batches: int
    loaded_bytes: float
    threads: int


def tile_work(problem: Problem, grad_output: GradOutputTile, multiplies: Multiplies) -> TileWork:
    """Returns the work of one chunk of a tile."""
    geometry, channels_last, bytes_ = problem.geometry, problem.channels_last, problem.dtype.itemsize
    few_channels = geometry.in_channels_per_group <= 8
    products, additions, splitting = 1, 0, 1 if bytes_ == 4 else 0
    if rounds_nothing(problem):
        products, additions, splitting = (2, 2, 3) if few_channels else (3, 4, 3)
    m, n = multiplies.m_tiles, multiplies.n_tiles
    count = loads(geometry, grad_output, channels_last)
    is_ahead = count * grad_output.load * bytes_ <= MAX_PREFETCHED_BYTES
    return TileWork(
        multiplies,
        reads=2 * n * multiplies.passes + multiplies.other_reads * m,
        products=products,
        instructions=n * 2 * (1 + splitting) + 2 + m * 4 * (1 + splitting) + m * n * (products + additions),
        elements=grad_output.channels
        * rows(geometry, grad_output)
        * columns(geometry, grad_output, channels_last)
        / 32,
        through_registers=not grad_output.async_,
        load=grad_output.load,
        places=count > MAX_KEPT_SOURCES,
        batches=0 if grad_output.async_ or is_ahead else ceil(count / BATCH),
        loaded_bytes=loaded_bytes(geometry, grad_output, channels_last, bytes_),
        threads=grad_output.threads,
    )


def work_of(
    problem: Problem,
    of_tile: TileWork,
    device: Device,
    tiles: int,
    blocks: int,
    resident: int,
    chunks: int,
    weights: float = 0.0,
    inputs: float = 0.0,
    partial_bytes: float = 0.0,
    sectors: float = 0.0,
) -> tuple[Work, float]:
    """Returns the work of a multiprocessor, and how many warps are resident on it, for ``tiles`` tiles of ``chunks``
    chunks of the taps each, in ``blocks`` blocks of which ``resident`` run on a multiprocessor at a time.

    Args:
        of_tile: the work of one chunk of a tile.
        weights: loads of weights of all blocks.
        inputs: loads of the input of a tile.
        partial_bytes: bytes of partial sums.
        sectors: of memory that all blocks touch, as ``Work`` has them.
    """
    multiprocessors = device.multiprocessors
    occupied = max(1.0, min(resident, blocks / multiprocessors))
    rounds = blocks / (multiprocessors * resident)
    if rounds <= 1:
        uneven = ceil(blocks / multiprocessors) * multiprocessors / blocks
    else:
        uneven = 1 + 0.5 * (ceil(rounds) / rounds - 1)
    share = tiles / multiprocessors * uneven
    multiplies = of_tile.multiplies
    steps, elements = share * multiplies.steps, share * chunks * of_tile.elements
    copies = elements / of_tile.load
    work = Work(
        reads=steps * of_tile.reads,
        multiplies=steps * multiplies.m_tiles * multiplies.n_tiles * of_tile.products,
        instructions=steps * of_tile.instructions,
        copies=copies,
        places=copies if of_tile.places else 0.0,
        puts=elements if of_tile.through_registers else 0.0,
        weights=weights / 32 / multiprocessors,
        inputs=share * inputs,
        loaded=tiles * chunks * of_tile.loaded_bytes / multiprocessors,
        tensors=problem.geometry.elements * problem.dtype.itemsize / multiprocessors,
        partials=partial_bytes / multiprocessors,
        sectors=sectors / multiprocessors,
        waits=share * chunks * of_tile.batches / occupied,
        steps=share * chunks / occupied,
        rounds=max(1.0, rounds),
    )
    return work, occupied * of_tile.threads / 32
