"""Verifies networks that hold compiled code: what is verified is that code, not a new version with hooks in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tconv_swap import swap_layers, verify
from tconv_swap.inputs import Inputs
from tconv_swap.verification import session
from tconv_swap.verification.layer_call import sum_roundoff
from tconv_swap.verification.noise import WithRoundedOperators, with_rounding
from tconv_swap.verification.runs import CHANGED
from tconv_swap.ways.check import verify_way
from tconv_swap.ways.run import Running, build
from tconv_swap.ways.way import Way


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def networks() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    original = nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))
    return original, swap_layers(copy.deepcopy(original)), torch.randn(2, 3, 6, 5)


def test_hooks_are_not_compiled() -> None:
    original, swapped, x = networks()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    swapped.compile(backend=backend)
    report = verify(original, swapped, x)
    assert report.passed, report
    # In each mode: with gradients of the inputs, of the parameters only, with none, and in inference mode.
    assert 0 < len(graphs) <= 2 * 4
    assert not counters["graph_break"]
    assert {check.name for check in report.checks if check.kind == "layer_output"} == {"0", "2"}


def test_compiled_code_that_keeps_old_weights_fails() -> None:
    original, swapped, x = networks()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        kept: dict[int, Tensor] = {}

        def run(*given: Tensor) -> object:
            for place, name in enumerate(names):
                if "weight" in name:
                    kept.setdefault(place, given[place].detach().clone())
            return graph.forward(*(kept.get(place, value) for place, value in enumerate(given)))

        return run

    swapped.compile(backend=backend)
    report = verify(original, swapped, x, modes=("eval",), backward=False)
    assert not report.passed
    assert any(CHANGED in failure for failure in report.failures), report


@pytest.mark.parametrize("training", [True, False])
def test_compiled_code_is_what_is_verified(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original, swapped, x = networks()
    factor = 1.0

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*given: Tensor) -> object:
            return [factor * value for value in graph.forward(*given)]

        return run

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda network, **_: compile(network, backend=backend, dynamic=False)
    )
    inputs = Inputs.of(x)
    running = build(swapped, Way("ours", runtime="compile"), inputs, training=training)
    report = verify_way(original, running, inputs)
    assert report.passed, report
    factor = 1.5
    assert not verify_way(original, running, inputs).passed


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(8, 2, 4, 2, 1),
    )


def _other_momentum(network: nn.Sequential) -> None:
    network[1].momentum = 0.1001


def _other_slope(network: nn.Sequential) -> None:
    network[2].negative_slope = 0.2002


def _other_eps(network: nn.Sequential) -> None:
    network[1].eps = 1e-4


def _other_padding(network: nn.Sequential) -> None:
    network[3].forward = lambda x: nn.functional.conv_transpose2d(  # type: ignore[method-assign]
        x, network[3].weight, None, 2, 1
    )


def _nothing(network: nn.Sequential) -> None:
    pass


@pytest.mark.parametrize(
    "change", [_nothing, *sampled([_other_eps, _other_momentum, _other_slope, _other_padding], 2)]
)
def test_what_rounding_everywhere_does_not_explain_fails(change: Callable[[nn.Sequential], None]) -> None:
    """Compiled code may round every operator differently; a wrong constant is no rounding."""
    original, x = with_norm(), torch.randn(4, 3, 9, 8)
    swapped = swap_layers(copy.deepcopy(original))
    wrong = copy.copy(swapped)
    wrong._modules = {
        name: copy.copy(child) for name, child in swapped.named_children()
    }  # the tensors are shared
    change(wrong)  # type: ignore[arg-type]
    inputs = Inputs.of(x)
    running = Running(swapped, Way("ours", runtime="compile"), for_training=True).train()
    wrong.train()
    running.built_for(inputs, lambda _: lambda given: given(wrong))
    assert verify_way(original, running, inputs).passed == (change is _nothing)


class MeanInAnotherOrder(nn.Module):
    """Its running mean is off by `factor` times what another order of the sum may change."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.factor = nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6), factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        output: Tensor = self.norm(y)
        mean, share = self.norm.running_mean, self.norm.momentum
        assert mean is not None
        assert share is not None
        if self.training:
            size = y.detach().square().mean((0, 2, 3)).sqrt()
            mean += self.factor * share * sum_roundoff(y.numel() // 6, y.dtype) * size
        return output


@pytest.mark.parametrize(
    ("factor", "is_compiled", "passes"), [(0.5, True, True), (0.5, False, False), (20, True, False)]
)
def test_only_a_compiler_may_add_up_a_mean_in_another_order(
    factor: float, is_compiled: bool, passes: bool
) -> None:
    report = verify(
        MeanInAnotherOrder(0),
        MeanInAnotherOrder(factor),
        torch.randn(2, 4, 20, 20, generator=torch.Generator().manual_seed(0)),
        modes=("train",),
        require_swapped=False,
        is_compiled=is_compiled,
    )
    assert report.passed == passes, report
    assert all("running_mean" in failure for failure in report.failures)


class Angles(nn.Module):
    """Encodes positions as SAM does: one module rounds large angles to float16 and amplifies that by its sines. A
    compiler fuses the product and the sine, so that ``keeps`` digits that eager mode rounds away."""

    def __init__(self, keeps: bool, turn: float = 2 * torch.pi) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.keeps, self.turn = nn.ConvTranspose2d(4, 6, 4, 2, 1), keeps, turn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 4 * self.up(x)
        if self.keeps:
            return torch.sin(self.turn * y.float()).to(y.dtype)
        return torch.sin(self.turn * y)


@pytest.mark.parametrize(
    ("is_compiled", "turn", "passes"),
    [(True, 2 * torch.pi, True), (False, 2 * torch.pi, False), (True, 2.1 * torch.pi, False)],
)
def test_only_a_compiler_may_leave_a_rounding_out(is_compiled: bool, turn: float, passes: bool) -> None:
    report = verify(
        Angles(False).half(),
        Angles(True, turn).half(),
        torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0)).half(),
        modes=("eval",),
        backward=False,
        reference="original",  # as for changed weights: no float64 shows how far off the original is
        require_swapped=False,
        is_compiled=is_compiled,
    )
    assert report.passed == passes, report


