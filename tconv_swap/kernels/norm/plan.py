"""Which launches compute a normalisation: one launch where a block or a cluster holds a tile, else two.
The choice is by predicted time; docs/kernels/norm.md has its byte counts and rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.norm.shape import ACCESS_BYTES, FROM_OUTPUT, MAX_ITEMS, Norm, Tiling
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div
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

#: STAGE of csrc/kernels/norm/norm.cuh.
_FUSED, _REDUCE, _APPLY = 0, 1, 2
_FORWARD, _BACKWARD = "norm_forward", "norm_backward"
#: Bytes a microsecond of an H200 in one launch, by the blocks that a multiprocessor runs at a time (the last: 3 or
#: more), and in two launches; and of its L2. Fitted, like the other numbers of the cost, to the times of
#: docs/kernels/norm.md.
_COPY_RATES, _TWO_PASS_RATE, _L2_RATE = {1: 5.0e6, 2: 3.95e6, 3: 3.2e6}, 4.0e6, 7.3e6
#: Microseconds of one launch and of two.
_ONE_LAUNCH, _TWO_LAUNCHES = 5.5, 12.8
#: Microseconds of a block that waits for its first bytes and reduces; what a cluster adds; and the share of them that
#: the next wave of blocks takes longer, where a multiprocessor runs one block at a time, and several.
_BLOCK, _CLUSTER, _NEXT_WAVE = 2.2, 1.5, (0.75, 0.6)
#: Bytes that stay in the L2 from one launch to the next.
_L2_BYTES = 30e6
#: The share of a GPU's multiprocessors that is enough to reach the full rate of its memory.
_SATURATING_SHARE = 0.75
#: Threads of a block of the single launch, and how many of such blocks share a multiprocessor's shared memory.
_BLOCKS = ((512, 1), (256, 2), (128, 4))
#: Threads that the registers of a multiprocessor hold, at the 80 of most kernels.
_MAX_RESIDENT_THREADS = 816
#: The share of a GPU's multiprocessors that clusters use, by the multiprocessors that a cluster is spread over: fitted
#: too. All blocks of a cluster run within one GPC, so some of its multiprocessors may have no cluster.
_CLUSTER_SHARE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.85}
#: Threads of a block of the two launches.
_SPLIT_THREADS = 256
#: Items of a thread of the last launch, at most: every block of it merges all splits again.
_MAX_ITEMS_TO_APPLY = 32
#: Partial results that every block of the last launch merges, at most; up to the second number no clusters are needed.
_MAX_PARTIALS, _FEW_PARTIALS = 128, 48
#: Blocks of a cluster.
_CLUSTERS = (1, 2, 8)
#: Static shared memory of a kernel, about; above 48 KB in all a launch must opt in to more.
_STATIC_BYTES, _DEFAULT_SHARED_BYTES = 20 << 10, 48 << 10
#: Items that a thread loads at once.
_UNROLL = 4
#: Blocks of the two launches for each multiprocessor: the registers hold two of them, and each block leaves partial
#: results that others merge.
_RESIDENT_SPLITS = 2

#: Arguments: threads, stage, blocks of a cluster, blocks, the words of the kernel's struct, bytes of shared
#: memory.
_MakeLaunch = Callable[[int, int, int, int, tuple[int, ...], int], Launch]


@dataclass(frozen=True, slots=True)
class _FusedLaunch:
    """A single launch; ``microseconds`` is its predicted time."""

    cluster: int
    threads: int
    cached: int
    shared_bytes: int
    microseconds: float


def plan_forward(
    norm: Norm, *, trains: bool, updates: bool, momentum: float | None, saves: bool, device: Device
) -> Plan | None:
    """Returns the plan of a normalisation and its activation, or None where the kernels do not support it.
    Inputs: the tensor, weight, bias, running_mean, running_var, num_batches_tracked, all but the first or None;
    with ``norm.adds`` the added tensor, which has the layout of the first. Outputs: the result; with ``saves``
    also ``[2, groups]`` float32, means and ``1 / sqrt(variance + eps)``, from which the backward pass starts.

    Args:
        trains: normalise by the batch's statistics, else by the running ones.
        updates: update the running statistics, and count the batch.
        momentum: of the update; None: the average of all batches, which num_batches_tracked has counted
            already.
    """
    if not _is_supported(norm):
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
            workspace(0) if stage != _FUSED else int64(0),
            input_(6) if norm.adds else int64(0),
        )
        constants = _constants(tiling, threads, stage, cluster)
        return _launch(_FORWARD, constants, blocks, threads, arguments, words, shared, stage)

    if not trains:
        splits = _apply_splits(tiling, device)
        words = tiling.struct_words(splits, trains=False)
        one = launch(_SPLIT_THREADS, _APPLY, 1, tiling.tiles * splits, words, 0)
        return Plan("norm", "running statistics: one pass", tuple(outputs), (_without_overlap(one),))
    return _planned(tiling, device, 1, True, counts, factor, tuple(outputs), launch)


def plan_backward(norm: Norm, *, trains: bool, wants: tuple[bool, bool], device: Device) -> Plan | None:
    """Returns the plan of the gradients of a normalisation and its activation, or None where the kernels do not
    support it.
    Inputs: the gradient of the output, the normalised tensor, what the forward pass saved, weight, bias; with
    ``norm.adds`` the output. Outputs: the gradients that ``wants`` selects: that of the tensor; those of weight and
    bias, ``[groups]``, float32 for every image where statistics are per image, else in the dtype of the parameters;
    with ``norm.adds``, where the tensor's is always wanted, that of the added tensor.

    Args:
        trains: the forward pass normalised by the batch's statistics.
        wants: the gradient of the tensor, those of weight and bias.
    """
    if not _is_supported(norm):
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
            workspace(0) if stage != _FUSED else int64(0),
            *((input_(5), output(len(outputs) - 1)) if norm.adds else (int64(0), int64(0))),
        )
        constants = (*_constants(tiling, threads, stage, cluster), ("Gradient", ELEMENT_TYPES[of_parameters]))
        return _launch(_BACKWARD, constants, blocks, threads, arguments, words, shared, stage)

    if not trains and not wants_parameters:
        splits = _apply_splits(tiling, device)
        words = tiling.struct_words(splits, trains=False)
        one = launch(_SPLIT_THREADS, _APPLY, 1, tiling.tiles * splits, words, 0)
        return Plan(
            "norm",
            "fixed statistics, no gradient of a parameter: one pass",
            tuple(outputs),
            (_without_overlap(one),),
        )
    return _planned(tiling, device, 2, trains, 0, 0.0, tuple(outputs), launch)


def _without_overlap(launch: Launch) -> Launch:
    """Returns the launch, changed so that it waits for the launch before it to end, because that one belongs to another
    plan."""
    return launch._replace(overlaps_previous=False)


def _is_supported(norm: Norm) -> bool:
    """Returns whether the kernels compute this normalisation."""
    return (
        norm.dtype in DTYPES
        and norm.parameters in (norm.dtype, torch.float32)
        and norm.bytes > 0
        and Tiling.of(norm).items < MAX_ITEMS
        and norm.groups < MAX_ITEMS // _MAX_PARTIALS
        and (norm.activation in FROM_OUTPUT or not norm.adds)
    )


def _constants(tiling: Tiling, threads: int, stage: int, cluster: int) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants of a kernel."""
    norm = tiling.norm
    return (
        ("Element", ELEMENT_TYPES[norm.dtype]),
        ("Parameter", ELEMENT_TYPES[norm.parameters]),
        ("VALUES", tiling.values),
        ("THREADS", threads),
        ("CHANNELS_LAST", tiling.channels_innermost),
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
    """Returns the launch of a kernel."""
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
    """Returns the plan of one launch or of two, whichever is predicted to be faster. ``read``: tensors that are
    read before one is written."""
    candidates = [
        _fused(tiling, device, read, cluster, *block)
        for cluster in _CLUSTERS
        if _has_cluster(device, cluster)
        for block in _BLOCKS
    ]
    best = min(candidates, key=lambda candidate: candidate.microseconds)
    if best.microseconds <= _two_pass_microseconds(tiling, read):
        words = tiling.struct_words(
            best.cluster, cached=best.cached, trains=trains, counts=counts, momentum=momentum
        )
        blocks = tiling.tiles * best.cluster
        one = launch(best.threads, _FUSED, best.cluster, blocks, words, best.shared_bytes)
        shared_by = f"{best.cluster} blocks" if best.cluster > 1 else "a block"
        return Plan("norm", f"{shared_by} to a tile: one launch", outputs, (one,))
    splits, cluster = _reduce_splits(tiling, device)
    partials = ceil_div(splits, cluster), tiling.split_items(splits) * cluster
    reducing = tiling.struct_words(splits, trains=trains)
    to_apply = _apply_splits(tiling, device)
    applying = tiling.struct_words(
        to_apply, partials=partials, trains=trains, counts=counts, momentum=momentum
    )
    return Plan(
        "norm",
        f"{splits} splits of a tile: reduced, then applied",
        outputs,
        (
            launch(_SPLIT_THREADS, _REDUCE, cluster, tiling.tiles * splits, reducing, 0),
            launch(_SPLIT_THREADS, _APPLY, 1, tiling.tiles * to_apply, applying, 0),
        ),
        workspace_bytes=partials[0] * tiling.norm.groups * 8,
    )


def _has_cluster(device: Device, blocks: int) -> bool:
    """Returns whether the GPU runs clusters of so many blocks."""
    return blocks == 1 or device.compute_capability >= 90


def _fused(
    tiling: Tiling, device: Device, read: int, cluster: int, threads: int, sharing: int
) -> _FusedLaunch:
    """Returns the single launch with clusters of ``cluster`` blocks, ``sharing`` of which share a multiprocessor's
    shared memory."""
    each = tiling.split_items(cluster)
    row = threads * tiling.item_bytes * read
    needed = ceil_div(each, tiling.step(threads))
    cached = min(needed, max(0, device.shared_memory_per_block // sharing - _STATIC_BYTES) // row)
    shared = cached * row
    if _DEFAULT_SHARED_BYTES - _STATIC_BYTES < shared <= _DEFAULT_SHARED_BYTES:
        shared = _DEFAULT_SHARED_BYTES + ACCESS_BYTES
    resident = max(
        1, min(_MAX_RESIDENT_THREADS // threads, device.shared_memory_per_block // (shared + _STATIC_BYTES))
    )
    blocks = tiling.tiles * cluster
    usable = int(device.multiprocessors * _CLUSTER_SHARE[max(1, cluster // resident)])
    slots = max(1, usable * resident // cluster) * cluster
    waves = ceil_div(blocks, slots)
    again = (1 - cached / needed) * read * tiling.norm.bytes
    rate = _COPY_RATES[min(resident, max(_COPY_RATES))]
    in_l2 = min(blocks, slots) * each * tiling.lanes * tiling.item_bytes * read <= _L2_BYTES
    moving = (read + 1) * tiling.norm.bytes / rate + again / (_L2_RATE if in_l2 else rate)
    last = (blocks - (waves - 1) * slots) / blocks
    share = min(
        1.0, min(last * blocks, device.multiprocessors) / (_SATURATING_SHARE * device.multiprocessors)
    )
    latency = (_BLOCK + _CLUSTER * (cluster > 1)) * (1 + (waves - 1) * _NEXT_WAVE[resident > 1])
    return _FusedLaunch(
        cluster, threads, cached, shared, _ONE_LAUNCH + latency + moving * (1 - last + last / share)
    )


def _two_pass_microseconds(tiling: Tiling, read: int) -> float:
    """Returns the predicted time of two launches."""
    size = tiling.norm.bytes
    again = read * size / (_L2_RATE if read * size <= _L2_BYTES else _TWO_PASS_RATE)
    return _TWO_LAUNCHES + (read + 1) * size / _TWO_PASS_RATE + again


def _reduce_splits(tiling: Tiling, device: Device) -> tuple[int, int]:
    """Returns the splits of a tile in the first of two launches, and how many of them a cluster reduces. All blocks
    run at a time."""
    blocks = _RESIDENT_SPLITS * device.multiprocessors
    most = max(1, ceil_div(tiling.items, tiling.step(_SPLIT_THREADS) * _UNROLL))
    splits = max(1, min(blocks // tiling.tiles, most))
    cluster = _CLUSTERS[-1]
    if splits <= _FEW_PARTIALS or not _has_cluster(device, cluster):
        return min(splits, _MAX_PARTIALS), 1
    usable = int(blocks * _CLUSTER_SHARE[cluster // _RESIDENT_SPLITS])
    clusters = min(usable // tiling.tiles // cluster, most // cluster, _MAX_PARTIALS)
    return max(1, clusters) * cluster, cluster


def _apply_splits(tiling: Tiling, device: Device) -> int:
    """Returns the splits of a tile in the launch that normalises."""
    row = tiling.step(_SPLIT_THREADS)
    for_all = ceil_div(_RESIDENT_SPLITS * device.multiprocessors, tiling.tiles)
    return max(
        ceil_div(tiling.items, row * _MAX_ITEMS_TO_APPLY), min(for_all, ceil_div(tiling.items, row * _UNROLL))
    )
