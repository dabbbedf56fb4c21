"""The verification of ways: what it refuses, and what it allows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_cases import Parts, Stand, captured, generator, images
from torch import nn

import tconv_swap
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.timing import Timing
from tconv_swap.verification import VerifyReport
from tconv_swap.ways import check, optimize
from tconv_swap.ways.run import WayWarning, build
from tconv_swap.ways.way import Way


class TestVerification:
    def test_the_captured_way_is_what_is_compared(self, stand: Stand) -> None:
        network = generator()
        running = captured(network)
        report = check.verify_way(generator(), running, Inputs.of(images()))
        assert report.passed, report.failures
        assert stand.replays > 0
        assert {c.kind for c in report.checks} >= {"output", "grad_parameter", "buffer"}
        with pytest.warns(WayWarning):  # the verification used none of them up
            running(images(1, 4, 5, 6))

    @pytest.mark.parametrize("training", [False, True])
    def test_outputs_have_the_strides_of_eager_mode(self, stand: Stand, training: bool) -> None:
        network = Parts()
        running = captured(copy.deepcopy(network), training=training)
        eager, graphed = network(images()), running(images())
        assert [t.stride() for t in graphed] == [t.stride() for t in eager]
        assert len({t.untyped_storage().data_ptr() for t in (*graphed, *running(images()))}) == 6
        report = check.verify_way(network, running, Inputs.of(images()))
        assert report.passed, report.failures
        assert stand.replays > 0

    @pytest.mark.parametrize("training", [False, True])
    def test_a_wrong_replay_is_found(self, stand: Stand, training: bool) -> None:
        running = captured(generator(), training=training)
        replay = running.built
        assert replay is not None
        running.built = lambda inputs: replay(inputs) * 1.001
        assert not check.verify_way(generator(), running, Inputs.of(images())).passed

    def test_a_buffer_that_a_replay_forgets_is_found(self, stand: Stand) -> None:
        """A network that replaces a buffer instead of writing to it: the graph writes somewhere else."""
        network = generator()
        running = captured(network)
        replay = running.built
        assert replay is not None

        def forgetful(inputs: Inputs) -> Any:
            before = {name: buffer.clone() for name, buffer in network.named_buffers()}
            output = replay(inputs)
            for name, buffer in network.named_buffers():
                buffer.data.copy_(before[name])  # behind autograd's back, as a replay does
            return output

        running.built = forgetful
        failures = check.verify_way(generator(), running, Inputs.of(images())).failures
        assert any("running_mean" in line for line in failures)

    def test_a_way_that_never_ran_is_not_verified(self, stand: Stand) -> None:
        running = captured(generator())
        report = check.verify_way(generator(), running, Inputs.of(images(1, 4, 3, 3)))
        assert not report.passed
        assert "no call of the verification ran in the way" in report.failures[0]

    def test_layouts_are_compared_in_float64(self) -> None:
        class Careless(nn.Module):
            """Reads memory as if it lay in NCHW."""

            def __init__(self) -> None:
                super().__init__()
                self.up = nn.ConvTranspose2d(4, 3, 2, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.up(x)
                return y.as_strided(y.shape, torch.empty(y.shape).stride())

        torch.manual_seed(0)
        network = Careless()
        running = build(
            copy.deepcopy(network), Way("pytorch", "channels_last"), Inputs.of(images()), training=False
        )
        failures = check.verify_way(network, running, Inputs.of(images())).failures
        assert failures
        assert all(line.startswith("in channels_last it is another network") for line in failures)

    def test_dropout_in_channels_last_draws_another_mask_and_is_verified(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.Dropout(0.5))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.dropout(self.up(x), 0.25, self.training)

        for network in (generator(), Functional()):
            inputs = Inputs.of(images())
            running = build(copy.deepcopy(network), Way("pytorch", "channels_last"), inputs, training=True)
            report = check.verify_way(network, running, inputs)
            assert report.passed, report.failures

    def test_batch_norm_in_channels_last_may_round_as_pytorch_does_there(self) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
        )
        inputs = Inputs.of(images(2, 8, 16, 16))
        swapped = tconv_swap.swap_layers(copy.deepcopy(network))
        running = build(swapped, Way("ours", "channels_last"), inputs, training=True)
        report = check.verify_way(network, running, inputs)
        assert report.passed, report.failures


@pytest.mark.parametrize("layer", [None, "layer 3: train: layer_output"])
def test_the_refusal_of_a_way_names_the_layer_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, layer: str | None
) -> None:
    report = VerifyReport(failures=["train: output: error 1e-2"], first_divergence=layer)
    monkeypatch.setattr(optimize, "verify_way", lambda *_, **__: report)
    searched = optimize.WaySearch(generator(), images(), training=False, timing_s=0.01)
    searched.search.measure = lambda today, running: (
        Timing(2.0, 2.0, 2.0, 5, (2.0,) * 5),
        Timing(2.0 - (running is not today), 1.0, 1.0, 5, (1.0,) * 5),
    )
    found = searched.fastest(searched.chosen_from("ours"), None)
    reason = layer or "train: output: error 1e-2"
    assert found.best.name == "pytorch"
    assert found.notes == [f"ours is not chosen: {reason}"]
    assert [row.failure for row in found.rows if row.failure] == [reason]
