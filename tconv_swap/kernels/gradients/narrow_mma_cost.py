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
    Price,
    TilePrice,
    rounds_nothing,
)
from tconv_swap.kernels.problem import Device, Problem

#: Loads of a batch (BATCH of csrc/kernels/gradients/grad_output_tile.cuh).
BATCH = 8


class Prices(NamedTuple):
    """The prices of one unit of each part of the work of a multiprocessor, on an H200. Instructions are counted for
    each warp."""

    #: A pass over the banks of shared memory.
    read: Price
    multiply: Price
    #: An instruction beside the copies.
    instruction: Price
    #: A copy to shared memory, a copy whose address is computed anew, and an element that goes through registers.
    copy: Price
    place: Price
    put: Price
    #: A load of a weight, and of a vector of the input.
    weight: Price
    input: Price
    #: A byte of grad_output that tiles load, with halos; of the problem's tensors; of partial sums.
    byte: Price
    tensor_byte: Price
    partial_byte: Price
    #: A sector of memory that stores touch, once for each store, beyond those that are stored, or that loads of weights
    #: touch.
    sector: Price
    #: A batch of loads through registers that is waited for; a chunk of a tile, of those that a block computes one
    #: after another.
    wait: Price
    step: Price
    #: A wave of blocks; the launch.
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


@dataclass(frozen=True, slots=True)
class Multiplies:
    """The steps of 8 k of all warps of a block for one tile and chunk, and the contents of a step."""

    steps: float
    m_tiles: int
    n_tiles: int
    passes: float
    #: Reads of shared memory for each m tile, beside those of grad_output.
    other_reads: int


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


def tile_price(of_chunk: TileWork, prices: Prices, chunks: int, inputs: float = 0.0) -> TilePrice:
    """Returns the price of a tile of ``chunks`` chunks of the taps each, with ``inputs`` loads of the input."""
    multiplies, elements = of_chunk.multiplies, chunks * of_chunk.elements
    copies = elements / of_chunk.load
    products = multiplies.m_tiles * multiplies.n_tiles * of_chunk.products
    issued = _sum(
        (multiplies.steps * of_chunk.reads, prices.read),
        (multiplies.steps * products, prices.multiply),
        (multiplies.steps * of_chunk.instructions, prices.instruction),
        (copies, prices.copy),
        (copies if of_chunk.places else 0.0, prices.place),
        (elements if of_chunk.through_registers else 0.0, prices.put),
        (inputs, prices.input),
    )
    latency = _sum((chunks * of_chunk.batches, prices.wait), (chunks, prices.step))
    loaded = _sum((chunks * of_chunk.loaded_bytes, prices.byte))
    return TilePrice(issued, latency, loaded, of_chunk.threads / 32)


def _sum(*amounts: tuple[float, Price]) -> Price:
    """Returns the price of these amounts."""
    alone = waiting = 0.0
    for amount, price in amounts:
        alone += amount * price[0]
        waiting += amount * price[1]
    return alone, waiting


def microseconds(
    problem: Problem,
    of_tile: TilePrice,
    prices: Prices,
    device: Device,
    tiles: int,
    blocks: int,
    resident: int,
    weights: float = 0.0,
    partial_bytes: float = 0.0,
    sectors: float = 0.0,
) -> float:
    """Returns the expected microseconds of ``tiles`` tiles in ``blocks`` blocks of which ``resident`` run on a
    multiprocessor at a time.

    Args:
        of_tile: the price of a tile, by these ``prices``.
        weights: loads of weights of all blocks.
        partial_bytes: bytes of partial sums.
        sectors: of memory that all blocks touch, as ``Prices`` counts them.
    """
    multiprocessors = device.multiprocessors
    occupied = max(1.0, min(resident, blocks / multiprocessors))
    rounds = blocks / (multiprocessors * resident)
    if rounds <= 1:
        uneven = ceil(blocks / multiprocessors) * multiprocessors / blocks
    else:
        uneven = 1 + 0.5 * (ceil(rounds) / rounds - 1)
    mean = tiles / multiprocessors
    share = mean * uneven
    alone, waiting = _sum(
        (share, of_tile.issued),
        (share / occupied, of_tile.latency),
        (mean, of_tile.loaded),
        (weights / 32 / multiprocessors, prices.weight),
        (problem.geometry.elements * problem.dtype.itemsize / multiprocessors, prices.tensor_byte),
        (partial_bytes / multiprocessors, prices.partial_byte),
        (sectors / multiprocessors, prices.sector),
        (max(1.0, rounds), prices.round),
        (1.0, prices.start),
    )
    return alone + waiting * 8 / (occupied * of_tile.warps)
