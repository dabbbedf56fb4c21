"""Our kernels or PyTorch's: the choice as data, the backend of a layer, and steps that are combined. No GPU."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import tconv_swap
from tconv_swap import op
from tconv_swap.cuda import call, choice
from tconv_swap.cuda.choice import NATIVE, WHY_NOT_GENERAL, Step, choose_backward, choose_forward
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import measured, plan
from tconv_swap.kernels.common import general
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
TURING = plan.Device("sm_75", 30, 64 << 10)

DCGAN = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
ALL = (True, True, True)


def problem(geometry: Geometry = DCGAN, dtype: torch.dtype = torch.float32) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", False, False)


@pytest.fixture
def fast_grad_input(plans_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a family claim only the gradient of the input; the general kernels compute the rest."""

    def part(of: str) -> Callable[..., Part]:
        return lambda problem, device: Part(of, f"{of} kernels", ())

    monkeypatch.setattr(plan, "_grad_input", part("fast"))
    monkeypatch.setattr(plan, "_grad_weight", lambda p, d: general.plan_grad_weight(p, d))
    monkeypatch.setattr(plan, "_grad_weight_and_bias", lambda p, d: None)
    monkeypatch.setattr(plan, "expected_clocks", lambda p, mask, d: math.inf if mask[1] else 1.0)


