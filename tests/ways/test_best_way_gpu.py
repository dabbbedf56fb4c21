"""Ways on a GPU: CUDA graphs as PyTorch captures them, compiled graphs, searched and verified; against eager mode."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graph_workspaces
import pytest
import torch
from graph_cases import Named, Parts, generator, images, trained
from torch import Tensor, nn

import tconv_swap
from tconv_swap.inputs import Inputs
from tconv_swap.ways.capture import NotCapturableError, StaleGraphError
from tconv_swap.ways.check import verify_way
from tconv_swap.ways.run import Running, WayWarning, build
from tconv_swap.ways.way import PYTORCH, Way, with_layers

pytestmark = pytest.mark.gpu

GRAPHS = ["graph", "compile+graph"]
LAYERS = ["pytorch", "ours", "fused"]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(train: bool = True) -> nn.Sequential:
    return generator().cuda().train(train)


def running(made: nn.Module, way: str, training: bool = True) -> Running:
    return tconv_swap.in_way(made, way, images(device="cuda"), training=training)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def state(made: nn.Module) -> list[Any]:
    tensors = [*made.parameters(), *made.buffers()]
    return [
        *((id(t), t.data_ptr(), t.tolist(), t.grad) for t in tensors),
        torch.cuda.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("runtime", GRAPHS)
@pytest.mark.parametrize("layers", LAYERS)
def test_building_changes_nothing(layers: str, runtime: str) -> None:
    made = network()
    before = state(made)
    running(made, f"{layers}+{runtime}")
    assert state(made) == before


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("runtime", GRAPHS)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_training_loop_equals_eager_mode(layers: str, runtime: str, accumulate: int) -> None:
    """With dropout, a gradient scaler and momentum: outputs, weights, buffers, momenta, the GPU's random state."""
    made, eager = network(), network()
    call = running(made, f"{layers}+{runtime}")
    expected = trained(eager, eager, device="cuda", accumulate=accumulate)
    found = trained(made, call, device="cuda", accumulate=accumulate)
    assert_close(found[:-1], expected[:-1])
    assert torch.equal(found[-1], expected[-1])
    assert call.calls == 4 * accumulate


@pytest.mark.parametrize("layers", LAYERS)
def test_the_loop_of_the_docs_under_autocast(layers: str) -> None:
    made, eager = network(), network()
    with torch.autocast("cuda", torch.float16):
        call = running(made, f"{layers}+channels_last+graph")
    eager.to(memory_format=torch.channels_last)

    def autocast(run: Any) -> Any:
        def called(batch: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.float16):
                return run(batch.contiguous(memory_format=torch.channels_last)).float()

        return called

    expected = trained(eager, autocast(eager), device="cuda")
    found = trained(made, autocast(call), device="cuda")
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=2e-2, atol=2e-2)
    assert torch.equal(found[-1], expected[-1])
    assert call.calls == 4


@pytest.mark.parametrize("layers", LAYERS)
def test_a_whole_step_in_one_graph_equals_eager_mode(layers: str) -> None:
    """As the documentation captures it; without dropout, whose numbers a warm-up would use up."""
    batches = [images(device="cuda", seed=seed) for seed in range(4)]
    steps = {True: WholeStep(layers, batches[0]), False: WholeStep("pytorch", batches[0])}
    for captured, step in steps.items():
        step.warm_up()
        replay = step.captured() if captured else step
        for batch in batches:
            step.static.copy_(batch)
            replay()
            step.losses.append(step.loss.clone())
    found, expected = ([*step.losses, *step.network.state_dict().values()] for step in steps.values())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert len({float(loss) for loss in steps[True].losses}) == len(batches)


class WholeStep:
    """A training step on `static`: forward pass under autocast, loss, backward pass, optimizer."""

    def __init__(self, layers: str, batch: Tensor) -> None:
        made = network()
        made[3].p = 0.0
        self.network = with_layers(made, layers)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.static = batch.clone()
        self.loss = torch.zeros((), device="cuda")
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            self.loss = self.network(self.static).float().square().mean()
        self.loss.backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)

    def captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


