"""Reflection padding: what is swapped, what a call by csrc/pad.h computes and leaves to PyTorch, and the verification.

On a pretended GPU."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_call_cases import CHANNELS_LAST, RecordedOperators, gradients, image, misaligned
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks import call, padding
from tconv_swap.blocks.modules import ReflectionPad2d
from tconv_swap.runtime import host, launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(4, 8, 3),
        nn.ConvTranspose2d(8, 4, 4, 2, 1),
        nn.ReflectionPad2d((1, 2, 0, 3)),
        nn.Conv2d(4, 4, 3),
    )


def swapped(model: nn.Module) -> nn.Sequential:
    return tconv_swap.swap_layers(model, fuse="all", inplace=False)  # type: ignore[return-value]


def ours(pad: nn.ReflectionPad2d, x: Tensor) -> Tensor:
    output = call.padded(pad, x)
    assert output is not None
    return output


# Surgery


def test_a_swap_and_the_way_back() -> None:
    model = network()
    made = swapped(model)
    assert [type(one) for one in (made[0], made[3])] == [ReflectionPad2d] * 2
    assert vars(made[3]) == {**vars(model[3]), "_modules": {}}
    assert str(made[3]) == str(model[3])
    again = swapped(made)
    assert type(again[0]) is ReflectionPad2d
    tconv_swap.unswap_layers(made)
    assert [type(one) for one in made] == [type(one) for one in model]
    kept = tconv_swap.swap_layers(model, fuse="blocks", inplace=False)
    assert type(kept[0]) is nn.ReflectionPad2d  # type: ignore[index]


def test_copies_and_pickles_are_ours() -> None:
    made = swapped(network())
    stream = io.BytesIO()
    torch.save(made, stream)
    stream.seek(0)
    for one in (
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(stream, weights_only=False),
    ):
        assert type(one[3]) is ReflectionPad2d
        assert one[3].padding == (1, 2, 0, 3)
        torch.testing.assert_close(one(image()), made(image()))


def test_the_plan_lists_every_padding() -> None:
    class Own(nn.ReflectionPad2d):
        pass

    model = network().append(Own(1)).append(nn.ReflectionPad2d(2))
    model[6].register_forward_hook(lambda *_: None)
    plan = tconv_swap.plan_swap(model, fuse="all", leave_blocks={"0": "slower"})
    found = [(block.name, block.kind, block.swap, block.reason) for block in plan.blocks]
    assert found == [
        ("0", "ReflectionPad2d", False, "slower"),
        ("3", "ReflectionPad2d", True, ""),
        ("5", "Own", False, "Own is not nn.ReflectionPad2d itself"),
        ("6", "ReflectionPad2d", False, "it has a hook or a forward of its own"),
    ]
    assert str(plan.blocks[1]) == "3: ReflectionPad2d: our kernel"
    assert tconv_swap.plan_swap(model, fuse="blocks").blocks == ()
    made = tconv_swap.swap_layers(model, fuse="all", leave_blocks=["0"])
    assert [type(made[index]) for index in (0, 3, 5, 6)] == [  # type: ignore[index]
        nn.ReflectionPad2d,
        ReflectionPad2d,
        Own,
        nn.ReflectionPad2d,
    ]
    made = tconv_swap.swap_layers(made, fuse="all", leave_blocks=["3"])
    assert type(made[3]) is nn.ReflectionPad2d  # type: ignore[index]


def test_tracers_and_compilers_see_pytorchs_operator(gpu: Pretended) -> None:
    made, x = swapped(network()), image()
    expected = network()(x)
    graph = torch.fx.symbolic_trace(made)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == list("01234")
    torch.testing.assert_close(torch.compile(made, backend="eager", fullgraph=True)(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.trace(made, x, check_trace=False)(x), expected)
    torch.testing.assert_close(torch.func.vmap(made)(x[:, None])[:, 0], expected)
    exported = torch.export.export(made.eval(), (x,))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert not any("reflection_pad" in name and "tconv_swap" in name for name in names)
    assert gpu.pads == 0


# What the kernel computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, CHANNELS_LAST], ids=str)
def test_outputs_and_gradients_are_pytorchs_in_the_format_of_the_input(
    form: torch.memory_format, dtype: torch.dtype, gpu: Pretended
) -> None:
    pad = nn.ReflectionPad2d((1, 2, 0, 3))
    x = image().to(dtype).contiguous(memory_format=form).requires_grad_()
    output, expected = ours(pad, x), pad(x.float())
    assert output.dtype == dtype
    assert output.is_contiguous(memory_format=form)
    assert torch.equal(output, expected.to(dtype))
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "ReflectionPadBackward"
    for given in (torch.contiguous_format, CHANNELS_LAST):
        grad = torch.randn(output.shape).to(dtype).contiguous(memory_format=given)
        (found,) = torch.autograd.grad(output, x, grad, retain_graph=True)
        (truth,) = torch.autograd.grad(expected, x, grad.float(), retain_graph=True)
        assert found.is_contiguous(memory_format=form)
        torch.testing.assert_close(found, truth)
    assert gpu.pads == 3


def test_an_image_without_a_batch_and_gradients_that_lie_otherwise(gpu: Pretended) -> None:
    pad, x = nn.ReflectionPad2d(2), image(3, 5, 6).requires_grad_()
    output = ours(pad, x)
    torch.testing.assert_close(output, pad(x))
    grad = torch.randn(output.shape)
    for given in (
        grad,
        misaligned(grad),
        grad[:1].expand_as(grad),
        grad.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        found, truth = (gradients(one, [x], given) for one in (output, pad(x)))
        torch.testing.assert_close(found, truth)
        output = ours(pad, x)
    assert gpu.pads == 9


def test_python_is_asked_once_for_each_kind_of_call(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    plan_call = padding.plan_call
    monkeypatch.setattr(padding, "plan_call", lambda *given: (asked.append(given), plan_call(*given))[1])
    images = [image(), image(2, 4, 3, 3), image().to(memory_format=CHANNELS_LAST), image().half()]
    pads = [nn.ReflectionPad2d(one) for one in (1, 2, (1, 2, 1, 2), (2, 1, 1, 2), (1, 2, 2, 1))]
    for _ in range(2):
        for x in images:
            for pad in pads:
                x = x.clone(memory_format=torch.preserve_format).requires_grad_()
                output = ours(pad, x)
                torch.testing.assert_close(output, pad(x))
                output.sum().backward()
        assert len(asked) == 2 * len(images) * len(pads) == launch.count_plans()


def test_what_the_kernel_does_not_take(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    pad = nn.ReflectionPad2d(1)
    for x in (
        misaligned(image()),
        image().transpose(2, 3),
        image()[:, :, ::2],
        image(0, 4, 3, 3),
        image().int(),
        torch._neg_view(image()),
    ):
        assert call.padded(pad, x) is None
        torch.testing.assert_close(swapped(nn.Sequential(pad))(x), pad(x))
    assert call.padded(nn.ReflectionPad2d((-1, 1, 0, 0)), image()) is None
    assert gpu.pads == 0
    monkeypatch.setattr(host, "is_available", lambda: False)
    assert call.padded(pad, image()) is None


def test_errors_are_pytorchs(gpu: Pretended) -> None:
    for pad, x in (
        (nn.ReflectionPad2d(6), image()),
        (nn.ReflectionPad2d((1, 1, 5, 1)), image()),
        (nn.ReflectionPad2d(1), image(4, 5)),
        (nn.ReflectionPad2d(1), image(1, 2, 3, 4, 5)),
        (nn.ReflectionPad2d(1), image(3, 0, 4, 4)),
    ):
        messages = []
        for one in (pad, swapped(nn.Sequential(pad))[0]):
            with pytest.raises((RuntimeError, NotImplementedError)) as raised:
                one(x)
            messages.append((type(raised.value), str(raised.value)))
        assert messages[0] == messages[1]


# Derivatives


def test_nothing_is_differentiated_that_need_not_be(gpu: Pretended) -> None:
    pad, x = nn.ReflectionPad2d(1), image()
    assert ours(pad, x).grad_fn is None
    with torch.no_grad():
        assert ours(pad, x.requires_grad_()).grad_fn is None
    with torch.inference_mode():
        ours(pad, image())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pytest.fail("saved"), lambda saved: saved):
        output = ours(pad, x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    # Only the sizes are kept, so that the image may change.
    with torch.no_grad():
        x.mul_(2)
    torch.autograd.grad(output.sum(), x)


def test_gradients_of_gradients_and_in_batches_are_pytorchs(gpu: Pretended) -> None:
    pad = nn.ReflectionPad2d((1, 2, 0, 3))
    x = image(1, 2, 4, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda one: ours(pad, one), x)
    assert torch.autograd.gradgradcheck(lambda one: ours(pad, one).pow(2), x)
    grads = torch.randn(3, 1, 2, 7, 7).double()
    before = gpu.pads
    found, truth = (
        torch.autograd.grad(one, x, grads, is_grads_batched=True) for one in (ours(pad, x), pad(x))
    )
    torch.testing.assert_close(found, truth)
    assert gpu.pads == before + 1


def test_transforms_and_modes_see_pytorchs_operator(gpu: Pretended) -> None:
    made, x = swapped(nn.Sequential(nn.ReflectionPad2d(1))), image()
    _, tangent = torch.func.jvp(made, (x,), (x,))
    torch.testing.assert_close(tangent, made(x))
    torch.testing.assert_close(
        torch.func.grad(lambda one: made(one).pow(2).sum())(x),
        torch.func.grad(lambda one: F.pad(one, (1,) * 4, "reflect").pow(2).sum())(x),
    )
    output = made(x.requires_grad_())
    with RecordedOperators() as recorded:
        gradients(output, [x])
    assert any("reflection_pad2d_backward" in name for name in recorded.names)
    assert not any("tconv_swap" in name for name in recorded.names)
    assert gpu.pads == 2


def test_hooks_see_the_call(gpu: Pretended) -> None:
    made, seen = swapped(nn.Sequential(nn.ReflectionPad2d(1))), []
    made[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    made(image())
    assert seen == [(3, 4, 7, 8)]
    assert gpu.pads == 1


# Verification


def test_right_kernels_pass_and_every_padding_is_compared(gpu: Pretended) -> None:
    model = network()
    report = tconv_swap.verify(model, swapped(model), image())
    assert report.passed, report.failures
    compared = {(check.name, check.kind) for check in report.checks}
    assert {("0", "layer_output"), ("3", "layer_output"), ("3", "layer_grad_input")} <= compared
    assert not any("not compared" in note for note in report.notes)


def replicated(padded: Tensor) -> Tensor:
    """Replicates the edges of the image instead, where the padding is 1 on all sides."""
    inner = padded[..., 1:-1, 1:-1]
    return F.pad(inner, (1,) * 4, "replicate")


FAULTS: dict[str, tuple[str, Any]] = {
    "replicated": ("reflection_pad_forward", replicated),
    "a row too far": ("reflection_pad_forward", lambda padded: padded.roll(1, 2)),
    "no reflections": (
        "reflection_pad_backward",
        lambda grad: grad * (torch.arange(grad.shape[2])[:, None] != 1),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_and_names_the_padding(name: str, gpu: Pretended) -> None:
    entry, change = FAULTS[name]
    gpu.spoil = lambda spoiled, value: change(value) if spoiled == entry else value
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReflectionPad2d(1), nn.ConvTranspose2d(4, 4, 3))
    report = tconv_swap.verify(model, swapped(model), image())
    assert not report.passed
    kind = "layer_output" if entry.endswith("forward") else "layer_grad_input"
    assert ("1", kind) in {(check.name, check.kind) for check in report.checks if not check.passed}