@pytest.fixture
def general_alone(plans_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes only the general kernels claim gradients."""
    monkeypatch.setattr(plan, "_grad_input", lambda p, d: general.plan_grad_input(p))
    monkeypatch.setattr(plan, "_grad_weight", lambda p, d: general.plan_grad_weight(p, d))
    monkeypatch.setattr(plan, "_grad_weight_and_bias", lambda p, d: None)
    monkeypatch.setattr(plan, "expected_clocks", lambda *_: math.inf)


# The choice


def test_ours_where_a_fast_family_claims_it() -> None:
    step = choose_forward(problem(), True, H200, "auto")
    assert step.plan == plan.plan_forward(problem(), True, H200)
    assert step.family == "implicit_gemm"
    assert step.why == step.plan.why


def test_pytorchs_where_only_the_general_kernels_claim_it_and_the_reason_says_so() -> None:
    step = choose_forward(problem(), True, TURING, "auto")
    assert (step.family, step.plan, step.why) == (NATIVE, None, WHY_NOT_GENERAL)
    assert choose_forward(problem(), True, TURING, "kernel").family == "general"
    assert choose_forward(problem(), True, H200, "native").plan is None


def test_an_empty_batch_and_what_passes_32_bits_stay_ours() -> None:
    for geometry in (DCGAN.with_batch(0), Geometry(1, 7, 16400, 16400, 9, (2, 2), (2, 2))):
        assert choose_forward(problem(geometry, torch.float64), True, H200, "auto").family == "general"


#: Geometry, dtype, channels_last, and which of (forward, gradient of the input, of the weight) PyTorch computes.
SAM = Geometry(64, 256, 64, 64, 64, (2, 2), (2, 2))
UNET1 = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
KB81 = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
#: Its layout is not converted, since it has 64 channels.
SMALL_FLAT = Geometry(8, 512, 32, 32, 64, (2, 2), (2, 2))
#: Its channels are no multiple of 4, so the implicit GEMM computes the gradient of the weight in TF32 and
#: channels_last, in pieces of 8 bytes.
ODD = Geometry(64, 130, 64, 64, 66, (2, 2), (2, 2))
MANY_ODD = Geometry(64, 258, 64, 64, 66, (2, 2), (2, 2))
DCGAN2 = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
STRIDE_1 = Geometry(64, 64, 128, 256, 128, (3, 5))
#: One row, without a stride and with one.
ONE_ROW = Geometry(4, 256, 1, 512, 256, (1, 7), padding=(0, 3))
HIFIGAN = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))
ONE_PIXEL_NARROW = Geometry(128, 100, 1, 1, 4, (4, 4))
ONE_PIXEL = Geometry(128, 100, 1, 1, 512, (4, 4))
#: Its channels are no multiple of 4, so the implicit GEMM computes its gradients.
ONE_PIXEL_ODD = Geometry(128, 102, 1, 1, 512, (4, 4))
RGB = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
TWO_CHANNELS = Geometry(12, 44, 56, 177, 2, (3, 3), (2, 2), (1, 1), (1, 1))
#: Many products of an element, by the copy engine, and of rows that are no multiples of 16 bytes.
POSE = Geometry(32, 512, 15, 20, 256, (4, 4), (2, 2), (1, 1))
VOCODER = Geometry(24, 1548, 1, 184, 774, (1, 6), (1, 3), (0, 1), (0, 1))
SHORT_VOCODER = Geometry(1, 1548, 1, 60, 774, (1, 6), (1, 3), (0, 1), (0, 1))
#: cuDNN's gradient of its weight was wrong in 16 bits.
WIDE_STRIDE = Geometry(12, 768, 1, 174, 384, (1, 20), (1, 10), (0, 5))


@pytest.mark.parametrize(
    ("geometry", "dtype", "precision", "channels_last", "native"),
    [
        (ODD, torch.float32, "tf32", True, (False, False, True)),
        (MANY_ODD, torch.float32, "tf32", True, (False, False, True)),
        (STRIDE_1, torch.float32, "ieee", False, (True, False, False)),
        (STRIDE_1.with_batch(2), torch.float32, "ieee", True, (False, False, False)),
        (VOCODER, torch.float32, "tf32", True, (False, True, True)),
        (SHORT_VOCODER, torch.float32, "tf32", True, (False, True, False)),
        (VOCODER, torch.float16, "ieee", False, (False, False, True)),
        *sampled(
            [
                (DCGAN2, torch.float16, "ieee", True, (False, False, False)),
                (DCGAN2, torch.float16, "ieee", False, (False, False, False)),
                (DCGAN2, torch.float32, "tf32", True, (False, False, False)),
                (DCGAN2, torch.float32, "ieee", True, (False, False, False)),
                (SAM, torch.bfloat16, "ieee", True, (False, False, False)),
                (DCGAN2, torch.float32, "tf32", False, (False, False, False)),
                (UNET1, torch.float32, "tf32", False, (False, False, False)),
                (SAM, torch.bfloat16, "ieee", False, (False, False, False)),
                (DCGAN, torch.float32, "tf32", True, (False, False, False)),
                (SAM, torch.float32, "tf32", True, (False, False, False)),
                (UNET1, torch.float32, "tf32", True, (False, False, False)),
                (KB81, torch.float16, "ieee", True, (False, False, False)),
                (HIFIGAN, torch.float32, "tf32", True, (False, False, False)),
                (STRIDE_1, torch.float16, "ieee", True, (False, False, False)),
                (STRIDE_1, torch.float32, "tf32", False, (False, False, False)),
                (ONE_PIXEL, torch.float32, "ieee", False, (False, False, False)),
                (ONE_PIXEL, torch.float32, "tf32", False, (False, False, False)),
                (ONE_PIXEL_ODD, torch.float32, "tf32", False, (False, False, False)),
                (ONE_PIXEL_ODD.with_batch(64), torch.float32, "tf32", False, (False, False, False)),
                (ONE_PIXEL_NARROW, torch.float32, "tf32", False, (False, False, False)),
                (ONE_ROW, torch.float32, "tf32", False, (False, False, False)),
                (HIFIGAN, torch.float32, "tf32", False, (False, False, False)),
                (KB81, torch.float32, "ieee", False, (False, False, False)),
                (HIFIGAN, torch.float32, "ieee", False, (False, False, False)),
                (SMALL_FLAT, torch.float16, "ieee", False, (False, False, False)),
                (RGB, torch.float16, "ieee", True, (False, False, False)),
                (TWO_CHANNELS, torch.float16, "ieee", True, (False, False, False)),
                (TWO_CHANNELS, torch.float32, "tf32", True, (False, False, False)),
                (TWO_CHANNELS, torch.float16, "ieee", False, (False, False, False)),
                (TWO_CHANNELS, torch.float32, "ieee", True, (False, False, False)),
                (POSE, torch.float16, "ieee", True, (False, False, False)),
                (POSE, torch.float32, "tf32", True, (False, False, False)),
                (VOCODER, torch.float32, "ieee", True, (False, False, False)),
            ],
            2,
        ),
    ],
    ids=str,
)
def test_layers_that_pytorch_computes_faster_are_left_to_it_on_hopper_alone(
    geometry: Geometry, dtype: torch.dtype, precision: str, channels_last: bool, native: tuple[bool, ...]
) -> None:
    one = plan.Problem(geometry, dtype, precision, channels_last, channels_last)

    def by_pytorch(device: plan.Device, backend: str) -> tuple[bool, ...]:
        steps = [
            choose_forward(one, True, device, backend),
            *choose_backward(one, (True, False, False), device, backend),
            *choose_backward(one, (False, True, False), device, backend),
        ]
        assert all(step.why.startswith("PyTorch's ") for step in steps if step.plan is None)
        return tuple(step.plan is None for step in steps)

    assert by_pytorch(H200, "auto") == native
    assert not any(by_pytorch(H200, "kernel"))
    assert not any(by_pytorch(plan.Device("sm_80", 108, 163 << 10), "auto"))


def test_a_gradient_that_cudnn_computes_wrongly_stays_ours() -> None:
    """Narrower strides of as many channels are PyTorch's."""
    for dtype in (torch.float16, torch.bfloat16):
        for stride, ours in ((10, True), (9, False)):
            geometry = WIDE_STRIDE._replace(stride=(1, stride))
            asked = plan.Problem(geometry, dtype, "ieee", False, False)
            (step,) = choose_backward(asked, (False, True, False), H200, "auto")
            assert (step.plan is not None) == ours


def test_a_gradient_that_one_pass_computes_with_another_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "why_grad_input_is_native", lambda *_: "for this test")
    asked = plan.Problem(TWO_CHANNELS, torch.float32, "tf32", True, True)
    (alone,) = choose_backward(asked, (True, False, False), H200, "auto")
    assert alone.plan is None
    (both,) = choose_backward(asked, (True, True, False), H200, "auto")
    assert both.family == "narrow_joint"


