"""Blocks in evaluation on a GPU: one program for the layer, the norm and the activation, beside PyTorch's error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks import call
from tconv_swap.cuda import call as cuda_call

pytestmark = pytest.mark.gpu


def network(norm: type[nn.Module] = nn.BatchNorm2d, **arguments: object) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.ConvTranspose2d(100, 64, 4, 1, 0, bias=False),
        norm(64, **arguments),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 48, 4, 2, 1, groups=2),
        norm(48, **arguments),
        nn.LeakyReLU(0.2, inplace=True),
        nn.ConvTranspose2d(48, 33, 3, 2, 1, 1),
        norm(33, **arguments),
        nn.ConvTranspose2d(33, 3, 4, 2, 1),
        nn.Tanh(),
    )
    for module in made.modules():
        for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d) and one.is_floating_point():
                nn.init.uniform_(one, 0.5, 1.5) if name in ("weight", "running_var") else nn.init.normal_(one)
    return made.cuda().eval()


def images(batch: int = 5) -> Tensor:
    return torch.randn(batch, 100, 1, 1, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


class Counted:
    """Counts how often ``call.evaluated`` computes a block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks, evaluated = 0, call.evaluated

        def counting(*given: object) -> Tensor | None:
            output = evaluated(*given)  # type: ignore[arg-type]
            self.blocks += output is not None
            return output

        monkeypatch.setattr(call, "evaluated", counting)


def check(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, blocks: int = 4) -> None:
    """Checks that the error against float64 is not larger than that of PyTorch's modules."""
    swapped = tconv_swap.swap_layers(model, fuse="blocks", inplace=False)
    counted = Counted(monkeypatch)
    # Our kernels are used also where "auto" would use PyTorch's operator.
    for layer in swapped.modules():
        if isinstance(layer, tconv_swap.ConvTranspose2d):
            layer.tconv_backend = "kernel"
    # PyTorch's operator does not use TF32 everywhere it is allowed.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.no_grad():
        ours, theirs = swapped(x), model(x)
        assert counted.blocks == blocks
        exact = copy.deepcopy(model).double()(x.double())
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.stride() == theirs.stride()
    found, original = (float((one.double() - exact).norm() / exact.norm()) for one in (ours, theirs))
    assert found <= 1.05 * original + 1e-7, (found, original)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_further_from_float64_than_pytorch(
    dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network().to(dtype)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    check(model, images().to(dtype), monkeypatch)


def test_instance_norms_that_track_their_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    check(network(nn.InstanceNorm2d, affine=True, track_running_stats=True), images(), monkeypatch)


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    swapped = tconv_swap.swap_layers(model, fuse="blocks", inplace=False)
    counted = Counted(monkeypatch)
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        ours, theirs = swapped(images()), model(images())
    assert counted.blocks > 0
    assert ours.dtype == theirs.dtype == torch.float16
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_statistics_are_read_at_the_call_and_by_a_replayed_graph() -> None:
    model = network()
    swapped = tconv_swap.swap_layers(model, fuse="blocks", inplace=False)
    x = images()
    with torch.no_grad():
        for _ in range(3):
            swapped(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = swapped(x)
        before = swapped(x)
        for one in (model, swapped):
            for norm in (one[1], one[4], one[7]):
                norm.running_mean += 0.5
                norm.running_var *= 3.0
                norm.weight *= 0.5
                norm.bias -= 0.25
        graph.replay()
        after, expected = swapped(x), model(x)
        assert not torch.allclose(before, expected, rtol=1e-2, atol=1e-2)
        for one in (after, replayed):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-3)


def test_one_launch_behind_the_packing_and_none_of_a_norm() -> None:
    swapped = tconv_swap.swap_layers(network().half(), fuse="blocks", inplace=False)
    x = images().half()
    with torch.no_grad():
        swapped(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            swapped(x)
            torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("forward" in name for name in names), names
    assert not any("norm" in name.lower() or "elementwise" in name for name in names), names


def test_its_kinds_of_calls_are_told_apart() -> None:
    """The epilogue is part of the key of a call plan."""
    cuda_call.forget()
    x = images()
    with torch.no_grad():
        for activation in (nn.ReLU(), nn.LeakyReLU(0.1), nn.LeakyReLU(0.3), nn.Tanh(), None):
            for eps in (1e-5, 0.3):
                layer, norm = network()[0], nn.BatchNorm2d(64, eps=eps).cuda().eval()
                model = nn.Sequential(*(one for one in (layer, norm, activation) if one is not None))
                swapped = tconv_swap.swap_layers(model, fuse="blocks", inplace=False)
                torch.testing.assert_close(swapped(x), model(x), rtol=1e-3, atol=1e-3)
