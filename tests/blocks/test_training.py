"""Blocks in training as one op with one autograd node: which calls use it, what the node saves and returns.

On a pretended GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from norm_call_cases import RecordedOperators
from pretended_norm import Pretended, pretended
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from training_cases import block, images, node, step, swapped

import tconv_swap
from tconv_swap.blocks import call, kernels
from tconv_swap.cuda import call as cuda_call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def check(made: nn.Sequential, x: Tensor, name: str = "BlockBackward") -> Tensor:
    """Compares a step of ours with PyTorch's, and the name of the output's node with ``name``; returns the output."""
    found, expected = step(swapped(made), x), step(copy.deepcopy(made), x)
    assert node(found["output"]) == name
    compare(found, expected, 1e-5)
    return found["output"]


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compares all relative to their norms, but the gradient of the layer's bias, which is zero behind a norm that
    trains, relative to what it is the sum of."""
    assert found.keys() == expected.keys()
    for name, one in found.items():
        one, other = one.double(), expected[name].double()
        scale = float(other.norm()) + (name == "0.bias") * expected["output"].numel() ** 0.5
        assert (one - other).norm() <= tolerance * scale, name


# What one node computes

NORMS = (
    nn.BatchNorm2d(24),
    nn.BatchNorm2d(24, momentum=None),
    nn.BatchNorm2d(24, affine=False, eps=0.1, momentum=0.3),
    nn.BatchNorm2d(24, track_running_stats=False),
    nn.BatchNorm2d(24).eval(),
    nn.InstanceNorm2d(24, affine=True),
    nn.InstanceNorm2d(24),
)


@pytest.mark.parametrize("activation", [None, nn.LeakyReLU(0.3), nn.Tanh()], ids=repr)
@pytest.mark.parametrize("norm", NORMS, ids=lambda one: f"{one}{'' if one.training else ', frozen'}")
def test_computes_what_the_modules_compute(
    norm: nn.Module, activation: nn.Module | None, gpu: Pretended
) -> None:
    check(block(norm, activation), images().requires_grad_())
    assert (gpu.layers, gpu.forwards, gpu.backwards) == (2, 1, 1)


@pytest.mark.parametrize(
    "arguments", [{"groups": 2}, {"bias": False}, {"output_padding": 1}, {"dilation": 2}], ids=repr
)
def test_every_geometry(arguments: dict[str, object], gpu: Pretended) -> None:
    check(block(nn.BatchNorm2d(24), nn.ReLU(), **arguments), images().requires_grad_())


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_every_layout(form: torch.memory_format, gpu: Pretended) -> None:
    made = block(nn.BatchNorm2d(24), nn.ReLU()).to(memory_format=form)  # type: ignore[call-overload]
    found = check(made, images().to(memory_format=form).requires_grad_())
    assert found.is_contiguous(memory_format=form)
    check(made, images().to(memory_format=form).transpose(2, 3).requires_grad_())


@pytest.mark.parametrize("needs", list(product([False, True], repeat=5)), ids=str)
def test_every_choice_of_gradients(needs: tuple[bool, ...], gpu: Pretended) -> None:
    """Of the input, and weight and bias of layer and norm. A layer without a gradient has no part in the node."""
    made, x = block(nn.BatchNorm2d(24), nn.SiLU()), images().requires_grad_(needs[0])
    for one, wanted in zip(made.parameters(), needs[1:], strict=True):
        one.requires_grad_(wanted)
    if not any(needs):
        assert swapped(made)(x).grad_fn is None
        return
    of_layer = any(needs[:3])
    check(made, x, "BlockBackward" if of_layer else "NormActivationBackward")
    assert gpu.layers == 1 + of_layer


