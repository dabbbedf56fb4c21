"""Programs of torch.export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from file_cases import exported_network, one_line, run
from sampling import sampled
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from typer.testing import CliRunner

import tconv_swap
from tconv_swap.cli import app
from tconv_swap.files import exported


def backends(program: torch.export.ExportedProgram) -> list[str]:
    return [node.args[-1] for node in program.graph.nodes if "tconv_swap" in str(node.target)]


def convolutions(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "conv" in str(node.target)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decomposed", sampled([False, True], 2))
def test_a_program_is_swapped_verified_and_saved(tmp_path: Path, decomposed: bool) -> None:
    model, program = exported_network()
    if decomposed:
        program = program.run_decompositions()
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(program, path)
    assert "whose loader can execute what the file says" in one_line(run(path), 3)

    arguments = [str(path), "--unsafe-pickle", "--no-benchmark", "--json", "-"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [layer["names"] for layer in data["plan"]["layers"]] == [["0"], ["2.0"], ["4"]]
    assert data["facts"]["inputs_origin"] == "those the program was exported with"
    assert "3 is left: the graph computes its weight" in data["facts"]["warnings"]
    names = {check["name"] for check in data["verification"]["checks"] if check["kind"] == "layer_output"}
    assert names == {"0", "2.0", "4"}
    loaded = torch.export.load(out)
    assert [("tconv_swap" in target) for target in convolutions(loaded)] == [True, True, False, True]
    x = torch.randn(3, 4, 5, 6)
    torch.testing.assert_close(loaded.module()(x), model(x))

    # The result is a program again: found to be swapped, partly swapped, unswapped.
    short = ("--unsafe-pickle", "--no-benchmark", "--no-backward")
    again = CliRunner().invoke(app, [str(out), *short, "--exclude", "4"])
    assert again.exit_code == 0, again.output
    assert "--out-format" in one_line(run(path, "--unsafe-pickle", "--out-format", "state_dict"), 2)
    back = exported.unswap_program(loaded)
    assert exported.count_swapped(back) == 0
    torch.testing.assert_close(back.module()(x), model(x))


def test_swap_program_swaps_every_form_and_leaves_its_argument() -> None:
    model, program = exported_network()
    swapped = tconv_swap.swap_program(program)
    assert exported.count_swapped(program) == 0
    assert exported.count_swapped(swapped) == 4  # the weight-normed one too, whose weight the graph computes
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(swapped.module()(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_a_swapped_network_is_recognised_after_decompositions(tmp_path: Path) -> None:
    """They turn our op into the one that compiled graphs call."""
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, (4, 3), (3, 2), (1, 0), (2, 1), 2, dilation=(1, 2)), nn.Tanh()
    )
    x = torch.randn(2, 4, 5, 6)
    program = torch.export.export(tconv_swap.swap_layers(model, inplace=False), (x,)).run_decompositions()
    assert convolutions(program) == ["tconv_swap.conv_transpose2d_output.default"]
    assert exported.count_swapped(program) == 1
    back = exported.unswap_program(program)
    assert convolutions(back) == ["aten.conv_transpose2d.input"]
    torch.testing.assert_close(back.module()(x), model(x))
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(program, path)
    result = run(path, "--unsafe-pickle", "--out", out)
    assert result.exit_code == 0, result.output
    loaded = torch.export.load(out)
    assert exported.count_swapped(loaded) == 1
    torch.testing.assert_close(loaded.module()(x), model(x))


def test_layers_that_follow_each_other(tmp_path: Path) -> None:
    """With nothing between them, not even an activation."""
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2)).eval()
    x = torch.randn(2, 8, 5, 6)
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    arguments = [str(path), "--unsafe-pickle"]
    result = CliRunner().invoke(app, [*arguments, "--no-benchmark", "--out", str(out)])
    assert result.exit_code == 0, result.output
    loaded = torch.export.load(out)
    assert exported.count_swapped(loaded) == 2
    torch.testing.assert_close(loaded.module()(x), model(x))
    result = CliRunner().invoke(app, ["explain", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    assert [layer["name"] for layer in json.loads(result.stdout)["explanation"]["layers"]] == ["0", "1"]


def test_swapped_layers_keep_their_backend(tmp_path: Path) -> None:
    """In what is verified, explained and written alike; unless another is asked for."""
    model = nn.Sequential(nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).eval()
    program = torch.export.export(model, (torch.randn(2, 64, 8, 8),))
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    for before, option, expected in [
        ("native", None, "native"),
        ("auto", None, "auto"),
        ("auto", "native", "native"),
        ("native", "auto", "auto"),
    ]:
        torch.export.save(tconv_swap.swap_program(program, backend=before), path)
        arguments = [str(path), "--unsafe-pickle", *(["--backend", option] if option else []), "--json", "-"]
        result = CliRunner().invoke(app, [*arguments, "--no-benchmark", "--out", str(out)])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert [layer["already"] for layer in told["plan"]["layers"]] == [True]
        assert backends(torch.export.load(out)) == [expected]
        result = CliRunner().invoke(app, ["explain", *arguments])
        for document in (told, json.loads(result.stdout)):
            why = document["explanation"]["layers"][0]["stages"][0]["why"]
            assert (why == "the backend is native") == (expected == "native")


def test_swap_program_sets_the_backend_of_swapped_calls() -> None:
    _, program = exported_network()
    some = tconv_swap.swap_program(program, names=["0", "4"], backend="native")
    assert backends(tconv_swap.swap_program(some)) == ["native", "auto", "auto", "native"]
    assert backends(tconv_swap.swap_program(some, names=["4"], backend="kernel")) == ["native", "kernel"]
    assert backends(tconv_swap.swap_program(some, backend="kernel")) == ["kernel"] * 4
    with pytest.raises(ValueError, match="backend"):
        tconv_swap.swap_program(program, backend="fast")


class Branches(nn.Module):
    """One layer behind a condition, one around it."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.one, self.other = nn.ConvTranspose2d(4, 4, 2, 2), nn.ConvTranspose2d(4, 4, 4, 2, 1)
        self.around: nn.Module = nn.ConvTranspose2d(4, 3, 3) if around else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,))
        return self.around(taken)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < 3

        def once(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, self.up(y)

        return while_loop(more, once, (torch.tensor(0), x))[1]


def weights_computed() -> nn.Module:
    """Of what the graph makes out of parameters: weight_norm and spectral_norm."""
    weight_norm, spectral_norm = (
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    )
    return nn.Sequential(
        weight_norm(nn.ConvTranspose2d(4, 3, 2, 2)), spectral_norm(nn.ConvTranspose2d(3, 3, 2, 2))
    )


INSIDE = "is left: it is in a graph inside the program's (control flow)"


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (Branches(False), [INSIDE, INSIDE]),
        (Looped(), [INSIDE]),
        (
            weights_computed(),
            ["0 is left: the graph computes its weight", "1 is left: the graph computes its weight"],
        ),
    ],
    ids=["cond", "while_loop", "computed weights"],
)
def test_a_program_without_swappable_layers(tmp_path: Path, model: nn.Module, left: list[str]) -> None:
    """A line for each, no traceback, nothing written."""
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(torch.export.export(model.eval(), (torch.randn(2, 4, 5, 6),)), path)
    result = run(path, "--unsafe-pickle", "--out", out)
    assert result.exit_code == 4, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "nothing to swap: no layer of the model is a transposed convolution"
    assert len(lines) == 1 + len(left)
    assert all(line.endswith(end) for line, end in zip(lines[1:], left, strict=True))
    assert "Warning" not in result.stderr
    assert not out.exists()


