"""Says how much memory is free, and limits how much memory the reading of a file may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

CPU = torch.device("cpu")
#: At least this much is assumed to be free, since what a system reports for a container is an estimate.
MIN_FREE_BYTES = 1 << 30


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that a GPU or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # PyTorch's CPU allocator raises no class of its own, and other C++ code says no more than bad_alloc.
    signs = ("DefaultCPUAllocator", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a CPU or CUDA device; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        # torch.cuda.set_per_process_memory_fraction may limit a process to less than the GPU has. With "cuda", the
        # current GPU, torch.cuda needs its index.
        index = torch.cuda.current_device() if device.index is None else device.index
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(index)) - reserved
        return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)
    available = [_meminfo_available(), _cgroup_available()]
    return min((n for n in available if n is not None), default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_available() -> int | None:
    """Returns the free bytes of this container, if its limit is set on the group that it sees as the root."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def within_free_memory() -> Iterator[None]:
    """Makes an allocation beyond the CPU's free memory raise inside, if the system supports such a limit (Linux).

    Without a limit, a small file that unpacks to something huge makes the system kill this process, or another one.
    """
    free, used = free_bytes(CPU), _private_bytes()
    try:
        import resource
    except ImportError:  # Windows
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if free is None or used is None or before[0] != resource.RLIM_INFINITY:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (used + max(free, MIN_FREE_BYTES), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _private_bytes() -> int | None:
    """Returns the bytes of this process that RLIMIT_DATA counts."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
