"""Tests how much memory is free on a GPU named with or without an index, and which exceptions mean out of memory."""

from __future__ import annotations

import pytest
import torch

from tconv_swap import memory

MIB = 1 << 20


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize(("fraction", "free"), [(1.0, 600 + 200 - 50), (0.5, 500 - 50)])
def test_free_bytes_of_a_gpu(name: str, fraction: float, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has 1000 MiB: another process has 200, and this one has reserved 200 and uses 50."""

    def allowed(device: torch.device | int) -> float:
        # torch's function also refuses a device without an index.
        assert torch.cuda._utils._get_device_index(device) == 0
        return fraction

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50 * MIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", allowed)
    assert memory.free_bytes(torch.device(name)) == free * MIB


def test_exceptions_that_mean_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.int8)
    assert memory.is_out_of_memory(raised.value)
    windows = "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError(windows)):
        assert memory.is_out_of_memory(error)
    for other in (RuntimeError("shapes do not fit"), ValueError(windows)):
        assert not memory.is_out_of_memory(other)
