"""Which launches compute a normalisation: one where a block or a cluster holds a tile, else two.

The choice is by predicted time, of which docs/kernels/norm.md has the byte counts and the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tconv_swap.kernels.norm.shape import ACCESS_BYTES, FROM_OUTPUT, MOST_ITEMS, Norm, Tiling
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    Constant,
    Kernel,
    Launch,
    Output,
    Plan,
    input_,
    int64,
    output,
    struct,
    workspace,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: STAGE of the kernels.
_TOGETHER, _REDUCE, _APPLY = 0, 1, 2
_FORWARD, _BACKWARD = "norm_forward", "norm_backward"
#: Bytes a microsecond: memory of an H200, copying; its L2.
_COPY_RATE, _L2_RATE = 4.284e6, 9e6
#: Microseconds: of a launch; of a block that waits for its first bytes, reduces, and waits for its cluster.
_LAUNCH, _BLOCK = 2.5, 2.0
#: What stays in the L2 from one launch to the next, in bytes.
_L2_BYTES = 30e6
#: So many multiprocessors of a GPU's take all that its memory gives.
_ENOUGH_MULTIPROCESSORS = 0.7
_MOST_THREADS_RESIDENT = 2048
_SMALL_BLOCK_BYTES, _SMALL_THREADS, _THREADS = 16 << 10, 128, 512
#: Of the kernels that share the work with another launch.
_SLICE_THREADS = 256
#: Items that a thread of the last launch takes, at most: a new block puts all slices together again.
_SLICE_DEPTH = 32
#: Slices whose statistics every block of the last launch puts together.
_MOST_PARTIALS = 128
_CLUSTERS = (1, 2, 4, 8)
#: Of a kernel's own; 48 KB of its own and what a launch asks for need no permission, which a launch of more asks for.
_STATIC_BYTES, _UNASKED_BYTES = 20 << 10, 48 << 10
_UNROLL = 4
#: Of 256 threads, whose registers let about so many be on a multiprocessor.
_SLICES_RESIDENT = 4


#: Threads, stage, blocks of a cluster, blocks, the kernel's struct, bytes of shared memory.
_MakeLaunch = Callable[[int, int, int, int, tuple[int, ...], int], Launch]


@dataclass(frozen=True, slots=True)
class _Together:
    """One launch. ``microseconds``: as predicted."""

    cluster: int
    threads: int
    cached: int
    shared_bytes: int
    microseconds: float


def plan_forward(
    norm: Norm, *, trains: bool, updates: bool, momentum: float | None, saves: bool, device: Device
) -> Plan | None:
    """Inputs: the tensor, weight, bias, running_mean, running_var, num_batches_tracked, all but the first or None; with
    ``norm.adds`` what is added, which lies as the tensor does.
    Outputs: the tensor normalised and activated; with ``saves`` also ``[2, groups]`` float32, means and
    ``1 / sqrt(variance + eps)``, which the backward pass starts from. None where the kernels do not claim it.

    Args:
        trains: by the batch's statistics, else by the running ones.
        updates: bring the running statistics up to date, and count the batch.
        momentum: of that; None: the average of all batches, which num_batches_tracked has counted already.
    """
    if not _is_claimed(norm):
        return None
    tiling = Tiling.of(norm)
    outputs = [Output(norm.shape, norm.channels_last)]
    if saves:
        outputs.append(Output((2, norm.groups), dtype=torch.float32))
    factor = 0.0 if momentum is None else momentum
    counts = 0 if not updates else -1 if momentum is None else 1

    def launch(
        threads: int, stage: int, cluster: int, blocks: int, words: tuple[int, ...], shared: int
    ) -> Launch:
        arguments = (
            input_(0),
            output(0),
            input_(1),
            input_(2),
            *((input_(3), input_(4), input_(5)) if updates or not trains else (int64(0),) * 3),
            output(1) if saves and stage != _REDUCE else int64(0),
            workspace(0) if stage != _TOGETHER else int64(0),
            input_(6) if norm.adds else int64(0),
        )
        constants = _constants(tiling, threads, stage, cluster)
        return _launch(_FORWARD, constants, blocks, threads, arguments, words, shared, stage)

    if not trains:
        slices = _slices_to_apply(tiling, device)
        words = tiling.words(slices, trains=False)
        one = launch(_SLICE_THREADS, _APPLY, 1, tiling.tiles * slices, words, 0)
        return Plan("norm", "running statistics: one pass", tuple(outputs), (_alone(one),))
    return _planned(tiling, device, 1, True, counts, factor, tuple(outputs), launch)


def plan_backward(norm: Norm, *, trains: bool, wants: tuple[bool, bool], device: Device) -> Plan | None:
    """Inputs: the gradient of the output, the tensor that was normalised, what the forward pass saved, weight, bias;
    with ``norm.adds`` the output. Outputs: the gradients that ``wants`` asks for: the tensor's; ``[groups]`` of the
    weight and as many of the bias, float32 for every image where statistics are per image, else as the parameters; with
    ``norm.adds``, where the tensor's is always wanted, that of what was added. None as above.

    Args:
        trains: the forward pass went by the batch's statistics.
    """
    if not _is_claimed(norm):
        return None
    tiling = Tiling.of(norm)
    wants_input, wants_parameters = wants
    assert wants_input or not norm.adds
    of_parameters = torch.float32 if norm.per_image else norm.parameters
    outputs = [Output(norm.shape, norm.channels_last)] if wants_input else []
    if wants_parameters:
        outputs += [Output((norm.groups,), dtype=of_parameters)] * 2
    if norm.adds:
        outputs.append(Output(norm.shape, norm.channels_last))
    first: Argument = output(0) if wants_input else int64(0)
    others = (output(wants_input), output(wants_input + 1)) if wants_parameters else (int64(0), int64(0))

    def launch(
        threads: int, stage: int, cluster: int, blocks: int, words: tuple[int, ...], shared: int
    ) -> Launch:
        arguments = (
            *(input_(i) for i in range(5)),
            first,
            *((int64(0), int64(0)) if stage == _REDUCE else others),
            workspace(0) if stage != _TOGETHER else int64(0),
            *((input_(5), output(len(outputs) - 1)) if norm.adds else (int64(0), int64(0))),
        )
        constants = (*_constants(tiling, threads, stage, cluster), ("Gradient", ELEMENT_TYPES[of_parameters]))
        return _launch(_BACKWARD, constants, blocks, threads, arguments, words, shared, stage)

    if not trains and not wants_parameters:
        slices = _slices_to_apply(tiling, device)
        words = tiling.words(slices, trains=False)
        one = launch(_SLICE_THREADS, _APPLY, 1, tiling.tiles * slices, words, 0)
        return Plan(
            "norm", "fixed statistics, no gradient of a parameter: one pass", tuple(outputs), (_alone(one),)
        )
    return _planned(tiling, device, 2, trains, 0, 0.0, tuple(outputs), launch)


def _alone(launch: Launch) -> Launch:
    """Of a plan by itself: what runs before it is somebody else's."""
    return replace(launch, overlaps_previous=False)


