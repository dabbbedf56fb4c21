"""Layers are planned before their first calls if their kernels are on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import pretended_gpu
from remembered import forget
from torch import nn

import tconv_swap
from tconv_swap import layer_state
from tconv_swap.cuda import call, kept_layers
from tconv_swap.cuda.call import CallKind, plans_of
from tconv_swap.cuda.expected import ExpectedLayer
from tconv_swap.cuda.kept_layers import KeptLayer, plan_kept
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.layer_sizes import usual_sizes
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime import disk_cache, host, jit, launch
from tconv_swap.runtime.program import Plan

LAYER = ExpectedLayer(Geometry(1, 64, 1, 1, 32, (4, 4), (2, 2), (1, 1)), has_bias=True)
USUAL = next(iter(usual_sizes(LAYER.geometry)))
KEPT = KeptLayer(LAYER, torch.float16, False, 0, "auto", trains=True)
#: A layer, and the precision of its calls.
CASES = (
    (KEPT, "ieee"),
    (KEPT._replace(trains=False), "ieee"),
    (KEPT._replace(channels_last=True), "ieee"),
    (KEPT._replace(dtype=torch.float32), "tf32"),
    (KEPT._replace(dtype=torch.float32), "ieee"),
)


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, in a process that remembers nothing, with a GPU that loads nothing; yields the folder of what
    is searched."""
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(host, "is_loaded", lambda: False)
    forget()
    with pretended_gpu(monkeypatch):
        yield tmp_path / "plans"
    forget()


def kinds(layer: KeptLayer, precision: str) -> tuple[CallKind, CallKind]:
    """Returns the calls of another size than the usual ones."""
    size, last = LAYER.geometry._replace(batch=3, height=11, width=9), layer.channels_last
    problem = Problem(size, layer.dtype, precision, last, last)
    return CallKind(problem, (), True, 0), call.kind_of_gradients(problem, (True, True, True), 0)


def test_nothing_is_searched(searched: Path) -> None:
    plan_kept([KEPT])
    assert not searched.exists()


@pytest.mark.parametrize(("layer", "precision"), CASES, ids=str)
def test_what_is_on_disk_is_read_before_the_first_call(
    searched: Path, layer: KeptLayer, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "precision", lambda: precision)
    forward, gradients = kinds(layer, precision)
    before = [made for kind in (forward, gradients) for made in plans_of(kind, "auto")]
    assert len(list(searched.iterdir())) >= 3
    forget()
    plan_kept([layer])
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: searched / "elsewhere")
    with disk_cache.only_kept():
        assert plans_of(forward, "auto") == before[:1]
        if layer.trains:
            assert plans_of(gradients, "auto") == before[1:]
        else:
            with pytest.raises(disk_cache.NotKeptError):
                plans_of(gradients, "auto")


@pytest.mark.parametrize("trains", [False, True])
def test_kernels_on_disk_are_loaded_before_the_first_call(
    searched: Path, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = KEPT._replace(trains=trains, device=3)
    usual = [
        plan
        for kind in kinds(layer, "ieee")[: 1 + trains]
        for plan in plans_of(kind._replace(problem=kind.problem._replace(geometry=USUAL)), "auto")
    ]
    missing = {one.kernel for plan in usual for one in plan.launches}
    on_disk = set(missing)
    added: list[tuple[Plan, torch.dtype, torch.device, str]] = []
    dropped: list[int] = []

    def add(*arguments: Any) -> int:
        added.append(arguments)
        return len(added)

    def plan_again() -> list[Plan]:
        added.clear(), dropped.clear()
        plan_kept([layer])
        assert dropped == list(range(1, len(added) + 1))
        return [plan for plan, *_ in added]

    monkeypatch.setattr(host, "is_loaded", lambda: True)
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel, architecture: kernel in on_disk)
    monkeypatch.setattr(
        launch,
        "missing_kernels",
        lambda plan, architecture: [one.kernel for one in plan.launches if one.kernel in missing],
    )
    monkeypatch.setattr(launch, "add_plan", add)
    monkeypatch.setattr(launch, "drop_plan", dropped.append)

    assert plan_again() == usual
    assert {tuple(rest) for _, *rest in added} == {(torch.float16, torch.device("cuda:3"), "sm_90a")}
    on_disk.remove(usual[0].launches[0].kernel)  # a call compiles it
    assert plan_again() == usual[1:]
    missing.clear()  # they are loaded
    assert plan_again() == []
    missing.update(on_disk)
    monkeypatch.setattr(host, "is_loaded", lambda: False)
    assert plan_again() == []


def test_each_layer_once_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def plans(kind: CallKind, backend: str) -> list[Any]:
        planned.append(kind.problem.geometry.in_channels)
        return []

    monkeypatch.setattr(call, "plans_of", plans)
    layers = [
        KEPT._replace(layer=LAYER._replace(geometry=LAYER.geometry._replace(in_channels=n)), trains=False)
        for n in range(1, 100)
    ]
    plan_kept([layers[0], layers[0], *layers])
    assert planned == list(range(1, kept_layers.MAX_LAYERS + 1))


def test_an_error_is_left_to_the_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(kind: CallKind, backend: str) -> list[Any]:
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(call, "plans_of", broken)
    with caplog.at_level("INFO", logger="tconv_swap"):
        plan_kept([KEPT])
    assert "no plan" in caplog.text


def test_layers_on_a_gpu_are_planned_as_their_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KeptLayer] = []
    monkeypatch.setattr(layer_state, "plan_kept", found.extend)
    network = nn.Sequential(
        nn.ConvTranspose2d(8, 4, 4, 2, 1),
        nn.ConvTranspose2d(4, 2, 2, 2, bias=False).half().to(memory_format=torch.channels_last).eval(),
        nn.ConvTranspose1d(4, 2, 2).requires_grad_(False),
    )
    tconv_swap.swap_layers(network, include_1d=True)
    layer_state.expect_calls(network)
    assert found == []  # on the CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 3)
    layer_state.expect_calls(network)
    assert [one.dtype for one in found] == [torch.float32, torch.float16, torch.float32]
    assert [one.channels_last for one in found] == [False, True, False]
    assert [one.trains for one in found] == [True, False, False]
    assert [one.layer.has_bias for one in found] == [True, False, True]
    assert {(one.device, one.backend) for one in found} == {(3, "auto")}
    found.clear()
    tconv_swap.swap_layers(network, include_1d=True, backend="native")
    layer_state.expect_calls(network)
    assert found == []
