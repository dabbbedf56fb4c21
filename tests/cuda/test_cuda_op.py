"""The operator on CUDA, against a float64 oracle that shares nothing with the kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import (
    DTYPES,
    NAMED,
    TF32_TOLERANCE,
    TOLERANCE,
    arguments,
    check_against_oracle,
    conv_transpose2d,
    random_case,
    relative_error,
)
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.cuda import call
from tconv_swap.geometry import as_list
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import host, launch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ieee(request: pytest.FixtureRequest):
    with MODES["fp32"].switched_on():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("name", NAMED)
def test_named_geometries(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    torch.manual_seed(0)
    case = NAMED[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(case["x"], device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(case["w"], device="cuda", dtype=dtype).to(memory_format=layout)
    b = torch.randn(case["w"][1] * case.get("groups", 1), device="cuda", dtype=dtype)
    check_against_oracle(x, w, b, arguments(case), TOLERANCE[dtype])
    check_against_oracle(x, w, None, arguments(case), TOLERANCE[dtype])


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(
    "name", ["dcgan4", "cyclegan", "unet", "kb75", "odd channels", "dilated, 128 channels", "wide, stride 1"]
)
def test_named_geometries_in_tf32(name: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    case = NAMED[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, w = (torch.randn(case[k], device="cuda").to(memory_format=layout) for k in "xw")
    b = torch.randn(case["w"][1] * case.get("groups", 1), device="cuda")
    check_against_oracle(x, w, b, arguments(case), TF32_TOLERANCE)


@pytest.mark.parametrize("seed", range(60))
def test_random_geometries(seed: int) -> None:
    torch.manual_seed(seed)
    case = random_case(seed)
    dtype = DTYPES[seed % 4]
    layouts = list(itertools.product((torch.contiguous_format, torch.channels_last), repeat=2))
    x_layout, w_layout = layouts[seed // 4 % 4]
    x = torch.randn(case["x"], device="cuda", dtype=dtype).to(memory_format=x_layout)
    w = torch.randn(case["w"], device="cuda", dtype=dtype).to(memory_format=w_layout)
    b = torch.randn(case["w"][1] * case["groups"], device="cuda", dtype=dtype) if seed % 3 else None
    check_against_oracle(x, w, b, arguments(case), TOLERANCE[dtype])


@pytest.mark.parametrize("alone", [False, True], ids=["with the weight's", "alone"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("out_channels", [3, 32])
def test_the_gradient_of_the_bias_is_hardly_rounded(
    out_channels: int, channels_last: bool, alone: bool
) -> None:
    """131072 numbers a channel: with plain sums the weight tile's is 3e-7 to 5e-7 off (docs/kernels/grad_weight.md)."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(8, 64, 64, 64, device="cuda").to(memory_format=layout)
    w = torch.randn(64, out_channels, 4, 4, device="cuda").to(memory_format=layout).requires_grad_()
    b = torch.randn(out_channels, device="cuda", requires_grad=True)
    y = conv_transpose2d(x, w, b, 2, 1)
    grad = torch.randn_like(y)

    def gradient() -> Tensor:
        return torch.autograd.grad(y, (b,) if alone else (w, b), grad, retain_graph=True)[-1]

    finite = gradient()
    assert relative_error(finite, grad.double().sum((0, 2, 3))) < 1e-7
    grad[1, 1, 3, 5] = float("inf")
    infinite = gradient()
    assert infinite[1] == float("inf")
    infinite[1] = finite[1]
    assert torch.equal(infinite, finite)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("how", ["flag", "fp32_precision"])
