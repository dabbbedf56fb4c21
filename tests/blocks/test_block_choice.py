"""Blocks of the command line: swapped by default, left out where slower or wrong, and the report says so."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import run
from pretended_norm import Pretended, pretended
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks.modules import Blocks, LeftBatchNorm2d, ReflectionPad2d
from tconv_swap.cli.block_choice import BlockChoice
from tconv_swap.files.loading import load_model
from tconv_swap.verification import VerifyReport


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended(monkeypatch) as made:
        yield made


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(network(), "model.pt")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(3, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(6, 4, 4, 2, 1),
        nn.InstanceNorm2d(4),
        nn.Tanh(),
    )


def swapped(*arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Returns the JSON of a swap on the CPU, and its output."""
    options = ("--out", "fast.pt", "--input-shape", "4,3,6,6", "--device", "cpu", "--json", "result.json")
    result = run("model.pt", *options, *arguments)
    assert result.exit_code == code, result.output
    return json.loads(Path("result.json").read_text()), " ".join(result.output.split())


def blocks_of(document: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {block["name"]: (block["swap"], block["reason"]) for block in document["plan"]["blocks"]}


def written() -> nn.Module:
    return torch.load("fast.pt", weights_only=False)  # type: ignore[no-any-return]


def test_blocks_by_default_and_what_becomes_of_them_on_a_cpu() -> None:
    document, text = swapped("--no-benchmark")
    assert blocks_of(document) == {"1": (True, ""), "4": (True, "")}
    assert type(written()) is Blocks
    for said in ("2 of 2 norms swapped, 2 with the activation", "for 2 of them, on CUDA only, were neither"):
        assert said in text
    document, text = swapped("--no-benchmark", "--fuse", "none")
    assert not blocks_of(document)
    assert type(written()) is nn.Sequential
    assert "norms" not in text


def test_what_does_not_verify_is_left_out(kernels: Pretended) -> None:
    kernels.spoil = lambda name, value: value + 1e-3 * (name == "mean" and value.numel() == 6)
    document, text = swapped("--no-benchmark", "--report", "report.md", "--report", "report.html")
    assert document["outcome"] == "verified"
    found = blocks_of(document)
    assert found["4"] == (True, "")
    assert not found["1"][0]
    assert found["1"][1].startswith("does not verify: train, buffer 1.running_mean: error ")
    file = written()
    assert type(file) is Blocks
    assert type(file[1]) is LeftBatchNorm2d
    assert "1 of 2 norms swapped, 1 with the activation" in text
    assert "does not verify" in text
    for report in ("report.md", "report.html"):
        assert "does not verify: train, buffer" in Path(report).read_text().replace("\\", "")


def test_a_padding_that_does_not_verify_is_left_out(kernels: Pretended) -> None:
    torch.save(nn.Sequential(nn.ReflectionPad2d(1), *network(), nn.ReflectionPad2d(2)), "model.pt")
    kernels.spoil = lambda name, value: (
        value.roll(1, 2) if name == "reflection_pad_forward" and value.shape[1] == 3 else value
    )
    document, text = swapped("--no-benchmark", "--fuse", "all")
    assert document["outcome"] == "verified"
    found = blocks_of(document)
    assert found["7"] == (True, "")
    assert found["0"][1].startswith("does not verify: ")
    assert "layer output 0" in found["0"][1]
    assert [type(written()[at]) for at in (0, 7)] == [nn.ReflectionPad2d, ReflectionPad2d]  # type: ignore[index]
    assert "of 4 norms and paddings swapped" in text
    assert load_model("fast.pt").model[7].padding == (2, 2, 2, 2)


def test_a_gradient_or_a_statistic_that_is_wrong_is_left_out(kernels: Pretended) -> None:
    for fault, said in (("gradient", "layer grad input 1"), ("momentum", "buffer 1.running_mean")):
        kernels.spoil = lambda name, value, fault=fault: (
            value * (1.01 if name == fault and value.shape[1:2] != (4,) else 1)
        )
        document, _ = swapped("--no-benchmark")
        found = blocks_of(document)
        assert not found["1"][0]
        assert f", {said}: error" in found["1"][1]


def test_what_is_slower_is_left_out(kernels: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch norm's kernels sleep, and so does PyTorch's instance norm: one block is slower, one is faster."""
    instance_norm = nn.functional.instance_norm

    def sleepy(name: str, value: Tensor) -> Tensor:
        time.sleep(0.05 * (name == "mean" and value.numel() == 6))
        return value

    def sleepy_instance_norm(x: Tensor, *arguments: Any) -> Tensor:
        time.sleep(0.05 * (x.dtype is torch.float32))  # the pretended kernels compute in float64
        return instance_norm(x, *arguments)

    kernels.spoil = sleepy
    monkeypatch.setattr(nn.functional, "instance_norm", sleepy_instance_norm)
    document, text = swapped("--iters", "6", "--warmup", "1")
    found = blocks_of(document)
    assert found["4"] == (True, "")
    assert not found["1"][0]
    assert found["1"][1].startswith("slower by itself: evaluation takes ")
    assert "; forward and backward takes " in found["1"][1]
    assert "slower by itself" in text
    assert type(written()[1]) is LeftBatchNorm2d
    before = kernels.forwards
    document, _ = swapped("--no-benchmark")
    assert blocks_of(document)["1"] == (True, "")  # nothing was timed
    assert kernels.forwards > before


def test_a_state_dict_is_loaded_with_the_same_blocks(kernels: Pretended) -> None:
    kernels.spoil = lambda name, value: value + 1e-3 * (name == "mean" and value.numel() == 6)
    document, _ = swapped("--no-benchmark", "--out-format", "state_dict")
    snippet = document["facts"]["load_snippet"]
    assert "swap_layers(..., fuse='blocks', leave_blocks=['1'])" in snippet


def test_a_fault_of_none_by_itself_leaves_all_out() -> None:
    choice = BlockChoice(tconv_swap.plan_swap(network(), fuse="blocks"))
    choice.times.complete = False
    report = VerifyReport()
    report.failures.append("output: too far away")
    assert choice.leave_failing(report)
    assert choice.left_out == dict.fromkeys(
        "14", "the network does not verify with it, and no block by itself fails"
    )
    assert not choice.leave_failing(report)


def test_blocks_that_are_left() -> None:
    model = network().eval()
    expected = model(torch.ones(2, 3, 4, 4))
    (first, second) = tconv_swap.plan_swap(model, fuse="all", leave_blocks={"1": "because"}).blocks
    assert (first.swap, first.reason, second.swap) == (False, "because", True)
    tconv_swap.swap_layers(model, fuse="all", leave_blocks=["1"])
    assert type(model[1]) is LeftBatchNorm2d
    file = io.BytesIO()
    torch.save(model, file)
    Path("left.pt").write_bytes(file.getvalue())
    for again in (copy.deepcopy(model), load_model(Path("left.pt")).model):
        assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
        torch.testing.assert_close(again(torch.ones(2, 3, 4, 4)), expected)
    traced = torch.fx.symbolic_trace(model)
    assert "1" in [node.target for node in traced.graph.nodes]
    (first, _) = tconv_swap.plan_swap(model, fuse="all").blocks
    assert "left out by an earlier swap" in first.reason
    tconv_swap.swap_layers(model, fuse="all")
    assert type(model[1]) is LeftBatchNorm2d
    tconv_swap.unswap_layers(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in network().modules()]
    everything = tconv_swap.swap_layers(network(), fuse="blocks", leave_blocks=["1", "4"])
    assert [type(everything), type(everything[1])] == [nn.Sequential, nn.BatchNorm2d]
    with pytest.raises(ValueError, match="no normalisation or padding of the model is called '0'"):
        tconv_swap.plan_swap(model, fuse="all", leave_blocks=["0"])


def test_a_block_that_was_swapped_is_left_later(kernels: Pretended) -> None:
    model = tconv_swap.swap_layers(network(), fuse="all")
    tconv_swap.swap_layers(model, fuse="all", leave_blocks=["1"])
    model(torch.randn(2, 3, 4, 4))
    assert kernels.forwards == 1
