"""Hands plans and kernels over to csrc/launch.cpp, which returns a handle for the launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

import torch

from tconv_swap.runtime import host, jit
from tconv_swap.runtime.program import Kernel, Output, Plan

_lock = threading.Lock()
_kernels: dict[tuple[Kernel, str], int] = {}


def raise_for(code: int) -> None:
    if code != 0:
        raise RuntimeError(host.library().tconv_last_error().decode())


def missing_kernels(plan: Plan, architecture: str) -> list[Kernel]:
    """Returns the kernels of a plan that this process has not loaded, each once."""
    wanted = dict.fromkeys(launch.kernel for launch in plan.launches)
    return [kernel for kernel in wanted if (kernel, architecture) not in _kernels]


def load_kernels(plan: Plan, device: torch.device, architecture: str) -> bool:
    """Loads the kernels of a plan that this process lacks; returns whether one of them was not on disk.

    Raises:
        BuildError, CompileError, RuntimeError: as ``add_plan``.
    """
    missing = missing_kernels(plan, architecture)
    if not missing:
        return False
    cubins, compiled = jit.compile_kernels(missing, architecture)
    with _lock, torch.cuda.device(device):
        for kernel, cubin in zip(missing, cubins, strict=True):
            if (kernel, architecture) in _kernels:  # another thread has loaded it meanwhile
                continue
            handle = ctypes.c_void_p()
            raise_for(host.library().tconv_load_kernel(cubin, kernel.entry.encode(), ctypes.byref(handle)))
            assert handle.value is not None
            _kernels[kernel, architecture] = handle.value
    return compiled


def _strides(output: Output) -> list[int]:
    order = list(range(len(output.shape)))
    if output.channels_last:
        order = [0, 2, 3, 1]
    strides = [0] * len(order)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(output.shape[dimension], 1)
    return strides


def _may_overlap(architecture: str) -> bool:
    """Returns whether programmatic dependent launch exists (compute capability 9.0 and later). Other kernels do
    not wait."""
    return int("".join(filter(str.isdigit, architecture))) >= 90


def plan_words(plan: Plan, dtype: torch.dtype, architecture: str, handles: Mapping[Kernel, int]) -> list[int]:
    """Returns a plan as the numbers that tconv_add_program in csrc/launch.cpp reads. ``handles``: of its kernels."""
    words = [plan.workspace_bytes, len(plan.outputs)]
    for output in plan.outputs:
        words += [DTYPE_CODES[output.dtype or dtype], len(output.shape), *output.shape, *_strides(output)]
    words.append(len(plan.launches))
    for launch in plan.launches:
        words += [
            handles[launch.kernel],
            launch.grid,
            launch.block,
            launch.shared_bytes,
            int(launch.overlaps_previous and _may_overlap(architecture)),
            len(launch.arguments),
        ]
        for argument in launch.arguments:
            words += [int(argument.kind), argument.value]
        words.append(len(launch.tensor_maps))
        for one in launch.tensor_maps:
            words += [int(one.base.kind), one.base.value, one.offset]
            words += [
                int(one.element),
                one.swizzle_bytes,
                one.fetched_bytes,
                len(one.sizes),
                len(one.corners),
            ]
            words += [*one.sizes, *one.strides, *one.box, *one.steps, *one.corners]
        words.append(len(launch.structs))
        for struct in launch.structs:
            words += [len(struct), *struct]
    return words


#: c10::ScalarType.
DTYPE_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


def add_plan(plan: Plan, dtype: torch.dtype, device: torch.device, architecture: str) -> int:
    """Compiles and loads what a plan needs; returns the handle that ``torch.ops.tconv_swap.launch`` takes.

    Raises:
        BuildError, CompileError: the host part or a kernel cannot be built.
        RuntimeError: the driver refuses the kernel.
    """
    load_kernels(plan, device, architecture)
    handles = {launch.kernel: _kernels[launch.kernel, architecture] for launch in plan.launches}
    words = plan_words(plan, dtype, architecture, handles)
    array = (ctypes.c_int64 * len(words))(*words)
    handle = ctypes.c_int64()
    with _lock, torch.cuda.device(device):
        raise_for(host.library().tconv_add_program(array, device.index, ctypes.byref(handle)))
        return handle.value


def drop_plan(handle: int) -> None:
    """Releases the program of ``add_plan``; the kernels stay loaded."""
    host.library().tconv_drop_program(ctypes.c_int64(handle))


def forget_plans() -> None:
    """Empties the cache of call plans in csrc/compute.cpp: every call is planned again."""
    if host.is_loaded():
        host.library().tconv_forget()


def count_plans() -> int:
    """Returns how many call plans the cache of csrc/compute.cpp holds."""
    return int(host.library().tconv_known()) if host.is_loaded() else 0
