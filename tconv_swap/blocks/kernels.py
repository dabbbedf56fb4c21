"""Norms, sums and activations on CUDA: what computes a call that csrc/norm.h does not know yet.

A call goes by the op ``norm_activation``, which remembers the answers of ``answer`` by everything that they depend on.
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
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import Plan

_library = torch.library.Library("tconv_swap", "FRAGMENT")
# None: nothing was done, PyTorch's modules have to compute it. For eager calls on CUDA alone: a graph has the modules.
_library.define(
    "norm_activation(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " Tensor(c!)? num_batches_tracked, Tensor? added, int[] form) -> Tensor?"
)
_library.define("norm_answer(Tensor?[] tensors, int[] form, int stage) -> int[]")
_library.define(
    "norm_gradients_by_pytorch(Tensor grad_output, Tensor input, Tensor statistics, Tensor? weight, Tensor? bias,"
    " Tensor? output, int[] form, bool[4] mask) -> Tensor[]"
)
norm_activation = torch.ops.tconv_swap.norm_activation.default

#: What is asked: a forward pass; one that saves what its backward pass begins from; a backward pass, 1 more for the
#: gradient of the input, 2 for those of weight and bias. As csrc/norm.h numbers them.
FORWARD, FORWARD_THAT_SAVES, BACKWARD = 16, 17, 18
#: In place of an answer: the modules compute it.
DECLINED = [FORMAT_WORDS[torch.contiguous_format], 1]
_NO_MASK = (0, 0, 0)


class _Posed(NamedTuple):
    """A norm and an activation, tensors apart, as the op's ``form`` writes them.

    Attributes:
        averages: running statistics follow the average of all batches, which num_batches_tracked counts.
        kind: index of the norm's class in ``NORMS``.
        features: channels that the norm is made for.
        updates: the running statistics are brought up to date.
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
    def read(cls, words: Sequence[int]) -> _Posed:
        return cls(*words[:6], *struct.unpack("<3d", struct.pack("<3q", *words[6:])))

    @property
    def form(self) -> Form:
        _, per_image = list(NORMS.values())[self.kind]
        return Form(per_image, bool(self.trains), self.eps, Activation(self.activation), self.slope)


# A network asks with the same numbers again and again.
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
    """The op's ``form``.

    Args:
        cls: of the norm.
        features: channels that it is made for.
        trains: by the batch's statistics, else by the running ones.
        updates: bring the running ones up to date.
        momentum: of that; None: the average of all batches.
    """
    kind = next(index for index, norm in enumerate(NORMS) if issubclass(cls, norm))
    floats = struct.unpack("<3q", struct.pack("<3d", eps, momentum or 0.0, slope))
    averages = updates and momentum is None
    return [*map(int, (averages, kind, features, trains, updates, activation)), *floats]


def answer(tensors: Sequence[Tensor | None], form: Sequence[int], stage: int) -> list[int]:
    """How a call is computed, in the words that csrc/compute.h reads.

    Args:
        tensors: input, weight, bias, running_mean, running_var, num_batches_tracked, what is added before the
            activation; of a backward pass grad_output, input, statistics, weight, bias, the output of a sum.
        form: as ``form_words`` writes it.
        stage: which pass.

    Raises:
        BuildError, CompileError, RuntimeError: as ``launch.add_plan``.
    """
    x = tensors[stage >= BACKWARD]
    assert x is not None
    made = planned(tensors, form, stage, device_facts(x.get_device()))
    if made is None:
        return DECLINED
    return _words(made, x, (None, None, None) if stage < BACKWARD else _formats(tensors, bool(_lies(x))))


def planned(tensors: Sequence[Tensor | None], form: Sequence[int], stage: int, device: Device) -> Plan | None:
    """The plan of such a call, as ``answer`` is asked for it; None where the modules compute it. The tensors need no
    numbers."""
    posed = _Posed.read(form)
    if stage < BACKWARD:
        return _forward(posed, tensors, stage == FORWARD_THAT_SAVES, device)
    return _backward(posed, tensors, (bool(stage - BACKWARD & 1), bool(stage - BACKWARD & 2)), device)


def _forward(posed: _Posed, tensors: Sequence[Tensor | None], saves: bool, device: Device) -> Plan | None:
    x, _, _, running_mean, running_var, batches, added = tensors
    assert x is not None
    if not _fits(posed, x, running_mean, running_var, batches) or not _can_be_added(added, x):
        return None
    given = [one for one in tensors[1:6] if one is not None]
    dtypes = {one.dtype for one in given if one is not batches} or {torch.float32}
    channels_last = _lies(x)
    if (
        channels_last is None
        or len(dtypes) > 1
        or any(one.device != x.device or not one.is_contiguous() for one in given)
    ):
        return None
    return plan.plan_forward(
        _norm(posed, x, dtypes.pop(), channels_last, added is not None),
        trains=bool(posed.trains),
        updates=bool(posed.updates),
        momentum=None if posed.averages else posed.momentum,
        saves=saves,
        device=device,
    )


