"""Transposed convolution on CUDA: from tensors to a plan's handle, remembered, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tconv_swap import launch, plan
from tconv_swap.geometry import Geometry

_handles: dict[tuple[Any, ...], int] = {}


@lru_cache(maxsize=64)
def device_facts(index: int) -> plan.Device:
    """What planning must know of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return plan.Device(
        architecture=f"sm_{properties.major}{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=properties.shared_memory_per_block_optin,
    )


def precision(dtype: torch.dtype) -> str:
    """``"tf32"`` where PyTorch's switches allow it for a float32 convolution just now, else ``"ieee"``."""
    if dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def _is_channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    memory_format: torch.memory_format,
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]`` in ``memory_format``, on the current stream."""
    weight_channels_last = _is_channels_last(weight)
    problem = plan.Problem(
        geometry=geometry,
        dtype=input.dtype,
        precision=precision(input.dtype),
        channels_last=memory_format == torch.channels_last,
        weight_channels_last=weight_channels_last,
    )
    key = (problem, bias is None, input.device.index)
    handle = _handles.get(key)
    if handle is None:
        device = device_facts(input.device.index)
        made = plan.plan_forward(problem, bias is not None, device)
        handle = _handles[key] = launch.add_plan(made, input.dtype, input.device, device.architecture)
    outputs = torch.ops.tconv_swap.launch(
        handle,
        input.contiguous(memory_format=memory_format),
        weight if weight_channels_last else weight.contiguous(),
        None if bias is None else bias.contiguous(),
    )
    return outputs[0]  # type: ignore[no-any-return]


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    memory_format: torch.memory_format,
    output_mask: tuple[bool, bool, bool],
) -> list[Tensor]:
    """The gradients ``output_mask`` asks for (input, weight, bias), in that order, on the current stream."""
    weight_channels_last = memory_format == torch.channels_last
    problem = plan.Problem(
        geometry=geometry,
        dtype=input.dtype,
        precision=precision(input.dtype),
        channels_last=weight_channels_last,
        weight_channels_last=weight_channels_last,
    )
    key = (problem, output_mask, input.device.index)
    handle = _handles.get(key)
    if handle is None:
        device = device_facts(input.device.index)
        made = plan.plan_backward(problem, output_mask, device)
        handle = _handles[key] = launch.add_plan(made, input.dtype, input.device, device.architecture)
    return torch.ops.tconv_swap.launch(  # type: ignore[no-any-return]
        handle,
        grad_output.contiguous(memory_format=memory_format),
        input.contiguous(memory_format=memory_format),
        weight.contiguous(memory_format=memory_format),
    )
