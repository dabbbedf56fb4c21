"""``activation(norm(x) + added)`` as one inside a user's own ``forward``: residual blocks."""

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


class Block(nn.Module):
    """Like torchvision's block: the added tensor is computed after the norm, and the sum is in place."""

    def __init__(self, norm: nn.Module | None = None, activation: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4) if norm is None else norm
        self.relu = nn.ReLU(inplace=True) if activation is None else activation
        self.downsample: nn.Module | None = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        for one in self.modules():
            if isinstance(one, nn.BatchNorm2d) and one.affine:
                nn.init.uniform_(one.weight, 0.5, 1.5)
                nn.init.normal_(one.bias)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


class Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(x + self.bn2(self.conv2(x)))
        return y


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)


def swapped_of(original: nn.Module) -> nn.Module:
    """The kernels support float parameters; the comparison converts to float64."""
    swapped = tconv_swap.swap_layers(original.float(), fuse="all", inplace=False).double()
    original.double()
    return swapped


def compare(original: nn.Module, swapped: nn.Module, x: Tensor) -> None:
    found = []
    for model in (original, swapped):
        given = x.clone().requires_grad_()
        output = model(given * 1)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
        wanted = [given, *(p for p in model.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(output, wanted, weights, allow_unused=True)
        found.append([output, *gradients, *[one.clone() for one in model.buffers()]])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.ReLU(), nn.Tanh(), nn.Sigmoid()], ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [Block, Other])
def test_computes_what_the_modules_compute(
    cls: type[Block], norm: nn.Module, activation: nn.Module, kernels: Pretended
) -> None:
    original = cls(copy.deepcopy(norm), activation)
    swapped = swapped_of(original)
    (plan,) = (one for one in tconv_swap.plan_swap(original.float(), fuse="all").blocks if one.name == "bn2")
    original.double()
    assert (plan.swap, plan.activation) == (True, "relu")
    assert plan.kind.startswith(type(norm).__name__ + " + sum + ")
    for _ in range(2):
        compare(original, swapped, images())
    assert kernels.sum_forwards == kernels.sum_backwards == 2
    original.eval(), swapped.eval()
    compare(original, swapped, images())
    with torch.no_grad():
        torch.testing.assert_close(swapped(images()), original(images()))
    assert kernels.sum_forwards == 4


def test_torchvisions_networks(kernels: Pretended) -> None:
    from torchvision.models import resnet18, resnet50

    for build, sums, norms in ((resnet18, 8, 20), (resnet50, 16, 53)):
        original = build(num_classes=5)
        swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
        blocks = tconv_swap.plan_swap(original, fuse="all").blocks
        assert sum(block.kind == "BatchNorm2d + sum + ReLU" for block in blocks) == sums
        kernels.sum_forwards = kernels.forwards = 0
        x = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(swapped(x), original(x), rtol=1e-3, atol=1e-3)
        assert (kernels.sum_forwards, kernels.forwards) == (sums, norms)
        tconv_swap.unswap_layers(swapped)
        assert [type(m) for m in swapped.modules()] == [type(m) for m in original.modules()]


def test_one_value_a_channel_raises_as_pytorch(kernels: Pretended) -> None:
    swapped = tconv_swap.swap_layers(Other(), fuse="all")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        swapped(torch.randn(1, 4, 1, 1))
    assert kernels.sum_forwards == 0


def test_gradients_of_gradients(kernels: Pretended) -> None:
    original = Other(activation=nn.Tanh())
    swapped = swapped_of(original)
    second = []
    for model in (original, swapped):
        x = images().requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        wanted = [x, *model.conv2.parameters(), *model.bn2.parameters()]
        second.append(torch.autograd.grad(first.pow(2).sum(), wanted))
    torch.testing.assert_close(second[1], second[0])
    assert kernels.sum_forwards == 1


def test_frozen_parts(kernels: Pretended) -> None:
    original = Block()
    original.bn2.eval().requires_grad_(False)
    compare(original, swapped_of(original), images())
    original.requires_grad_(False)
    swapped = swapped_of(original)
    found = []
    for model in (original, swapped):  # what is added alone needs a gradient
        x = images().requires_grad_()
        model.conv1.weight.requires_grad_()
        found.append(torch.autograd.grad(model(x).sum(), [x, model.conv1.weight]))
    torch.testing.assert_close(found[1], found[0])
    assert kernels.sum_backwards == 2


def test_hooks_and_changes_later_are_seen(kernels: Pretended) -> None:
    original = Block()
    swapped = swapped_of(original)
    seen: list[Tensor] = []
    for module in (swapped.bn2, swapped.relu):
        handle = module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
        compare(original, swapped, images())
        handle.remove()
    assert (seen[0] < 0).any()
    assert kernels.sum_forwards == 0
    for model in (original, swapped):
        model.downsample = None
    compare(original, swapped, images())
    assert kernels.sum_forwards == 1
    for model in (original, swapped):
        model.conv2 = nn.Identity()  # whose output is somebody else's tensor
    compare(original, swapped, images())
    for model in (original, swapped):
        model.relu = nn.SiLU()
    compare(original, swapped, images())
    assert kernels.sum_forwards == 1