def _fits(
    posed: _Posed,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
) -> bool:
    """Whether the kernels may compute it. A wrong number of dimensions or channels, or one value to take the statistics
    of: PyTorch's error."""
    dimensions, per_image = list(NORMS.values())[posed.kind]
    if x.dim() not in dimensions or x.shape[1] != posed.features:
        return False
    if per_image and running_mean is not None:
        return False  # the average over images of their statistics is left to PyTorch
    count = x.numel() // max(1, x.shape[1]) // (x.shape[0] if per_image and x.shape[0] else 1)
    if (posed.trains and count < 2) or (running_mean is None) is not (running_var is None):
        return False
    return not posed.updates or (batches is not None and batches.dtype == torch.int64)


def _can_be_added(added: Tensor | None, x: Tensor) -> bool:
    """Whether kernels read it beside ``x``. PyTorch broadcasts, and adds other dtypes and layouts."""
    return added is None or (
        added.shape == x.shape
        and added.stride() == x.stride()
        and added.dtype == x.dtype
        and added.device == x.device
        and added.data_ptr() % ALIGNMENT == 0
    )


def _backward(
    posed: _Posed, tensors: Sequence[Tensor | None], wants: tuple[bool, bool], device: Device
) -> Plan:
    _, x, _, weight, bias, output = tensors
    assert x is not None
    parameter = bias if weight is None else weight
    parameters = torch.float32 if parameter is None else parameter.dtype
    made = plan.plan_backward(
        _norm(posed, x, parameters, bool(_lies(x)), output is not None),
        trains=bool(posed.trains),
        wants=wants,
        device=device,
    )
    assert made is not None  # what is claimed forward is claimed backward
    return made


def _formats(tensors: Sequence[Tensor | None], channels_last: bool) -> tuple[torch.memory_format | None, ...]:
    """Of a backward pass: what of the gradient, the tensor and what was saved has to be copied, and into what."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    # What was saved may have been handed back otherwise by a hook of somebody's.
    wanted = zip(tensors[:3], (form, form, torch.contiguous_format), strict=True)
    return tuple(None if one is None or reads_as_it_lies(one, lies) else lies for one, lies in wanted)


def _norm(posed: _Posed, x: Tensor, parameters: torch.dtype, channels_last: bool, adds: bool) -> Norm:
    form = posed.form
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


def _lies(x: Tensor) -> bool | None:
    """Returns whether ``x`` is channels_last; None if the kernels would have to copy ``x`` first."""
    if x.data_ptr() % ALIGNMENT:
        return None
    if x.is_contiguous():
        return False
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return True
    return None


def _words(made: Plan, x: Tensor, formats: tuple[torch.memory_format | None, ...]) -> list[int]:
    handle = launch.add_plan(made, x.dtype, x.device, device_facts(x.get_device()).architecture)
    lies = FORMAT_WORDS[torch.channels_last if made.outputs[0].channels_last else torch.contiguous_format]
    return [lies, 0, handle, *_NO_MASK, *(FORMAT_WORDS[form] for form in formats)]


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
    """The gradients that ``mask`` asks for, of ``x``, weight, bias and what was added, by PyTorch's operators: of every
    order, for every transform and mode. ``output``: of a sum, else None."""
    created = torch.is_grad_enabled()
    of = (x, weight, bias)
    computes = _Posed.read(form).form
    grad = grad_output
    if output is not None:
        grad = _before_activation(computes.activation, grad_output, output)
        computes = replace(computes, activation=Activation.IDENTITY)
    wanted = [one for one, asked in zip(of, mask[:3], strict=True) if asked and one is not None]
    found: list[Tensor] = []
    if wanted:
        with torch.enable_grad():
            computed = by_pytorch(*of, statistics, computes)
            found = list(torch.autograd.grad(computed, wanted, grad, create_graph=created))
    return [*found, grad] if mask[3] else found


def _before_activation(activation: Activation, grad: Tensor, output: Tensor) -> Tensor:
    """The gradient of what an activation of ``FROM_OUTPUT`` was given, from that of its output and the output, by
    PyTorch's operator."""
    aten = torch.ops.aten
    if activation is Activation.TANH:
        return aten.tanh_backward.default(grad, output)  # type: ignore[no-any-return]
    if activation is Activation.SIGMOID:
        return aten.sigmoid_backward.default(grad, output)  # type: ignore[no-any-return]
    return aten.threshold_backward.default(grad, output, 0)  # type: ignore[no-any-return]


def is_plain(tensor: Tensor | None) -> bool:
    """Whether it is of no subclass that wants to see the call."""
    return type(tensor) in _PLAIN


_PLAIN = frozenset((Tensor, Parameter, type(None)))

# Called through the module, whose function a test may replace.
_library.impl("norm_answer", lambda *question: answer(*question), "CompositeExplicitAutograd")
# In autograd.grad(is_grads_batched=True), too.
for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode", "Batched"):
    _library.impl("norm_gradients_by_pytorch", gradients_by_pytorch, _key)
