"""Blocks: what is fused at a call and what is not, gradients of every order, modes, copies, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks.modules import AllBlocks, BatchNorm2d, Blocks, InstanceNorm2d

ACTIVATIONS = (
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.LeakyReLU(0.2),
    nn.ReLU6(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


def up() -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(3, 4, 4, 2, 1)


def block(norm: nn.Module | None = None, activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(4) if norm is None else norm
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return nn.Sequential(up(), norm, nn.ReLU() if activation is None else activation).double()


def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 3, 5, generator=generator, dtype=torch.float64)


def fused(model: nn.Sequential, fuse: str = "blocks") -> nn.Sequential:
    return tconv_swap.swap_layers(model.float(), fuse=fuse, inplace=False).double()  # type: ignore[return-value]


def compare(original: nn.Module, swapped: nn.Module, x: Tensor) -> None:
    """Returns outputs, gradients and buffers."""
    outputs, gradients = [], []
    for model in (original, swapped):
        given = x.clone().requires_grad_()
        output = model(given)
        wanted = [given, *(p for p in model.parameters() if p.requires_grad)]
        # A gradient of ones has no gradient through a norm.
        gradients.append(
            torch.autograd.grad(
                output, wanted, torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
            )
        )
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    for (name, one), (_, other) in zip(original.named_buffers(), swapped.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, momentum=0.7, eps=0.1),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_computes_what_the_modules_compute(
    kernels: Pretended, norm: nn.Module, activation: nn.Module
) -> None:
    original = block(copy.deepcopy(norm), activation)
    swapped = fused(original)
    original.double()
    for _ in range(2):  # with a momentum of None, the second batch counts as much as the first
        compare(original, swapped, images())
    assert kernels.forwards == kernels.backwards == 2
    original.eval(), swapped.eval()
    compare(original, swapped, images())
    with torch.no_grad():
        torch.testing.assert_close(swapped(images()), original(images()))
    assert kernels.forwards == 4


def test_frozen_norms_inside_training(kernels: Pretended) -> None:
    original = block()
    original[1].eval().requires_grad_(False)
    swapped = fused(original)
    compare(original.double(), swapped, images())
    assert kernels.backwards == 1


def test_gradients_of_gradients(kernels: Pretended) -> None:
    original = block(activation=nn.Tanh())
    swapped = fused(original)
    original.double()
    second = []
    for model in (original, swapped):
        x = images().requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.pow(2).sum(), [x, *model.parameters()]))
    torch.testing.assert_close(second[1], second[0])


def test_transforms_and_traces_see_the_modules(kernels: Pretended) -> None:
    swapped = fused(block()).eval()
    x = images()
    expected = swapped(x)
    count = kernels.forwards
    torch.testing.assert_close(torch.func.vmap(swapped)(x[:, None])[:, 0], expected)
    _, tangent = torch.func.jvp(swapped, (x,), (x,))
    assert tangent.shape == expected.shape
    graph = torch.fx.symbolic_trace(swapped)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    assert kernels.forwards == count


def test_compiled_graphs_have_the_modules(kernels: Pretended) -> None:
    swapped = fused(block()).eval()
    expected = swapped(images())
    count = kernels.forwards
    torch.testing.assert_close(torch.compile(swapped, backend="eager", fullgraph=True)(images()), expected)
    assert kernels.forwards == count


def test_a_hook_later_is_obeyed(kernels: Pretended) -> None:
    seen: list[Tensor] = []
    swapped = fused(block())
    for module, expected in ((swapped[1], 0), (swapped[2], 1)):
        handle = module.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        kernels.forwards = 0
        swapped(images())
        assert kernels.forwards == expected  # a norm without its activation, or neither
        handle.remove()
    assert len(seen) == 2
    assert (seen[1] < 0).any()  # what the activation is given is not activated yet


def test_modules_called_alone_and_parts_taken_out(kernels: Pretended) -> None:
    original = block()
    swapped = fused(original)
    original.double()
    for take in (lambda m: m[1], lambda m: m[:2], lambda m: nn.Sequential(*list(m)[:2])):
        x = images() if take(original) is not original[1] else original[0](images()).detach()
        torch.testing.assert_close(take(swapped)(x), take(original)(x))


def test_another_activation_later(kernels: Pretended) -> None:
    original = block()
    swapped = fused(original)
    original.double()
    for model in (original, swapped):
        model[2] = nn.Softplus()
        model.append(nn.Identity())
    compare(original, swapped, images())
    assert kernels.forwards == 1


def test_a_norm_behind_another_layer_is_left_by_blocks_and_taken_by_all(kernels: Pretended) -> None:
    original = nn.Sequential(up(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    assert not tconv_swap.plan_swap(original, fuse="blocks").blocks
    swapped, everywhere = fused(original), fused(original, "all")
    original.double()
    compare(copy.deepcopy(original), swapped, images())
    assert kernels.forwards == 0
    compare(original, everywhere, images())
    assert kernels.forwards == 1


def test_one_value_a_channel_raises_as_pytorch(kernels: Pretended) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        tconv_swap.swap_layers(model, fuse="blocks")(torch.randn(1, 3, 1, 1))


class UserSequential(nn.Sequential):
    pass


class OwnForward(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input) + 1
        return output


class InForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.activation = up(), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.norm(self.up(x)))
        return y


def test_each_candidate_has_its_reason() -> None:
    hooked = block()
    hooked[1].register_forward_hook(lambda *_: None)
    networks = {
        "a forward of its own": OwnForward(up(), nn.BatchNorm2d(4), nn.ReLU()),
        "hook": hooked,
        "GroupNorm is none of": nn.Sequential(up(), nn.GroupNorm(2, 4)),
        "SyncBatchNorm is none of": nn.Sequential(up(), nn.SyncBatchNorm(4)),
        "averages them": nn.Sequential(up(), nn.InstanceNorm2d(4, track_running_stats=True)),
        "not proven": Branching(),
        "unsupported dtype torch.float64": block().double(),
    }
    for reason, network in networks.items():
        (left,) = tconv_swap.plan_swap(network, fuse="blocks").blocks
        assert not left.swap
        assert reason in left.reason
        assert reason in str(left)
        before = [type(module) for module in network.modules() if not isinstance(module, nn.ConvTranspose2d)]
        if reason == "averages them":  # in evaluation it is computed with the layer before it
            before[0] = Blocks
        tconv_swap.swap_layers(network, fuse="blocks")
        assert before == [type(m) for m in network.modules() if not isinstance(m, nn.ConvTranspose2d)]


def test_an_activation_of_no_kernel_has_its_reason() -> None:
    (plan,) = tconv_swap.plan_swap(nn.Sequential(up(), nn.BatchNorm2d(4), nn.PReLU()), fuse="blocks").blocks
    assert (plan.swap, plan.activation) == (True, "")
    assert plan.reason.startswith("without 2: PReLU is none of ReLU, LeakyReLU")
    for following in (nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4)):
        model = nn.Sequential(up(), nn.BatchNorm2d(4), following)
        assert not tconv_swap.plan_swap(model, fuse="blocks").blocks[0].reason


class Branching(InForward):
    """A network that also uses the norm's output elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x))
        z: Tensor = self.activation(y) + y
        return z