def test_the_node_leads_to_the_five_leaves(gpu: Pretended) -> None:
    made, x = swapped(block(nn.BatchNorm2d(24), nn.ReLU())), images().requires_grad_()
    grad_fn = made(x).grad_fn
    assert grad_fn is not None
    assert [edge.variable for edge, _ in grad_fn.next_functions] == [x, *made.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_input", [False, True])
def test_an_autocast_casts_what_the_layer_reads(dtype: torch.dtype, of_input: bool, gpu: Pretended) -> None:
    made = block(nn.BatchNorm2d(24), nn.Tanh())
    x = images().requires_grad_(of_input)
    gpu.casts = True
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    try:
        found = step(swapped(made), x)
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert node(found["output"]) == "BlockBackward"
    assert found["output"].dtype == dtype
    expected = step(copy.deepcopy(made), x)
    assert all(found[name].dtype == one.dtype for name, one in expected.items() if name != "output")
    compare(found, expected, {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype])


# The node


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.InstanceNorm2d(4, affine=True)]
)
def test_derivatives_of_first_and_second_order(norm: nn.Module, gpu: Pretended) -> None:
    made = swapped(block(norm, nn.Tanh(), groups=2)).double()  # a swap would leave out norms in float64
    leaves = [
        images(batch=2)[..., :2, :2].double().contiguous(),
        *(one.detach() for one in made.parameters()),
    ]
    names = [name for name, _ in made.named_parameters()]
    statistics = {name: one.clone() for name, one in made.named_buffers()}

    def compute(x: Tensor, *parameters: Tensor) -> Tensor:
        for name, one in statistics.items():
            made.get_buffer(name).copy_(one)
        for name, one in zip(names, parameters, strict=True):
            module, _, last = name.rpartition(".")
            made.get_submodule(module)._parameters[last] = one  # type: ignore[assignment]
        output = made(x)
        assert node(output) == "BlockBackward"
        return output  # type: ignore[no-any-return]

    leaves = [one.requires_grad_() for one in leaves]
    assert gradcheck(compute, leaves, fast_mode=True)
    assert gradgradcheck(compute, leaves, fast_mode=True)
    assert gpu.backwards > 0


def test_a_second_derivative_under_an_autocast(gpu: Pretended) -> None:
    """It leads to the weight itself, of which the node has a copy, by the gradient of the input."""
    made, x = block(nn.BatchNorm2d(24).eval(), nn.Tanh()), images().requires_grad_()
    gpu.casts = True
    second = []
    for one in (swapped(made), made):
        # float16 is the dtype of an autocast on CUDA, unless another one is set.
        (first,) = torch.autograd.grad(one(x).float().pow(2).mean(), x, create_graph=True)
        of = [x, *one.parameters()]
        second.append(torch.autograd.grad((1e3 * first).pow(2).sum(), of))
    for found, expected, like in zip(*second, of, strict=True):
        assert found.dtype == like.dtype
        assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_nothing_is_computed_that_nobody_wants(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, stages = swapped(block(nn.BatchNorm2d(24), nn.ReLU())), images().requires_grad_(), []
    plan_call = kernels.plan_call
    monkeypatch.setattr(kernels, "plan_call", lambda *given: (stages.append(given[2]), plan_call(*given))[1])
    output, backward = made(x), kernels.BACKWARD
    for of, wanted, layers in ((made[1].weight, 2, 0), (x, 1, 1), ([made[0].bias, made[1].bias], 3, 1)):
        stages.clear()
        before = gpu.layers
        torch.autograd.grad(output.sum(), of, retain_graph=True)  # type: ignore[arg-type]
        assert (stages, gpu.layers - before) == ([backward + wanted], layers)


def test_what_was_saved_is_watched(gpu: Pretended) -> None:
    made, x = swapped(block(nn.BatchNorm2d(24), nn.ReLU())), images().requires_grad_()
    output = made(x)
    first, second = (torch.autograd.grad(output.sum(), x, retain_graph=kept) for kept in (True, False))
    assert torch.equal(*first, *second)
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()
    for changed in (x, made[0].weight, made[1].weight, made[1].bias):
        output = made(x)
        with torch.no_grad():
            changed.mul_(2)  # type: ignore[operator, arg-type, union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    packed: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed.append(tuple(tensor.shape)), tensor.clone())[1], lambda tensor: tensor
    ):
        output = made(x)
    assert packed == [x.shape, made[0].weight.shape, output.shape, (24,), (24,), (2, 24)]
    assert output.sum().backward() is None