class Autocast(nn.Module):
    """A network with an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = generator()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            y: Tensor = self.network(x)
        return y.float()


@pytest.mark.parametrize("runtime", GRAPHS)
def test_an_autocast_inside_the_network_sees_the_weights_of_each_step(runtime: str) -> None:
    made, eager = Autocast().cuda(), Autocast().cuda()
    expected = trained(eager, eager, device="cuda")
    found = trained(made, running(made, f"ours+{runtime}"), device="cuda")
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("runtime", GRAPHS)
def test_results_of_a_call_are_not_overwritten(runtime: str) -> None:
    made = network(train=False)
    call = running(made, f"ours+{runtime}", training=False)
    first = call(images(device="cuda", seed=1))
    kept = first.clone()
    for seed in range(2, 5):
        call(images(device="cuda", seed=seed))
    assert torch.equal(first, kept)
    assert_close(first, made(images(device="cuda", seed=1)).detach())


@pytest.mark.parametrize("runtime", GRAPHS)
def test_gradients_are_not_overwritten(runtime: str) -> None:
    made = network()
    call = running(made, f"ours+{runtime}")
    weight = next(made.parameters())
    (first,) = torch.autograd.grad(call(images(device="cuda", seed=1)).sum(), weight)
    kept = first.clone()
    for seed in range(2, 5):
        torch.autograd.grad(call(images(device="cuda", seed=seed)).sum(), weight)
    assert torch.equal(first, kept)


def test_a_backward_pass_through_an_older_call_is_refused() -> None:
    call = running(network(), "ours+graph")
    older, newer = (call(images(device="cuda", seed=seed)) for seed in (1, 2))
    with pytest.raises(StaleGraphError):
        older.sum().backward()
    newer.sum().backward()


@pytest.mark.parametrize("runtime", GRAPHS)
def test_other_shapes_run_eagerly_with_one_warning(runtime: str) -> None:
    made = network(train=False)
    call = running(made, f"ours+{runtime}", training=False)
    with pytest.warns(WayWarning, match="shapes") as caught:
        found = [call(images(1, 4, 5, 6, device="cuda")) for _ in range(2)]
    assert len([w for w in caught if w.category is WayWarning]) == 1
    assert call.calls == 0
    assert_close(found[0], made(images(1, 4, 5, 6, device="cuda")).detach())


@pytest.mark.parametrize("runtime", GRAPHS)
def test_weights_are_read_on_every_call(runtime: str) -> None:
    made = network(train=False)
    call = running(made, f"ours+{runtime}", training=False)
    with torch.no_grad():
        next(made.parameters()).mul_(2)
    assert_close(call(images(device="cuda")), made(images(device="cuda")).detach())
    assert call.calls == 1


def test_arguments_and_outputs_of_any_structure() -> None:
    made = Named().cuda()
    inputs = Inputs((), {"image": images(device="cuda"), "scale": 2.0})
    call = build(made, Way("pytorch", runtime="graph"), inputs, training=False)
    other = images(device="cuda", seed=3)
    output, expected = call(image=other, scale=2.0), made(image=other, scale=2.0)
    assert output["sizes"][1] == "text"
    assert_close(output["image"], expected["image"].detach())
    assert call.calls == 1


def test_a_network_that_waits_is_refused_and_the_gpu_still_works() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 3, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(x)
            return y if y.sum().item() > 0 else -y

    made = Waits().cuda()
    with pytest.raises(NotCapturableError, match="waits for the GPU"):
        running(made, "pytorch+graph", training=False)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.rand(3, device="cuda").sum().item()
    report = tconv_swap.optimize(made, images(device="cuda"), ways=["pytorch+graph", "ours"]).report
    row = report.stages[0].row(Way("pytorch", runtime="graph"))
    assert row is not None
    assert "waits for the GPU" in row.why_not
    assert report.stages[0].row(Way("ours")).timing is not None  # type: ignore[union-attr]


def test_a_graph_keeps_its_workspaces_when_others_are_gone() -> None:
    done = subprocess.run(
        [sys.executable, graph_workspaces.__file__],
        env={**os.environ, "PYTHONPATH": str(Path(tconv_swap.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("runtime", GRAPHS)
@pytest.mark.parametrize("layout", ["", "channels_last+"])
@pytest.mark.parametrize("training", [False, True])
def test_verified(runtime: str, layout: str, training: bool) -> None:
    made, eager = network(), network()
    call = running(made, f"ours+{layout}{runtime}", training=training)
    report = verify_way(eager, call, Inputs.of(images(device="cuda")))
    assert report.passed, report.failures


@pytest.mark.parametrize("runtime", GRAPHS)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_have_the_strides_of_eager_mode(runtime: str, training: bool) -> None:
    eager = Parts().cuda()
    call = running(copy.deepcopy(eager), f"ours+{runtime}", training=training)
    report = verify_way(eager, call, Inputs.of(images(device="cuda")))
    assert report.passed, report.failures


@pytest.mark.parametrize("training", [False, True])
def test_the_search_times_everything_and_its_choice_is_verified(training: bool) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)
    ).cuda()
    before = state(made)
    batch = images(4, 16, 16, 16, device="cuda")
    model, run, report = tconv_swap.optimize(made, batch, training=training)
    assert state(made) == before
    (stage,) = report.stages
    for row in stage.rows:
        assert row.timing is not None or row.why_not.startswith("not tried: "), str(report)
    # Which way that is, only a GPU that computes nothing else tells.
    assert stage.best is not None, str(report)
    is_as_today = stage.best == Way(PYTORCH.name)
    assert is_as_today or stage.row(stage.best).verified, str(report)  # type: ignore[union-attr]
    assert stage.bound
    assert next(model.parameters()) is next(run.parameters())
    eager = copy.deepcopy(made).train(training)
    assert_close(run(batch).detach(), eager(batch).detach())