@pytest.mark.parametrize(
    "exact",
    [torch.relu, torch.floor, torch.clone, nn.functional.relu6, nn.MaxPool2d(2), lambda x: torch.cat([x, x])],
)
def test_operators_that_round_nothing_stay_as_they_are(exact: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4, 6)
    expected = exact(x)
    with WithRoundedOperators(2.0, seed=0):
        assert torch.equal(exact(x), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rounding_is_added_in_the_forward_pass(device: str) -> None:
    x = torch.randn(2, 3, 4, 6, requires_grad=True, device=device)
    passes = []
    for roundings in (0.0, 2.0):
        with WithRoundedOperators(roundings, seed=0):
            y = torch.sin(x)
            passes.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    (without, gradient), (rounded, again) = passes
    off = (rounded - without).abs() / without.abs()
    assert 0 < off.max() <= 3 * torch.finfo(x.dtype).eps
    assert torch.equal(gradient, again)


@pytest.mark.parametrize(
    ("module", "ends_with_one"),
    [(nn.SiLU(), True), (nn.BatchNorm1d(16), True), (nn.Linear(16, 16), False), (nn.Flatten(), False)],
)
def test_the_output_of_a_module_is_not_rounded_twice(module: nn.Module, ends_with_one: bool) -> None:
    x = torch.randn(64, 16)
    with WithRoundedOperators(2.0, seed=0) as operators:
        torch.sin(x)  # before the module
        output = module(x)
        assert (operators.amplitude(output) > 0) is ends_with_one
        assert operators.amplitude(output.clone()) == 0


def test_a_module_that_ends_with_a_rounded_operator_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[type[nn.Module], set[float]] = {}

    def spied(
        network: nn.Module, names: list[str], amplitude: Callable[..., float], *given: object
    ) -> object:
        def spy(layer: nn.Module, output: Tensor) -> float:
            value = amplitude(layer, output)
            found.setdefault(type(layer), set()).add(value)
            return value

        return with_rounding(network, names, spy, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "with_rounding", spied)
    torch.manual_seed(0)
    network = nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.SiLU()).half()
    other = nn.Sequential(network[0], nn.GELU())
    x = torch.randn(2, 4, 9, 9).half()
    assert not verify(network, other, x, modes=("eval",), require_swapped=False, is_compiled=True).passed
    assert found[nn.SiLU] == {0.0}
    assert min(found[nn.ConvTranspose2d]) >= 2 * 2.0**-11


@pytest.mark.parametrize(
    ("norm", "shape", "elements"),
    [
        (nn.BatchNorm2d(3), (2, 3, 8, 8), 128),
        (nn.BatchNorm1d(3), (4, 3), 4),
        (nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 8, 8), 128),
        (nn.InstanceNorm2d(3, track_running_stats=True), (3, 8, 8), 64),
        (nn.InstanceNorm1d(3, track_running_stats=True), (3, 8), 8),
    ],
)
def test_a_mean_is_of_the_elements_of_its_channel(
    norm: nn.BatchNorm1d, shape: tuple[int, ...], elements: int
) -> None:
    seen = []

    def amplitude(terms: int, _: torch.dtype) -> float:
        seen.append(terms)
        return 1.0

    x = torch.randn(shape)
    only_the_first = torch.tensor([1.0, 0.0, 0.0]).view(3, *[1] * (len(shape) - 1 - shape.index(3)))
    with with_rounding(norm.train(), [""], lambda *_: 0.0, seed=0, mean_amplitude=amplitude):
        norm(x * only_the_first)
    assert seen == [elements]
    mean = norm.running_mean
    assert mean is not None
    assert mean[0] != 0
    assert mean[1:].tolist() == [0, 0]