def _is_claimed(norm: Norm) -> bool:
    return (
        norm.dtype in DTYPES
        and norm.parameters in (norm.dtype, torch.float32)
        and norm.bytes > 0
        and Tiling.of(norm).items < MOST_ITEMS
        and norm.groups < MOST_ITEMS // _MOST_PARTIALS
        and (norm.activation in FROM_OUTPUT or not norm.adds)
    )


def _constants(tiling: Tiling, threads: int, stage: int, cluster: int) -> tuple[tuple[str, Constant], ...]:
    norm = tiling.norm
    return (
        ("Element", ELEMENT_TYPES[norm.dtype]),
        ("Parameter", ELEMENT_TYPES[norm.parameters]),
        ("VALUES", tiling.values),
        ("THREADS", threads),
        ("CHANNELS_LAST", tiling.walks_channels_last),
        ("ACTIVATION", int(norm.activation)),
        ("CLUSTER", cluster),
        ("STAGE", stage),
        ("ADDS", norm.adds),
    )


def _launch(
    entry: str,
    constants: tuple[tuple[str, Constant], ...],
    blocks: int,
    threads: int,
    arguments: tuple[Argument, ...],
    words: tuple[int, ...],
    shared_bytes: int,
    stage: int,
) -> Launch:
    return Launch(
        Kernel(f"norm/{entry}.cu", entry, constants),
        blocks,
        threads,
        (*arguments, struct(0)),
        shared_bytes,
        structs=(words,),
        overlaps_previous=stage == _APPLY,
    )