@pytest.mark.usefixtures("fast_grad_input")
def test_each_gradient_comes_from_where_it_is_faster() -> None:
    ours, theirs = choose_backward(problem(), ALL, H200, "auto")
    assert (ours.mask, ours.family) == ((True, False, False), "fast")
    assert (theirs.mask, theirs.family, theirs.why) == ((False, True, True), NATIVE, WHY_NOT_GENERAL)
    (only,) = choose_backward(problem(), (True, False, False), H200, "auto")
    assert only == ours
    (kernel,) = choose_backward(problem(), ALL, H200, "kernel")
    assert kernel.mask == ALL
    assert "general" in kernel.family


@pytest.mark.usefixtures("general_alone")
@pytest.mark.parametrize("mask", [ALL, (True, True, False), (False, True, True)])
def test_one_call_of_pytorchs_computes_all_that_it_computes(mask: tuple[bool, ...]) -> None:
    (step,) = choose_backward(problem(), mask, H200, "auto")
    assert (step.mask, step.family) == (mask, NATIVE)


@pytest.mark.usefixtures("general_alone")
def test_the_gradient_of_the_bias_goes_with_that_of_the_weight() -> None:
    ours, theirs = choose_backward(problem(), (True, False, True), H200, "auto")
    assert (ours.mask, ours.family) == ((False, False, True), "general")
    assert (theirs.mask, theirs.family) == ((True, False, False), NATIVE)


