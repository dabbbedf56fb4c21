"""Norms, sums and activations on CUDA: plans a call that is not in the cache of csrc/norm.h.

A call goes through the op ``norm_activation``, which keeps each result of ``plan_call`` under everything that it
depends on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tconv_swap.blocks.form import NORMS, Form, by_pytorch
from tconv_swap.cuda.call import ALIGNMENT, FORMAT_WORDS, device_facts, reads_as_it_lies
from tconv_swap.kernels.norm import plan
from tconv_swap.kernels.norm.shape import Activation, Norm
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime import ahead, launch
from tconv_swap.runtime.program import Plan

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# It returns None if it did nothing and PyTorch's modules have to compute the call. Only eager calls on CUDA use it: a
# compiled graph contains the modules.
_library.define(
    "norm_activation(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " Tensor(c!)? num_batches_tracked, Tensor? added, int[] form) -> Tensor?"
)
# A layer with the norm and the activation behind it. It returns the block's output and True; the layer's output and
# False if norm and activation are still to be computed; None and False if it did nothing.
_library.define(
    "block_training(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias,"
    " Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, int[] geometry, str backend,"
    " int[] form) -> (Tensor?, bool)"
)
_library.define("plan_norm_call(Tensor?[] tensors, int[] form, int stage) -> int[]")
_library.define(
    "norm_gradients_by_pytorch(Tensor grad_output, Tensor input, Tensor statistics, Tensor? weight, Tensor? bias,"
    " Tensor? output, int[] form, bool[4] mask) -> Tensor[]"
)
norm_activation = torch.ops.tconv_swap.norm_activation.default
block_training = torch.ops.tconv_swap.block_training.default

#: Stages, with the numbers of csrc/norm.h: a forward pass; one that saves tensors for its backward pass; a backward
#: pass, plus 1 for the gradient of the input and 2 for those of weight and bias.
FORWARD, FORWARD_THAT_SAVES, BACKWARD = 16, 17, 18
#: The call plan that leaves a call to PyTorch's modules.
DECLINED = [FORMAT_WORDS[torch.contiguous_format], 1]
_NO_MASK = (0, 0, 0)


class _NormCall(NamedTuple):
    """A norm and an activation without their tensors, as the op's ``form`` encodes them.

    Attributes:
        averages: running statistics are the average of all batches, which num_batches_tracked counts.
        kind: index of the norm's class in ``NORMS``.
        features: channels of the norm.
        updates: whether the running statistics are updated.
    """

    averages: int
    kind: int
    features: int
    trains: int
    updates: int
    activation: int
    eps: float
    momentum: float
    slope: float

    @classmethod
    def read(cls, words: Sequence[int]) -> _NormCall:
        return cls(*words[:6], *struct.unpack("<3d", struct.pack("<3q", *words[6:])))

    @property
    def form(self) -> Form:
        _, per_image = list(NORMS.values())[self.kind]
        return Form(per_image, bool(self.trains), self.eps, Activation(self.activation), self.slope)


# A network calls this with the same numbers again and again.
@lru_cache(maxsize=4096)
def form_words(
    cls: type[nn.Module],
    features: int,
    trains: bool,
    updates: bool,
    eps: float,
    momentum: float | None,
    activation: Activation,
    slope: float,
) -> list[int]:
    """Returns the op's ``form``.

    Args:
        cls: class of the norm.
        features: its channels.
        trains: whether it normalises with the batch's statistics instead of the running ones.
        updates: whether it updates the running statistics.
        momentum: of the update; None for the average of all batches.
    """
    kind = next(index for index, norm in enumerate(NORMS) if issubclass(cls, norm))
    floats = struct.unpack("<3q", struct.pack("<3d", eps, momentum or 0.0, slope))
    averages = updates and momentum is None
    return [*map(int, (averages, kind, features, trains, updates, activation)), *floats]


def plan_call(tensors: Sequence[Tensor | None], form: Sequence[int], stage: int) -> list[int]:
    """Returns the plan of a call, in the words that csrc/compute.cpp reads.

    Args:
        tensors: input, weight, bias, running_mean, running_var, num_batches_tracked and the tensor that is added before
            the activation; for a backward pass grad_output, input, statistics, weight, bias and the output of a sum.
        form: as ``form_words`` returns it.
        stage: ``FORWARD``, ``FORWARD_THAT_SAVES`` or ``BACKWARD`` and what it adds.

    Raises:
        BuildError, CompileError, RuntimeError: as ``launch.add_plan``.
    """
    x = tensors[stage >= BACKWARD]
    assert x is not None
    device = device_facts(x.get_device())
    made = planned(tensors, form, stage, device)
    if made is None:
        return DECLINED
    if stage == FORWARD_THAT_SAVES:
        _plan_ahead(_NormCall.read(form), tensors, device)
    return call_words(
        made, x, (None, None, None) if stage < BACKWARD else _formats(tensors, bool(is_channels_last(x)))
    )


def planned(tensors: Sequence[Tensor | None], form: Sequence[int], stage: int, device: Device) -> Plan | None:
    """Returns the plan of the kernels for a call, with the arguments of ``plan_call``; None if the modules compute
    the call. Only the shapes, strides and dtypes of the tensors matter."""
    norm_call = _NormCall.read(form)
    if stage < BACKWARD:
        return _forward(norm_call, tensors, stage == FORWARD_THAT_SAVES, device)
    return _backward(norm_call, tensors, (bool(stage - BACKWARD & 1), bool(stage - BACKWARD & 2)), device)


def _forward(
    norm_call: _NormCall, tensors: Sequence[Tensor | None], saves: bool, device: Device
) -> Plan | None:
    x, _, _, running_mean, running_var, batches, added = tensors
    assert x is not None
    if not _fits(norm_call, x, running_mean, running_var, batches) or not _can_be_added(added, x):
        return None
    given = [one for one in tensors[1:6] if one is not None]
    dtypes = {one.dtype for one in given if one is not batches} or {torch.float32}
    channels_last = is_channels_last(x)
    if (
        channels_last is None
        or len(dtypes) > 1
        or any(one.device != x.device or not one.is_contiguous() for one in given)
    ):
        return None
    return plan.plan_forward(
        _norm(norm_call, x, dtypes.pop(), channels_last, added is not None),
        trains=bool(norm_call.trains),
        updates=bool(norm_call.updates),
        momentum=None if norm_call.averages else norm_call.momentum,
        saves=saves,
        device=device,
    )


def _fits(
    norm_call: _NormCall,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
) -> bool:
    """Returns whether the kernels may compute the call. They leave it to PyTorch, which raises the error, if the
    number of dimensions or channels is wrong, or if the statistics would be of a single value."""
    dimensions, per_image = list(NORMS.values())[norm_call.kind]
    if x.dim() not in dimensions or x.shape[1] != norm_call.features:
        return False
    if per_image and running_mean is not None:
        return False  # the average over images of their statistics is left to PyTorch
    count = x.numel() // max(1, x.shape[1]) // (x.shape[0] if per_image and x.shape[0] else 1)
    if (norm_call.trains and count < 2) or (running_mean is None) is not (running_var is None):
        return False
    return not norm_call.updates or (batches is not None and batches.dtype == torch.int64)


def _can_be_added(added: Tensor | None, x: Tensor) -> bool:
    """Returns whether the kernels can add ``added`` to ``x``. Only PyTorch broadcasts, and adds other dtypes and
    layouts."""
    return added is None or (
        added.shape == x.shape
        and added.stride() == x.stride()
        and added.dtype == x.dtype
        and added.device == x.device
        and added.data_ptr() % ALIGNMENT == 0
    )


def _backward(
    norm_call: _NormCall, tensors: Sequence[Tensor | None], wants: tuple[bool, bool], device: Device
) -> Plan:
    _, x, _, weight, bias, output = tensors
    assert x is not None
    made = plan.plan_backward(
        _norm_of_backward(norm_call, x, weight, bias, output is not None),
        trains=bool(norm_call.trains),
        wants=wants,
        device=device,
    )
    assert made is not None  # every call with a forward plan has a backward plan
    return made


def _norm_of_backward(
    norm_call: _NormCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, adds: bool
) -> Norm:
    parameter = bias if weight is None else weight
    parameters = torch.float32 if parameter is None else parameter.dtype
    return _norm(norm_call, x, parameters, bool(is_channels_last(x)), adds)


def _plan_ahead(norm_call: _NormCall, tensors: Sequence[Tensor | None], device: Device) -> None:
    """Compiles the kernels of the backward pass in the background, while the layers behind the norm are computed."""
    x, weight, bias, *_, added = tensors
    assert x is not None
    norm = _norm_of_backward(norm_call, x, weight, bias, added is not None)
    wants, trains = (True, weight is not None or bias is not None), bool(norm_call.trains)

    def make_plans() -> list[Plan]:
        made = plan.plan_backward(norm, trains=trains, wants=wants, device=device)
        return [] if made is None else [made]

    ahead.begin((norm, wants, trains), make_plans, device.architecture)


def _formats(tensors: Sequence[Tensor | None], channels_last: bool) -> tuple[torch.memory_format | None, ...]:
    """Returns the formats that the gradient, the input and the saved statistics of a backward pass are copied into;
    None for a tensor that is read in its own layout."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    # A hook may have changed the layout of a saved tensor.
    wanted = zip(tensors[:3], (form, form, torch.contiguous_format), strict=True)
    return tuple(None if one is None or reads_as_it_lies(one, lies) else lies for one, lies in wanted)


