"""Networks that give nothing to compare, end the program, or want inputs that only a file can hold."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import files, run, saved_generator, swap
from torch import Tensor, nn

from tconv_swap.cli import outcome, workflow
from tconv_swap.cli.outcome import ExitCode
from tconv_swap.files.loading import LoadedModel

Load = Callable[[nn.Module], Path]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Has the command load a network whose class no file could hold; gives the name of a file that is there."""
    monkeypatch.chdir(tmp_path)

    def loaded(network: nn.Module) -> Path:
        monkeypatch.setattr(workflow, "load_model", lambda *_, **__: LoadedModel(network))
        return saved_generator()

    return loaded


class Returning(nn.Module):
    """Gives what `change` makes of the layer's output, and in which modes."""

    def __init__(self, change: Callable[[Tensor], Any], modes: tuple[bool, ...] = (False, True)) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 2)
        self.change, self.modes = change, modes

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return self.change(y) if self.training in self.modes else y


class Odd(BaseException):
    pass


def raising(error: type[BaseException], *arguments: object) -> Callable[[Tensor], Any]:
    def end(_: Tensor) -> Any:
        raise error(*arguments)

    return end


class TestEndingTheProgram:
    @pytest.mark.parametrize("command", ["swap", "explain", "tune"])
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda y: sys.exit(0), r"SystemExit: 0"),
            (lambda y: sys.exit(), r"SystemExit"),
            (raising(SystemExit, "no such size"), r"SystemExit: no such size"),
            (raising(Odd, "else"), r"Odd: else"),
            (raising(GeneratorExit), r"GeneratorExit"),
        ],
    )
    def test_a_network_that_ends_the_program_is_wrong_usage(
        self, load: Load, command: str, change: Callable[[Tensor], Any], words: str
    ) -> None:
        more = ("--out", "fast.pt", "--report", "r.md") if command == "swap" else ()
        result = run(command, load(Returning(change)), "--device", "cpu", "--json", "r.json", *more)
        assert result.exit_code == ExitCode.USAGE
        expected = rf"the network's code ends the program \({words}\) instead of returning something\n"
        assert re.search(expected, result.stderr)
        assert json.loads(Path("r.json").read_text())["outcome"] == "error"
        assert files() == ["model.pt", "r.json"]

    def test_a_network_that_ends_the_program_only_in_training(self, load: Load) -> None:
        result = swap(load(Returning(lambda y: sys.exit(0), modes=(True,))), "--out", "fast.pt")
        assert result.exit_code == ExitCode.USAGE
        assert files() == ["model.pt"]

    def test_a_keyboard_interrupt_of_the_network(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        model = load(Returning(raising(KeyboardInterrupt)))
        assert swap(model).exit_code == ExitCode.INTERRUPTED, "without the entry point nobody can tell"
        monkeypatch.setattr(outcome, "handlers_are_installed", lambda: True)
        result = swap(model, "--out", "fast.pt")
        assert result.exit_code == ExitCode.USAGE
        assert "ends the program (KeyboardInterrupt)" in result.stderr


class TestNothingToCompare:
    @pytest.mark.parametrize("modes", [(False, True), (False,), (True,)])
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda y: None, "returns NoneType: let its forward return tensors"),
            (lambda y: (part for part in y), "returns generator: let its forward return tensors"),
            (lambda y: iter([y]), "returns list_iterator: let"),
            (lambda y: map(abs, [y]), "returns map: let"),
            (lambda y: {}, "returns no tensor: let its forward return tensors"),
            (lambda y: "done", "returns no tensor: let its forward return tensors"),
            (lambda y: y[:0], "returns empty tensors: give inputs with at least one sample"),
            (lambda y: {"boxes": y[:, :0]}, "returns empty tensors: give inputs with at least one sample"),
            (lambda y: y * torch.nan, "returns no finite number: give other inputs"),
        ],
    )
    def test_is_wrong_usage_with_advice(
        self, load: Load, change: Callable[[Tensor], Any], words: str, modes: tuple[bool, ...]
    ) -> None:
        result = swap(load(Returning(change, modes)), "--out", "fast.pt")
        assert result.exit_code == ExitCode.USAGE, result.output
        mode = "train" if modes == (True,) else "eval"
        assert f"nothing to compare in {mode} mode: the network {words}" in result.stderr
        assert files() == ["model.pt"]

    def test_an_empty_batch(self, load: Load) -> None:
        torch.save(torch.zeros(0, 4, 3, 3), "inputs.pt")
        result = swap(load(Returning(lambda y: y)), "--inputs", "inputs.pt")
        assert result.exit_code == ExitCode.USAGE
        assert "returns empty tensors" in result.stderr

    def test_an_output_beside_an_empty_one_is_compared(self, load: Load) -> None:
        result = swap(load(Returning(lambda y: {"y": y, "later": iter([y]), "none": None})))
        assert result.exit_code == 0, result.output
        assert "not compared: output later (list_iterator)" in " ".join(result.stdout.split())