def test_tensors_that_kernels_do_not_take(kernels: Pretended) -> None:
    class Broadcasts(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(x))
            out += x.mean(0, keepdim=True)
            return self.relu(out)  # type: ignore[no-any-return]

    class Mixes(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(x))
            out += x.float()
            return self.relu(out)  # type: ignore[no-any-return]

    class Promotes(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(self.bn2(self.conv2(x)) + x.double())
            return y

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(x))
            out += x.double()
            return self.relu(out)  # type: ignore[no-any-return]

    class LiesOtherwise(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(self.bn2(self.conv2(x)) + x.contiguous(memory_format=torch.channels_last))
            return y

    for cls in (Broadcasts, Mixes, LiesOtherwise):
        original = cls()
        compare(original, swapped_of(original), images())
    for cls, dtype in ((Promotes, torch.float64), (Keeps, torch.float32)):
        original = cls().float()
        swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
        x = images(torch.float32)
        assert swapped(x).dtype is original(x).dtype is dtype
    assert kernels.sum_forwards == 0
    assert kernels.forwards == 5  # the norms by themselves


def test_without_gradients_in_a_part(kernels: Pretended) -> None:
    class Partly(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out = self.bn2(self.conv2(x))
            out = out + x
            return self.relu(out)  # type: ignore[no-any-return]

    original = Partly()
    swapped = swapped_of(original)
    found = []
    for model in (original, swapped):
        x = images().requires_grad_()
        found.append(torch.autograd.grad(model(x).sum(), [x, model.bn2.weight], allow_unused=True))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1] is found[0][1] is None


def test_what_is_added_may_change_before_the_backward_pass(kernels: Pretended) -> None:
    """A sum does not save the added tensor, so PyTorch allows it to change."""

    class Adds(nn.Module):
        def __init__(self, block: nn.Module, other: nn.Module) -> None:
            super().__init__()
            self.block, self.other = block, other

        def forward(self, x: Tensor) -> Tensor:
            changed = self.other(x)
            y: Tensor = self.block(changed)
            changed.mul_(2)
            return y

    class OfOne(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(x.detach() * 1))
            out += x
            return self.relu(out)  # type: ignore[no-any-return]

    original = Adds(OfOne(), nn.Conv2d(4, 4, 1))
    compare(original, swapped_of(original), images())
    assert kernels.sum_backwards == 1


def test_copies_pickles_and_compiled_graphs(kernels: Pretended) -> None:
    original = Block().eval()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    x = images(torch.float32)
    expected = original(x)
    for again in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        torch.testing.assert_close(again(x), expected)
    count = kernels.sum_forwards
    assert count == 2
    torch.testing.assert_close(torch.compile(swapped, backend="eager")(x), expected)
    assert kernels.sum_forwards == count


class Elsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(x)) + x
        y: Tensor = self.relu(out) + out
        return y


class IntoTheOther(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += self.bn2(self.conv2(x))
        z: Tensor = self.relu(y) + y
        return z


class WritesInto(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += self.bn2(self.conv2(x))
        z: Tensor = self.relu(y)
        return z


class InputIsNotFresh(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(x)
        z: Tensor = self.relu(self.bn2(y) + self.conv2(y))
        return z


class InputIsReadElsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(x)
        out = self.bn2(y)
        y.mul_(2)
        z: Tensor = self.relu(out + y)
        return z


class AddsANumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.bn2(self.conv2(x)) + 1)
        return y


class Doubles(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(x))
        y: Tensor = self.relu(out + out)
        return y


NOT_PROVEN = [
    Elsewhere,
    IntoTheOther,
    WritesInto,
    InputIsNotFresh,
    InputIsReadElsewhere,
    AddsANumber,
    Doubles,
]


@pytest.mark.parametrize("cls", NOT_PROVEN)
def test_what_is_not_proven_is_not_fused(cls: type[Block], kernels: Pretended) -> None:
    assert not any(pair.sums for pair in pairs_of(cls()))
    original = cls()
    swapped = swapped_of(original).eval()
    torch.testing.assert_close(swapped(images()), original.eval()(images()))
    assert kernels.sum_forwards == 0


def test_of_two_norms_one_waits_for_the_other(kernels: Pretended) -> None:
    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)))
            return y

    original = Both()
    compare(original, swapped_of(original), images())
    assert (kernels.sum_forwards, kernels.forwards) == (1, 2)


def test_an_activation_without_kernels_has_its_reason(kernels: Pretended) -> None:
    original = Block(activation=nn.SiLU())
    (plan,) = (one for one in tconv_swap.plan_swap(original, fuse="all").blocks if one.name == "bn2")
    assert plan.swap
    assert not plan.activation
    assert plan.reason == "no kernel for a sum and then SiLU"
    compare(original, swapped_of(original), images())
    assert kernels.sum_forwards == 0


@pytest.mark.parametrize("fault", ["added", "grad_added", ""])
def test_the_verification_finds_what_is_wrong(fault: str, kernels: Pretended) -> None:
    kernels.spoil = lambda name, value: value * (1.01 if name == fault else 1)
    original = Block().float()
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False)
    report = tconv_swap.verify(original, swapped, images(torch.float32))
    failed = {(check.name, check.kind) for check in report.checks if not check.passed}
    assert report.passed is not bool(fault)
    if fault == "added":
        assert ("bn2", "layer_output") in failed
    if fault == "grad_added":
        assert ("bn2", "layer_grad_input") in failed
        assert ("bn2", "layer_output") not in failed
    assert ("bn2", "layer_grad_weight") in {(check.name, check.kind) for check in report.checks}