def _norm(norm_call: _NormCall, x: Tensor, parameters: torch.dtype, channels_last: bool, adds: bool) -> Norm:
    form = norm_call.form
    return Norm(
        tuple(x.shape),
        channels_last,
        x.dtype,
        parameters,
        form.per_image,
        form.eps,
        form.activation,
        form.slope,
        adds,
    )


def is_channels_last(x: Tensor) -> bool | None:
    """Returns whether ``x`` is channels_last; None if the kernels would have to copy ``x`` first."""
    if x.data_ptr() % ALIGNMENT:
        return None
    if x.is_contiguous():
        return False
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return True
    return None


def call_words(made: Plan, x: Tensor, formats: tuple[torch.memory_format | None, ...]) -> list[int]:
    """Returns the plan of a call that ``made`` computes, in the words that csrc/compute.cpp reads.

    Args:
        x: a tensor of the plan's dtype, on its device.
        formats: into which the first three tensors are copied; None for one that is read as it lies in memory.

    Raises:
        BuildError, CompileError, RuntimeError: as ``launch.add_plan``.
    """
    handle = launch.add_plan(made, x.dtype, x.device, device_facts(x.get_device()).architecture)
    result = FORMAT_WORDS[torch.channels_last if made.outputs[0].channels_last else torch.contiguous_format]
    return [result, 0, handle, *_NO_MASK, *(FORMAT_WORDS[form] for form in formats)]


