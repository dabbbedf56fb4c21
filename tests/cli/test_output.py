"""What cannot be written as asked for is refused before any work is done for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import files, run, saved_generator, swap
from torch import nn

from tconv_swap.cli import workflow
from tconv_swap.files.loading import load_weights


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return saved_generator()


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification would end in an internal error."""
    monkeypatch.setattr(workflow, "verify", None)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("name", "out_format", "reason"),
    [
        ("fast.safetensors", "module", "add --out-format state_dict"),
        ("fast.SafeTensors", "module", "add --out-format state_dict"),
        ("fast.pt2", "module", ".pt2 is for torch.export archives"),
        ("fast.pt2", "state_dict", ".pt2 is for torch.export archives"),
    ],
)
def test_names_that_do_not_fit_the_content(model: Path, name: str, out_format: str, reason: str) -> None:
    for more in ([], ["--dry-run"]):
        result = swap(model, "--out", name, "--out-format", out_format, "-q", *more)
        assert result.exit_code == 2
        assert reason in result.stderr
        assert files() == ["model.pt"]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", ["fast.pt", "fast.safetensors", "fast"])
def test_a_program_is_written_as_pt2_only(model: Path, name: str) -> None:
    program = torch.export.export(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), (torch.randn(2, 4, 5, 6),))
    torch.export.save(program, "model.pt2")
    result = swap("model.pt2", "--unsafe-pickle", "--out", name, "-q")
    assert result.exit_code == 2
    assert "must end in .pt2" in result.stderr
    assert files() == ["model.pt", "model.pt2"]


def test_the_suffix_safetensors_in_capitals(model: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    result = swap(model, "--out", "fast.SAFETENSORS", "--out-format", "state_dict")
    assert result.exit_code == 0, result.output
    assert "safetensors.torch.load_file('fast.SAFETENSORS')" in result.stdout
    assert (
        safetensors.load_file("fast.SAFETENSORS").keys()
        == torch.load(model, weights_only=False).state_dict().keys()
    )


PARAMETRIZED = """
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

def build():
    return nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.Sequential(spectral_norm(nn.ConvTranspose2d(3, 3, 2))))
"""


@pytest.fixture
def parametrized(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Arguments for weights of a network that cannot be pickled."""
    monkeypatch.delitem(sys.modules, "normed", raising=False)
    Path("normed.py").write_text(PARAMETRIZED)
    names: dict[str, Any] = {}
    exec(PARAMETRIZED, names)
    torch.save(names["build"]().state_dict(), "weights.pt")
    return ("weights.pt", "--model", "normed.py:build", "--input-shape", "2,4,5,6")


@pytest.mark.usefixtures("unverified")
def test_a_parametrized_network_is_refused_before_it_is_verified(parametrized: tuple[str, ...]) -> None:
    result = swap(*parametrized, "--out", "fast.pt", "-q")
    assert result.exit_code == 2
    assert "(1.0: weight): add --out-format state_dict" in result.stderr
    assert not Path("fast.pt").exists()
    assert run(*parametrized, "--out", "fast.pt", "--dry-run").exit_code == 0


def test_the_weights_of_a_parametrized_network_are_written(parametrized: tuple[str, ...]) -> None:
    assert swap(*parametrized).exit_code == 0
    result = swap(*parametrized, "--out", "fast.pt", "--out-format", "state_dict")
    assert result.exit_code == 0, result.output
    assert load_weights(Path("fast.pt")).keys() == torch.load("weights.pt").keys()
