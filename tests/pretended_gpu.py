"""A GPU where there is none: routes and plans as on an H200, on CPU tensors, whose launches PyTorch computes.

What chooses, remembers and finds the way of a call (route.py, graph_calls.py, csrc/node.cpp) is the real thing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap import graph
from tconv_swap.cuda import call, graph_calls, launch, node, plan, program, route, tuned

H200 = plan.Device("sm_90a", 132, 227 << 10)
NCHW, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_RELAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.POINTER(ctypes.c_void_p)
)


@dataclass
class GPU:
    """Computes one geometry, of 4 x 4 taps, stride 2, padding 1.

    Attributes:
        launched: handles of plans, in the order of their launches.
        asked: the ops that Python was asked for.
    """

    launched: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    _plans: list[tuple[program.Plan, torch.dtype, list[Any]]] = field(default_factory=list)

    def add_plan(
        self,
        made: program.Plan,
        dtype: torch.dtype,
        device: torch.device,
        architecture: str,
        inputs: list[Tensor | None],
    ) -> int:
        assert (device.type, architecture) == ("cpu", H200.architecture)
        self._plans.append((made, dtype, [_layout(tensor) for tensor in inputs]))
        return len(self._plans) - 1

    def launch(self, handle: int, *tensors: Tensor | None) -> list[Tensor]:
        made, dtype, layouts = self._plans[handle]
        assert [_layout(tensor) for tensor in tensors] == layouts
        self.launched.append(handle)
        return [
            found.to(dtype).contiguous(memory_format=CHANNELS_LAST if output.channels_last else NCHW)
            for output, found in zip(made.outputs, _computed(made.outputs, *tensors), strict=True)
        ]

    def relaunch(self, handle: int, *tensors: Tensor | None) -> list[Tensor]:
        _, dtype, layouts = self._plans[handle]
        fits = [_layout(tensor) for tensor in tensors] == layouts
        fits = fits and all(tensor is None or tensor.dtype == dtype for tensor in tensors)
        return self.launch(handle, *tensors) if fits else []

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None, backend: str = "kernel") -> Tensor:
        op = torch.ops.tconv_swap.conv_transpose2d_output.default
        return op.redispatch(_CUDA, input, weight, bias, GEOMETRY, backend)  # type: ignore[no-any-return]

    def gradients(
        self,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        mask: list[bool],
        backend: str = "kernel",
    ) -> list[Tensor]:
        op = torch.ops.tconv_swap.conv_transpose2d_gradients.default
        return op.redispatch(_CUDA, grad_output, input, weight, GEOMETRY, mask, backend)  # type: ignore[no-any-return]

    def differentiable(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As an eager call is that was made before."""
        key = (input.shape, weight.shape, input.dtype, bias is None)
        known = route.find(key)
        if known is None:
            route.remember(key, input, weight, bias, None, ARGUMENTS, "kernel")
            known = route.find(key)
        assert known is not None
        output = known.differentiable(input, weight, bias)
        assert output is not None
        return output


ARGUMENTS = (2, 2), (1, 1), (0, 0), 1, (1, 1)
GEOMETRY = graph.as_list(ARGUMENTS)


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    """Meanwhile, CPU tensors are computed as on CUDA by what is below the dispatcher."""
    gpu = GPU()
    monkeypatch.setattr(call, "device_facts", lambda index: H200)
    monkeypatch.setattr(tuned, "winners", lambda index: tuned.NONE)
    monkeypatch.setattr(launch, "add_plan", gpu.add_plan)
    route.forget()
    library = node._library()
    assert library is not None
    relaunch = _RELAUNCH(_on_handles(gpu.relaunch))
    library.tconv_use_launcher(ctypes.cast(relaunch, ctypes.c_void_p))
    with torch.library._scoped_library("tconv_swap", "IMPL") as ops:
        ops.impl("launch", gpu.launch, "CPU")
        ops.impl("relaunch", gpu.relaunch, "CPU")
        ops.impl("gradients_anew", _gradients_anew(gpu), "CPU")
        for name in ("output", "gradients"):
            ops.impl(f"conv_transpose2d_{name}_anew", _asked(gpu, name), "CPU")
        try:
            yield gpu
        finally:
            library.tconv_use_launcher(ctypes.c_void_p(launch.relaunch_address()))
            route.forget()


def _gradients_anew(gpu: GPU) -> Any:
    def ask(*arguments: Any) -> list[Tensor]:
        gpu.asked.append("gradients")
        return route._gradients_anew(*arguments)

    return ask


def _asked(gpu: GPU, name: str) -> Any:
    def ask(*arguments: Any) -> Any:
        gpu.asked.append(name)
        geometry = graph.from_list(GEOMETRY)
        if name == "output":
            *tensors, given, backend = arguments
            return graph_calls.output(*tensors, given, geometry, backend)
        *tensors, given, mask, backend = arguments
        return graph_calls.gradients(*tensors, given, geometry, tuple(mask), backend)

    return ask


def _layout(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride())


def _computed(outputs: tuple[program.Output, ...], *tensors: Tensor | None) -> list[Tensor]:
    """What the outputs of a plan are: that of a forward pass is larger than its input, gradients have their shapes."""
    first, second, third = tensors
    assert first is not None
    assert second is not None
    if first.shape[1] == second.shape[0]:
        assert len(outputs) == 1
        bias = None if third is None else third.float()
        return [F.conv_transpose2d(first.float(), second.float(), bias, *ARGUMENTS[:2])]
    assert third is not None
    found = torch.ops.aten.convolution_backward(
        *(first.float(), second.float(), third.float(), [third.shape[1]]),
        *(*ARGUMENTS[:2], ARGUMENTS[4], True, ARGUMENTS[2], 1, [True] * 3),
    )
    of_shape = {tuple(gradient.shape): gradient for gradient in found}
    return [of_shape[tuple(output.shape)] for output in outputs]


def _on_handles(relaunch: Any) -> Any:
    """As csrc/launch.cpp's tconv_relaunch."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    new_capsule, pointer_in = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    new_capsule.restype, new_capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def tensor_of(handle: int | None) -> Tensor | None:
        if handle is None:
            return None
        own = ctypes.c_void_p()
        assert torch_cpu.aoti_torch_new_tensor_handle(ctypes.c_void_p(handle), ctypes.byref(own)) == 0
        return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(new_capsule(own, None, None))

    def on_handles(handle: int, first: int, second: int, third: int | None, outputs: Any) -> int:
        computed = relaunch(handle, *map(tensor_of, (first, second, third)))
        for i, tensor in enumerate(computed):
            outputs[i] = pointer_in(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
        return len(computed)

    return on_handles
