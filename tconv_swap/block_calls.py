"""For which calls of blocks and paddings kernels are compiled ahead, and the plans of these calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from tconv_swap.blocks import padding
from tconv_swap.blocks.call import Recorded, RecordedPad
from tconv_swap.blocks.finding import find
from tconv_swap.blocks.form import activation_of
from tconv_swap.blocks.kernels import BACKWARD, FORWARD, form_words, planned
from tconv_swap.blocks.modules import NORM_CLASSES, PAD_CLASSES, AllBlocks, Blocks
from tconv_swap.kernels.common.schedules import SIZES, SIZES_OF_ONE_ROW
from tconv_swap.kernels.problem import Device
from tconv_swap.layer import SWAPPED
from tconv_swap.layer_calls import empty_form, form_of, in_format
from tconv_swap.runtime.program import Plan

BlockCall = Recorded | RecordedPad

#: Of a padding for inputs of any size: it does not say how many channels there are.
_PAD_CHANNELS = 64


def usual_blocks(model: nn.Module) -> Iterator[BlockCall]:
    """Yields, for each norm and padding that our kernels compute, a call of each representative size."""
    yield from _usual_norms(model)
    yield from _usual_pads(model)


def _usual_norms(model: nn.Module) -> Iterator[Recorded]:
    kinds = {type(module) for module in model.modules()}
    if not any(issubclass(kind, (Blocks, *NORM_CLASSES.values())) for kind in kinds):
        return
    in_all = any(issubclass(kind, (AllBlocks, *NORM_CLASSES.values())) for kind in kinds)
    for block in find(
        model, "all" if in_all else "blocks", lambda module: isinstance(module, SWAPPED)
    ).blocks:
        norm: Any = model.get_submodule(block.name)
        if isinstance(norm, nn.ReflectionPad2d):
            continue
        applied = activation_of(model.get_submodule(block.activation) if block.activation else None)
        if not block.swap or applied is None:
            continue
        buffers = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
        form = form_words(
            type(norm),  # type: ignore[arg-type]  # mypy compares the hash of the instances
            norm.num_features,
            norm.training or buffers[0] is None,
            norm.training and buffers[0] is not None,
            norm.eps,
            norm.momentum,
            *applied,
        )
        parameters = [form_of(one) for one in (norm.weight, norm.bias, *buffers)]
        dtype = torch.float32 if norm.weight is None else norm.weight.dtype
        is_1d = isinstance(norm, nn.BatchNorm1d | nn.InstanceNorm1d)
        for batch, *image in SIZES_OF_ONE_ROW if is_1d else SIZES:
            x = empty_form((batch, norm.num_features, *image[is_1d:]), dtype)
            added = x if "sum" in block.kind.split(" + ") else None
            yield Recorded((x, *parameters, added), form)


def _usual_pads(model: nn.Module) -> Iterator[RecordedPad]:
    """Yields, for each padding that our kernels compute, a call of each representative size."""
    dtype = next((one.dtype for one in model.parameters()), torch.get_default_dtype())
    for pad in model.modules():
        if type(pad) in PAD_CLASSES.values():
            for batch, *image in SIZES:
                yield RecordedPad(empty_form((batch, _PAD_CHANNELS, *image), dtype), tuple(pad.padding))  # type: ignore[arg-type]


def block_variants(
    block: BlockCall,
    dtypes: Sequence[torch.dtype] | None,
    memory_formats: Sequence[torch.memory_format] | None,
) -> Iterator[BlockCall]:
    """Yields the same call of a block in other dtypes and layouts; an autocast casts no parameter of a norm."""
    for dtype, memory_format in product(dtypes or (None,), memory_formats or (None,)):
        if isinstance(block, RecordedPad):
            yield RecordedPad(in_format(form_of(block.image, dtype), memory_format), block.padding)
            continue
        x, *parameters, added = block.tensors
        first, last = (in_format(form_of(one, dtype), memory_format) for one in (x, added))
        yield Recorded((first, *parameters, last), block.form)


def block_plans(block: BlockCall, training: bool, device: Device) -> Iterator[Plan]:
    """Yields the plans of a call, and of its gradients if it trains."""
    if isinstance(block, RecordedPad):
        found = padding.planned(*block, padding.FORWARD, device)
        if found is None:
            return
        yield found
        if training:
            form = (*block.padding, found.outputs[0].channels_last)
            padded = empty_form(found.outputs[0].shape, block.image.dtype)
            backward = padding.planned(padded, form, padding.BACKWARD, device)
            assert backward is not None
            yield backward
        return
    x, weight, bias, *_, added = block.tensors
    made = planned(block.tensors, block.form, FORWARD, device)
    if made is None:
        return
    yield made
    if training:
        stage = BACKWARD + 1 + 2 * (weight is not None or bias is not None)
        backward = planned((x, x, x, weight, bias, added), block.form, stage, device)
        assert backward is not None
        yield backward