def test_an_unknown_backend_is_named() -> None:
    layer = tconv_swap.ConvTranspose2d(2, 3, 2)
    x = torch.randn(1, 2, 3, 3)
    for attempt in (
        lambda: tconv_swap.conv_transpose2d(x, layer.weight, backend="cudnn"),
        lambda: tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(2, 3, 2)), backend="cudnn"),
    ):
        with pytest.raises(ValueError, match="expected one of auto, rules, kernel, native, got 'cudnn'"):
            attempt()
    layer.tconv_backend = "cudnn"
    with pytest.raises(ValueError, match="cudnn"):
        layer(x)


# The layer


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend of every call of our operator."""
    backends: list[str] = []
    real = op.conv_transpose2d

    def spy(*args: Any) -> Tensor:
        backends.append(args[8] if len(args) > 8 else "auto")
        return real(*args)

    monkeypatch.setattr(op, "conv_transpose2d", spy)
    return backends


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Subclass(nn.ConvTranspose2d):
    """A class of this module, which the unpickler can find."""


@pytest.mark.parametrize("cls", [nn.ConvTranspose2d, Subclass])
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), saved_and_loaded]
)
def test_a_layers_backend_survives(
    again: Callable[[nn.Module], nn.Module], cls: type[nn.ConvTranspose2d], backends: list[str]
) -> None:
    layer = tconv_swap.swap_layers(cls(2, 3, 2), backend="kernel")
    copied = again(layer)
    copied.load_state_dict(layer.state_dict())
    copied(torch.randn(1, 2, 3, 3))
    assert backends == ["kernel"]
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_old_pickles_and_new_layers_are_auto(backends: list[str]) -> None:
    layer = tconv_swap.swap_layers(nn.ConvTranspose2d(2, 3, 2))
    assert "tconv_backend" not in vars(layer)
    layer(torch.randn(1, 2, 3, 3))
    assert backends == ["auto"]


def test_a_second_swap_changes_the_backend_only_where_asked() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.ConvTranspose2d(3, 2, 2))
    tconv_swap.swap_layers(model, include="0", backend="native")
    tconv_swap.swap_layers(model)
    assert [layer.tconv_backend for layer in model] == ["native", "auto"]
    tconv_swap.swap_layers(model, include="1", backend="kernel")
    assert [layer.tconv_backend for layer in model] == ["kernel", "kernel"]
    tconv_swap.unswap_layers(model)
    assert not any("tconv_backend" in vars(layer) for layer in model)


def test_native_is_pytorchs_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.nn.functional.conv_transpose2d

    def spy(*args: Any) -> Tensor:
        made.append(args)
        return real(*args)

    layer = tconv_swap.ConvTranspose2d(4, 3, 2, stride=2)
    x = torch.randn(1, 4, 1, 1)
    monkeypatch.setattr(torch.nn.functional, "conv_transpose2d", spy)
    expected = layer(x)
    assert not made  # one pixel: ours is a matrix product
    layer.tconv_backend = "native"
    torch.testing.assert_close(layer(x), expected)
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_of_both_kinds_on_the_gpu(
    dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernels compute the gradient of the input and PyTorch the others, and the other way round."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 16, 5, 6, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    w = torch.randn(16, 8, 3, 3, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    b = torch.randn(8, device="cuda", dtype=dtype, requires_grad=True)
    leaves = (x, w, b)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        y = tconv_swap.conv_transpose2d(*leaves, 2, backend=backend)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    wanted = gradients("native")
    for ours in ((True, False, False), (False, True, True)):
        native = tuple(not one for one in ours)

        def mixed(problem: Any, *_: Any, ours=ours, native=native) -> Any:
            return (
                Step(ours, plan.plan_backward(problem, ours, call.device_facts(0)), ""),
                Step(native, None, ""),
            )

        with monkeypatch.context() as patched:
            patched.setattr(choice, "choose_backward", mixed)
            call.forget()
            for found, theirs in zip(gradients("auto"), wanted, strict=True):
                assert found.stride() == theirs.stride()
                tolerance = 1e-10 if dtype == torch.float64 else 1e-2
                torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance * 10)
    call.forget()
