"""A network run in a way: numbers, gradients and state as in eager mode; on the CPU, CUDA graphs by a stand-in."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from graph_cases import Named, Stand, captured, generator, images, trained
from torch import nn

import tconv_swap
from tconv_swap.inputs import Inputs
from tconv_swap.ways import capture, check, optimize, way
from tconv_swap.ways.capture import NotCapturableError, StaleGraphError
from tconv_swap.ways.run import WayWarning, build
from tconv_swap.ways.way import Way, parse_way


def state(network: nn.Module) -> list[Any]:
    tensors = [*network.parameters(), *network.buffers()]
    return [*((id(t), t.data_ptr(), t.tolist(), t.grad) for t in tensors), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("runtime", ["eager", "graph"])
def test_building_changes_nothing(stand: Stand, runtime: Any) -> None:
    network = generator().train()
    before = state(network)
    build(network, Way("pytorch", runtime=runtime), Inputs.of(images()), training=True)
    assert state(network) == before
    assert int(network[1].num_batches_tracked) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_equals_eager_mode(stand: Stand, accumulate: int) -> None:
    """Dropout, buffers, the optimizer's and the generator's state, and gradients that are accumulated."""
    network, eager = generator().train(), generator().train()
    running = captured(network)
    expected = trained(eager, eager, accumulate=accumulate)
    torch.testing.assert_close(trained(network, running, accumulate=accumulate), expected, rtol=0, atol=0)
    assert running.calls == stand.replays == 4 * accumulate


def test_results_of_a_call_are_not_overwritten(stand: Stand) -> None:
    running = captured(generator(), training=False)
    first = running(images(seed=1))
    kept = first.clone()
    second = running(images(seed=2))
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_gradients_are_not_overwritten(stand: Stand) -> None:
    network = generator().train()
    running = captured(network)
    weight = network[0].weight
    (first,) = torch.autograd.grad(running(images(seed=1)).sum(), weight)
    kept = first.clone()
    torch.autograd.grad(running(images(seed=2)).sum(), weight)
    assert torch.equal(first, kept)


def test_a_backward_pass_through_an_older_call_is_refused(stand: Stand) -> None:
    running = captured(generator().train())
    older = running(images(seed=1))
    newer = running(images(seed=2))
    with pytest.raises(StaleGraphError, match="called again before the backward pass"):
        older.sum().backward()
    newer.sum().backward()


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        (lambda running: running(images(1, 4, 5, 6)), "the inputs' shapes"),
        (
            lambda running: running(images().double().float().requires_grad_()),
            "which inputs require gradients",
        ),
        (lambda running: running.eval()(images()), "the network's modes"),
        (lambda running: torch.no_grad()(running)(images()), "whether gradients are wanted"),
        (lambda running: torch.autocast("cpu", torch.bfloat16)(running)(images()), "autocast"),
    ],
)
def test_calls_that_were_not_captured_run_eagerly_with_one_warning(
    stand: Stand, differs: Any, why: str
) -> None:
    network, eager = generator().train(), generator().train()
    network[3].p = eager[3].p = 0.0
    running = captured(network)
    with pytest.warns(WayWarning, match=why) as caught:
        found = [differs(running), differs(running)]
    assert len([w for w in caught if w.category is WayWarning]) == 1
    assert running.calls == stand.replays == 0
    for output in found:
        torch.testing.assert_close(output, differs(eager), rtol=0, atol=0)


def test_moved_parameters_run_eagerly(stand: Stand) -> None:
    """The graph reads where they lay."""
    network = generator()
    running = captured(network, training=False)
    network.load_state_dict({k: v + 1 for k, v in network.state_dict().items()})
    here = running(images())
    assert (running.calls, stand.replays) == (1, 1)
    assert torch.equal(here, network(images()))
    network.load_state_dict({k: v - 2 for k, v in network.state_dict().items()}, assign=True)
    with pytest.warns(WayWarning, match="the addresses of the parameters"):
        moved = running(images())
    assert stand.replays == 1
    assert torch.equal(moved, network(images()))


def test_a_network_with_another_module_runs_eagerly(stand: Stand) -> None:
    """The graph computes what was there, whose parameters still lie where they lay."""
    network = generator()
    running = captured(network, training=False)
    # No parameters, so no address changes.
    place = next(
        name for name, child in network.named_children() if not [*child.parameters(), *child.buffers()]
    )
    setattr(network, place, nn.Tanh())
    with pytest.warns(WayWarning, match="the network's modules"):
        found = running(images())
    assert (running.calls, stand.replays) == (0, 0)
    assert torch.equal(found, network(images()))


def test_arguments_and_outputs_of_any_structure(stand: Stand) -> None:
    network = Named()
    running = captured(network, image=images(), scale=2.0)
    output = running(image=images(seed=3), scale=2.0)
    expected = network(image=images(seed=3), scale=2.0)
    assert list(output) == list(expected)
    assert output["sizes"][1] == "text"
    assert output["none"] is None
    torch.testing.assert_close(output["image"], expected["image"])
    torch.testing.assert_close(output["sizes"][0], expected["sizes"][0])
    with pytest.warns(WayWarning, match="arguments that are not tensors"):
        other = running(image=images(seed=3), scale=1.0)
    torch.testing.assert_close(other["image"] * 2, expected["image"])
    assert stand.replays == 1


def test_the_module_has_the_parameters_and_state_of_the_network() -> None:
    network = generator()
    running = build(network, Way("pytorch", "channels_last"), Inputs.of(images()), training=True)
    assert dict(running.named_parameters()) == dict(network.named_parameters())
    assert list(running.state_dict()) == list(network.state_dict())
    assert running.eval().training is False is network[3].training
    assert running.train().training is True is network.training
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert running(images()).is_contiguous(memory_format=torch.channels_last)


def test_serving_has_no_gradients_and_no_dropout() -> None:
    running = build(generator().train(), Way("pytorch"), Inputs.of(images()), training=False)
    assert not running(images()).requires_grad
    assert torch.equal(running(images()), running(images()))


def test_in_way_swaps_and_keeps_swapped_layers() -> None:
    network = generator()
    assert isinstance(tconv_swap.in_way(network, "ours", images()).network[0], tconv_swap.ConvTranspose2d)
    assert network[0].weight.data_ptr() == next(network.parameters()).data_ptr()
    partly = tconv_swap.swap_layers(generator(), exclude="0")
    tconv_swap.in_way(partly, "ours", images())
    assert [isinstance(partly[i], tconv_swap.ConvTranspose2d) for i in (0, 4)] == [False, True]
    tconv_swap.in_way(partly, "pytorch", images())
    assert type(partly[4]) is nn.ConvTranspose2d
    with pytest.raises(ValueError, match=r"ours\+graph: CUDA graphs need a CUDA device"):
        tconv_swap.in_way(network, "graph", images())


def test_compiled() -> None:
    """Without dropout: on the CPU, Inductor draws its mask in another way."""

    def without_dropout() -> nn.Sequential:
        return generator().train()[:3]

    network, eager = without_dropout(), without_dropout()
    before = state(network)
    running = build(network, Way("pytorch", runtime="compile"), Inputs.of(images()), training=True)
    assert state(network) == before
    report = check.verify_way(without_dropout(), running, Inputs.of(images()))
    assert report.passed, report.failures
    calls = running.calls
    expected = trained(eager, eager, steps=2)
    torch.testing.assert_close(trained(network, running, steps=2), expected, rtol=1e-4, atol=1e-5)
    assert running.calls == calls + 2
    nodes = capture.compiled_nodes(running(images()))
    assert [type(node).__name__ for node in nodes] == ["CompiledFunctionBackward"]
    with pytest.warns(WayWarning, match="shapes"):
        assert running(images(1, 4, 5, 6)).shape[0] == 1


def test_every_way_of_the_cpu_is_tried_and_the_choice_is_verified() -> None:
    """Compiles four networks: a minute on two cores."""
    network = nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.ReLU()).eval()
    before = state(network)
    model, run, report = tconv_swap.optimize(network, images(), seconds=None)
    assert state(network) == before
    (stage,) = report.stages
    assert len(stage.rows) == 8
    assert all(row.timing is not None or row.why_not.startswith("not tried: ") for row in stage.rows), str(
        report
    )
    assert any(row.timing is not None for row in stage.rows if row.way.runtime == "compile"), str(report)
    best = stage.row(stage.best)
    assert best is not None
    assert best.verified or stage.best == way.TODAY
    assert run.network is model is not network
    torch.testing.assert_close(run(images()), network(images()).detach(), rtol=1e-4, atol=1e-5)
    assert f"* forward  {stage.best.name} " in str(report)


def test_a_network_that_waits_is_refused_before_the_capture(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.cuda.set_sync_debug_mode("error")` makes it raise."""

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if modes[-1] == "error":
                raise RuntimeError("called a synchronizing CUDA operation\nmore")
            return x * 2

    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with pytest.raises(
        NotCapturableError, match=r"waits for the GPU \(called a synchronizing CUDA operation\)$"
    ):
        capture.check_no_wait(capture.Surface(Waits(), Inputs.of(images())), (images(),), training=False)
    assert modes == [0, "error", 0]
    assert stand.replays == 0