@pytest.mark.parametrize("option", ["--atol", "--rtol"])
@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "-1", "-1e-9", "infinity"])
def test_infinite_tolerances_are_refused(load: Load, option: str, number: str) -> None:
    result = run(load(Returning(lambda y: y)), f"{option}={number}")
    assert result.exit_code == ExitCode.USAGE
    assert option in result.stderr


@pytest.mark.parametrize("number", ["inf", "nan"])
def test_an_infinite_time_limit_is_refused(number: str) -> None:
    assert run("bench", "--only", "dcgan1", "--seconds", number).exit_code == ExitCode.USAGE


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 2)

    def forward(self, image: Tensor, *, scale: float) -> Tensor:
        return self.up(image) * scale


class Whole(Keywords):
    def forward(self, image: Tensor, times: int) -> Tensor:  # type: ignore[override]
        return self.up(image).repeat(times, 1, 1, 1)


class Images(Keywords):
    def forward(self, images: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [self.up(image) for image in [*images, *images.copy()]]


class Batch(Keywords):
    def forward(self, batch):  # type: ignore[no-untyped-def,override]
        return self.up(batch["image"])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.up = nn.ConvTranspose2d(4, 3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.up(self.words(tokens.view(-1, 2, 8)).permute(0, 3, 1, 2))


class TestAdvice:
    """What is advised is done, and works."""

    @pytest.mark.parametrize(
        ("network", "arguments", "advised"),
        [
            (Keywords, (), "torch.save({'image': image, 'scale': scale}, FILE)"),
            (Whole, (), "torch.save((image, times,), FILE)"),
            (Whole, ("--input-shape", "2,4,3,3"), "torch.save((image, times,), FILE)"),
            (Images, (), "torch.save(([images],), FILE)"),
            (Batch, (), "torch.save(([batch],), FILE)"),
            (Words, ("--input-shape", "2,16"), "torch.save(torch.randint(7, (2, 16)), FILE)"),
        ],
    )
    def test_the_advice_works_on_the_command_line(
        self, load: Load, network: type[nn.Module], arguments: tuple[str, ...], advised: str
    ) -> None:
        model = load(network())
        # Without numbers nobody sees that an embedding is given the wrong ones.
        for command in ("swap",) if network is Words else ("swap", "explain"):
            result = run(command, model, *arguments, "--device", "cpu")
            assert result.exit_code == ExitCode.USAGE, result.output
            assert advised in result.stderr
            shape = network is Batch
            assert ("--input-shape" in result.stderr) == shape
        image = torch.ones(2, 4, 3, 3)
        names = {"image": image, "scale": 2.0, "times": 2, "images": image, "batch": {"image": image}}
        # A dict takes the list's place.
        advised = advised.replace("[batch]", "batch")
        exec(advised, {"torch": torch, "FILE": "inputs.pt", **names})
        done = swap(model, "--inputs", "inputs.pt")
        assert done.exit_code == 0, done.output
