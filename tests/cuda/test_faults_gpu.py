"""Faults on a GPU while a process runs: the call raises or warns, and the next one is right."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tconv_swap import swap_layers
from tconv_swap.cuda import call
from tconv_swap.runtime import host, launch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of the input and of the parameters."""
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *model.parameters()])]


@pytest.mark.parametrize("known", [False, True], ids=["first call", "made again"])
def test_out_of_memory_in_the_middle_of_a_backward_pass(known: bool) -> None:
    """Memory runs out after the gradients of the last layer: the gradient of the first layer's input takes 32 MiB."""
    layers = (nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 8, 4, 2, 1))
    model = swap_layers(nn.Sequential(*layers).cuda(), backend="kernel")
    x = torch.randn(8, 16, 256, 256, device="cuda", requires_grad=True)
    call.forget()
    wanted = gradients(model, x)
    if not known:
        call.forget()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    fraction, (_, total) = torch.cuda.get_per_process_memory_fraction(), torch.cuda.mem_get_info()
    reached: list[Tensor] = []

    def fill(gradient: Tensor) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        with suppress(torch.OutOfMemoryError):
            while True:  # what lies free in memory that is reserved
                reached.append(gradient.new_empty(4 << 20))

    middle = model[0](x)
    middle.register_hook(fill)
    loss = model[2](model[1](middle)).square().mean()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)
    assert x.grad is None
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    model.zero_grad()
    reached.clear()
    del middle, loss
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 1024
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), wanted))
        assert launch.count_plans() == 4


def python(code: str, **environment: str) -> str:
    """Returns what the process printed and logged."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


NETWORKS = (
    "import copy, os, sys, traceback, warnings\n"
    "import torch, tconv_swap\n"
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
    "def pair(device, backend='kernel', channels=16):\n"
    "    theirs = torch.nn.ConvTranspose2d(channels, 8, 4, 2, 1, device=device)\n"
    "    return theirs, tconv_swap.swap_layers(theirs, inplace=False, backend=backend)\n"
    "def same(theirs, ours, size=6):\n"
    "    x = torch.randn(2, theirs.in_channels, 5, size, device=theirs.weight.device)\n"
    "    found, wanted = (torch.autograd.grad(one(x).square().sum(), one.weight)[0] for one in (ours, theirs))\n"
    "    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)\n"
)


def test_a_fork_after_cuda_is_in_use() -> None:
    """A forked process cannot use CUDA: a call there raises, and does not crash or hang; both processes compute on
    the CPU."""
    code = NETWORKS + (
        "theirs, ours = pair('cuda')\n"
        "cpu = pair('cpu')\n"
        "same(theirs, ours); same(*cpu)\n"
        "x_cpu = torch.randn(2, 16, 5, 6)\n"
        "x = x_cpu.cuda()\n"
        "torch.cuda.synchronize()\n"
        "torch.set_num_threads(1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        with torch.no_grad():\n"
        "            torch.testing.assert_close(cpu[1](x_cpu), cpu[0](x_cpu), rtol=1e-4, atol=1e-4)\n"
        "        try:\n"
        "            ours(x)\n"
        "            torch.cuda.synchronize()\n"
        "        except RuntimeError as error:\n"
        "            print('raised', type(error).__name__, str(error).splitlines()[0], flush=True)\n"
        "            os._exit(0)\n"
        "        os._exit(3)\n"
        "    except BaseException:\n"
        "        traceback.print_exc()\n"
        "        os._exit(4)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.waitstatus_to_exitcode(status) == 0, status\n"
        "same(theirs, ours); same(theirs, ours, 9); same(*cpu)\n"
        "print('went on')\n"
    )
    said = python(code)
    assert "raised" in said
    assert "went on" in said


def test_without_a_compiler_pytorchs_operator_computes(tmp_path: Path) -> None:
    """PyTorch's operator computes the calls, and one warning says why."""
    code = NETWORKS + "one = pair('cuda', 'auto'); same(*one); same(*one)\n"
    said = python(code, TCONV_SWAP_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert said.count("layers on CUDA are computed by PyTorch's operator") == 1
    assert "'no-such-compiler' was not found" in said


@pytest.mark.parametrize("fault", ["removed", "full"])
def test_the_cache_while_kernels_are_wanted(fault: str, tmp_path: Path) -> None:
    """Of a process that has built its host part. ``"full"``: the system writes no more than 4 KiB to a file."""
    host.library()
    built = host.library_path().parent
    of_others = shutil.ignore_patterns("tmp*")  # who build it at this moment
    shutil.copytree(built, tmp_path / "cache" / "host" / built.name, ignore=of_others)
    faults = {
        # Renamed first: while files are removed one by one, threads that compile ahead would write others.
        "removed": (
            "import shutil\n"
            "gone = cache.cache_directory().rename(cache.cache_directory().with_name('gone'))\n"
            "shutil.rmtree(gone)\n"
        ),
        "full": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n",
    }
    code = NETWORKS + (
        "from tconv_swap.runtime import cache\n"
        "one = pair('cuda'); same(*one)\n"
        f"{faults[fault]}"
        # Kernels of the first layer for other sizes may have been compiled ahead.
        "same(*one); same(*one, 9); same(*pair('cuda', channels=24), 11)\n"
        "torch.cuda.synchronize()\n"
        "print('computed', flush=True)\n"
        "sys.stderr.flush(); os._exit(0)\n"  # as ddp_worker.py ends
    )
    said = python(code, TCONV_SWAP_CACHE=str(tmp_path / "cache"))
    assert "computed" in said
    assert "building the host part" not in said
    assert said.count("compiled kernels are not kept") == (fault == "full"), said
    left = list((tmp_path / "cache" / "kernels").glob("*.cubin"))
    assert left
