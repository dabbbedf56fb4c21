"""A call of a norm and its activation by csrc/norm.h: which calls Python plans, and what the node saves and returns.

On a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from norm_call_cases import CHANNELS_LAST, RecordedOperators, gradients, image, misaligned, norm
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

from tconv_swap.blocks import call, kernels
from tconv_swap.runtime import host, launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def ours(norm: nn.Module, x: Tensor, activation: nn.Module | None = None) -> Tensor:
    output = call.computed(norm, activation, x)
    assert output is not None
    return output


# What our kernels compute


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_python_is_asked_once_for_each_kind_of_call(gpu: Pretended, cls: type[nn.Module]) -> None:
    made = norm(cls)
    images = [image(), image(2, 4, 3, 3), image().to(memory_format=CHANNELS_LAST), image().half()]
    for repeated in range(3):
        for x in images:
            x = x.clone(memory_format=torch.preserve_format).requires_grad_()
            ours(made, x, nn.ReLU()).sum().backward()
        assert gpu.planned == 2 * len(images), repeated
    assert gpu.forwards == gpu.backwards == 3 * len(images)


def test_no_kind_is_taken_for_another(gpu: Pretended) -> None:
    """Each constant of a block is part of the key of a call plan."""
    x, seen = image(), []
    for arguments, activation, training in product(
        ({}, {"eps": 0.3}, {"momentum": 0.5}, {"momentum": None}),
        (None, nn.ReLU(), nn.LeakyReLU(0.2), nn.LeakyReLU(0.3)),
        (True, False),
    ):
        found = []
        for compute in (ours, lambda norm, x, after: norm(x) if after is None else after(norm(x))):
            made = norm(**arguments).train(training)
            with torch.no_grad():
                made.running_mean.fill_(0.1)
                found.append([compute(made, x, activation), made.running_var])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        seen.append(gpu.planned)
    assert seen == list(range(1, len(seen) + 1))


def test_what_is_forgotten_is_asked_again(gpu: Pretended) -> None:
    made, x = norm(), image()
    ours(made, x)
    ours(made, x)
    known = launch.count_plans()
    assert gpu.planned == known == 1
    launch.forget_plans()
    ours(made, x)
    assert gpu.planned == 2


def test_the_cache_is_bounded(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    declined = [0, 1]
    monkeypatch.setattr(kernels, "plan_call", lambda *given: declined)
    made, most = norm(), 2 * 2048
    for channels in range(1, most + 500):
        assert call.computed(made, None, image(1, channels, 1, 2)) is None
        assert launch.count_plans() <= most
    assert launch.count_plans() > most // 4


def test_the_backward_pass_is_planned_with_the_forward_pass(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x, planned = norm(), image().requires_grad_(), []
    planner = kernels.planned
    monkeypatch.setattr(kernels, "planned", lambda *given: (planned.append(planner(*given)), planned[-1])[1])
    output = ours(made, x)
    (make_plans,) = gpu.begun
    output.sum().backward()
    backward = planned[-1]
    assert [one.kernels_digest for one in make_plans()] == [backward.kernels_digest]
    with torch.no_grad():
        ours(made, image(3, 4, 3, 3))
    assert len(gpu.begun) == 1


# What is left to PyTorch's modules


class Subclass(nn.Parameter):
    pass


def test_what_the_kernels_do_not_take_changes_nothing(gpu: Pretended) -> None:
    made = norm(momentum=None)
    before = {name: one.clone() for name, one in made.named_buffers()}
    for x in (
        misaligned(image()),
        image().transpose(2, 3),
        image(3, 5, 4, 4),
        image(4, 5, 6),
        image(1, 4, 1, 1),
        image(0, 4, 3, 3),
        image().int(),
        torch._neg_view(image()),
    ):
        assert call.computed(made, None, x) is None
    made.weight = Subclass(made.weight.detach())
    assert call.computed(made, None, image()) is None
    for name, one in made.named_buffers():
        torch.testing.assert_close(one, before[name], rtol=0, atol=0)
    assert gpu.forwards == 0


@pytest.mark.parametrize("momentum", [0.1, None])
def test_versions_of_buffers_are_those_of_pytorchs_module(gpu: Pretended, momentum: float | None) -> None:
    versions = []
    for compute in (ours, lambda norm, x: norm(x)):
        made = norm(momentum=momentum)
        for training in (True, True, False):
            compute(made.train(training), image())
        versions.append([one._version for one in made.buffers()])
        assert int(made.num_batches_tracked) == 2
    assert versions[0] == versions[1]
    with torch.inference_mode():
        ours(norm(), image())


def test_without_a_compiler_the_modules_compute(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_available", lambda: False)
    assert call.computed(norm(), None, image()) is None
    assert gpu.planned == gpu.forwards == 0


# The node


@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=3) if any(one)], ids=str)
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_gradients_that_are_wanted(gpu: Pretended, needs: tuple[bool, ...], cls: type[nn.Module]) -> None:
    made = norm(cls)
    leaves = [image(), made.weight, made.bias]
    for one, wanted in zip(leaves, needs, strict=True):
        one.requires_grad_(wanted)
    of = [one for one, wanted in zip(leaves, needs, strict=True) if wanted]
    found, expected = (gradients(output, of) for output in (ours(made, leaves[0]), made(leaves[0])))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert gpu.backwards == 1


def test_a_gradient_that_lies_otherwise_is_copied(gpu: Pretended) -> None:
    made = norm()
    for x in (image(), image().to(memory_format=CHANNELS_LAST)):
        x = x.requires_grad_()
        lies = x.stride()
        grad = image()
        for given in (
            grad,
            grad.to(memory_format=CHANNELS_LAST),
            misaligned(grad),
            grad[:1, :, :1].expand_as(grad),
        ):
            found, expected = (
                gradients(output, [x, made.weight], given) for output in (ours(made, x), made(x))
            )
            assert found[0].stride() == lies
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert set(gpu.grad_outputs) == {lies}
        gpu.grad_outputs.clear()


def test_nothing_is_differentiated_that_need_not_be(gpu: Pretended) -> None:
    made, x = norm(), image()
    with torch.no_grad():
        assert ours(made, x).grad_fn is None
    assert ours(made.requires_grad_(False), x).grad_fn is None
    node = ours(made, x.clone().requires_grad_()).grad_fn
    assert node is not None
    assert node.name() == "NormActivationBackward"


def test_what_was_saved_is_watched(gpu: Pretended) -> None:
    made, x = norm(), image().requires_grad_()
    output = ours(made, x)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()
    for changed in (made.weight, made.bias, x):
        output = ours(made, x)
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    packed: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
    ):
        ours(made, x)
    assert packed == [x.shape, (4,), (4,), (2, 4)]


def test_what_was_saved_may_come_back_otherwise(gpu: Pretended) -> None:
    """Hooks keep the saved tensors in another memory meanwhile."""
    made, x = norm(), image().to(memory_format=CHANNELS_LAST).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.tolist(), lambda saved: misaligned(torch.tensor(saved))
    ):
        output = ours(made, x)
    found = gradients(output, [x, made.weight, made.bias])
    for one, other in zip(found, gradients(made(x), [x, made.weight, made.bias]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert gpu.backwards == 1


@pytest.mark.parametrize("training", [True, False])
def test_gradients_in_batches_and_of_gradients_are_pytorchs(gpu: Pretended, training: bool) -> None:
    made, x = norm().train(training), image().requires_grad_()
    after = nn.Tanh()
    of = [x, made.weight, made.bias]
    grads = torch.stack([image(), 2 * image()])
    found, expected = (
        torch.autograd.grad(output, of, grads, is_grads_batched=True)
        for output in (ours(made, x, after), after(made(x)))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert gpu.backwards == 0
    second = []
    for output in (ours(made, x, after), after(made(x))):
        first = torch.autograd.grad(output.pow(3).sum(), of, create_graph=True)
        second.append(torch.autograd.grad(sum(one.pow(2).sum() for one in first), of))
    for one, other in zip(*second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    assert gpu.backwards == 1  # the gradient of the output is computed once, as in a first derivative


def test_a_mode_around_the_backward_pass_sees_pytorchs_operators(gpu: Pretended) -> None:
    made, x = norm(), image().requires_grad_()
    output = ours(made, x)
    with RecordedOperators() as recorded:
        (found,) = gradients(output, [x])
    torch.testing.assert_close(found, gradients(made(x), [x])[0], rtol=1e-4, atol=1e-5)
    assert any("batch_norm" in name for name in recorded.names)
    assert not any("tconv_swap" in name for name in recorded.names)
    assert gpu.backwards == 0
