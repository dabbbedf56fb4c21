"""`--way` and `--seconds`: what is searched, chosen, written and said; without compiling."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import files, run, saved_generator
from torch import Tensor
from way_cases import time_ways_briefly

import tconv_swap
from tconv_swap import interruption
from tconv_swap.ways import optimize, way
from tconv_swap.ways.run import Running


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(way, "RUNTIMES", ("eager",))
    time_ways_briefly(monkeypatch)


def swapped(*arguments: object) -> tuple[int, dict[str, Any], str]:
    short = ("--device", "cpu", "--warmup", 0, "--iters", 2)
    result = run(saved_generator(), *short, "--json", "r.json", *arguments)
    return result.exit_code, json.loads(Path("r.json").read_text()), result.output


def test_a_way_by_name_is_verified_written_and_its_lines_run() -> None:
    code, document, text = swapped("--out", "fast.pt", "--way", "channels_last", "--no-backward")
    assert code == 0
    (stage,) = document["ways"]["stages"]
    assert (stage["stage"], stage["best"]) == ("forward", "ours+channels_last")
    assert [row["way"] for row in stage["rows"]] == ["pytorch", "ours+channels_last"]
    assert stage["rows"][1]["verified"] is True
    assert stage["verification"]["passed"] is True
    snippet = document["facts"]["load_snippet"]
    assert len(snippet.splitlines()) == 3
    assert snippet.splitlines()[-1] in text
    names: dict[str, Any] = {"inputs": torch.randn(2, 4, 1, 1)}
    exec(snippet, names)
    model, call = names["model"], names["run"]
    assert isinstance(call, Running)
    assert isinstance(model[0], tconv_swap.ConvTranspose2d)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    original = torch.load("model.pt", weights_only=False).eval()
    torch.testing.assert_close(call(names["inputs"]), original(names["inputs"]).detach())


def test_auto_searches_both_stages() -> None:
    code, document, text = swapped("--way", "auto", "--seconds", "60")
    assert code == 0
    assert [stage["stage"] for stage in document["ways"]["stages"]] == ["forward", "step"]
    for stage in document["ways"]["stages"]:
        assert [row["way"] for row in stage["rows"]] == [
            "pytorch",
            "ours",
            "pytorch+channels_last",
            "ours+channels_last",
        ]
        chosen = next(row for row in stage["rows"] if row["way"] == stage["best"])
        assert chosen["verified"] is True or stage["best"] == "pytorch"
    assert "Ways to run it, training step" in text


def test_the_lines_say_how_to_train_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code, document, _ = swapped("--out", "fast.pt", "--way", "channels_last")
    assert code == 0
    last = document["facts"]["load_snippet"].splitlines()[-1]
    assert last == (
        "run = tconv_swap.in_way(model, 'ours+channels_last', inputs)  "
        "# to train: tconv_swap.in_way(model, 'ours+channels_last', inputs, training=True)"
    )


def test_keep_is_the_default() -> None:
    code, document, text = swapped("--out", "fast.pt")
    assert code == 0
    assert document["ways"] is None
    assert "in_way" not in document["facts"]["load_snippet"]
    assert "Ways" not in text
    assert torch.load("fast.pt", weights_only=False)[0].weight.is_contiguous()


def test_a_way_by_name_that_computes_something_else_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    eagerly = Running._eagerly

    def wrong(self: Running, inputs: Any) -> Tensor:
        output: Tensor = eagerly(self, inputs)
        return output * 1.01 if self.way.name == "ours+channels_last" else output

    monkeypatch.setattr(Running, "_eagerly", wrong)
    code, document, _ = swapped("--out", "fast.pt", "--way", "channels_last", "--no-backward")
    assert code == 1
    assert document["outcome"] == "mismatch"
    assert "--way ours+channels_last: eval: output" in document["verification"]["failures"][0]
    assert "fast.pt" not in files()


def test_ctrl_c_keeps_the_measurements_and_the_swap_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    build = optimize.build
    tried: list[str] = []

    def interrupted(network: Any, found: way.Way, *arguments: Any, **more: Any) -> Running:
        tried.append(found.name)
        if found.name == "pytorch+channels_last":
            interruption.on_signal(signal.SIGINT, None)
        return build(network, found, *arguments, **more)

    monkeypatch.setattr(optimize, "build", interrupted)
    code, document, _ = swapped("--out", "fast.pt", "--way", "auto")
    assert code == 0
    assert tried == ["pytorch", "ours", "pytorch+channels_last"]
    (stage,) = document["ways"]["stages"]
    assert [row["why_not"] for row in stage["rows"]] == ["", "", "interrupted", "interrupted"]
    assert "fast.pt" in files()
    assert interruption.received() is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--way", "fastest"], "'fastest' is not part of a way"),
        (["--way", "graph"], "CUDA graphs need a CUDA device, not cpu"),
        (["--way", "auto", "--no-benchmark"], "leave out --no-benchmark"),
        (["--way", "auto", "--seconds", "-1"], "--seconds"),
    ],
)
def test_impossible_ways_are_wrong_usage(arguments: list[str], why: str) -> None:
    result = run(saved_generator(), "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
