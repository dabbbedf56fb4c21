"""Wrapped networks with fused blocks: DDP on two processes, averaged weights, DataParallel's replicas, SGD."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ddp_blocks_worker import network, stepped
from pretended_norm import Pretended, pretended
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import tconv_swap

WORKER = Path(__file__).parents[1] / "support" / "ddp_blocks_worker.py"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def batches() -> Tensor:
    return torch.randn(3, 2, 4, 6, 5, generator=torch.Generator().manual_seed(1))


def same(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_ddp_on_two_processes(tmp_path: Path) -> None:
    repository = str(Path(tconv_swap.__file__).parents[1])
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "group"), "gloo"],
            env={**os.environ, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert "12 blocks: same" in output  # four in each of three steps


def test_steps_of_training(kernels: Pretended) -> None:
    original = network()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    same(stepped(swapped, batches()), stepped(original, batches()))
    assert (kernels.sum_forwards, kernels.sum_backwards) == (3, 3)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_weights(use_buffers: bool, kernels: Pretended) -> None:
    original = network()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    averages = []
    for model in (original, swapped):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=use_buffers)
        for batch in batches():
            stepped(model, batch[None])
            average.update_parameters(model)
        if not use_buffers:
            update_bn(batches(), average)
        averages.append(average.eval())
    same(averages[1], averages[0])
    assert [type(m) for m in averages[1].module.modules()] == [type(m) for m in swapped.modules()]
    count = kernels.sum_forwards
    with torch.no_grad():
        torch.testing.assert_close(averages[1](batches()[0]), averages[0](batches()[0]), rtol=1e-3, atol=1e-4)
    assert kernels.sum_forwards == count + 1
    tconv_swap.unswap_layers(averages[1])
    assert [type(m) for m in averages[1].modules()] == [type(m) for m in averages[0].modules()]


def test_replicas_compute_by_the_modules(kernels: Pretended) -> None:
    """nn.DataParallel makes new replicas for each call; nothing is proven of them before."""
    original = network().eval()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    replica = copy.copy(swapped[3])
    replica.__dict__["_is_replica"] = True
    x = torch.randn(2, 8, 5, 4)
    torch.testing.assert_close(replica(x), original[3](x))
    assert kernels.sum_forwards == 0
