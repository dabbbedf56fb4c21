"""Transposed convolutions that are called as functions are found while the network runs or is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from surgery_models import up
from torch import Tensor, nn
from typer.testing import CliRunner

from tconv_swap import find_functional_calls, swap_layers
from tconv_swap.cli import app, workflow
from tconv_swap.inputs import Inputs
from tconv_swap.verification import VerifyReport


class Upsample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 2, 2, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.conv_transpose2d(x, self.filter, stride=2)  # the line that is found


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Upsample()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() != 0 else x


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "is found" in line)


@pytest.mark.parametrize("inputs", [torch.randn(1, 4, 3, 3), None], ids=["run", "traced"])
def test_calls_are_found_with_module_and_line_except_those_of_layers(inputs: Tensor | None) -> None:
    model = nn.Sequential(up(), nn.Sequential(Upsample()))
    for network in (model, swap_layers(model, inplace=False)):
        before = network[1][0].calls.clone()
        (call,) = find_functional_calls(network, inputs)
        assert (call.function, call.module) == ("conv_transpose2d", "1.0")
        assert call.where == f"{__file__}:{LINE}"
        assert "calls conv_transpose2d as a function: there is no layer to swap" in str(call)
        assert torch.equal(network[1][0].calls, before)
        assert network.training


def test_inputs_are_not_changed_by_the_search() -> None:
    """A forward may write to its inputs in each mode: neither the next run nor the caller must see that."""
    seen = []

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.body = nn.ReLU(inplace=True), Upsample()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.clone())
            return self.body(self.relu(x))

    inputs = torch.randn(1, 4, 3, 3)
    before = inputs.clone()
    (call,) = find_functional_calls(Writes(), inputs)
    assert call.module == "body"
    assert len(seen) == 2
    assert all(torch.equal(x, before) for x in (inputs, *seen))


def test_the_command_line_verifies_on_the_inputs_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(nn.Sequential(nn.ReLU(inplace=True), up()), tmp_path / "model.pt")
    given = torch.randn(1, 4, 3, 3)
    torch.save(given, tmp_path / "inputs.pt")
    verified, verify = [], workflow.verify

    def kept(original: nn.Module, swapped: nn.Module, inputs: Inputs, **options: Any) -> VerifyReport:
        verified.append(inputs.args[0].clone())
        return verify(original, swapped, inputs, **options)

    monkeypatch.setattr(workflow, "verify", kept)
    options = ["--inputs", str(tmp_path / "inputs.pt"), "--device", "cpu", "--no-benchmark"]
    result = CliRunner().invoke(app, [str(tmp_path / "model.pt"), *options])
    assert result.exit_code == 0, result.output
    assert torch.equal(verified[0], given)


def test_a_network_that_cannot_be_traced_is_run() -> None:
    model = Branching()
    assert find_functional_calls(model) == ()
    (call,) = find_functional_calls(model, torch.ones(1, 4, 3, 3))
    assert call.module == "body"
    assert find_functional_calls(model, torch.ones(1, 3, 3, 3)) != ()  # raises behind the call
    assert find_functional_calls(model, torch.zeros(1, 4, 3, 3)) == ()


def test_a_subclass_whose_forward_calls_the_function_is_found() -> None:
    class Own(nn.ConvTranspose2d):
        def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
            return (
                torch.conv_transpose2d(x, self.weight, self.bias, 2)
                + F.conv_transpose1d(x[0], self.weight[..., 0]).sum()
            )

    found = find_functional_calls(nn.Sequential(Own(4, 4, 2)), torch.randn(1, 4, 3, 3))
    assert [(call.function, call.module) for call in found] == [
        ("conv_transpose2d", "0"),
        ("conv_transpose1d", "0"),
    ]


def test_the_command_line_reports_functional_calls(tmp_path: Path) -> None:
    torch.save(nn.Sequential(up(), Upsample()), tmp_path / "model.pt")
    for options in (["--dry-run"], ["--input-shape", "1,4,3,3", "--no-benchmark"]):
        result = CliRunner().invoke(app, [str(tmp_path / "model.pt"), "--unsafe-pickle", *options])
        assert result.exit_code == 0, result.output
        assert "calls conv_transpose2d as a function" in " ".join(result.output.split())
