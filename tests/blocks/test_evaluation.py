"""Blocks in evaluation as one program: which calls use it, the key of their plans, and that results are never stale.

On a pretended GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from pretended_norm import Pretended, pretended
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tconv_swap
from tconv_swap.blocks import call, evaluation
from tconv_swap.cuda import call as cuda_call
from tconv_swap.kernels.norm.shape import Activation

VECTORS = "weight", "bias", "running_mean", "running_var"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def up(**arguments: object) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(16, 24, 4, 2, 1, **arguments)  # type: ignore[arg-type]


def model(*modules: nn.Module | None) -> nn.Sequential:
    """In evaluation, with statistics and parameters that differ from channel to channel."""
    torch.manual_seed(0)
    made = nn.Sequential(*(copy.deepcopy(one) for one in modules if one is not None), nn.Identity())
    for module in made.modules():
        if not hasattr(module, "running_mean"):
            continue
        for name, one in (*module.named_parameters(), *module.named_buffers()):
            if one.is_floating_point():
                nn.init.uniform_(one, 0.5, 1.5) if name in ("weight", "running_var") else nn.init.normal_(one)
    return made.eval()


def swapped(made: nn.Module) -> nn.Sequential:
    ours = tconv_swap.swap_layers(made, fuse="blocks", inplace=False)[:-1]
    for layer in ours:
        if isinstance(layer, tconv_swap.ConvTranspose2d):
            layer.tconv_backend = "kernel"
    return ours  # type: ignore[return-value]


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 16, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(made: nn.Sequential, gpu: Pretended, blocks: int = 1, x: Tensor | None = None) -> nn.Sequential:
    """Returns the swapped network, after checking its results and how many of its blocks use one program."""
    x = images() if x is None else x
    ours = swapped(made)
    before = gpu.blocks
    found, expected = ours(x), made[:-1](x)
    assert gpu.blocks - before == blocks
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    return ours


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_off_cuda_the_modules_compute_it() -> None:
    made, x = model(up(), nn.BatchNorm2d(24), nn.ReLU()), images()
    given = x, made[0].weight, made[0].bias, *(getattr(made[1], name) for name in VECTORS)
    words = evaluation.block_words((2, 2), (1, 1), (0, 0), 1, (1, 1), 1e-5, Activation.RELU, 0.0)
    assert evaluation.block_output(*given, words, "kernel") is None


# Which blocks use one program

ACTIVATIONS = (
    *(
        None,
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.3),
        nn.ReLU6(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.SiLU(),
    ),
    *(nn.GELU(), nn.GELU(approximate="tanh")),
)
NORMS = (
    None,
    nn.BatchNorm2d(24),
    nn.BatchNorm2d(24, eps=0.2, momentum=None),
    nn.BatchNorm2d(24, affine=False),
    nn.InstanceNorm2d(24, track_running_stats=True, affine=True),
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_computes_what_the_modules_compute(
    norm: nn.Module | None, activation: nn.Module | None, gpu: Pretended
) -> None:
    check(model(up(), norm, activation), gpu, blocks=norm is not None or activation is not None)
    assert gpu.forwards == 0


@pytest.mark.parametrize(
    "arguments", [{"groups": 2}, {"bias": False}, {"output_padding": 1}, {"dilation": 2}], ids=repr
)
def test_every_geometry(arguments: dict[str, object], gpu: Pretended) -> None:
    check(model(up(**arguments), nn.BatchNorm2d(24), nn.ReLU()), gpu)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_every_layout(form: torch.memory_format, gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU()).to(memory_format=form)  # type: ignore[call-overload]
    x = images().to(memory_format=form)
    assert swapped(made)(x).is_contiguous(memory_format=form)
    check(made, gpu, x=x)
    # One input has every other column, one begins at an address that is not aligned.
    check(made, gpu, x=torch.randn(2, 16, 5, 12)[..., ::2])
    check(made, gpu, x=torch.cat((torch.zeros(1), x.flatten()))[1:].view(x.shape))


def test_signals(gpu: Pretended) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.ConvTranspose1d(16, 24, 4, 2, 1), nn.BatchNorm1d(24), nn.ReLU(), nn.Identity()
    ).eval()
    nn.init.normal_(made[1].running_mean)  # type: ignore[arg-type]
    ours = tconv_swap.swap_layers(made, fuse="blocks", inplace=False, include_1d=True)
    ours[0].tconv_backend = "kernel"  # type: ignore[index]
    x = torch.randn(32, 16, 999)  # more than what one launch computes of tiny problems
    torch.testing.assert_close(ours(x), made(x), rtol=2e-5, atol=2e-5)
    assert gpu.blocks == 1


def test_half_precision_with_parameters_of_either(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU()).half()
    for dtype in (torch.float16, torch.float32):
        made[1].to(dtype)
        ours = swapped(made)
        exact = copy.deepcopy(made).double()[:-1](images().double())
        torch.testing.assert_close(ours(images(torch.float16)).double(), exact, rtol=2e-3, atol=2e-3)
    assert gpu.blocks == 2


def test_an_autocast_casts_what_the_layer_reads(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU())
    ours, x = swapped(made), images()
    gpu.casts = True
    before = torch.get_autocast_dtype("cuda")
    for dtype in (torch.float16, torch.bfloat16):
        torch.set_autocast_dtype("cuda", dtype)
        try:
            found = ours(x)
        finally:
            torch.set_autocast_dtype("cuda", before)
        assert found.dtype == dtype
        rounded = copy.deepcopy(made)
        for one in (rounded[0].weight, rounded[0].bias):
            one.copy_(one.to(dtype))  # type: ignore[operator, union-attr]
        expected = rounded[:-1](x.to(dtype).float()).to(dtype)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert gpu.blocks == 2


# No stale results


def test_statistics_and_parameters_are_read_at_the_call(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.LeakyReLU(0.1))
    ours = check(made, gpu)
    x = images()
    for one in (made, ours):
        one[1].running_mean += 0.5  # type: ignore[operator]
        one[1].running_var *= 2  # type: ignore[operator]
        one[1].weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
        one[0].bias.data.sub_(1.0)  # type: ignore[operator, union-attr]
        one[2].negative_slope = 0.4
        one[1].eps = 0.25
    torch.testing.assert_close(ours(x), made[:-1](x), rtol=2e-5, atol=2e-5)
    assert gpu.blocks == 2


def test_no_kind_of_call_is_taken_for_another(gpu: Pretended) -> None:
    kinds = 0
    for eps in (1e-5, 0.3):
        for activation in (nn.ReLU(), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), None):
            for layer in (up(), up(groups=2)):
                made = model(layer, nn.BatchNorm2d(24, eps=eps), activation)
                kinds += 1
                for _ in range(3):
                    check(made, gpu)
                assert gpu.blocks_planned == kinds


def test_a_training_step_between_changes_what_the_next_evaluation_reads(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU())
    ours = check(made, gpu)
    for one in (made[:-1], ours):
        with torch.enable_grad():
            one.train()(images() + 1).sum().backward()
        one.eval()
    assert gpu.forwards == gpu.backwards == 1
    torch.testing.assert_close(ours(images()), made[:-1](images()), rtol=2e-5, atol=2e-5)
    assert gpu.blocks == 2


# What the modules compute


def test_a_frozen_norm_inside_training(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU()).train()
    made[1].eval()
    check(made, gpu)


@pytest.mark.parametrize("which", ["input", "weight", "norm"])
def test_where_a_gradient_is_wanted(which: str, gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU()).requires_grad_(False)
    wanted = {"input": images(), "weight": made[0].weight, "norm": made[1].bias}[which].requires_grad_()  # type: ignore[union-attr]
    with torch.enable_grad():
        ours = check(made, gpu, blocks=0, x=wanted if which == "input" else None)  # type: ignore[arg-type]
        assert ours(wanted if which == "input" else images()).requires_grad


def test_norms_by_the_batchs_statistics(gpu: Pretended) -> None:
    check(model(up(), nn.BatchNorm2d(24, track_running_stats=False), nn.ReLU()), gpu, blocks=0)
    check(model(up(), nn.InstanceNorm2d(24), nn.ReLU()), gpu, blocks=0)
    tracked = model(up(), nn.InstanceNorm2d(24, track_running_stats=True), nn.ReLU())
    tracked[1].track_running_stats = False  # PyTorch's then asks the image again
    check(tracked, gpu, blocks=0)
    assert gpu.forwards == 2


def test_hooks_are_obeyed(gpu: Pretended) -> None:
    made = model(up(), nn.BatchNorm2d(24), nn.ReLU())
    ours, x, called = swapped(made), images(), []
    for at, blocks in ((0, 0), (1, 0), (2, 1)):
        handle = ours[at].register_forward_hook(lambda module, args, output: called.append(module))
        before = gpu.blocks
        torch.testing.assert_close(ours(x), made[:-1](x), rtol=2e-5, atol=2e-5)
        assert (called, gpu.blocks - before) == ([ours[at]], blocks)
        handle.remove()
        called.clear()
    ours(x)
    assert gpu.blocks == 2


def test_layers_of_their_own_kind(gpu: Pretended) -> None:
    class Own(nn.ConvTranspose2d):
        pass

    for layer in (Own(16, 24, 4, 2, 1), weight_norm(up())):
        check(model(layer, nn.BatchNorm2d(24), nn.ReLU()), gpu, blocks=0)
    native = swapped(model(up(), nn.BatchNorm2d(24), nn.ReLU()))
    native[0].tconv_backend = "native"  # type: ignore[assignment]
    native(images())
    assert gpu.blocks == 0
    check(model(up(), nn.BatchNorm2d(24), nn.ReLU()).double(), gpu, 0, images(torch.float64))
    check(model(up(), nn.ReLU(), nn.BatchNorm2d(24)), gpu, blocks=1, x=images())
    assert check(model(up(), nn.Tanh()), gpu, 0, images()[0]) is not None


def test_pytorchs_errors(gpu: Pretended) -> None:
    for made, x in (
        (model(up(), nn.BatchNorm2d(23), nn.ReLU()), images()),
        (model(up(), nn.BatchNorm1d(24), nn.ReLU()), images()),
        (model(up(), nn.BatchNorm2d(24), nn.ReLU()), torch.randn(2, 17, 5, 6)),
    ):
        ours = swapped(made)
        for one in (made, ours):
            with pytest.raises((RuntimeError, ValueError)):
                one(x)
    assert gpu.blocks == 0


def test_questions_are_recorded_as_the_layers(gpu: Pretended) -> None:
    ours = swapped(model(up(), nn.BatchNorm2d(24), nn.ReLU()))
    cuda_call.forget()
    with cuda_call.recording() as posed:
        ours(images())
        ours(images())
    assert [(one.problem.geometry.out_channels, one.mask) for one in posed] == [(24, ())]


def test_who_observes_norms_sees_them(gpu: Pretended) -> None:
    ours, seen = swapped(model(up(), nn.BatchNorm2d(24), nn.ReLU())), []
    call.observers.append(lambda norm, *_: seen.append(norm))
    try:
        ours(images())
    finally:
        call.observers.clear()
    assert seen == [ours[1]]
    assert (gpu.blocks, gpu.forwards) == (0, 1)
