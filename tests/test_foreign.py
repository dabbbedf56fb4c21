"""End to end on networks of other libraries: found, swapped, verified, saved, and verified in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import foreign_networks
import pytest
import torch
from foreign_networks import FOREIGN, mask2former
from forked import run_python
from sampling import sampled
from torch import nn
from typer.testing import CliRunner

import tconv_swap
from tconv_swap.cli import app
from tconv_swap.inputs import named_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

#: One network of each library and kind of layer.
SAVED = ("mask_rcnn", "sam", "hifigan", "monai_unet", "linknet")


@pytest.fixture(autouse=True, scope="module")
def _offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"


def built(name: str) -> tuple[nn.Module, tconv_swap.Inputs]:
    foreign = FOREIGN[name]
    for package in foreign.needs:
        pytest.importorskip(package)
    torch.manual_seed(0)
    return foreign.build(), foreign.inputs()


@pytest.mark.parametrize("name", [*SAVED, *sampled(sorted(FOREIGN.keys() - SAVED), 3)])
def test_swapped_and_verified(name: str) -> None:
    foreign, (model, inputs) = FOREIGN[name], built(name)
    plan = tconv_swap.plan_swap(model, include_1d=foreign.include_1d)
    assert (len(plan.swapped), len(plan.skipped)) == (foreign.layers, 0), str(plan)
    swapped = tconv_swap.swap_layers(model, inplace=False, include_1d=foreign.include_1d)
    report = tconv_swap.verify(model, swapped, inputs)
    assert report.passed, report.failures
    assert {check.mode for check in report.checks if check.kind == "output"} == {"eval", "train"}, (
        report.notes
    )
    layers = {names[0] for names in (layer.names for layer in plan.swapped)}
    for kind in ("layer_output", "layer_grad_weight"):
        assert {
            check.name for check in report.checks if check.kind == kind and check.mode != "probe"
        } == layers
    assert [check for check in report.checks if check.kind == "grad_parameter" and check.passed]


@pytest.mark.parametrize("name", ["mask_rcnn", "sam", "hifigan"])
def test_networks_of_other_libraries_are_timed(name: str) -> None:
    """Inputs are lists of images, keyword arguments and non-tensors; outputs are losses or dicts."""
    foreign, (model, inputs) = FOREIGN[name], built(name)
    swapped = tconv_swap.swap_layers(model, inplace=False, include_1d=foreign.include_1d)
    timing = tconv_swap.benchmark(model, swapped, inputs, warmup=0, iters=2)
    assert {comparison.stage for comparison in timing.network} == {"forward", "backward", "step"}, (
        timing.notes
    )
    assert len({comparison.name for comparison in timing.layers}) == foreign.layers


def test_saved_networks_are_verified_in_a_fresh_process(tmp_path: Path) -> None:
    """One network of each library and kind of layer; the other networks of a library load with the same classes."""
    names = [name for name in SAVED if all(map(importlib.util.find_spec, FOREIGN[name].needs))]
    assert "mask_rcnn" in names
    for name in names:
        model, inputs = built(name)
        swapped = tconv_swap.swap_layers(model, inplace=False, include_1d=FOREIGN[name].include_1d)
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = [tensor for _, tensor in named_tensors(inputs(swapped.eval()))]
        torch.save(model, tmp_path / f"{name}.pt")
        torch.save((inputs.args, inputs.kwargs), tmp_path / f"{name}-inputs.pt")
        torch.save(swapped.train(), tmp_path / f"{name}-fast.pt")
        torch.save(outputs, tmp_path / f"{name}-outputs.pt")
    script = Path(foreign_networks.__file__)
    result = run_python(str(script), str(tmp_path), *names, env=os.environ)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == [f"{name}: verified" for name in names]


def test_the_command_line_loads_a_network_with_the_names_that_it_lists(tmp_path: Path) -> None:
    """The refusal lists exactly the names that have to be trusted; with them the file loads, is swapped and
    verified."""
    path, inputs = tmp_path / "network.pt", tmp_path / "unet-inputs.pt"
    torch.save(built("monai_unet")[0], path)
    torch.save((torch.randn(1, 1, 16, 16),), inputs)
    options = [str(path), "--inputs", str(inputs), "--no-benchmark", "--json", "-"]
    refused = json.loads(CliRunner().invoke(app, options).stdout)
    assert refused["exit_code"] == 3
    words = refused["error"].split("add: ")[1].split()
    assert words[::2] == ["--trust"] * (len(words) // 2)
    result = CliRunner().invoke(app, [*options, *words, "--out", str(tmp_path / "unet-fast.pt")])
    assert result.exit_code == 0, result.output


def test_mask2former_has_nothing_to_swap() -> None:
    """It interpolates: there is nothing to swap, neither a layer nor a function call."""
    pytest.importorskip("transformers")
    model = mask2former()
    assert isinstance(model, nn.Module)
    assert (
        str(tconv_swap.plan_swap(model))
        == "nothing to swap: no layer of the model is a transposed convolution"
    )
    inputs = tconv_swap.Inputs((), {"pixel_values": torch.randn(1, 3, 64, 64)})
    assert tconv_swap.find_functional_calls(model, inputs) == ()
