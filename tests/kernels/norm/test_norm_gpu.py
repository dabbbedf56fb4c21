"""The kernels of normalisation on a GPU: against float64 and PyTorch's error, poisoned memory, the same bits twice."""

from __future__ import annotations

import copy
import math
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
from tconv_swap.kernels.norm.shape import Activation

pytestmark = pytest.mark.gpu

ACTIVATIONS = [None, nn.ReLU(), nn.LeakyReLU(0.2), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.GELU()]
#: Distance of the activation's input from a kink that is far more than the rounding of float32.
KINK = 1e-5


def run(
    norm: nn.Module, activation: nn.Module | None, x: Tensor, grad: Tensor, ours: bool
) -> dict[str, Tensor]:
    """Output, gradients and buffers; the modules are copied first."""
    norm = copy.deepcopy(norm).to(x.dtype) if x.dtype is torch.float64 else copy.deepcopy(norm)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    if ours:
        assert call.takes(x)
        output = call.computed(norm, activation, x)
        assert output is not None, "the kernels do not take it"
    else:
        output = norm(x)
        output = output if activation is None else activation(output)
    output.backward(grad.to(output.dtype))
    found = {"output": output.detach(), "grad_x": x.grad}
    found |= {f"grad_{name}": parameter.grad for name, parameter in norm.named_parameters()}
    found |= {name: buffer for name, buffer in norm.named_buffers() if buffer.is_floating_point()}
    return {name: value for name, value in found.items() if value is not None}