def gradients_by_pytorch(
    grad_output: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output: Tensor | None,
    form: Sequence[int],
    mask: Sequence[bool],
) -> list[Tensor]:
    """Returns the gradients in ``mask`` (of ``x``, weight, bias and the added tensor) by PyTorch's operators, which
    support every order, transform and mode. ``output`` is that of a sum, else None."""
    created = torch.is_grad_enabled()
    if mask[0] and not x.requires_grad:  # x is the output of a layer without a node of its own
        x = x.detach().requires_grad_()
    of = (x, weight, bias)
    computes = _NormCall.read(form).form
    grad = grad_output
    if output is not None:
        grad = _before_activation(computes.activation, grad_output, output)
        computes = replace(computes, activation=Activation.IDENTITY)
    wanted = [one for one, is_wanted in zip(of, mask[:3], strict=True) if is_wanted and one is not None]
    found: list[Tensor] = []
    if wanted:
        with torch.enable_grad():
            computed = by_pytorch(*of, statistics, computes)
            found = list(torch.autograd.grad(computed, wanted, grad, create_graph=created))
    return [*found, grad] if mask[3] else found


def _before_activation(activation: Activation, grad: Tensor, output: Tensor) -> Tensor:
    """Returns the gradient of the input of an activation in ``FROM_OUTPUT``, by PyTorch's operator, from the output
    and its gradient."""
    aten = torch.ops.aten
    if activation is Activation.TANH:
        return aten.tanh_backward.default(grad, output)  # type: ignore[no-any-return]
    if activation is Activation.SIGMOID:
        return aten.sigmoid_backward.default(grad, output)  # type: ignore[no-any-return]
    return aten.threshold_backward.default(grad, output, 0)  # type: ignore[no-any-return]


def is_plain(tensor: Tensor | None) -> bool:
    """Returns whether the tensor is of no subclass that has to see the call."""
    return type(tensor) in _PLAIN


_PLAIN = frozenset((Tensor, Parameter, type(None)))

# The lambda looks the function up at each call, so that a test may replace it.
_library.impl("plan_norm_call", lambda *given: plan_call(*given), "CompositeExplicitAutograd")
# These keys are needed for autograd.grad(is_grads_batched=True), too.
for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode", "Batched"):
    _library.impl("norm_gradients_by_pytorch", gradients_by_pytorch, _key)
