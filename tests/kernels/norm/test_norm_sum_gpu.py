"""The kernels of a norm, a sum and an activation on a GPU: against float64 and PyTorch's error, the same bits twice."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from norm_cases import ROUNDING, SHAPES, errors, norm_for
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks import call
from tconv_swap.cuda.call import forget
from tconv_swap.kernels.norm import plan

pytestmark = pytest.mark.gpu


def run(
    norm: nn.Module, activation: nn.Module, x: Tensor, added: Tensor, grad: Tensor, ours: bool
) -> dict[str, Tensor]:
    """Output, gradients and buffers; the modules are copied first."""
    norm = copy.deepcopy(norm).to(x.dtype) if x.dtype is torch.float64 else copy.deepcopy(norm)
    given = [one.detach().clone(memory_format=torch.preserve_format).requires_grad_() for one in (x, added)]
    if ours:
        assert call.takes(x)
        output = call.computed(norm, activation, *given)
        assert output is not None, "the kernels do not take it"
    else:
        output = activation(norm(given[0]) + given[1])
    output.backward(grad.to(output.dtype))
    found = {"output": output.detach(), "grad_x": given[0].grad, "grad_added": given[1].grad}
    found |= {f"grad_{name}": parameter.grad for name, parameter in norm.named_parameters()}
    found |= {name: buffer for name, buffer in norm.named_buffers() if buffer.is_floating_point()}
    return {name: value for name, value in found.items() if value is not None}


def check(
    shape: Sequence[int],
    dtype: torch.dtype,
    channels_last: bool,
    per_image: bool,
    activation: nn.Module,
    evaluates: bool = False,
    frozen: bool = False,
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    form = torch.channels_last if channels_last else torch.contiguous_format
    x, added, grad = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype).contiguous(memory_format=form)
        for _ in range(3)
    )
    torch.manual_seed(0)
    norm = norm_for(shape, per_image).train(not evaluates).requires_grad_(not frozen)
    # At a kink of the activation rounding decides the slope: the gradient is zero there.
    before = copy.deepcopy(norm).double()(x.double()).detach() + added.double()
    grad.mul_((before.abs() > 8 * torch.finfo(dtype).eps).to(dtype))
    truth = run(norm, activation, x.double(), added.double(), grad.double(), ours=False)
    theirs = errors(run(norm, activation, x, added, grad, ours=False), truth)
    poisoned = torch.full((4 * x.numel(),), float("nan"), device="cuda")
    del poisoned  # the next allocation gets its memory
    first = run(norm, activation, x, added, grad, ours=True)
    assert first["output"].is_contiguous(memory_format=form)
    for name, error in errors(first, truth).items():
        room = ROUNDING[dtype if name in ("output", "grad_x", "grad_added") else torch.float32]
        assert error <= 1.1 * theirs[name] + room, f"{name}: {error:.2e}, PyTorch's {theirs[name]:.2e}"
    second = run(norm, activation, x, added, grad, ours=True)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if len(shape) == 4])
def test_named_shapes_match_float64(name: str, dtype: torch.dtype) -> None:
    for channels_last in (False, True):
        check(SHAPES[name], dtype, channels_last, False, nn.ReLU())
        if SHAPES[name][2] > 1:
            check(SHAPES[name], dtype, channels_last, True, nn.ReLU())


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Sigmoid(), nn.ReLU(inplace=True)], ids=str)
def test_activations_and_modes_match_float64(activation: nn.Module) -> None:
    # The rounding of the output, PyTorch's too, decides the errors: with few channels it is chance which one is larger.
    shape = (4, 384, 17, 12)
    for dtype in ROUNDING:
        for channels_last in (False, True):
            for evaluates, frozen in ((False, False), (True, False), (True, True), (False, True)):
                check(shape, dtype, channels_last, False, activation, evaluates, frozen)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_match_float64(seed: int) -> None:
    chosen = random.Random(seed)
    shape = [chosen.randint(1, 12), chosen.randint(1, 150), chosen.randint(2, 70), chosen.randint(1, 70)]
    dtype = chosen.choice(list(ROUNDING))
    check(shape, dtype, seed % 2 == 1, seed % 3 == 2, nn.ReLU(), evaluates=seed % 5 == 4)


@pytest.mark.parametrize("launches", ["one", "two"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_one_launch_of_every_cluster_and_two_launches_are_right(
    launches: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_two_pass_microseconds", lambda *_: 0.0 if launches == "two" else float("inf"))
    clusters = plan._CLUSTERS if torch.cuda.get_device_capability() >= (9, 0) else (1,)
    for cluster in clusters[: None if launches == "one" else 1]:
        if launches == "one":
            monkeypatch.setattr(plan, "_CLUSTERS", (cluster,))
            monkeypatch.setattr(plan, "_has_cluster", lambda *_: True)
        forget()
        for shape in ((9, 20, 33, 40), (2, 3, 200, 301)):  # cached whole, and in part
            check(shape, torch.float16, channels_last, False, nn.ReLU())
    forget()  # so that no other test gets these plans


def test_a_residual_network_is_verified() -> None:
    from torchvision.models.resnet import BasicBlock, Bottleneck

    torch.manual_seed(0)
    downsample = nn.Sequential(nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64))
    original = nn.Sequential(BasicBlock(16, 16), Bottleneck(16, 16, downsample=downsample)).cuda()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    x = torch.randn(4, 16, 24, 24, device="cuda")
    added: list[bool] = []
    call.observers.append(lambda *seen: added.append(seen[-1] is not None))
    try:
        copy.deepcopy(swapped)(x)  # a copy, because its running statistics change
    finally:
        call.observers.pop()
    assert added.count(True) == 2
    report = tconv_swap.verify(original, swapped, x)
    assert report.passed, report.failures
    assert ("0.bn2", "layer_grad_weight") in {(check.name, check.kind) for check in report.checks}