def test_all_takes_the_norm_alone_where_its_activation_is_not_known(kernels: Pretended) -> None:
    original = Branching()
    (plan,) = tconv_swap.plan_swap(original, fuse="all").blocks
    assert plan.swap
    assert not plan.activation
    swapped = tconv_swap.swap_layers(original, fuse="all", inplace=False).double()
    assert type(swapped.norm) is BatchNorm2d
    compare(original.double(), swapped, images())
    assert kernels.forwards == 1


@pytest.mark.parametrize("fuse", ["blocks", "all"])
@pytest.mark.parametrize("container", [nn.Sequential, UserSequential])
def test_copies_pickles_states_and_the_way_back(fuse: str, container: type[nn.Sequential]) -> None:
    original = nn.Sequential(container(up(), nn.InstanceNorm2d(4, affine=True), nn.Tanh()), nn.BatchNorm2d(4))
    before = [type(module) for module in original.modules()]
    parts = [id(one) for one in (*original.modules(), *original.parameters(), *original.buffers())]
    expected = copy.deepcopy(original)(images().float())
    state = copy.deepcopy(original.state_dict())
    swapped = tconv_swap.swap_layers(original, fuse=fuse)
    assert swapped is original
    assert parts == [id(one) for one in (*original.modules(), *original.parameters(), *original.buffers())]
    assert list(swapped.state_dict()) == list(state)
    inner = swapped[0]
    assert isinstance(inner, AllBlocks if fuse == "all" else Blocks)
    assert isinstance(inner, container)
    assert (type(inner[1]) is InstanceNorm2d) is (fuse == "all")
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    for again in (
        copy.deepcopy(swapped),
        pickle.loads(pickle.dumps(swapped)),
        torch.load(file, weights_only=False),
    ):
        assert [type(m).__mro__[1:] for m in again.modules()] == [
            type(m).__mro__[1:] for m in swapped.modules()
        ]
        torch.testing.assert_close(again.train()(images().float()), expected)
    tconv_swap.unswap_layers(swapped)
    assert [type(module) for module in swapped.modules()] == before
    assert not any("tconv" in name for module in swapped.modules() for name in vars(module))


def test_the_other_choice_later() -> None:
    model = tconv_swap.swap_layers(block().float(), fuse="blocks")
    assert type(model) is Blocks
    assert type(tconv_swap.swap_layers(model, fuse="all")) is AllBlocks
    assert type(tconv_swap.swap_layers(model)) is AllBlocks  # None leaves what is
    with pytest.raises(ValueError, match="fuse must be"):
        tconv_swap.plan_swap(model, fuse="everything")  # type: ignore[arg-type]


class Named(nn.Sequential):
    """A subclass that a file may name."""


def test_files_of_fused_networks_load(tmp_path) -> None:
    from tconv_swap.files.loading import load_model

    path = tmp_path / "model.pt"
    for fuse in ("blocks", "all"):
        model = tconv_swap.swap_layers(nn.Sequential(Named(up(), nn.BatchNorm2d(4), nn.ReLU())), fuse=fuse)
        torch.save(model, path)
        loaded = load_model(path, trust=[f"{__name__}:Named"]).model
        assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
        plain = tconv_swap.swap_layers(nn.Sequential(up(), nn.BatchNorm2d(4), nn.ReLU()), fuse=fuse)
        torch.save(plain, path)
        assert type(load_model(path).model) is type(plain)


def test_the_command_line_fuses(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from tconv_swap.cli import app

    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(up(), nn.BatchNorm2d(4), nn.ReLU()), "model.pt")
    for fuse, expected in (("blocks", Blocks), ("none", nn.Sequential)):
        arguments = ["swap", "model.pt", "--fuse", fuse, "--out", f"{fuse}.pt", "--input-shape", "2,3,6,6"]
        result = CliRunner().invoke(app, [*arguments, "--no-benchmark", "--device", "cpu"])
        assert result.exit_code == 0, result.output
        assert type(torch.load(f"{fuse}.pt", weights_only=False)) is expected
