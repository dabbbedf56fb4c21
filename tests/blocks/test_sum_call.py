"""A call of a norm, a sum and an activation by csrc/norm.h: the path of norms, with one more tensor.

On a pretended GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from norm_call_cases import CHANNELS_LAST, RecordedOperators, gradients, image, misaligned, norm
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

from tconv_swap.blocks import call, kernels
from tconv_swap.runtime import launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def other(x: Tensor) -> Tensor:
    """Returns the tensor that is added to the normalised ``x``; it has the strides of ``x``."""
    return x.detach().flip(0).mul(0.7).add_(0.1).clone(memory_format=torch.preserve_format)


def ours(norm: nn.Module, x: Tensor, added: Tensor, after: nn.Module) -> Tensor:
    output = call.computed(norm, after, x, added)
    assert output is not None
    return output


def theirs(norm: nn.Module, x: Tensor, added: Tensor, after: nn.Module) -> Tensor:
    output: Tensor = after(norm(x) + added)
    return output


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, another in zip(found, expected, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


# What our kernels compute


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_python_is_asked_once_for_each_kind_of_call(gpu: Pretended, cls: type[nn.Module]) -> None:
    made = norm(cls)
    images = [image(), image(2, 4, 3, 3), image().to(memory_format=CHANNELS_LAST), image().half()]
    for repeated in range(3):
        for x in images:
            x = x.clone(memory_format=torch.preserve_format).requires_grad_()
            ours(made, x, other(x), nn.ReLU()).sum().backward()
        assert gpu.planned == 2 * len(images), repeated
    assert gpu.sum_forwards == gpu.sum_backwards == 3 * len(images)
    for x in images:
        call.computed(made, nn.ReLU(), x.clone(memory_format=torch.preserve_format))
    assert gpu.planned == 3 * len(images)  # without a sum it is another kind
    assert gpu.sum_forwards == 3 * len(images)


def test_answers_are_kept_where_all_are_and_bounded(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = norm(), image().requires_grad_()
    ours(made, x, other(x), nn.ReLU()).sum().backward()
    assert launch.count_plans() == gpu.planned == 2
    launch.forget_plans()
    ours(made, x, other(x), nn.ReLU())
    assert gpu.planned == 3
    declined, most = [0, 1], 2 * 2048
    monkeypatch.setattr(kernels, "plan_call", lambda *given: declined)
    for channels in range(1, most + 500):
        x = image(1, channels, 1, 2)
        assert call.computed(made, nn.ReLU(), x, x) is None
        assert launch.count_plans() <= most
    assert launch.count_plans() > most // 4


class Subclass(Tensor):
    pass


def test_what_the_kernels_do_not_take_changes_nothing(gpu: Pretended) -> None:
    made, x = norm(momentum=None), image()
    before = {name: one.clone() for name, one in made.named_buffers()}
    ours(made.eval(), x, x, nn.ReLU())
    made.train()
    for added in (
        image(1, 4, 5, 6),
        image(4, 1, 1),
        image().to(memory_format=CHANNELS_LAST),
        image().transpose(2, 3).contiguous().transpose(2, 3),
        image().double(),
        image().half(),
        misaligned(image()),
        torch._neg_view(image()),
        image().as_subclass(Subclass),
        nn.Parameter(image()),
    ):
        assert call.computed(made, nn.ReLU(), x, added) is None
    for after in (None, nn.SiLU(), nn.LeakyReLU(0.1)):
        assert call.computed(made, after, x, image()) is None
    for name, one in made.named_buffers():
        torch.testing.assert_close(one, before[name], rtol=0, atol=0)
    assert gpu.forwards == 1


def test_a_transform_of_what_is_added_is_left_to_the_modules(gpu: Pretended) -> None:
    made, x = norm().eval(), image()
    stacked = torch.stack([image(), 2 * image()])

    def block(added: Tensor) -> Tensor:
        output = call.computed(made, nn.ReLU(), x, added)
        return theirs(made, x, added, nn.ReLU()) if output is None else output

    found = torch.vmap(block)(stacked)
    assert gpu.forwards == 0
    torch.testing.assert_close(found, torch.stack([theirs(made, x, one, nn.ReLU()) for one in stacked]))


# The node


@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=4) if any(one)], ids=str)
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_gradients_that_are_wanted(gpu: Pretended, needs: tuple[bool, ...], cls: type[nn.Module]) -> None:
    made, x = norm(cls), image()
    leaves = [x, made.weight, made.bias, other(x)]
    for one, wanted in zip(leaves, needs, strict=True):
        one.requires_grad_(wanted)
    of = [one for one, wanted in zip(leaves, needs, strict=True) if wanted]
    found, expected = (gradients(compute(made, x, leaves[3], nn.Sigmoid()), of) for compute in (ours, theirs))
    assert_alike(found, expected)
    assert gpu.sum_backwards == 1


def test_what_is_added_twice_has_both_gradients(gpu: Pretended) -> None:
    """``x`` is normalised and added."""
    made, x = norm(), image().requires_grad_()
    found, expected = (gradients(compute(made, x, x, nn.Tanh()), [x]) for compute in (ours, theirs))
    assert_alike(found, expected)


def test_nothing_is_differentiated_that_need_not_be(gpu: Pretended) -> None:
    made, x = norm(), image()
    with torch.no_grad():
        assert ours(made, x, other(x), nn.ReLU()).grad_fn is None
    made.requires_grad_(False)
    assert ours(made, x, other(x), nn.ReLU()).grad_fn is None
    node = ours(made, x, other(x).requires_grad_(), nn.ReLU()).grad_fn
    assert node is not None
    assert node.name() == "NormActivationBackward"


def test_what_was_saved_is_watched(gpu: Pretended) -> None:
    made, x = norm(), image().requires_grad_()
    output = ours(made, x, other(x), nn.ReLU())
    output.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()
    output = ours(made, x, other(x), nn.ReLU())
    total = output.sum()
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    added = other(x)
    total = ours(made, x, added, nn.ReLU()).sum()
    added.mul_(2)
    total.backward()  # what was added is not kept
    packed: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
    ):
        ours(made, x, added, nn.ReLU())
    assert packed == [x.shape, (4,), (4,), (2, 4), x.shape]


def test_what_was_saved_lives_no_longer_than_the_graph(gpu: Pretended) -> None:
    """The node saves its own output without a reference to itself."""
    made, x = norm(), image().requires_grad_()
    output = ours(made, x, other(x), nn.ReLU())
    saved = weakref.ref(x)
    del x
    assert saved() is not None
    del output
    assert saved() is None


def test_what_was_saved_is_released_by_the_backward_pass(gpu: Pretended) -> None:
    class Packed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        one = Packed(tensor)
        packed.append(weakref.ref(one))
        return one

    made, x = norm(), image().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        total = ours(made, x, other(x), nn.ReLU()).sum()
    assert len(packed) == 5
    assert all(one() is not None for one in packed)
    total.backward()
    assert all(one() is None for one in packed)


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("form", [torch.contiguous_format, CHANNELS_LAST], ids=str)
def test_tensors_that_come_back_otherwise_are_copied(
    gpu: Pretended, form: torch.memory_format, cls: type[nn.Module]
) -> None:
    """Hooks keep the saved tensors in another memory meanwhile."""
    made, x = norm(cls), image().to(memory_format=form).requires_grad_()
    added = other(x).requires_grad_()
    of = [x, made.weight, made.bias, added]
    expected = gradients(theirs(made, x, added, nn.Tanh()), of)
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
        misaligned,
        lambda tensor: tensor.to(memory_format=CHANNELS_LAST) if tensor.dim() == 4 else tensor,
    ]
    is_last = [False, False, False, False, True]  # the output
    for back, others in product(ways, (True, False)):
        saved = iter(is_last)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: (tensor.detach(), next(saved)),
            lambda kept, back=back, others=others: back(kept[0]) if others or kept[1] else kept[0],
        ):
            output = ours(made, x, added, nn.Tanh())
        assert_alike(gradients(output, of), expected)
    grad = torch.linspace(-1, 1, x.numel()).view(x.shape)
    for given in (grad.to(memory_format=CHANNELS_LAST), misaligned(grad)):
        output = ours(made, x, added, nn.Tanh())
        assert_alike(gradients(output, of, given), expected)
    assert gpu.sum_backwards == 8


@pytest.mark.parametrize("after", [nn.ReLU(), nn.Tanh(), nn.Sigmoid()], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_gradients_in_batches_and_of_gradients_are_pytorchs(
    gpu: Pretended, cls: type[nn.Module], training: bool, after: nn.Module
) -> None:
    made, x = norm(cls).train(training), image().requires_grad_()
    added = other(x).requires_grad_()
    of = [x, made.weight, made.bias, added]
    grads = torch.stack([image(), 2 * image()])
    batched = [
        torch.autograd.grad(compute(made, x, added, after), of, grads, is_grads_batched=True)
        for compute in (ours, theirs)
    ]
    assert_alike(*batched)
    assert gpu.backwards == 0
    second = []
    for compute in (ours, theirs):
        output = compute(made, x, added, after)
        first = torch.autograd.grad(output.pow(3).sum(), of, create_graph=True)
        second.append(torch.autograd.grad(sum(one.pow(2).sum() for one in first), of))
    for one, another in zip(*second, strict=True):
        torch.testing.assert_close(one, another, rtol=2e-3, atol=2e-3)


def test_second_derivatives_of_what_is_added_alone(gpu: Pretended) -> None:
    made, x = norm().requires_grad_(False), image()
    added = other(x).requires_grad_()
    second = []
    for compute in (ours, theirs):
        (first,) = torch.autograd.grad(
            compute(made, x, added, nn.Tanh()).pow(3).sum(), added, create_graph=True
        )
        second.append(torch.autograd.grad(first.pow(2).sum(), added))
    assert_alike(*second)


def test_under_an_autocast_tensors_of_one_dtype_are_taken(gpu: Pretended) -> None:
    made, x = norm(), image().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(made, x, other(x), nn.ReLU())
        assert call.computed(made, nn.ReLU(), x, other(x).float()) is None
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, theirs(norm(), x, other(x), nn.ReLU()), rtol=2e-2, atol=2e-2)


def test_a_mode_around_the_backward_pass_sees_pytorchs_operators(gpu: Pretended) -> None:
    made, x = norm(), image().requires_grad_()
    output = ours(made, x, other(x), nn.Tanh())
    with RecordedOperators() as recorded:
        found = gradients(output, [x])
    assert_alike(found, gradients(theirs(made, x, other(x), nn.Tanh()), [x]))
    assert any("tanh_backward" in name for name in recorded.names)
    assert not any("tconv_swap" in name for name in recorded.names)
    assert gpu.backwards == 0
