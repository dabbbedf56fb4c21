"""Networks that are wrapped for training in several processes are refused before a gradient is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

from tconv_swap import swap_layers, verify


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inside", [False, True])
def test_in_distributed_data_parallel(inside: bool) -> None:
    plain = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    swapped: nn.Module = nn.parallel.DistributedDataParallel(swap_layers(plain, inplace=False))
    original: nn.Module = nn.parallel.DistributedDataParallel(plain)
    if inside:
        original, swapped = nn.Sequential(original), nn.Sequential(swapped)
    report = verify(original, swapped, torch.randn(2, 4, 3, 3))
    (failure,) = report.failures
    assert "in DistributedDataParallel" in failure
    assert "verify before it is wrapped" in failure
    assert report.checks == []
