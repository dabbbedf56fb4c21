"""Ways of running that only a GPU has: CUDA graphs, side streams, several GPUs, no second copy of the weights."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import ddp_worker
import pytest
import torch
from torch import Tensor, nn

import tconv_swap
from tconv_swap import swap_layers, verify
from tconv_swap.cli import networks, workflow
from tconv_swap.measurement.bench import benchmark
from tconv_swap.preserving import preserved

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 8, 3, 2, 1, 1, bias=False)
    ).cuda()
    return theirs, swap_layers(theirs, inplace=False, backend="kernel")


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x)
    y.square().mean().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_graphed_callables_forward_and_backward() -> None:
    theirs, ours = pair()
    graphed = torch.cuda.make_graphed_callables(
        copy.deepcopy(ours), (torch.randn(2, 16, 9, 7, device="cuda"),)
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, graphed)]
    for _ in range(3):  # a replayed graph sees the weights of the step before
        x = torch.randn(2, 16, 9, 7, device="cuda")
        assert_close(trained(graphed, x), trained(theirs, x))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_compiled_into_cuda_graphs() -> None:
    theirs, ours = pair()
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(2, 16, 9, 7, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(trained(compiled, x), trained(theirs, x))


def test_side_streams_from_several_threads() -> None:
    theirs, ours = pair()
    found: dict[int, list[Tensor]] = {}
    inputs = [torch.randn(2, 16, 5 + i, 7, device="cuda") for i in range(4)]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        model = copy.deepcopy(ours)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                result = trained(model, inputs[i])
        torch.cuda.synchronize()
        found[i] = result

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        assert_close(found[i], trained(theirs, x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_one_process() -> None:
    theirs, ours = pair()
    x = torch.randn(4, 16, 9, 7, device="cuda")
    expected = trained(theirs, x)
    parallel = nn.DataParallel(ours, device_ids=[0, 1])
    assert_close(trained(parallel, x), expected)
    elsewhere = copy.deepcopy(ours).to("cuda:1")  # while cuda:0 is the current device
    assert_close([t.to("cuda:0") for t in trained(elsewhere, x.to("cuda:1"))], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ddp_and_fsdp2_over_nccl(tmp_path: Path) -> None:
    """Of two processes with a GPU each, against one with the whole batch and PyTorch's layers."""
    outputs = ddp_worker.outputs_of(2, "nccl", tmp_path / "group")
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2, nccl on cuda:{rank}: ddp: same" in output
        assert f"rank {rank} of 2, nccl on cuda:{rank}: fsdp2: same" in output


def test_moved_to_the_gpu_saved_and_loaded_elsewhere(tmp_path: Path) -> None:
    theirs, ours = pair()
    x = torch.randn(2, 16, 9, 7, device="cuda")
    torch.save(ours, tmp_path / "model.pt")
    for place in ("cpu", "cuda"):
        loaded = torch.load(tmp_path / "model.pt", map_location=place, weights_only=False)
        torch.testing.assert_close(loaded(x.to(place)).cuda(), theirs(x), rtol=1e-4, atol=1e-5)
    assert_close(trained(ours.cpu().cuda(), x), trained(theirs, x))


def test_networks_that_share_parameters_are_kept_once() -> None:
    """A weight of 1 GiB, and one copy of it, not one for each network, while it is verified on a tiny input."""
    original = nn.Sequential(nn.Linear(1 << 14, 1 << 14, bias=False), nn.Unflatten(1, (16, 32, 32)))
    original.append(nn.ConvTranspose2d(16, 8, 2, 2))
    original.cuda().requires_grad_(False)
    swapped = swap_layers(copy.deepcopy(original, {id(p): p for p in original.parameters()}))
    assert all(a is b for a, b in zip(original.parameters(), swapped.parameters(), strict=True))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = verify(original, swapped, torch.randn(1, 1 << 14, device="cuda"), reference="original")
    assert report.passed, report.failures
    # The copy, and the bytes that comparing it takes.
    assert torch.cuda.max_memory_allocated() - before < 3 << 29


def test_a_network_larger_than_half_of_what_its_gpu_allows(tmp_path: Path) -> None:
    """1 GiB of weights where 1.75 GiB may be allocated: swapped, verified and timed, and never there twice."""
    gc.collect()
    torch.cuda.empty_cache()
    fraction, (_, total) = torch.cuda.get_per_process_memory_fraction(), torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + (7 << 28)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        model = nn.Sequential(
            nn.Linear(1 << 14, 1 << 14, bias=False, device="cuda").requires_grad_(False),
            nn.Unflatten(1, (16, 32, 32)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, device="cuda"),
        ).eval()
        with pytest.raises(torch.OutOfMemoryError):
            copy.deepcopy(model)
        original, swapped = workflow.original_and_swapped(
            model, workflow.Request(tmp_path), torch.device("cuda")
        )
        assert all(a is b for a, b in zip(model.parameters(), swapped.parameters(), strict=True))
        x = torch.randn(1, 1 << 14, device="cuda")
        report = verify(original, swapped, x)
        assert report.passed, report.failures
        assert "float64 needs about" in report.reference
        timing = benchmark(original, swapped, x, warmup=0, iters=2)
        assert [c.stage for c in timing.network] == ["forward", "backward", "step"], timing.notes
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)


def test_saved_state_goes_to_the_cpu_if_the_gpu_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("tconv_swap.module_state.free_bytes", lambda device: 1000)
    allocated = torch.cuda.memory_allocated()
    with preserved(model):
        assert torch.cuda.memory_allocated() == allocated
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_explains_one_dimension(dtype: torch.dtype) -> None:
    layer = tconv_swap.ConvTranspose1d(64, 32, 8, 4, 2, device="cuda", dtype=dtype)
    x = torch.randn(2, 64, 100, device="cuda", dtype=dtype)
    text = str(tconv_swap.explain(layer, x))
    assert "64->32 k1x8 s1x4 p0x2" in text, text


def test_the_command_line_in_a_fresh_process(tmp_path: Path) -> None:
    """A file whose tensors lie on a GPU: CUDA starts while the loader's memory is limited."""
    theirs, _ = pair()
    torch.save(theirs, tmp_path / "model.pt")
    options = ["--out", "fast.pt", "--input-shape", "2,16,9,7", "--no-benchmark"]
    result = subprocess.run(
        [sys.executable, "-m", "tconv_swap", "model.pt", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tconv_swap.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    loaded = torch.load(tmp_path / "fast.pt", weights_only=False)
    assert loaded[0].weight.is_cuda
    x = torch.randn(2, 16, 9, 7, device="cuda")
    torch.testing.assert_close(loaded(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_network_that_fills_its_gpu_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    theirs, _ = pair()
    if crowded:
        monkeypatch.setattr(networks, "free_bytes", lambda device: 1000)
    request = workflow.Request(tmp_path)
    original, swapped = workflow.original_and_swapped(theirs, request, torch.device("cuda"))
    pairs = list(zip(theirs.parameters(), original.parameters(), swapped.parameters(), strict=True))
    assert all(b is c for _, b, c in pairs)
    assert all((a is b) == crowded for a, b, _ in pairs)
    halved = workflow.Request(tmp_path, dtype=torch.float16)
    moved, _ = workflow.original_and_swapped(theirs, halved, torch.device("cuda"))
    assert {p.dtype for p in moved.parameters()} == {torch.float16}
    assert {p.dtype for p in theirs.parameters()} == {torch.float32}
