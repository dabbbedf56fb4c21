"""The architecture that kernels are compiled for, with an NVRTC that knows the GPU and with an older one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tconv_swap.cuda import call
from tconv_swap.runtime import nvrtc

#: The architectures that NVRTC 12.8 and 13.0 list.
OLD = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120)
NEW = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.fixture(autouse=True)
def _no_facts_remembered() -> Iterator[None]:
    call.device_facts.cache_clear()
    yield
    call.device_facts.cache_clear()


@pytest.mark.parametrize(
    ("known", "capability", "expected"),
    [
        (NEW, (7, 5), "sm_75"),
        (NEW, (8, 9), "sm_89"),
        (NEW, (9, 0), "sm_90a"),
        (NEW, (10, 3), "sm_103"),
        (NEW, (12, 1), "sm_121"),
        (OLD, (10, 3), "sm_100"),  # not 101, a system on a chip
        (OLD, (12, 1), "sm_120"),
        (OLD, (8, 7), "sm_87"),
        (OLD, (8, 8), "sm_88"),  # one itself: no other's machine code is for it
        (OLD, (11, 0), "sm_110"),
        (OLD, (13, 0), "sm_130"),
        ((80, 86, 90), (8, 9), "sm_86"),
        ((75, 80), (9, 0), "sm_90a"),
        ((), (10, 0), "sm_100"),
    ],
    ids=str,
)
def test_the_newest_of_its_major_that_nvrtc_knows(
    monkeypatch: pytest.MonkeyPatch, known: tuple[int, ...], capability: tuple[int, int], expected: str
) -> None:
    gpu = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=148,
        shared_memory_per_block_optin=99 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(nvrtc, "architectures", lambda: known)
    assert call.device_facts(0).architecture == expected


def test_a_missing_nvrtc_leaves_the_gpu_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, ...]:
        raise nvrtc.NvrtcMissingError

    monkeypatch.setattr(nvrtc, "architectures", missing)
    assert nvrtc.architecture_for(10, 3) == "sm_103"


def test_nvrtc_is_asked_once() -> None:
    nvrtc.architectures.cache_clear()
    assert set(nvrtc.architectures()) >= {80, 86, 89, 90}
    assert nvrtc.architecture_for(8, 0) == "sm_80"
    assert nvrtc.architectures() is nvrtc.architectures()
    assert nvrtc.architectures.cache_info().misses == 1
