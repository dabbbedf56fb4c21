"""A pretended H200: calls of CPU tensors, whose launches PyTorch computes.

The code that casts, plans, copies and differentiates a call (csrc/call.cpp, cuda/call.py) is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap.cuda import call, expected, tuned
from tconv_swap.geometry import as_list
from tconv_swap.kernels import plan
from tconv_swap.runtime import ahead, host, launch, program

H200 = plan.Device("sm_90a", 132, 227 << 10)
NCHW, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


def _keys(*names: str) -> torch._C.DispatchKeySet:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


_CUDA, _AUTOGRAD, _AUTOCAST = (
    _keys("CUDA"),
    _keys("AutogradCUDA", "CUDA"),
    _keys("AutocastCUDA", "AutogradCUDA", "CUDA"),
)
_OUTPUT = torch.ops.tconv_swap.conv_transpose2d_output.default
_GRADIENTS = torch.ops.tconv_swap.conv_transpose2d_gradients.default

ARGUMENTS = (2, 2), (1, 1), (0, 0), 1, (1, 1)
GEOMETRY = as_list(ARGUMENTS)
#: More than the steps of all call plans that are kept.
MAX_PLANS = 4 * 4096


@dataclass
class GPU:
    """Computes one geometry, of 4 x 4 taps, stride 2, padding 1.

    Attributes:
        launched: handles of plans, in the order of their launches.
        casts: how many launches cast tensors for an autocast.
        planned: the calls that Python planned: ``"output"`` or ``"gradients"``.
        begun: the functions that would make plans in the background.
        compiles: whether the kernels of a call are not on disk.
        received: the address and strides of each tensor of these launches.
    """

    launched: list[int] = field(default_factory=list)
    casts: int = 0
    planned: list[str] = field(default_factory=list)
    begun: list[Callable[[], list[program.Plan]]] = field(default_factory=list)
    compiles: bool = False
    received: list[list[tuple[int, tuple[int, ...]] | None]] = field(default_factory=list)
    _plans: dict[int, tuple[program.Plan, torch.dtype]] = field(default_factory=dict)
    # These differ from the handles of programs that a test with a launcher of its own adds.
    _handles: Iterator[int] = field(default_factory=lambda: count(1 << 40))

    def add_plan(
        self, made: program.Plan, dtype: torch.dtype, device: torch.device, architecture: str
    ) -> int:
        assert (device.type, architecture) == ("cpu", H200.architecture)
        handle = next(self._handles)
        self._plans[handle] = made, dtype
        self._plans.pop(handle - MAX_PLANS, None)
        return handle

    def launch(self, handle: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        made, dtype = self._plans[handle]
        images = [output for output in made.outputs if len(output.shape) == 4]
        form = CHANNELS_LAST if any(output.channels_last for output in images) else NCHW
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                assert tensor.dtype == dtype
                if index in made.read_as_they_lie:
                    passed = {
                        one.structs[place] for one in made.launches for k, place in one.strides if k == index
                    }
                    assert passed == {tensor.stride()}
                    continue
                assert tensor.data_ptr() % call.ALIGNMENT == 0
                if index == 0 and images:  # the gradient of a bias alone does not say how the others lie
                    assert tensor.is_contiguous(memory_format=form)
        if made.family == "cast":
            self.casts += 1
            return [
                tensor.to(output.dtype)
                for output, tensor in zip(made.outputs, tensors, strict=False)
                if tensor is not None
            ]
        self.launched.append(handle)
        self.received.append([None if one is None else (one.data_ptr(), one.stride()) for one in tensors])
        return [
            found.to(output.dtype or dtype).contiguous(
                memory_format=CHANNELS_LAST if output.channels_last else NCHW
            )
            for output, found in zip(
                made.outputs, layer_outputs(made.outputs, ARGUMENTS, *tensors), strict=True
            )
        ]

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None, backend: str = "kernel") -> Tensor:
        """Computes the output without a derivative."""
        return _OUTPUT.redispatch(_CUDA, input, weight, bias, GEOMETRY, backend)  # type: ignore[no-any-return]

    def gradients(
        self,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        mask: list[bool],
        backend: str = "kernel",
    ) -> list[Tensor]:
        """Computes gradients as a compiled graph does."""
        return _GRADIENTS.redispatch(_CUDA, grad_output, input, weight, GEOMETRY, mask, backend)  # type: ignore[no-any-return]

    def differentiable(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, backend: str = "kernel"
    ) -> Tensor:
        """Computes the output as an eager layer does."""
        return _OUTPUT.redispatch(_AUTOGRAD, input, weight, bias, GEOMETRY, backend)  # type: ignore[no-any-return]

    def under_autocast(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Computes the output as an eager layer does inside ``torch.autocast("cuda", dtype)``."""
        before = torch.get_autocast_dtype("cuda")
        torch.set_autocast_dtype("cuda", dtype)
        try:
            return _OUTPUT.redispatch(_AUTOCAST, input, weight, bias, GEOMETRY, "kernel")  # type: ignore[no-any-return]
        finally:
            torch.set_autocast_dtype("cuda", before)


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    """Inside, the code below the dispatcher computes CPU tensors as on CUDA."""
    gpu = GPU()
    assert host.is_available()
    plan_call = call.plan_call

    def planned(*given: Any) -> list[int]:
        _, _, mask, *_ = given
        gpu.planned.append("gradients" if any(mask) else "output")
        return plan_call(*given)

    monkeypatch.setattr(call, "plan_call", planned)
    monkeypatch.setattr(call, "device_facts", lambda index: H200)
    monkeypatch.setattr(tuned, "winners", lambda index: tuned.NONE)
    monkeypatch.setattr(launch, "add_plan", gpu.add_plan)
    monkeypatch.setattr(launch, "load_kernels", lambda *_: gpu.compiles)
    monkeypatch.setattr(expected, "_layers", {})
    monkeypatch.setattr(ahead, "begin", lambda key, make_plans, *_, **__: gpu.begun.append(make_plans))
    call.forget()
    with torch.library._scoped_library("tconv_swap", "IMPL") as ops:
        ops.impl("launch", gpu.launch, "CPU")
        try:
            yield gpu
        finally:
            call.forget()


def operands(
    form: torch.memory_format = NCHW, dtype: torch.dtype = torch.float32, batch: int = 2
) -> list[Tensor]:
    torch.manual_seed(0)
    x, w, b = torch.randn(batch, 16, 5, 6), torch.randn(16, 8, 4, 4), torch.randn(8)
    return [one.to(dtype) for one in (x.to(memory_format=form), w.to(memory_format=form), b)]


def grad_output(dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 8, 10, 12).to(dtype)


def layer_outputs(
    outputs: tuple[program.Output, ...], arguments: tuple[Any, ...], *tensors: Tensor | None
) -> list[Tensor]:
    """Returns the outputs of a layer's plan, by PyTorch. ``arguments``: of the layer, as ``geometry.Arguments``."""
    first, second, third = (None if one is None else one.to(_wide(one.dtype)) for one in tensors)
    assert first is not None
    assert second is not None
    stride, padding, output_padding, groups, dilation = arguments
    if third is None or third.dim() == 1:
        assert len(outputs) == 1
        return [F.conv_transpose2d(first, second, third, *arguments)]
    found = torch.ops.aten.convolution_backward(
        *(first, second, third, [third.shape[1] * groups]),
        *(stride, padding, dilation, True, output_padding, groups, [True] * 3),
    )
    of_shape = {tuple(gradient.shape): gradient for gradient in found}
    return [of_shape[tuple(output.shape)] for output in outputs]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
