"""A norm, a sum and an activation as one: ``activation(norm(x) + added)``, as at the end of a residual block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tconv_swap.blocks import call
from tconv_swap.blocks.form import NORMS, Form, activation_of, by_pytorch
from tconv_swap.cuda import launch
from tconv_swap.cuda.call import ALIGNMENT, device_facts
from tconv_swap.cuda.program import Plan
from tconv_swap.dispatch import is_eager
from tconv_swap.kernels.norm import plan
from tconv_swap.kernels.norm.shape import FROM_OUTPUT, Activation, Norm

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_Maybe = Tensor | None
#: weight, bias, running_mean, running_var, num_batches_tracked
_Of = tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


@dataclass(frozen=True, slots=True, eq=False)  # looked up by what it is, not by what it says
class Sum:
    """One such block on tensors of one kind, ready to run. ``momentum``: of the running statistics, where they are
    brought up to date (``updates``)."""

    form: Form
    norm: Norm
    device: torch.device
    saves: bool
    updates: bool
    momentum: float | None


_sums: dict[tuple[Any, ...], Sum | None] = {}
_forwards: dict[Sum, int] = {}
_backwards: dict[tuple[Sum, bool], int] = {}


def takes(activation: nn.Module) -> bool:
    """Whether there are kernels for a sum before it."""
    applied = activation_of(activation)
    return applied is not None and applied[0] in FROM_OUTPUT


def computed(norm: nn.Module, activation: nn.Module, x: Tensor, added: Tensor) -> Tensor | None:
    """What ``activation(norm(x) + added)`` gives, running statistics brought up to date; None, and nothing done, where
    the modules have to compute it. ``call.takes(x)`` and ``takes`` have been asked, and the modules are not watched.

    Raises:
        BuildError, CompileError, RuntimeError: the kernels cannot be built, or CUDA fails.
    """
    if not call.is_on_gpu(added) or added.shape != x.shape or added.stride() != x.stride():
        return None
    parameters, buffers = norm._parameters, norm._buffers
    if not {"weight", "bias"} <= parameters.keys() or not {"running_mean", "running_var"} <= buffers.keys():
        return None  # somebody keeps them elsewhere, computed
    given: Any = norm
    statistics = buffers["running_mean"], buffers["running_var"]
    trains = norm.training or statistics[0] is None
    updates = norm.training and given.track_running_stats and statistics[0] is not None
    batches = buffers.get("num_batches_tracked") if updates else None
    of: _Of = (parameters["weight"], parameters["bias"], *statistics, batches)
    needed = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (x, added, *of[:2])
    )
    applied = activation_of(activation)
    key = (
        type(norm),
        *(
            (one.shape, one.stride(), one.dtype, one.get_device(), one.data_ptr() % ALIGNMENT)
            for one in (x, added)
        ),
        (trains, updates, needed, given.eps, given.momentum, applied),
        *(None if one is None else (one.dtype, one.shape, one.get_device(), type(one)) for one in of),
    )
    if key not in _sums:
        _sums[key] = _made(norm, x, added, of, trains, updates, needed, applied)
    how = _sums[key]
    if how is None:
        return None
    if updates and given.momentum is None and batches is not None:
        batches.add_(1)
    before = {name: one.clone() for name, one in buffers.items() if one is not None} if call.observers else {}
    if needed:
        output = _apply(x, added, *of[:2], (how, of))
    else:
        output = forward(how, x, added, of)[0]
    for observe in call.observers:
        observe(norm, activation, x, output, before, added)
    return output


def _made(
    norm: nn.Module,
    x: Tensor,
    added: Tensor,
    of: _Of,
    trains: bool,
    updates: bool,
    needed: bool,
    applied: tuple[Activation, float] | None,
) -> Sum | None:
    given: Any = norm
    dimensions, per_image = next(how for cls, how in NORMS.items() if isinstance(norm, cls))
    if applied is None or x.dim() not in dimensions or x.shape[1] != given.num_features or not x.numel():
        return None
    if x.dtype != added.dtype or any(one.data_ptr() % ALIGNMENT for one in (x, added)):
        return None
    channels_last = not x.is_contiguous()
    if channels_last and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return None
    count = x.numel() // x.shape[1] // (x.shape[0] if per_image else 1)
    # One value to take the statistics of: PyTorch's error. The average over images of theirs is left to PyTorch.
    if (trains and count < 2) or (per_image and of[2] is not None) or (updates and of[4] is None):
        return None
    if (of[2] is None) is not (of[3] is None):
        return None
    dtypes = {one.dtype for one in of[:4] if one is not None} or {torch.float32}
    if len(dtypes) > 1 or not all(_is_plain(one, x) for one in of if one is not None):
        return None
    form = Form(per_image, trains, given.eps, *applied)
    shape = Norm(
        tuple(x.shape), channels_last, x.dtype, dtypes.pop(), per_image, given.eps, *applied, adds=True
    )
    how = Sum(form, shape, x.device, needed, updates, given.momentum)
    return how if prepare(how) else None


def _is_plain(tensor: Tensor, x: Tensor) -> bool:
    return type(tensor) in (Parameter, Tensor) and tensor.device == x.device and tensor.is_contiguous()


class NormSum(torch.autograd.Function):
    """Norm, sum and activation; gradients of gradients by PyTorch's operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, weight: _Maybe, bias: _Maybe, how: tuple[Sum, _Of]
    ) -> Tensor:
        output, saved = forward(how[0], x, added, how[1])
        # What PyTorch's activation keeps too, so that whoever overwrites it hears of it as from PyTorch.
        ctx.save_for_backward(x, weight, bias, saved, output)
        ctx.sum = how[0]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[_Maybe, ...]:
        x, weight, bias, saved, output = ctx.saved_tensors
        of_x, _, of_weight, of_bias, _ = needs = ctx.needs_input_grad
        plain = type(grad) is Tensor and is_eager() and not _is_batched(grad)
        if torch.is_grad_enabled() or not plain:
            of_sum = _activation_backward(ctx.sum.form.activation)(grad, output)
            wanted = [
                one for one, need in zip((x, weight, bias), (of_x, of_weight, of_bias), strict=True) if need
            ]
            found = iter(_norm_backward(ctx.sum.form, of_sum, x, weight, bias, saved, wanted))
            first, *others = [next(found) if need else None for need in (of_x, of_weight, of_bias)]
            return first, of_sum, *others, None
        grad_x, *of_parameters, grad_added = backward(
            ctx.sum, grad, x, saved, weight, bias, output, of_weight or of_bias
        )
        found_all = (grad_x, grad_added, *(of_parameters or (None, None)), None)
        return tuple(one if need else None for one, need in zip(found_all, needs, strict=True))


