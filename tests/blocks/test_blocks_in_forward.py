"""Norm and activation as one inside a user's own ``forward``: what is proven, and what happens after changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks.proof import pairs_of


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


class Residual(nn.Module):
    """Like torchvision's Bottleneck: one activation for all, a sum in place, a part that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 4, 2, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.side: nn.Module | None = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.up(x)
        out = self.bn1(out)
        out = self.relu(out)
        identity = out
        if self.side is not None:
            identity = self.side(out)
        out = self.bn2(self.conv(out))
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


def images() -> Tensor:
    return torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def compare(original: nn.Module, swapped: nn.Module, x: Tensor) -> None:
    found = []
    for model in (original, swapped):
        given = x.clone().requires_grad_()
        output = model(given)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        gradients = torch.autograd.grad(output, [given, *model.parameters()], weights)
        found.append([output, *gradients, *[one.clone() for one in model.buffers()]])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fuse", ["blocks", "all"])
def test_computes_what_the_modules_compute(kernels: Pretended, fuse: str) -> None:
    torch.manual_seed(0)
    original = Residual()
    swapped = tconv_swap.swap_layers(original, fuse=fuse, inplace=False)
    first = tconv_swap.plan_swap(original, fuse=fuse).blocks[0]
    assert (first.name, first.activation, first.behind) == ("bn1", "relu", "up")
    for train in (True, False):
        original.train(train), swapped.train(train)
        kernels.forwards = kernels.sum_forwards = 0
        compare(original, swapped, images())
        assert kernels.forwards - kernels.sum_forwards == 1  # the other is in front of a sum
    if fuse == "all":
        assert tconv_swap.plan_swap(original, fuse=fuse).blocks[1].kind == "BatchNorm2d + sum + ReLU"


def test_torchvisions_networks(kernels: Pretended) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    original = resnet18(num_classes=5).eval()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    fused = [block for block in tconv_swap.plan_swap(original, fuse="all").blocks if block.activation]
    assert len(fused) == 16  # in front of each relu of each BasicBlock
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(swapped(x), original(x), rtol=1e-4, atol=1e-4)
    assert (kernels.forwards, kernels.sum_forwards) == (20, 8)
    tconv_swap.unswap_layers(swapped)
    assert [type(m) for m in swapped.modules()] == [type(m) for m in original.modules()]


def test_modules_alone_compute_their_own(kernels: Pretended) -> None:
    original = Residual()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    x = torch.randn(2, 4, 6, 6)
    swapped(images())
    original(images())
    torch.testing.assert_close(swapped.bn1(x), original.bn1(x))
    torch.testing.assert_close(swapped.relu(x.clone()), original.relu(x.clone()))


def test_hooks_and_changes_later_are_seen(kernels: Pretended) -> None:
    torch.manual_seed(0)
    original = Residual()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    compare(original, swapped, images())
    seen: list[Tensor] = []
    for module in (swapped.bn1, swapped.relu):
        handle = module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
        compare(original, swapped, images())
        handle.remove()
    assert (seen[0] < 0).any()  # what the hook of the norm sees is not activated
    given: list[Tensor] = []
    handle = swapped.relu.register_forward_pre_hook(lambda module, args: given.append(args[0].clone()))
    compare(original, swapped, images())
    handle.remove()
    assert (given[0] < 0).any()
    for model in (original, swapped):
        model.side = None
    compare(original, swapped, images())
    for model in (original, swapped):
        model.relu = nn.Softplus()
    compare(original, swapped, images())


def test_copies_pickles_and_compiled_graphs(kernels: Pretended) -> None:
    torch.manual_seed(0)
    original = Residual().eval()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    expected = original(images())
    assert isinstance(swapped, Residual)
    for again in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert type(again) is type(swapped)
        torch.testing.assert_close(again(images()), expected)
    count = kernels.forwards
    torch.testing.assert_close(torch.compile(swapped, backend="eager")(images()), expected)
    assert kernels.forwards == count


class Keeps(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.kept = self.bn1(self.up(x))
        z: Tensor = self.relu(y)
        return z


class Optional(Residual):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z: Tensor = self.bn1(self.up(x))
        return self.relu(z) if y is None else z


ASKED = False


class Asks(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn1(self.up(x))
        return y if ASKED else self.relu(y)


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.bn1(self.up(x))) + self.bn1(self.up(x))
        return y


class ReadsElsewhere(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.up(x))
        z: Tensor = self.relu(y) + y
        return z


class Branches(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn1(self.up(x))
        return self.relu(y) if y.sum() > 0 else y


@pytest.mark.parametrize("cls", [Keeps, Optional, Asks, Twice, ReadsElsewhere, Branches])
def test_what_is_not_proven_is_not_fused(cls: type[Residual], kernels: Pretended) -> None:
    assert pairs_of(cls()) == ()
    torch.manual_seed(0)
    original = cls().eval()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    torch.testing.assert_close(swapped(images()), original(images()))


def test_what_is_proven() -> None:
    network = Residual()
    assert pairs_of(network) == (
        (network.up, network.bn1, network.relu, False),
        (network.conv, network.bn2, network.relu, True),
    )