def check(
    shape: Sequence[int],
    dtype: torch.dtype,
    channels_last: bool,
    per_image: bool,
    activation: nn.Module | None,
    offset: float = 0.5,
    **arguments: object,
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = (
        torch.randn(shape, generator=generator, device="cuda")
        .mul_(1.5)
        .add_(offset)
        .to(dtype)
        .contiguous(memory_format=form)
    )
    grad = torch.randn(shape, generator=generator, device="cuda").to(dtype).contiguous(memory_format=form)
    torch.manual_seed(0)
    norm = norm_for(shape, per_image, **arguments)
    # At a kink of the activation rounding decides the slope: the gradient is zero there.
    before = copy.deepcopy(norm).double()(x.double()).detach()
    grad.mul_((before.abs() > KINK).to(dtype))
    truth = run(norm, activation, x.double(), grad.double(), ours=False)
    theirs = errors(run(norm, activation, x, grad, ours=False), truth)
    poisoned = torch.full((4 * x.numel(),), float("nan"), device="cuda")
    del poisoned  # the next allocation gets its memory
    first = run(norm, activation, x, grad, ours=True)
    assert first["output"].is_contiguous(memory_format=form)
    for name, error in errors(first, truth).items():
        # A mean is rounded, by PyTorch too.
        room = ROUNDING[dtype if name in ("output", "grad_x") else torch.float32] + abs(offset) * 2**-23
        assert error <= 1.1 * theirs[name] + room, f"{name}: {error:.2e}, PyTorch's {theirs[name]:.2e}"
    second = run(norm, activation, x, grad, ours=True)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


#: Shape, channels_last, per image: where PyTorch has such a norm.
CASES = [
    pytest.param(shape, last, image, id=f"{name}{', channels_last' * last}{', of each image' * image}")
    for name, shape in SHAPES.items()
    for last in (False, True)[: 1 + (len(shape) == 4)]
    for image in (False, True)[: 1 + (math.prod(shape[2:]) > 1)]
]


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(("shape", "channels_last", "per_image"), CASES)
def test_named_shapes_match_float64(
    shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, per_image: bool
) -> None:
    check(shape, dtype, channels_last, per_image, nn.ReLU())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_activations_match_float64(activation: nn.Module | None, channels_last: bool) -> None:
    for dtype in ROUNDING:
        check((4, 24, 17, 12), dtype, channels_last, False, activation)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_match_float64(seed: int) -> None:
    chosen = random.Random(seed)
    shape = [chosen.randint(1, 12), chosen.randint(1, 150), chosen.randint(2, 70), chosen.randint(1, 70)]
    activation = chosen.choice(ACTIVATIONS)
    dtype = chosen.choice(list(ROUNDING))
    arguments = {"eps": chosen.choice((1e-5, 0.1)), "momentum": chosen.choice((0.1, 0.7))}
    check(shape, dtype, seed % 2 == 1, seed % 3 == 2, activation, **arguments)


@pytest.mark.parametrize("launches", ["one", "two"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_one_launch_of_every_cluster_and_two_launches_are_right(
    launches: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_two_pass_microseconds", lambda *_: 0.0 if launches == "two" else float("inf"))
    clusters = plan._CLUSTERS if torch.cuda.get_device_capability() >= (9, 0) else (1,)
    for cluster in clusters:
        if launches == "one":
            monkeypatch.setattr(plan, "_CLUSTERS", (cluster,))
            monkeypatch.setattr(plan, "_has_cluster", lambda *_: True)
        forget()
        for shape in ((9, 20, 33, 40), (40, 72, 16, 8), (2, 3, 200, 301)):
            check(shape, torch.float16, channels_last, False, nn.LeakyReLU(0.1))
    forget()  # so that no other test gets these plans


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_a_mean_far_from_zero_loses_nothing(channels_last: bool) -> None:
    check((8, 16, 40, 40), torch.float32, channels_last, False, None, offset=3000.0)


def test_momentum_counts_and_evaluation_match_pytorch() -> None:
    for momentum in (0.3, None):
        original = nn.Sequential(
            nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()
        )
        original.cuda()
        swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False, backend="native")
        for _ in range(3):
            x = torch.randn(4, 3, 9, 9, device="cuda")
            torch.testing.assert_close(swapped(x), original(x))
        for (name, ours), (_, theirs) in zip(swapped.named_buffers(), original.named_buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
        assert int(swapped[1].num_batches_tracked) == 3
        original.eval(), swapped.eval()
        with torch.no_grad():
            torch.testing.assert_close(swapped(x), original(x))
            swapped[1].running_mean += 1  # which no cache may remember
            original[1].running_mean += 1
            torch.testing.assert_close(swapped(x), original(x))


def test_half_parameters_and_autocast_are_right() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)).cuda()
    x = torch.randn(4, 8, 9, 9, device="cuda")
    truth = copy.deepcopy(original).double()(x.double())
    swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False)
    with torch.autocast("cuda", torch.float16):
        output = swapped(x)
    assert output.dtype is torch.float16
    assert float((output.double() - truth).norm() / truth.norm()) < 2e-3
    half = swapped.half()
    output = half(x.half())
    assert float((output.double() - truth).norm() / truth.norm()) < 5e-3
    output.float().square().mean().backward()
    assert half[1].weight.grad.dtype is torch.float16


def test_a_network_of_norms_is_verified() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.InstanceNorm2d(16),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 8, 3),
        nn.BatchNorm2d(8),
        nn.Tanh(),
    ).cuda()
    for fuse in ("blocks", "all"):
        swapped = tconv_swap.swap_layers(original, fuse=fuse, inplace=False)
        report = tconv_swap.verify(original, swapped, torch.randn(4, 16, 16, 16, device="cuda"))
        assert report.passed, report.failures


def test_second_derivatives_and_a_captured_graph_are_right() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.Tanh()).cuda()
    swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False)
    x = torch.randn(3, 4, 6, 6, device="cuda", requires_grad=True)
    found = []
    for model in (original, swapped):
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)
    static = x.detach().clone()
    with torch.no_grad():
        for _ in range(2):
            swapped(static)
        before = int(swapped[1].num_batches_tracked)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = swapped(static)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
    assert int(swapped[1].num_batches_tracked) == before + 2
    torch.testing.assert_close(output, original(static), rtol=1e-3, atol=1e-3)


def test_every_activation_has_a_module() -> None:
    applied = {call.activation_of(module)[0] for module in ACTIVATIONS}  # type: ignore[index]
    assert applied == set(Activation) - {Activation.GELU_TANH}


def test_a_smaller_batch_takes_no_shared_memory_from_a_larger_one() -> None:
    """Both run the same kernels with different amounts of shared memory; each is planned once, then computed again."""
    norm = norm_for((96, 512, 16, 16), False)
    for batch in (96, 48, 96):
        x = torch.randn(batch, 512, 16, 16, device="cuda")
        grad = torch.randn_like(x)
        found, truth = (
            run(norm, None, tensor, grad, ours) for tensor, ours in ((x, True), (x.double(), False))
        )
        assert errors(found, truth)["grad_x"] < 1e-5