def test_float32_obeys_the_switches(how: str, precision: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    if how == "flag":
        # It is more than the fixture sets back, and cannot be read while the fixture holds: as PyTorch begins.
        request.addfinalizer(lambda: setattr(torch.backends.cudnn, "allow_tf32", True))
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    else:
        torch.backends.cudnn.conv.fp32_precision = precision
    assert (call.precision() == "tf32") == (precision == "tf32")
    case = NAMED["dcgan4"]
    x, w = (torch.randn(case[k], device="cuda") for k in "xw")
    tolerance = TOLERANCE[torch.float32] if precision == "ieee" else TF32_TOLERANCE
    check_against_oracle(x, w, None, arguments(case), tolerance)


def test_every_output_is_written_even_into_poisoned_memory() -> None:
    case = NAMED["phases without taps"]
    x, w = (torch.randn(case[k], device="cuda") for k in "xw")
    size = conv_transpose2d(x, w, **arguments(case)).numel()
    for _ in range(3):
        torch.full(
            (size,), float("nan"), device="cuda"
        )  # freed at once: the next allocation takes its memory
        assert torch.isfinite(conv_transpose2d(x, w, **arguments(case))).all()


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [(16, 3, 1), (24, 1, 24)], ids=["rgb", "depthwise"])
def test_an_infinity_that_no_tap_reaches_stays_out_of_the_gradients(channels, dtype, channels_last) -> None:
    """Stride 5 and kernel 3 leave gaps in the output; 13 pixels fill no tile."""
    torch.manual_seed(0)
    in_channels, out_channels, groups = channels
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, in_channels, 5, 13, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(in_channels, out_channels, 3, 3, device="cuda", dtype=dtype).to(memory_format=layout)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = conv_transpose2d(x, w, None, 5, 1, 3, groups)
    reached = conv_transpose2d(torch.ones_like(x), torch.ones_like(w), None, 5, 1, 3, groups) != 0
    assert not reached.all()
    grad = torch.randn_like(y).masked_fill(~reached, float("inf"))
    for gradient in torch.autograd.grad(y, (x, w), grad):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    "name", ["dcgan4", "kb75", "rgb", "unet", "super-resolution", "depthwise", "fcn32s", "4x4 map"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_input_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    case = NAMED[name]
    x, w = (torch.randn(case[k], device="cuda", dtype=dtype, requires_grad=True) for k in "xw")
    first = None
    for _ in range(3):
        y = conv_transpose2d(x, w, **arguments(case))
        results = [y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_layout", [torch.contiguous_format, torch.channels_last], ids=["x", "x_last"])
@pytest.mark.parametrize("w_layout", [torch.contiguous_format, torch.channels_last], ids=["w", "w_last"])
def test_memory_formats_are_pytorchs(dtype, x_layout, w_layout) -> None:
    x = torch.randn(2, 8, 5, 6, device="cuda", dtype=dtype).to(memory_format=x_layout).requires_grad_()
    w = torch.randn(8, 4, 3, 3, device="cuda", dtype=dtype).to(memory_format=w_layout).requires_grad_()
    ours, theirs = conv_transpose2d(x, w, stride=2), F.conv_transpose2d(x, w, stride=2)
    assert ours.stride() == theirs.stride()
    grad = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, w), grad), torch.autograd.grad(theirs, (x, w), grad), strict=True
    ):
        assert a.stride() == b.stride()


def test_non_contiguous_everything() -> None:
    x = torch.randn(6, 2, 10, 8, device="cuda").transpose(0, 1)[:, ::2, ::2]
    w = torch.randn(3, 3, 3, 8, device="cuda").permute(2, 3, 0, 1)
    b = torch.randn(16, device="cuda")[::2]
    check_against_oracle(x, w[:3], b, dict(stride=2, padding=1), TOLERANCE[torch.float32])
    y = conv_transpose2d(x, w[:3].requires_grad_(), None, 2, 1)
    expanded = torch.ones((), device="cuda").expand_as(y)
    torch.autograd.backward(y, expanded)


def test_empty_batch_and_unbatched() -> None:
    w = torch.randn(4, 3, 3, 3, device="cuda", requires_grad=True)
    x = torch.randn(0, 4, 5, 5, device="cuda", requires_grad=True)
    b = torch.randn(3, device="cuda", requires_grad=True)
    y = conv_transpose2d(x, w, b, 2)
    assert y.shape == (0, 3, 11, 11)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()
    assert not b.grad.any()
    image = torch.randn(4, 5, 5, device="cuda")
    torch.testing.assert_close(conv_transpose2d(image, w, b, 2), conv_transpose2d(image[None], w, b, 2)[0])


def test_only_the_gradients_needed_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    original = launch.add_plan

    def spy(plan, *rest):
        planned.append([one.kernel.entry for one in plan.launches])
        return original(plan, *rest)

    call.forget()
    monkeypatch.setattr(launch, "add_plan", spy)
    x = torch.randn(2, 8, 5, 6, device="cuda", requires_grad=True)
    w = torch.randn(8, 4, 3, 3, device="cuda")
    conv_transpose2d(x, w).sum().backward()
    assert len(planned) == 2
    assert not any("weight" in entry or "bias" in entry for entry in planned[1])


def test_gradcheck_and_gradgradcheck() -> None:
    make = dict(device="cuda", dtype=torch.float64, requires_grad=True)
    x, w, b = torch.randn(2, 4, 4, 3, **make), torch.randn(4, 2, 3, 2, **make), torch.randn(4, **make)

    def function(x, w, b):
        return conv_transpose2d(x, w, b, (2, 1), (1, 0), (1, 0), 2, (1, 2))

    assert torch.autograd.gradcheck(function, (x, w, b))
    assert torch.autograd.gradgradcheck(function, (x, w, b))