def test_gradients_in_batches_and_modes_see_each_operator(gpu: Pretended) -> None:
    made, x = block(nn.BatchNorm2d(24), nn.Tanh()), images().requires_grad_()
    ours = swapped(made)
    grads = torch.stack([torch.ones(3, 24, 10, 12), torch.randn(3, 24, 10, 12)])
    found, expected = (
        torch.autograd.grad(one(x), [x, *one.parameters()], grads, is_grads_batched=True)
        for one in (ours, made)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    output = ours(x)
    with RecordedOperators() as recorded:
        torch.autograd.grad(output.sum(), x)
    assert "tconv_swap.conv_transpose2d_gradients.default" in recorded.names
    assert any("batch_norm" in name for name in recorded.names)
    assert (gpu.backwards, gpu.layers) == (0, 2)


# What takes another way


def test_a_norm_of_pytorchs_behind_a_layer_of_ours(gpu: Pretended) -> None:
    tracked = nn.InstanceNorm2d(24, affine=True, track_running_stats=True)
    check(block(tracked, nn.Tanh()), images().requires_grad_(), "TanhBackward0")
    assert (gpu.layers, gpu.forwards) == (2, 0)  # the layer is computed once, and so are its gradients


def test_a_layer_of_pytorchs_before_a_norm_of_ours(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_call, "plan_call", lambda *_: [0, 1, -1, 0, 0, 0, -1, -1, -1])
    output = check(block(nn.BatchNorm2d(24), nn.Tanh()), images().requires_grad_(), "NormActivationBackward")
    assert output.grad_fn is not None
    assert output.grad_fn.next_functions[0][0].name() == "ConvolutionBackward0"  # type: ignore[union-attr]
    assert gpu.layers == 0


def test_hooks_and_observers_see_each_module(gpu: Pretended) -> None:
    made, called = swapped(block(nn.BatchNorm2d(24), nn.Tanh())), []
    for module in made:
        handle = module.register_forward_hook(lambda module, args, output: called.append(module))
        before = gpu.layers
        made(images())
        assert called.pop() is module
        # An activation with a hook is computed behind the block.
        assert gpu.layers - before == (module is made[2])
        handle.remove()
    call.observers.append(lambda norm, *_: called.append(norm))
    try:
        made(images())
    finally:
        call.observers.clear()
    assert called == [made[1]]
    made(images())
    assert gpu.layers == 2


def test_layers_of_their_own_kind(gpu: Pretended) -> None:
    made, x = block(nn.BatchNorm2d(24), nn.Tanh()), images()

    class Own(nn.ConvTranspose2d):
        pass

    for index, layer in enumerate((Own(16, 24, 4, 2, 1), made[0], made[0])):
        ours = swapped(nn.Sequential(layer, *made[1:]))
        if index == 1:
            ours[0].tconv_backend = "native"  # type: ignore[assignment]
        if index == 2:
            tconv_swap.freeze(ours.eval())
            ours[1:].train()
        assert node(ours(x)) == "NormActivationBackward"
    ours = swapped(made)
    ours[0].tconv_backend = "kernels"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="backend"):
        ours(x)
    signal = nn.Sequential(nn.ConvTranspose1d(16, 24, 4, 2, 1), nn.BatchNorm1d(24))
    ours = tconv_swap.swap_layers(signal, fuse="blocks", include_1d=True)  # type: ignore[assignment]
    assert node(ours(x[..., 0])) == "NormActivationBackward"
    with torch.no_grad():
        swapped(made)(x)
    assert gpu.layers == 0


def test_pytorchs_errors(gpu: Pretended) -> None:
    one_value = nn.Sequential(nn.ConvTranspose2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU())
    for made, x in (
        (block(nn.BatchNorm2d(24)), torch.randn(2, 17, 5, 6)),
        (nn.Sequential(block(nn.BatchNorm2d(24))[0], nn.BatchNorm2d(23)), images()),
        (nn.Sequential(block(nn.BatchNorm2d(24))[0], nn.BatchNorm1d(24)), images()),
        (one_value, torch.randn(1, 16, 1, 1)),
    ):
        messages = []
        for one in (made, swapped(made)):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                one(x)
            messages.append(type(raised.value))
        assert messages[0] is messages[1]
        assert int(one[1].num_batches_tracked) == int(made[1].num_batches_tracked)  # type: ignore[arg-type]
    assert gpu.forwards == 0