# As of call.NormActivation: what Function.apply does before is for functorch, which is_eager has ruled out.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, NormSum).apply


def _norm_backward(
    form: Form, grad: Tensor, x: Tensor, weight: _Maybe, bias: _Maybe, saved: Tensor, wanted: list[Any]
) -> tuple[Tensor, ...]:
    created = torch.is_grad_enabled()
    if not wanted:
        return ()
    with torch.enable_grad():
        plain = Form(form.per_image, form.trains, form.eps, Activation.IDENTITY)
        output = by_pytorch(x, weight, bias, saved, plain)
        return torch.autograd.grad(output, wanted, grad, create_graph=created)


def _activation_backward(activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """PyTorch's gradient of what an activation was given, from that of its output and the output."""
    aten = torch.ops.aten
    if activation is Activation.TANH:
        return aten.tanh_backward.default
    if activation is Activation.SIGMOID:
        return aten.sigmoid_backward.default
    return lambda grad, output: aten.threshold_backward.default(grad, output, 0)


# ---- launches --------------------------------------------------------------------------------------------------------


def prepare(how: Sum) -> bool:
    """Whether the kernels claim it; its forward pass is ready to run then."""
    made = plan.plan_forward(
        how.norm,
        trains=how.form.trains,
        updates=how.updates,
        momentum=how.momentum if how.updates else None,
        saves=how.saves,
        device=device_facts(how.device.index),
    )
    if made is not None:
        _forwards[how] = _add(made, how)
    return made is not None


def forward(how: Sum, x: Tensor, added: Tensor, of: _Of) -> list[Tensor]:
    """The output, and, where the call saves, ``[2, groups]``: means and ``1 / sqrt(variance + eps)``."""
    return torch.ops.tconv_swap.launch.default(_forwards[how], [x, *of, added])  # type: ignore[no-any-return]


def backward(
    how: Sum,
    grad: Tensor,
    x: Tensor,
    saved: Tensor,
    weight: _Maybe,
    bias: _Maybe,
    output: Tensor,
    of_parameters: bool,
) -> list[Tensor]:
    """The gradients of ``x``, with ``of_parameters`` of weight and bias, and of what was added."""
    handle = _backwards.get((how, of_parameters))
    if handle is None:
        facts = device_facts(how.device.index)
        made = plan.plan_backward(how.norm, trains=how.form.trains, wants=(True, of_parameters), device=facts)
        assert made is not None  # what is claimed forward is claimed backward
        handle = _backwards[how, of_parameters] = _add(made, how)
    form = torch.channels_last if how.norm.channels_last else torch.contiguous_format
    if not grad.is_contiguous(memory_format=form) or grad.data_ptr() % ALIGNMENT:
        grad = grad.clone(memory_format=form)
    found: list[Tensor] = torch.ops.tconv_swap.launch.default(handle, [grad, x, saved, weight, bias, output])
    if of_parameters and how.norm.per_image:
        each = how.norm.batch, how.norm.channels
        found[1:3] = [one.view(each).sum(0).to(how.norm.parameters) for one in found[1:3]]
    return found


def _add(made: Plan, how: Sum) -> int:
    return launch.add_plan(made, how.norm.dtype, how.device, device_facts(how.device.index).architecture)