def test_layers_outside_of_control_flow_are_swapped(tmp_path: Path) -> None:
    model = Branches(True).eval()
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(2, 4, 5, 6),)), path)
    short = ("--unsafe-pickle", "--no-benchmark", "--no-backward")
    result = CliRunner().invoke(app, [str(path), *short, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).count(INSIDE) == 2
    assert "Warning" not in result.stderr
    loaded = torch.export.load(out)
    assert exported.count_swapped(loaded) == 1
    for sign in (1, -1):
        x = sign * torch.rand(2, 4, 5, 6)
        torch.testing.assert_close(loaded.module()(x), model(x))


def test_calls_that_are_not_batched_2d_layers_are_listed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave, self.one = nn.ConvTranspose1d(4, 4, 2), nn.ConvTranspose2d(4, 4, 2)
            self.kernel = nn.Parameter(torch.randn(4, 4, 2, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return (
                self.wave(x[:, :, 0]),
                self.one(x[0]),
                nn.functional.conv_transpose2d(x, self.kernel),
                self.one(x),
                nn.functional.conv_transpose2d(x, self.one.weight, stride=2),
            )

    model, x = Net(), torch.randn(2, 4, 3, 3)
    network, left = exported.lifted(torch.export.export(model, (x,)))
    assert [layer.names for layer in tconv_swap.plan_swap(network).layers] == [("one",)]
    assert len(left) == 4
    text = "\n".join(left)
    assert "conv_transpose1d" in text
    assert "its weight and bias are not those of one layer" in text
    assert "its weight is used with other arguments too" in text
    torch.testing.assert_close(network(x), model(x))


class WithoutItsBias(nn.Module):
    """A layer whose weight is also used by itself, before the layer is called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = nn.functional.conv_transpose2d(x, self.up.weight, stride=2)
        return y + self.up(x)


def test_a_call_without_the_bias_is_not_a_call_of_the_layer() -> None:
    model, x = WithoutItsBias().eval(), torch.randn(2, 4, 3, 3)
    network, left = exported.lifted(torch.export.export(model, (x,)))
    assert [line.partition(" is left: ")[2] for line in left] == ["its layer's bias is left out"]
    torch.testing.assert_close(network(x), model(x))
