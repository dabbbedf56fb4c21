"""A pretended GPU whose kernels of normalisation, of blocks and of padding are computed by the CPU.

The code that plans, copies and differentiates a call (csrc/norm.h, csrc/training.h, blocks/kernels.py; csrc/block.h,
blocks/evaluation.py; csrc/pad.h, blocks/padding.py) is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated_pad import emulate
from pretended_gpu import H200, layer_outputs
from torch import Tensor

from tconv_swap.blocks import call, evaluation, kernels, padding
from tconv_swap.blocks.form import Form, activate, by_pytorch
from tconv_swap.cuda import call as cuda_call
from tconv_swap.cuda import tuned
from tconv_swap.cuda.call import ALIGNMENT, forget
from tconv_swap.geometry import from_list
from tconv_swap.kernels.common.epilogue import Epilogue
from tconv_swap.kernels.norm import plan
from tconv_swap.kernels.norm.shape import Activation, Norm
from tconv_swap.kernels.pad import reflection_pad
from tconv_swap.runtime import ahead, host, launch
from tconv_swap.runtime.program import Plan

_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
#: The gradients of the activations that may follow a sum, from their output.
_SLOPES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: lambda z: (z > 0).double(),
    Activation.TANH: lambda z: 1 - z * z,
    Activation.SIGMOID: lambda z: z * (1 - z),
}
_AUTOGRAD = _CUDA | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
_AUTOCAST = _AUTOGRAD | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


class Pretended:
    """Computes plans of norms.

    Attributes:
        forwards, backwards: how often each was launched.
        sum_forwards, sum_backwards: how many of these had a sum before the activation.
        blocks: how often a block in evaluation was launched.
        pads: how often a padding or its gradient was launched.
        layers: how often a layer or its gradients were launched as a part of a block in training.
        planned: how many calls of a norm Python planned.
        begun: the functions that would make plans in the background.
        blocks_planned: how many calls of a block in evaluation Python planned.
        casts: whether calls of blocks are made as inside an autocast.
        spoil: changes what a kernel writes, for tests of the verification.
        grad_outputs: the strides of grad_output in each backward pass.
    """

    _geometry: Any = None

    def __init__(self) -> None:
        self.forwards = self.backwards = self.sum_forwards = self.sum_backwards = self.planned = 0
        self.blocks = self.blocks_planned = self.layers = self.pads = 0
        self.casts = False
        self.begun: list[Callable[[], list[Plan]]] = []
        self.spoil: Callable[[str, Tensor], Tensor] = lambda name, value: value
        self.grad_outputs: list[tuple[int, ...]] = []
        self._made: list[tuple[Plan, Norm | None, dict[str, Any]]] = []
        self._planned: list[tuple[Plan, Norm | None, dict[str, Any]]] = []

    def planning(self, function: Callable[..., Plan | None]) -> Callable[..., Plan | None]:
        def planned(norm: Norm, **arguments: Any) -> Plan | None:
            made = function(norm, **arguments)
            if made is not None:
                self._made.append((made, norm, arguments))
            return made

        return planned

    def counting(self, function: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def planned(tensors: Any, words: Sequence[int], backend: str) -> list[int]:
            self.blocks_planned += 1
            self._words = words
            return function(tensors, words, backend)

        return planned

    def calling(self, function: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def planned(tensors: Any, geometry: Sequence[int], *given: Any) -> list[int]:
            self._geometry = from_list(geometry)
            return function(tensors, geometry, *given)

        return planned

    def ending(self, function: Callable[..., Plan | None]) -> Callable[..., Plan | None]:
        def ended(plan: Plan, epilogue: Epilogue) -> Plan | None:
            made = function(plan, epilogue)
            if made is not None:
                self._made.append((made, None, {"epilogue": epilogue, "words": self._words}))
            return made

        return ended

    def block_output(self, *given: Any) -> Tensor | None:
        op = torch.ops.tconv_swap.block_output.default
        found: Tensor | None = op.redispatch(_AUTOCAST if self.casts else _AUTOGRAD, *given)
        return found

    def block_training(self, *given: Any) -> tuple[Tensor | None, bool]:
        op = torch.ops.tconv_swap.block_training.default
        found: tuple[Tensor | None, bool] = op.redispatch(_AUTOCAST if self.casts else _AUTOGRAD, *given)
        return found

    def add_plan(self, made: Plan, dtype: torch.dtype, device: torch.device, architecture: str) -> int:
        # A plan with strides is another plan; the one that was planned last is computed.
        kernels = [one.kernel for one in made.launches]
        known = (
            one
            for one in reversed(self._made)
            if one[0] is made or (one[1] is None and [each.kernel for each in one[0].launches] == kernels)
        )
        layer = {} if made.family == "cast" else {"layer": self._geometry}
        self._planned.append(next(known, (made, None, layer)))
        return len(self._planned) - 1 + (1 << 41)

    def launch(self, handle: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        made, norm, arguments = self._planned[handle - (1 << 41)]
        if made.family == "reflection_pad":
            assert tensors[0] is not None
            self.pads += 1
            return [self.spoil(made.launches[0].kernel.entry, emulate(made, tensors[0]))]
        if norm is None and made.family == "cast":
            given = zip(made.outputs, tensors, strict=False)
            return [one.to(output.dtype) for output, one in given if one is not None]
        if "layer" in arguments:
            return self._layer(made, arguments["layer"], tensors)
        if norm is None:
            return self._block(*tensors, **arguments)
        work = self._backward if "wants" in arguments else self._forward
        found = work(norm, *tensors, **arguments)
        for output, one in zip(made.outputs, found, strict=True):
            assert (output.shape, output.dtype or norm.dtype) == (tuple(one.shape), one.dtype)
        return found

    def _layer(self, made: Plan, arguments: Any, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        self.layers += 1
        given = (None if one is None else one.double() for one in tensors)
        found = layer_outputs(made.outputs, arguments, *given)
        (dtype,) = {one.dtype for one in tensors if one is not None}
        return [
            one.to(output.dtype or dtype).contiguous(
                memory_format=torch.channels_last if output.channels_last else torch.contiguous_format
            )
            for one, output in zip(found, made.outputs, strict=True)
        ]

    def _block(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *vectors: Tensor | None,
        epilogue: Epilogue,
        words: Any,
    ) -> list[Tensor]:
        self.blocks += 1
        assert epilogue.normalizes is (vectors[2] is not None)
        stride, padding, output_padding, groups, dilation = from_list(words[:9])
        y = torch.nn.functional.conv_transpose2d(
            *(None if one is None else one.double() for one in (x, weight, bias)),  # type: ignore[arg-type]
            *(stride, padding, output_padding, groups, dilation),
        )
        if epilogue.normalizes:
            scale, shift, mean, variance = (
                None if one is None else one.double().view(-1, 1, 1) for one in vectors
            )
            assert mean is not None
            assert variance is not None
            y = (y - self.spoil("block mean", mean)) * (
                self.spoil("block variance", variance) + epilogue.eps
            ).rsqrt()
            y = y if scale is None else y * scale
            y = y if shift is None else y + shift
        slope = float(self.spoil("block slope", torch.tensor(epilogue.slope)))
        form = (
            torch.channels_last
            if x.is_contiguous(memory_format=torch.channels_last)
            else torch.contiguous_format
        )
        return [activate(y, epilogue.activation, slope).to(x.dtype).contiguous(memory_format=form)]

    def _forward(
        self,
        norm: Norm,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        batches: Tensor | None,
        added: Tensor | None,
        *,
        trains: bool,
        updates: bool,
        momentum: float | None,
        saves: bool,
        **_: object,
    ) -> list[Tensor]:
        self.forwards += 1
        self.sum_forwards += norm.adds
        assert norm.adds is (added is not None)
        of = (2, *range(3, x.dim())) if norm.per_image else (0, *range(2, x.dim()))
        view = (-1, *[1] * (x.dim() - 2))
        wide = x.double()
        mean, variance = wide.mean(of, keepdim=True), wide.var(of, unbiased=False, keepdim=True)
        if not trains:
            assert running_mean is not None
            assert running_var is not None
            mean, variance = running_mean.double().view(view), running_var.double().view(view)
        mean, variance = self.spoil("mean", mean), self.spoil("variance", variance)
        inverse = (variance + norm.eps).rsqrt()
        y = (wide - mean) * inverse
        y = y if weight is None or bias is None else y * weight.view(view) + bias.view(view)
        y = y if added is None else y + self.spoil("added", added.double())
        slope = float(self.spoil("slope", torch.tensor(norm.slope)))
        z = torch.empty_like(x).copy_(activate(y, norm.activation, slope))
        if updates:
            assert running_mean is not None
            assert running_var is not None
            assert batches is not None
            if momentum is None:
                part = 1 / float(batches)
            else:
                part = float(self.spoil("momentum", torch.tensor(momentum)))
                batches += 1
            count = x.numel() // x.shape[1]
            running_mean.mul_(1 - part).add_(part * mean.flatten().to(running_mean.dtype))
            running_var.mul_(1 - part).add_(
                part * count / (count - 1) * variance.flatten().to(running_var.dtype)
            )
        saved = torch.stack([mean.flatten(), inverse.flatten()]).float()
        return [z, saved] if saves else [z]

    def _backward(
        self,
        norm: Norm,
        grad: Tensor,
        x: Tensor,
        saved: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        z: Tensor | None,
        *,
        trains: bool,
        wants: tuple[bool, bool],
        **_: object,
    ) -> list[Tensor]:
        self.backwards += 1
        self.sum_backwards += norm.adds
        assert norm.adds is (z is not None)
        assert not any(one.data_ptr() % ALIGNMENT for one in (grad, x, z) if one is not None)
        self.grad_outputs.append(grad.stride())
        activation, passed_back = norm.activation, grad.double()
        if z is not None:
            assert z.stride() == x.stride()
            activation, passed_back = Activation.IDENTITY, passed_back * _SLOPES[activation](z.double())
        form = Form(norm.per_image, trains, norm.eps, activation, norm.slope)
        # A kernel writes separate gradients of the parameters for every image that has statistics of its own.
        images = norm.batch if norm.per_image else 1
        found_x, of_parameters = [], []
        for image in range(images):
            # A launch is below autograd, which is used here to compute what a kernel writes.
            with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
                chosen = slice(image, image + 1) if norm.per_image else slice(None)
                # On a CPU, PyTorch's InstanceNorm treats a gradient in channels_last as a contiguous one.
                part, given = x.detach()[chosen], passed_back.detach()[chosen].contiguous()
                of = [
                    one.detach().double().requires_grad_() for one in (part, weight, bias) if one is not None
                ]
                statistics = saved.view(2, images, norm.channels)[:, image].double()
                output = by_pytorch(*(of if len(of) == 3 else (of[0], None, None)), statistics, form)
                found = torch.autograd.grad(output, of, given)
            found_x.append(found[0])
            of_parameters.append(found[1:])
        computed = [self.spoil("gradient", torch.cat(found_x)).to(norm.dtype)] if wants[0] else []
        if wants[1]:
            dtype = torch.float32 if norm.per_image else norm.parameters
            computed += [
                self.spoil("gradient", torch.cat(one)).to(dtype) for one in zip(*of_parameters, strict=True)
            ]
        if norm.adds:
            computed.append(self.spoil("grad_added", passed_back).to(norm.dtype))
        return computed


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Inside, blocks on the CPU use pretended kernels, as the code below the dispatcher does on CUDA."""
    assert host.is_available()
    gpu = Pretended()
    plan_call, op, pad = kernels.plan_call, kernels.norm_activation, padding.reflection_pad

    def planned(*given: Any) -> list[int]:
        gpu.planned += 1
        return plan_call(*given)

    with monkeypatch.context() as patch, torch.library._scoped_library("tconv_swap", "IMPL") as ops:
        ops.impl("launch", gpu.launch, "CPU")
        patch.setattr(call, "is_on_gpu", lambda x: type(x) is Tensor)
        patch.setattr(call, "norm_activation", lambda *given: op.redispatch(_AUTOGRAD, *given))
        patch.setattr(call, "reflection_pad", lambda *given: pad.redispatch(_AUTOGRAD, *given))
        patch.setattr(kernels, "plan_call", planned)
        patch.setattr(call, "block_output", gpu.block_output)
        patch.setattr(call, "block_training", gpu.block_training)
        patch.setattr(cuda_call, "plan_call", gpu.calling(cuda_call.plan_call))
        patch.setattr(evaluation, "plan_call", gpu.counting(evaluation.plan_call))
        patch.setattr(evaluation, "with_epilogue", gpu.ending(evaluation.with_epilogue))
        patch.setattr(cuda_call, "device_facts", lambda index: H200)
        patch.setattr(tuned, "winners", lambda index: tuned.NONE)
        for module in (kernels, padding):
            patch.setattr(module, "device_facts", lambda index: H200)
        patch.setattr(launch, "add_plan", gpu.add_plan)
        patch.setattr(launch, "load_kernels", lambda *_: False)
        patch.setattr(ahead, "begin", lambda key, make_plans, *_, **__: gpu.begun.append(make_plans))
        dtypes = (*plan.DTYPES, torch.float64)
        for module in (plan, reflection_pad):
            patch.setattr(module, "DTYPES", dtypes)
        for name in ("plan_forward", "plan_backward"):
            patch.setattr(plan, name, gpu.planning(getattr(plan, name)))
        forget()
        try:
            yield gpu
        finally:
            forget()
