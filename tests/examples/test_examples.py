"""The examples, tiny: each swaps the layers it should, verifies, and trains its two networks alike."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import matplotlib.image
import pytest
import torch
from forked import run_python
from torch import nn
from way_cases import time_ways_briefly

from tconv_swap import op
from tconv_swap.measurement.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
# Relative. Measured on the CPU: rounding moves these losses by up to 1.4e-7, layers that are 5 % off by at least
# 1.7e-5 (the VAE, whose normalisation hides most of it). On CUDA the same, with TF32 off: with it on, two right
# networks differ by more (measured on an H200: 5e-4 in the second step of DCGAN, 5e-2 in Mask R-CNN's).
LOSS_TOLERANCE = 5e-6
#: Relative. Losses further apart than this come from other random numbers (noise and dropout are drawn on the device).
SAME_DRAWS = 1e-4


class Case(NamedTuple):
    example: str
    options: str
    layers: int
    blocks: int = 0


CASES = [
    Case("dcgan", "--size 32 --width 8 --batch 4", layers=4),
    Case("blocks", "--size 32 --width 8 --batch 4", layers=4, blocks=3),
    Case("pix2pix", "--size 64 --width 4", layers=6),
    Case("cyclegan", "--size 32 --width 4", layers=4),
    Case("vae", "--size 32 --width 4 --batch 4", layers=4),
    Case("unet", "--size 32 --width 4", layers=4),
    Case("mask_rcnn", "--size 64 --batch 1 --boxes 4", layers=1),
]
# Mask R-CNN's takes as long as all others together; each commit swaps and verifies that network in test_foreign.py.
each_example = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] if case.example == "mask_rcnn" else [])
        for case in CASES
    ],
    ids=[case.example for case in CASES],
)


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable, as they are to each other when one is run; and without a network, as they promise."""

    def refuse(*_: Any) -> None:
        raise AssertionError("an example tried to reach the network")

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(socket.socket, "connect", refuse)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def run(case: Case, device: str, *more: str) -> Any:
    options = f"{case.options} --steps {STEPS} --warmup 0 --iters 1 --device {device}"
    return example(case.example).main([*options.split(), *more])


def check_saved(name: str, directory: Path, headline: str) -> None:
    """A picture with something in it, and a report."""
    image = matplotlib.image.imread(directory / f"{name}.png")
    assert image.shape[0] > 100
    assert image[..., :3].std() > 0.05
    report = (directory / f"{name}.md").read_text()
    assert report.startswith(f"# tconv-swap: {headline}")
    assert f"examples/{name}.py" in report.replace("\\", "")


def check(case: Case, outcome: Any, printed: str, expected: list[float] | None = None) -> None:
    """``expected``: the original's losses on another device, which count where it drew the same random numbers."""
    assert len(outcome.plan.swapped) == case.layers
    assert f"Layers swapped: {case.layers}\n" in printed
    assert outcome.verification.passed
    assert "Verified: yes" in printed
    assert len(outcome.plan.blocks) == case.blocks
    assert printed.count(": one kernel\n") == case.blocks
    assert {row.stage for row in outcome.timing.network} == {"forward", "backward", "step"}
    assert all(f"{row.speedup:.2f}x" in printed for row in outcome.timing.network)
    assert len(outcome.losses) == STEPS
    for step, (original, swapped) in enumerate(outcome.losses):
        if expected and abs(original - expected[step]) <= SAME_DRAWS * abs(original):
            # cuDNN's own rounding can be the larger: then the swapped network must be the nearer to the reference.
            original = min(original, expected[step], key=lambda loss: abs(swapped - loss))
        assert swapped == pytest.approx(original, rel=LOSS_TOLERANCE)
    assert outcome.losses[0][0] != outcome.losses[1][0], "nothing was trained"


@each_example
def test_swaps_verifies_and_trains_alike(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(case, run(case, "cpu", "--save", str(tmp_path)), capsys.readouterr().out)
    check_saved(case.example, tmp_path, "VERIFIED")


@pytest.mark.gpu
@each_example
def test_swaps_verifies_and_trains_alike_on_cuda(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with MODES["fp32"].switched_on():
        on_cpu = [original for original, _ in run(case, "cpu").losses]
        capsys.readouterr()
        check(case, run(case, "cuda"), capsys.readouterr().out, expected=on_cpu)


def test_a_wrong_operator_fails_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = op.conv_transpose2d
    monkeypatch.setattr(op, "conv_transpose2d", lambda *args: 1.05 * right(*args))
    with pytest.raises(SystemExit, match="verification failed"):
        run(CASES[0], "cpu")
    assert "Verified: NO" in capsys.readouterr().out


def test_runs_as_a_command() -> None:
    case = CASES[0]
    options = f"{case.options} --steps 1 --warmup 0 --iters 1 --device cpu"
    result = run_python(str(ROOT / "examples" / "dcgan.py"), *options.split(), env=os.environ)
    assert result.returncode == 0, result.stderr
    assert f"Layers swapped: {case.layers}\n" in result.stdout


def best_way(device: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--size 32 --width 8 --batch 4 --steps {STEPS} --device {device} --save"
    found = example("best_way").main([*words.split(), str(directory)])
    check_saved("best_way", directory, "")
    printed = capsys.readouterr().out
    for report in (found.serving, found.training):
        (stage,) = report.stages
        assert stage.best.name == "pytorch" or stage.row(stage.best).verified
        assert str(report) in printed
    assert len(found.losses) == STEPS
    for today, best in found.losses:
        assert best == pytest.approx(today, rel=LOSS_TOLERANCE)


def test_the_best_way_trains_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time_ways_briefly(monkeypatch)
    best_way("cpu", tmp_path, capsys)


@pytest.mark.gpu
def test_the_best_way_trains_alike_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MODES["fp32"].switched_on():
        best_way("cuda", tmp_path, capsys)


def test_networks_have_the_published_number_of_parameters() -> None:
    """Those of pytorch/examples (DCGAN), pytorch-CycleGAN-and-pix2pix and Pytorch-UNet at their full size."""
    common, dcgan = example("common"), example("dcgan")
    with torch.device("meta"):
        networks = {
            3_576_704: dcgan.build_generator(size=64, width=64),
            2_765_568: dcgan.build_discriminator(size=64, width=64),
            54_413_955: example("pix2pix").UNetGenerator(levels=8, width=64),
            2_768_705: common.patch_discriminator(6, 64, nn.BatchNorm2d),
            11_378_179: example("cyclegan").build_generator(width=64, blocks=9),
            2_764_737: common.patch_discriminator(3, 64, nn.InstanceNorm2d),
            31_037_698: example("unet").UNet(classes=2, width=64),
        }
    counted = [sum(parameter.numel() for parameter in network.parameters()) for network in networks.values()]
    assert counted == list(networks)
