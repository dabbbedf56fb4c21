"""Options are declared once: what a dataclass declares is what a command takes, and what it holds afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from cli_cases import run
from typer.testing import CliRunner

from tconv_swap.cli import workflow
from tconv_swap.cli.declare import argument, expanded, option
from tconv_swap.cli.invocation import Invocation
from tconv_swap.cli.request import ExplainRequest, NetworkRequest, Request


def even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"{text} is odd")
    return int(text)


@dataclass(frozen=True)
class Wanted:
    place: Annotated[Path, argument("PLACE", help="Where.")]
    numbers: Annotated[tuple[int, ...], option("--number", "-n", parse=even, help="Even.")] = ()
    paths: Annotated[tuple[Path, ...], option("--path", help="Paths.")] = ()
    one: Annotated[int | None, option("--one", parse=even, help="One.")] = None
    count: Annotated[int, option("--count", help="How many.", min=1)] = 3
    loud: Annotated[bool, option("--quiet", is_negated=True, help="Say nothing.")] = True
    fixed: Annotated[bool, option("--fixed", help="Not taken.")] = False
    kept: str = "as it is"
    invocation: Invocation | None = None

    def __post_init__(self) -> None:
        if self.one == self.count:
            raise ValueError("--one and --count are the same")


def given(*words: str) -> tuple[Wanted | None, Any]:
    found: list[Wanted] = []

    @expanded(without=("fixed",))
    def command(wanted: Wanted) -> None:
        found.append(wanted)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, words)
    return (found[0] if found else None), result


def test_the_defaults_are_those_of_the_dataclass() -> None:
    assert given("here")[0] == Wanted(Path("here"))


def test_given_values_are_parsed() -> None:
    words = "here -n 2 --number 4 --path a --path b --one 6 --count 7 --quiet"
    expected = Wanted(Path("here"), (2, 4), (Path("a"), Path("b")), 6, 7, False)
    assert given(*words.split())[0] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--number 3", "--number: 3 is odd"),
        ("--one 3", "--one: 3 is odd"),
        ("--count 0", "--count"),
        ("--one 4 --count 4", "--one and --count are the same"),
        ("--fixed", "--fixed"),
        ("--loud", "--loud"),
    ],
)
def test_refused_values_are_wrong_usage(words: str, message: str) -> None:
    found, result = given("here", *words.split())
    assert found is None
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def requests(monkeypatch: pytest.MonkeyPatch, function: str, *words: str) -> Any:
    """What the workflow is asked for by a command."""
    found: list[NetworkRequest] = []

    def keep(request: NetworkRequest, *_: object) -> None:
        found.append(request)
        raise workflow.RequestError("enough")

    monkeypatch.setattr(workflow, function, keep)
    assert run(*words).exit_code == 2
    return found[0]


def test_every_option_of_a_swap_reaches_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").touch()
    words = """model.pt --input-shape 1,2,3 --input-shape 4 --device cpu --dtype half --channels-last --include a
    --exclude b
    --backend native --include-1d --fuse all --no-backward --seed 5 --trust m:C --unsafe-pickle --module net.py
    --model m:f --key k --out o.pt --autocast bfloat16 --dry-run --no-benchmark --atol 0.5 --rtol 0.25 --warmup 2
    --iters 3 --way auto --seconds 9 --out-format state_dict"""
    expected = Request(
        Path("model.pt"),
        input_shapes=((1, 2, 3), (4,)),
        device=torch.device("cpu"),
        dtype=torch.float16,
        channels_last=True,
        include=("a",),
        exclude=("b",),
        backend="native",
        include_1d=True,
        fuse="all",
        backward=False,
        seed=5,
        trust=("m:C",),
        unsafe_pickle=True,
        module=Path("net.py"),
        factory="m:f",
        key="k",
        out=Path("o.pt"),
        autocast=torch.bfloat16,
        dry_run=True,
        benchmark=False,
        atol=0.5,
        rtol=0.25,
        warmup=2,
        iters=3,
        way="auto",
        seconds=9,
        out_format="state_dict",
    )
    defaults = Request(Path("model.pt"))
    unset = {
        field.name
        for field in fields(Request)
        if getattr(expected, field.name) == getattr(defaults, field.name)
    }
    assert unset == {"model", "inputs", "written"}
    assert requests(monkeypatch, "run", *words.split()) == expected


def test_fields_without_an_option_have_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requests(monkeypatch, "explain_request", "explain", "m.pt", "--arch", "sm_90a")
    assert found == ExplainRequest(Path("m.pt"), architecture="sm_90a")
    assert requests(monkeypatch, "tune_layers", "tune", "m.pt", "--seed", "3") == NetworkRequest(
        Path("m.pt"), seed=3
    )
    for words in (
        ("explain", "m.pt", "--seed", "1"),
        ("tune", "m.pt", "--backend", "native"),
        ("doctor", "-q"),
    ):
        assert "No such option" in run(*words).stderr
