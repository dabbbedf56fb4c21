"""Blocks in training on a GPU: one op and one node give the bits of a layer and a norm with a node each."""

from __future__ import annotations

import copy
import gc
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from training_cases import block, images, node, separately, step, swapped

pytestmark = pytest.mark.gpu

KINDS = {
    "batch": (nn.BatchNorm2d(24), nn.ReLU(), {}),
    "average": (nn.BatchNorm2d(24, momentum=None), nn.LeakyReLU(0.2), {"bias": False}),
    "frozen": (nn.BatchNorm2d(24).eval(), nn.SiLU(), {"groups": 2}),
    "instance": (nn.InstanceNorm2d(24, affine=True), nn.Tanh(), {"output_padding": 1}),
    "plain": (nn.BatchNorm2d(3, affine=False, track_running_stats=False), None, {}),
}


def check(
    made: nn.Sequential, x: Tensor, patch: pytest.MonkeyPatch, autocast: torch.dtype | None = None
) -> None:
    """Compares the bits of three steps of both ways, so that the buffers count too."""
    ours = swapped(made)
    with patch.context() as separate:
        other = copy.deepcopy(ours)
        separately(separate)
        expected = [step(other, x, autocast) for _ in range(3)]
    for one in expected:
        found = step(ours, x, autocast)
        assert (node(found["output"]), node(one["output"])) == ("BlockBackward", "NormActivationBackward")
        assert found.keys() == one.keys()
        for name, value in found.items():
            assert value.dtype == one[name].dtype
            assert value.stride() == one[name].stride()
            assert torch.equal(value, one[name]), name


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(
    kind: str, dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, activation, arguments = KINDS[kind]
    form = torch.channels_last if channels_last else torch.contiguous_format
    made = block(norm, activation, **arguments).to("cuda", dtype, memory_format=form)  # type: ignore[call-overload]
    check(made, images("cuda").to(dtype, memory_format=form).requires_grad_(), monkeypatch)


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_bits_under_an_autocast(
    dtype: torch.dtype, of_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = block(nn.BatchNorm2d(24), nn.ReLU()).cuda()
    check(made, images("cuda").requires_grad_(of_input), monkeypatch, dtype)


@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=5) if any(one[:3])], ids=str)
def test_the_same_bits_of_every_choice_of_gradients(
    needs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x = block(nn.BatchNorm2d(24), nn.ReLU()).cuda(), images("cuda").requires_grad_(needs[0])
    for one, wanted in zip(made.parameters(), needs[1:], strict=True):
        one.requires_grad_(wanted)
    check(made, x, monkeypatch)


def test_a_norm_of_pytorchs_behind_a_layer_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = swapped(block(nn.InstanceNorm2d(24, affine=True, track_running_stats=True), nn.Tanh()).cuda())
    other, x = copy.deepcopy(ours), images("cuda").requires_grad_()
    found = step(ours, x)
    separately(monkeypatch)
    for name, value in step(other, x).items():
        assert torch.equal(value, found[name]), name
    assert node(found["output"]) == "TanhBackward0"


def test_hooks_on_the_norm_see_its_output() -> None:
    ours, seen = swapped(block(nn.BatchNorm2d(24), nn.Tanh()).cuda()), []
    ours[1].register_forward_hook(lambda module, args, output: seen.append((*args, output)))
    output = ours(images("cuda"))
    ((before, after),) = seen
    assert torch.equal(output, torch.tanh(after))
    assert (node(before), node(output)) == ("ConvTranspose2dBackward", "TanhBackward0")


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(24), nn.BatchNorm2d(24).eval()], ids=["trains", "frozen"])
def test_second_derivatives_beside_float64(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's operators, which compute second derivatives, obey the switch.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    theirs = block(norm, nn.Tanh()).cuda()
    ours, exact = swapped(theirs), copy.deepcopy(theirs).double()
    found = []
    for made in (ours, theirs, exact):
        x = images("cuda").to(made[0].weight.dtype).requires_grad_()  # type: ignore[arg-type, union-attr]
        of = [x, *made.parameters()]
        output = made(x)
        first = torch.autograd.grad(output.pow(3).sum(), of, create_graph=True)
        found.append(torch.autograd.grad(sum(one.pow(2).sum() for one in first), of))  # type: ignore[arg-type]
        assert node(output) == ("BlockBackward" if made is ours else "TanhBackward0")
    for one, original, truth in zip(*found, strict=True):
        scale = found[2][1].norm()  # that of the layer's bias is zero behind a norm, but for rounding
        error, allowed = ((each.double() - truth).norm() / scale for each in (one, original))
        assert error <= 2 * allowed + 1e-6


def test_the_graph_may_be_kept_and_changes_are_seen() -> None:
    ours, x = swapped(block(nn.BatchNorm2d(24), nn.ReLU()).cuda()), images("cuda").requires_grad_()
    output = ours(x)
    of = [x, *ours.parameters()]
    kept, again = (torch.autograd.grad(output.sum(), of, retain_graph=one) for one in (True, False))
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)
    for changed in (x, ours[0].weight, ours[1].weight, ours[1].bias):
        output = ours(x)
        with torch.no_grad():
            changed.mul_(2)  # type: ignore[operator, arg-type, union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_step_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of a block frees what its norm needed before it computes the layer's gradients, which need most here:
    the layer has few channels behind it."""
    ours = swapped(block(nn.BatchNorm2d(1), nn.ReLU()).cuda())
    x = images("cuda", batch=4096).requires_grad_()

    def peak(kept: bool = False) -> int:
        gc.collect()  # what other tests left in reference cycles counts otherwise, or is freed between two peaks
        found = []
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            output = ours(x).mul(2)  # with a gradient that nobody else holds
            torch.autograd.grad(output.sum(), [x, *ours.parameters()], retain_graph=kept)
            # What was requested: blocks of the allocator are larger, by what other tests left of its segments.
            found.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        # The first step has no output of an earlier one beside it. A thread of autograd's may still hold the gradients
        # of the step before when the next one begins.
        return min(found[1:])

    whole, kept = peak(), peak(kept=True)
    separately(monkeypatch)
    assert whole <= peak() < kept