def test_opcheck() -> None:
    x, w = torch.randn(2, 4, 5, 6, device="cuda", requires_grad=True), torch.randn(4, 3, 3, 2, device="cuda")
    geometry = ([2, 1], [1, 0], [1, 0], 1, [1, 2])
    forward = torch.ops.tconv_swap.conv_transpose2d.default
    backward = torch.ops.tconv_swap.conv_transpose2d_gradients.default
    for backend in ("auto", "kernel", "native"):
        torch.library.opcheck(forward, (x, w, None, *geometry, backend))
        grad = torch.randn_like(forward(x, w, None, *geometry, backend))
        torch.library.opcheck(backward, (grad, x.detach(), w, as_list(geometry), [True, True, True], backend))


def test_autocast_is_pytorchs() -> None:
    x = torch.randn(2, 4, 5, 6, device="cuda", requires_grad=True)
    w = torch.randn(4, 3, 3, 2, device="cuda", requires_grad=True)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            y, native = conv_transpose2d(x, w), F.conv_transpose2d(x, w)
            assert y.dtype == native.dtype == dtype
            assert conv_transpose2d(x.double(), w.double()).dtype == torch.float64
        y.float().sum().backward()
        assert x.grad.dtype == w.grad.dtype == torch.float32


def test_current_stream_and_graph_capture() -> None:
    case = NAMED["dcgan4"]
    x, w = (torch.randn(case[k], device="cuda") for k in "xw")
    expected = conv_transpose2d(x, w, **arguments(case))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        delayed = x * 1.0
        y = conv_transpose2d(delayed, w, **arguments(case))
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = conv_transpose2d(x, w, **arguments(case))
    x.copy_(torch.randn_like(x))
    w.mul_(2)
    graph.replay()
    assert torch.equal(captured, conv_transpose2d(x, w, **arguments(case)))


def test_backward_from_a_thread_without_a_context() -> None:
    x = torch.randn(2, 8, 5, 6, device="cuda", requires_grad=True)
    w = torch.randn(8, 4, 3, 3, device="cuda", requires_grad=True)
    conv_transpose2d(x, w).sum().backward()
    assert x.grad is not None


def test_two_devices_in_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, w = torch.randn(2, 8, 5, 6, device="cuda:1"), torch.randn(8, 4, 3, 3, device="cuda:1")
    assert torch.cuda.current_device() == 0
    y = conv_transpose2d(x, w)
    assert y.device == x.device
    torch.testing.assert_close(y.cpu(), conv_transpose2d(x.to("cuda:0"), w.to("cuda:0")).cpu())
    with pytest.raises(RuntimeError, match="same device"):
        conv_transpose2d(x, w.to("cuda:0"))


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    torch.manual_seed(0)
    x = torch.randn(1, 2, 16400, 16400, device="cuda", dtype=torch.float16)
    w = torch.randn(2, 2, 2, 2, device="cuda", dtype=torch.float16)
    y = conv_transpose2d(x, w, stride=2)
    assert y.numel() > 2**31
    corner = conv_transpose2d_reference(x[:, :, -40:, -40:].double().cpu(), w.double().cpu(), None, stride=2)
    assert relative_error(y[:, :, -80:, -80:], corner) < TOLERANCE[torch.float16]
    del x
    grad_input = torch.ops.tconv_swap.conv_transpose2d_gradients(
        y, y[:, :, ::2, ::2], w, [2, 2, 0, 0, 0, 0, 1, 1, 1], [True, False, False], "kernel"
    )[0]
    wanted = F.conv2d(y[:, :, -80:, -80:].double(), w.double(), stride=2)
    assert relative_error(grad_input[:, :, -40:, -40:], wanted) < TOLERANCE[torch.float16]


def test_no_call_to_cudnn_or_pytorchs_convolution() -> None:
    x = torch.randn(2, 8, 5, 6, device="cuda", requires_grad=True)
    w = torch.randn(8, 4, 3, 3, device="cuda", requires_grad=True)
    b = torch.randn(4, device="cuda", requires_grad=True)
    conv_transpose2d(x, w, b, 2).sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        conv_transpose2d(x, w, b, 2).sum().backward()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "tconv_swap::conv_transpose2d_output" in names
    foreign = (
        "cudnn",
        "aten::convolution",
        "aten::conv_transpose",
        "aten::mm",
        "aten::matmul",
        "cutlass",
        "gemm",
    )
    assert not [name for name in names if any(word in name.lower() for word in foreign)]


def test_a_cuda_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        launch.raise_for(host.library().tconv_load_kernel(b"no machine code", b"none", None))


def test_bad_arguments_raise_before_anything_is_launched() -> None:
    x, w = torch.randn(2, 8, 5, 6, device="cuda"), torch.randn(8, 4, 3, 3, device="cuda")
    with pytest.raises(RuntimeError, match="weight type"):
        conv_transpose2d(x, w.double())
    with pytest.raises(RuntimeError, match="same device"):
        conv_transpose2d(x, w.cpu())
    with pytest.raises(RuntimeError, match="stride"):
        conv_transpose2d(x, w, stride=0)
