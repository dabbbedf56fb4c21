"""The command line's reports: which files are written, in which form, and when not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tconv_swap import op
from tconv_swap.cli import app
from tconv_swap.report import json_schema, written
from tconv_swap.report.summary import summarise


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved network in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.ConvTranspose2d(3, 2, 2, 2), nn.Tanh()), "model.pt")
    return Path("model.pt")


def swap(*arguments: object, timed: bool = False) -> Any:
    effort = ["--iters", "2", "--warmup", "0"] if timed else ["--no-benchmark"]
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu", *effort])


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_all_forms_of_one_run(model: Path) -> None:
    result = swap(model, "--report", "r.md", "--report", "r.html", "--json", "r.json", timed=True)
    assert result.exit_code == 0, result.output
    assert files() == ["model.pt", "r.html", "r.json", "r.md"]
    document = json.loads(Path("r.json").read_text())
    jsonschema.validate(document, json_schema())
    assert Path("r.md").read_text() == written.render(Path("r.md"), document)
    assert Path("r.html").read_text() == written.render(Path("r.html"), document)
    assert "report written to r.html" in result.stdout
    (layer,) = document["explanation"]["layers"]
    assert [stage["stage"] for stage in layer["stages"]] == ["forward", "grad_input, grad_weight, grad_bias"]
    assert document["ceilings"] is None
    assert "ceilings are measured on CUDA" in " ".join(result.stdout.split())


def test_requested_autocast_is_in_every_form_of_the_report(model: Path) -> None:
    forms = ["--report", "r.md", "--report", "r.html", "--json", "r.json"]
    result = swap(model, *forms, "--autocast", "bfloat16")
    assert result.exit_code == 0, result.output
    document = json.loads(Path("r.json").read_text())
    assert document["verification"]["not_tried"] == []
    assert document["verification"]["tried"][-1] == "under bfloat16 autocast"
    assert any(
        check["mode"] == "train under bfloat16 autocast" for check in document["verification"]["checks"]
    )
    for text in (result.stdout, Path("r.md").read_text(), Path("r.html").read_text()):
        assert "under bfloat16 autocast" in " ".join(text.replace("\\", "").split())
        assert "not tried" not in text
    result = swap(model, *forms)
    assert json.loads(Path("r.json").read_text())["verification"]["not_tried"] == ["under autocast"]
    for text in (result.stdout, Path("r.md").read_text(), Path("r.html").read_text()):
        assert "not tried" in text
        assert "under autocast" in text
    assert swap(model, "--autocast", "float32").exit_code == 2


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose2d(3, 2, 2, 2), (3, 4, 5)),
        (nn.ConvTranspose1d(3, 2, 2, 2), (2, 3, 8)),
        (nn.ConvTranspose1d(3, 2, 2, 2), (3, 8)),
    ],
    ids=["unbatched", "1-D", "1-D unbatched"],
)
def test_what_computes_a_layer_is_reported_for_every_form_of_input(
    model: Path, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """The timings of a layer and its explanation are matched by the shape of its input."""
    torch.save(nn.Sequential(layer, nn.Tanh()), model)
    given = ["--include-1d", "--input-shape", ",".join(map(str, shape)), "--json", "r.json"]
    result = swap(model, *given, timed=True)
    assert result.exit_code == 0, result.output
    document = json.loads(Path("r.json").read_text())
    assert document["explanation"]["layers"][0]["input_shape"] == list(shape)
    (row,) = summarise(document).layers
    assert [bool(stage.family) for stage in row.stages if stage.stage != "both"] == [True, True]


def test_details_when_verbose(model: Path) -> None:
    short, long = swap(model), swap(model, "--verbose")
    assert "Verification" not in short.stdout
    assert "Verification" in long.stdout
    assert "What computes it" not in short.stdout


@pytest.mark.parametrize("name", ["r.pdf", "report", "model.pt", "."])
def test_an_impossible_report_is_refused_before_any_work(model: Path, name: str) -> None:
    before = model.read_bytes()
    result = swap(model, "--out", "fast.pt", "--report", name)
    assert result.exit_code == 2
    assert "--report" in result.stderr
    assert files() == ["model.pt"]
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [("--report", "a.md", "--json", "a.md"), ("--report", "a.md", "--out", "a.md"), ("--report", "a.md") * 2],
)
def test_two_results_in_one_file_are_refused(model: Path, options: tuple[str, ...]) -> None:
    result = swap(model, *options)
    assert result.exit_code == 2
    assert "name the same file" in result.stderr
    assert files() == ["model.pt"]


def test_a_mismatch_is_reported_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = op.conv_transpose2d
    monkeypatch.setattr(
        op, "conv_transpose2d", lambda input, weight, *others: right(input, weight * 1.001, *others)
    )
    result = swap(model, "--out", "fast.pt", "--report", "r.md")
    assert result.exit_code == 1, result.output
    assert Path("r.md").read_text().startswith("# tconv-swap: MISMATCH")
    assert files() == ["model.pt", "r.md"]


def test_a_directory_that_cannot_be_written(model: Path) -> None:
    result = swap(model, "--report", "nowhere/r.md")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_nothing_half_written_when_the_disk_is_full(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("r.md").write_text("the report before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        result = swap(model, "--report", "r.md")
    assert result.exit_code == 5
    assert "No space left" in result.stderr
    assert files() == ["model.pt", "r.md"]
    assert Path("r.md").read_text() == "the report before"
