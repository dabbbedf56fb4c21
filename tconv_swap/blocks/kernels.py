"""From the tensors of a block to the launches that compute it, remembered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tconv_swap.blocks.form import Form
from tconv_swap.cuda import launch
from tconv_swap.cuda.call import ALIGNMENT, device_facts
from tconv_swap.cuda.program import Plan
from tconv_swap.kernels.norm import plan
from tconv_swap.kernels.norm.shape import Norm


@dataclass(frozen=True, slots=True)
class Running:
    """How running statistics follow the batch's. ``momentum`` None: the average of all batches, which
    num_batches_tracked counts already."""

    momentum: float | None


@dataclass(frozen=True, slots=True, eq=False)  # looked up by what it is, not by what it says
class Call:
    """One block on tensors of one kind, ready to run. ``saves``: for a backward pass."""

    handle: int
    norm: Norm
    form: Form
    device: torch.device
    saves: bool


_backwards: dict[tuple[Call, tuple[bool, bool]], int] = {}


def lies(x: Tensor) -> bool | None:
    """Whether the channels lie together; None where the kernels would have to move ``x`` first."""
    if x.data_ptr() % ALIGNMENT:
        return None
    if x.is_contiguous():
        return False
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return True
    return None


def prepare(
    x: Tensor, parameters: torch.dtype, form: Form, running: Running | None, saves: bool, channels_last: bool
) -> Call | None:
    """The call for tensors such as ``x``; None where PyTorch's operators have to compute it.

    Args:
        parameters: the dtype of weight, bias and running statistics.
        running: None: they are not brought up to date.

    Raises:
        BuildError, CompileError, RuntimeError: as ``launch.add_plan``.
    """
    norm = Norm(
        tuple(x.shape),
        channels_last,
        x.dtype,
        parameters,
        form.per_image,
        form.eps,
        form.activation,
        form.slope,
    )
    made = plan.plan_forward(
        norm,
        trains=form.trains,
        updates=running is not None,
        momentum=None if running is None else running.momentum,
        saves=saves,
        device=device_facts(x.get_device()),
    )
    if made is None:
        return None
    return Call(_add(made, norm, x.device), norm, form, x.device, saves)


def forward(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
) -> list[Tensor]:
    """The output, and, where the call saves, ``[2, groups]``: means and ``1 / sqrt(variance + eps)``."""
    tensors = [x, weight, bias, running_mean, running_var, batches]
    return torch.ops.tconv_swap.launch.default(call.handle, tensors)  # type: ignore[no-any-return]


def backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wants: tuple[bool, bool],
) -> list[Tensor | None]:
    """The gradients of ``x``, weight and bias; None what ``wants`` (``x``; weight and bias) does not ask for."""
    handle = _backwards.get((call, wants))
    if handle is None:
        facts = device_facts(call.device.index)
        made = plan.plan_backward(call.norm, trains=call.form.trains, wants=wants, device=facts)
        assert made is not None  # what is claimed forward is claimed backward
        handle = _backwards[call, wants] = _add(made, call.norm, call.device)
    form = torch.channels_last if call.norm.channels_last else torch.contiguous_format
    if not grad.is_contiguous(memory_format=form) or grad.data_ptr() % ALIGNMENT:
        grad = grad.clone(memory_format=form)
    found = torch.ops.tconv_swap.launch.default(handle, [grad, x, saved, weight, bias])
    grad_x = found[0] if wants[0] else None
    if not wants[1]:
        return [grad_x, None, None]
    of_weight, of_bias = found[-2:]
    if call.norm.per_image:
        each = (call.norm.batch, call.norm.channels)
        of_weight, of_bias = (one.view(each).sum(0).to(call.norm.parameters) for one in (of_weight, of_bias))
    return [grad_x, of_weight, of_bias]


def _add(made: Plan, norm: Norm, device: torch.device) -> int:
    return launch.add_plan(made, norm.dtype, device, device_facts(device.index).architecture)
