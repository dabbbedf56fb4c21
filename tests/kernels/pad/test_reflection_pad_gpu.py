"""The kernels of reflection padding on a GPU: against float64, poisoned memory, the same bits twice, derivatives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks import call
from tconv_swap.cuda.call import forget
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.pad import reflection_pad

pytestmark = pytest.mark.gpu

FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
#: Half a unit in the last place.
ROUNDING = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
SHAPES = {
    "cyclegan": ((2, 256, 64, 64), (1, 1, 1, 1)),
    "cyclegan head": ((2, 64, 128, 128), (3, 3, 3, 3)),
    "rgb": ((4, 3, 130, 131), (3, 3, 3, 3)),
    "as wide as it may be": ((3, 24, 7, 5), (4, 4, 6, 6)),
    "one pixel": ((3, 8, 1, 1), (0, 0, 0, 0)),
    "one side": ((1, 33, 20, 17), (0, 5, 2, 0)),
}


@pytest.fixture(params=["one plane", "several planes"])
def planes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each thread computes one plane, or several, whatever fills the GPU."""
    resident = 0 if request.param == "several planes" else 1 << 40
    monkeypatch.setattr(reflection_pad, "RESIDENT_THREADS", resident)
    forget()
    yield
    forget()


def run(x: Tensor, padding: tuple[int, ...], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the gradient by our kernels."""
    x = x.detach().requires_grad_()
    assert call.takes(x)
    output = call.padded(nn.ReflectionPad2d(padding), x)
    assert output is not None, "the kernel does not take it"
    return output.detach(), torch.autograd.grad(output, x, grad)[0]


def check(shape: tuple[int, ...], padding: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    form = FORMATS[layout]
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype).contiguous(memory_format=form)
    exact = x.double().contiguous().requires_grad_()
    expected = F.pad(exact, padding, "reflect")
    grad = torch.randn(expected.shape, generator=generator, device="cuda").to(dtype)
    grad = grad.contiguous(memory_format=form)
    (truth,) = torch.autograd.grad(expected, exact, grad.double().contiguous())
    (magnitude,) = torch.autograd.grad(
        F.pad(exact, padding, "reflect"), exact, grad.double().abs().contiguous()
    )
    poisoned = torch.full((4 * expected.numel(),), float("nan"), device="cuda")
    del poisoned  # the next allocation gets its memory
    output, found = run(x, padding, grad)
    assert output.is_contiguous(memory_format=form)
    assert found.is_contiguous(memory_format=form)
    assert torch.equal(output.double(), expected.detach())
    # Up to nine numbers are added in float32, and the sum is rounded once.
    limit = 9 * 2**-24 * magnitude + ROUNDING[dtype] * truth.abs() * 1.001 + torch.finfo(dtype).tiny
    assert bool(((found.double() - truth).abs() <= limit).all())
    again = run(x, padding, grad)
    assert torch.equal(output, again[0])
    assert torch.equal(found, again[1])


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_match_float64(name: str, dtype: torch.dtype, layout: str, planes: None) -> None:
    check(*SHAPES[name], dtype, layout)


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes_match_float64(seed: int, planes: None) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        height, width = rng.randint(1, 70), rng.randint(1, 70)
        channels = rng.choice((1, 2, 3, 4, 8, 12, 40, 64, 130))
        shape = (rng.randint(1, 19), channels, height, width)
        padding = tuple(rng.randrange(min(size, 12)) for size in (width, width, height, height))
        check(shape, padding, rng.choice(DTYPES), rng.choice(list(FORMATS)))


@pytest.mark.parametrize("layout", FORMATS)
def test_a_tensor_that_fills_the_gpu_matches_float64(layout: str) -> None:
    for dtype in DTYPES:
        check((9, 256, 64, 64), (1, 2, 0, 3), dtype, layout)


def test_an_image_without_a_batch_and_inputs_of_other_strides() -> None:
    pad = nn.ReflectionPad2d((1, 2, 3, 0))
    ours = tconv_swap.swap_layers(nn.Sequential(pad), fuse="all", inplace=False)
    base = torch.randn(2, 6, 9, 16, device="cuda")
    for x in (
        base[0],
        base[:, :, :, 1:],
        base[:, :, ::2],
        base.transpose(2, 3),
        base[:0],
        base.double(),
        base.flatten()[1:].as_strided((1, 6, 9, 16), base.stride()),
    ):
        given = [x.detach().requires_grad_() for _ in range(2)]
        outputs = [model(one) for model, one in zip((ours, pad), given, strict=True)]
        assert torch.equal(*outputs)
        grad = torch.randn_like(outputs[0]).transpose(-1, -2).contiguous().transpose(-1, -2)
        found = [torch.autograd.grad(*one, grad)[0] for one in zip(outputs, given, strict=True)]
        torch.testing.assert_close(*found)
    for wrong in (base[0, 0], base[:, :, :2]):
        messages = []
        for model in (ours, pad):
            with pytest.raises((RuntimeError, NotImplementedError)) as raised:
                model(wrong)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("layout", FORMATS)
def test_second_derivatives_batches_and_transforms(layout: str) -> None:
    pad = nn.ReflectionPad2d((1, 2, 0, 3))
    ours = tconv_swap.swap_layers(nn.Sequential(pad), fuse="all", inplace=False)
    x = torch.randn(2, 4, 6, 7, device="cuda").contiguous(memory_format=FORMATS[layout]).requires_grad_()
    found = []
    for model in (ours, pad):
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        grads = torch.stack([torch.ones_like(model(x)), model(x).detach()])
        (batched,) = torch.autograd.grad(model(x), x, grads, is_grads_batched=True)
        _, tangent = torch.func.jvp(model, (x.detach(),), (x.detach(),))
        mapped = torch.func.vmap(model)(x.detach()[:, None])
        found.append((first, second, batched, tangent, mapped))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_and_deterministic_algorithms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReflectionPad2d(1), nn.ConvTranspose2d(8, 4, 3)).cuda()
    ours = tconv_swap.swap_layers(model, fuse="all", inplace=False)
    x = torch.randn(2, 3, 9, 9, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        inner = ours[0](x).detach().requires_grad_()
        padded = ours[1](inner)
        assert padded.dtype == torch.float16
        assert torch.equal(padded, model[1](inner))
        torch.use_deterministic_algorithms(True)
        try:
            ours[1](inner).float().sum().backward()  # PyTorch's gradient would raise
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_captured_graph_and_another_stream() -> None:
    pad = nn.ReflectionPad2d(2)
    x = torch.randn(2, 8, 9, 9, device="cuda")
    call.padded(pad, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call.padded(pad, x)
    assert output is not None
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(output, pad(x))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = call.padded(pad, x)
    torch.cuda.synchronize()
    assert found is not None
    assert torch.equal(found, pad(x))


@pytest.mark.parametrize("layout", FORMATS)
def test_a_network_of_paddings_is_verified(layout: str) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(
        nn.ReflectionPad2d(3),
        nn.Conv2d(3, 16, 7),
        nn.InstanceNorm2d(16),
        nn.ReLU(),
        nn.ReflectionPad2d(1),
        nn.Conv2d(16, 16, 3),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
    ).cuda()
    original = original.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    x = torch.randn(4, 3, 20, 20, device="cuda").contiguous(memory_format=FORMATS[layout])
    report = tconv_swap.verify(original, swapped, x)
    assert report.passed, report.failures
    compared = {(check.name, check.kind) for check in report.checks}
    assert {("4", "layer_output"), ("4", "layer_grad_input")} <= compared
