"""Shared by the tests of files: a call of the command line, the single line of a refusal, and a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

from tconv_swap.cli import app

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments), "--no-benchmark", "--input-shape", "2,4,5,6"])


def one_line(result: Any, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    text = result.stderr.strip()
    assert "Traceback" not in text
    return " ".join(text.split())


# --- exported programs --------------------------------------------------------------------------------------


def exported_network() -> tuple[nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.ConvTranspose2d(6, 3, 2, 2)})
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.Sequential(block["up"], nn.ReLU()),
        nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(3, 3, 2, 2)),
        nn.ConvTranspose2d(3, 2, 3, bias=False),
    ).eval()
    axes = {0: torch.export.Dim("n", min=1)}
    return model, torch.export.export(model, (torch.randn(2, 4, 5, 6),), dynamic_shapes=(axes,))