def test_an_autocast_inside_the_network_does_not_keep_old_weights() -> None:
    """Its cache lives as long as the outermost autocast, which is ours, or the caller's."""
    layer = nn.Conv2d(4, 3, 1)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
                return self.layer(x)

    surface = capture.Surface(Inside(), Inputs.of(images()))
    bias = layer.bias.detach().bfloat16()[:, None, None]
    with torch.autocast("cpu", enabled=False):
        with torch.autocast("cpu", torch.bfloat16):
            layer(images())  # casts the weight, which is kept
        layer.weight.data.zero_()
        (first,) = surface(images())
        layer.weight.data.fill_(1.0)
        (second,) = surface(images())
        layer.weight.data.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            last = layer(images())
    assert torch.equal(first, torch.zeros_like(first) + bias)
    assert not torch.equal(second, first)
    assert torch.equal(last, first)


def test_calls_that_fit_give_no_warning(stand: Stand) -> None:
    running = captured(generator().train())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            running(images(seed=seed)).sum().backward()


def test_a_search_compiles_the_kernels_of_our_layers_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[bool, bool, bool]] = []

    def prepare(network: nn.Module, inputs: Inputs, *, training: bool) -> None:
        (image,) = (tensor for _, tensor in inputs.named_tensors())
        laid_out = image.is_contiguous(memory_format=torch.channels_last)
        prepared.append((training, network.training, laid_out))

    monkeypatch.setattr(optimize, "prepare", prepare)
    for training in (True, False):
        searched = optimize.WaySearch(generator(), images(), training=training)
        searched.device = torch.device("cuda")
        for name in ("pytorch", "ours", "fused+channels_last"):
            searched.search.build(parse_way(name))
        assert prepared == [(training, training, False), (training, training, True)]
        prepared.clear()


def test_inference_mode_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compile, graphs = torch.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda network, **_: compile(network, backend=backend, dynamic=False)
    )
    network = generator().eval()
    running = build(network, Way("pytorch", runtime="compile"), Inputs.of(images()), training=False)
    before = len(graphs)
    assert before > 0
    with torch.inference_mode():
        here = running(images())
        again = running(images().mul(1))
    assert len(graphs) == before
    assert running.calls == 2
    assert torch.equal(here, network(images()))
    assert torch.equal(again, here)