def _planned(
    tiling: Tiling,
    device: Device,
    read: int,
    trains: bool,
    counts: int,
    momentum: float,
    outputs: tuple[Output, ...],
    launch: _MakeLaunch,
) -> Plan:
    """The faster of one launch and two. ``read``: tensors that are read before one is written."""
    ways = [
        _together(tiling, device, read, cluster) for cluster in _CLUSTERS if _has_cluster(device, cluster)
    ]
    best = min(ways, key=lambda way: way.microseconds)
    if best.microseconds <= _apart_microseconds(tiling, read):
        words = tiling.words(
            best.cluster, cached=best.cached, trains=trains, counts=counts, momentum=momentum
        )
        blocks = tiling.tiles * best.cluster
        one = launch(best.threads, _TOGETHER, best.cluster, blocks, words, best.shared_bytes)
        shared_by = f"{best.cluster} blocks" if best.cluster > 1 else "a block"
        return Plan("norm", f"{shared_by} to a tile: one launch", outputs, (one,))
    slices, cluster = _slices_to_reduce(tiling, device)
    partials = ceil_div(slices, cluster), tiling.slice(slices) * cluster
    reducing = tiling.words(slices, trains=trains)
    to_apply = _slices_to_apply(tiling, device)
    applying = tiling.words(to_apply, partials=partials, trains=trains, counts=counts, momentum=momentum)
    return Plan(
        "norm",
        f"{slices} slices of a tile: reduced, then applied",
        outputs,
        (
            launch(_SLICE_THREADS, _REDUCE, cluster, tiling.tiles * slices, reducing, 0),
            launch(_SLICE_THREADS, _APPLY, 1, tiling.tiles * to_apply, applying, 0),
        ),
        workspace_bytes=partials[0] * tiling.norm.groups * 8,
    )


def _has_cluster(device: Device, blocks: int) -> bool:
    return blocks == 1 or device.compute_capability >= 90


def _together(tiling: Tiling, device: Device, read: int, cluster: int) -> _Together:
    each = tiling.slice(cluster)
    block_bytes = each * tiling.lanes * tiling.item_bytes * read
    threads = _SMALL_THREADS if block_bytes <= _SMALL_BLOCK_BYTES else _THREADS
    row = threads * tiling.item_bytes * read
    needed = ceil_div(each, tiling.step(threads))
    cached = min(needed, (device.shared_memory_per_block - _STATIC_BYTES) // row)
    shared = cached * row
    if _UNASKED_BYTES - _STATIC_BYTES < shared <= _UNASKED_BYTES:
        shared = _UNASKED_BYTES + ACCESS_BYTES
    blocks = tiling.tiles * cluster
    resident = max(
        1,
        min(
            _MOST_THREADS_RESIDENT // threads // 2, device.shared_memory_per_block // (shared + _STATIC_BYTES)
        ),
    )
    slots = device.multiprocessors * resident
    waves = ceil_div(blocks, slots)
    share = min(1.0, min(blocks, device.multiprocessors) / (_ENOUGH_MULTIPROCESSORS * device.multiprocessors))
    again = (1 - cached / needed) * read * tiling.norm.bytes
    rate = _L2_RATE if min(blocks, slots) * block_bytes <= _L2_BYTES else _COPY_RATE
    moving = ((read + 1) * tiling.norm.bytes / _COPY_RATE + again / rate) / share
    if waves > 1:
        moving *= waves * slots / blocks
    return _Together(cluster, threads, cached, shared, _LAUNCH + _BLOCK * waves + moving)


def _apart_microseconds(tiling: Tiling, read: int) -> float:
    size = tiling.norm.bytes
    again = read * size / (_L2_RATE if read * size <= _L2_BYTES else _COPY_RATE)
    return 2 * (_LAUNCH + _BLOCK) + (read + 1) * size / _COPY_RATE + again


def _slices_to_reduce(tiling: Tiling, device: Device) -> tuple[int, int]:
    """Slices of a tile, and how many of them a cluster puts together at once."""
    wanted = ceil_div(_SLICES_RESIDENT * device.multiprocessors, tiling.tiles)
    slices = max(1, min(wanted, ceil_div(tiling.items, tiling.step(_SLICE_THREADS) * _UNROLL)))
    cluster = _CLUSTERS[-1] if slices > _CLUSTERS[-1] and _has_cluster(device, _CLUSTERS[-1]) else 1
    return min(round_up(slices, cluster), _MOST_PARTIALS * cluster), cluster


def _slices_to_apply(tiling: Tiling, device: Device) -> int:
    row = tiling.step(_SLICE_THREADS)
    for_all = ceil_div(_SLICES_RESIDENT * device.multiprocessors, tiling.tiles)
    return max(
        ceil_div(tiling.items, row * _SLICE_DEPTH), min(for_all, ceil_div(tiling.items, row * _UNROLL))
    )
