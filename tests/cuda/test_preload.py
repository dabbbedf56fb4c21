"""What an earlier process called first is planned and loaded before the first calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import ARGUMENTS, GPU, operands, pretended_gpu
from remembered import forget
from torch import nn

import tconv_swap
from tconv_swap import layer_state
from tconv_swap.cuda import call, first_calls, preload
from tconv_swap.cuda.call import kind_of_gradients, plans_of
from tconv_swap.cuda.choice import CallKind
from tconv_swap.cuda.first_calls import calls_of, remember
from tconv_swap.cuda.preload import PreloadedLayer
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.problem import Problem
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import ahead, disk_cache, host, jit, launch
from tconv_swap.runtime.program import Plan

GEOMETRY = Geometry(1, 64, 1, 1, 32, (4, 4), (2, 2), (1, 1))
LAYER = PreloadedLayer(GEOMETRY, device=3, backend="auto", trains=True)
#: As an autocast with channels_last calls a layer whose weight is float32 in NCHW.
PROBLEM = Problem(GEOMETRY._replace(batch=3, height=11, width=9), torch.float16, "ieee", True, False)
FORWARD = CallKind(PROBLEM, (), True, 3)
GRADIENTS = kind_of_gradients(PROBLEM, (True, True, True), 3)
OTHER = FORWARD._replace(problem=PROBLEM._replace(geometry=GEOMETRY._replace(batch=3, height=11, width=8)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


@pytest.fixture
def folder(gpu: GPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of what is kept, empty, in a process that remembers nothing, with a GPU that loads nothing."""
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(host, "is_loaded", lambda: False)
    begin_process()
    yield tmp_path / "plans"
    begin_process()


def begin_process() -> None:
    first_calls._first_calls.cache_clear()
    forget()


def test_the_first_calls_of_each_process_are_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls_of(GEOMETRY) == ()
    kinds = [
        FORWARD._replace(problem=PROBLEM._replace(geometry=GEOMETRY._replace(batch=n, height=5, width=5)))
        for n in range(1, 9)
    ]
    for kind in kinds:
        remember(kind)
    on_first_gpu = [kind._replace(device=0) for kind in kinds]
    assert calls_of(GEOMETRY._replace(batch=7)) == tuple(on_first_gpu[3::-1])
    assert calls_of(GEOMETRY._replace(padding=(0, 0))) == ()
    begin_process()
    for kind in (kinds[2], kinds[7], kinds[7], kinds[0], kinds[6]):
        remember(kind)
    assert calls_of(GEOMETRY) == tuple(on_first_gpu[i] for i in (0, 7, 3, 2))


@pytest.mark.parametrize("damaged", [b"", b"no pickle"])
def test_a_damaged_file_is_written_again(folder: Path, damaged: bytes) -> None:
    remember(FORWARD)
    (file,) = folder.iterdir()
    file.write_bytes(damaged)
    begin_process()
    assert calls_of(GEOMETRY) == ()
    remember(GRADIENTS)
    begin_process()
    assert calls_of(GEOMETRY) == (GRADIENTS._replace(device=0),)


@pytest.mark.parametrize("backend", ["rules", "native"])
def test_calls_are_remembered_as_they_are_made(folder: Path, gpu: GPU, backend: str) -> None:
    x, weight, bias = operands(dtype=torch.float16, batch=3)
    gpu.differentiable(x.requires_grad_(), weight.requires_grad_(), bias, backend).sum().backward()
    geometry = Geometry(1, *x.shape[1:], weight.shape[1], (4, 4), *ARGUMENTS[:2])
    made = [(kind.problem.geometry.batch, kind.problem.dtype, kind.mask) for kind in calls_of(geometry)]
    called = [(3, torch.float16, (True, True, False)), (3, torch.float16, ())]
    assert made == (called if backend == "rules" else [])


def test_without_earlier_calls_nothing_is_planned(folder: Path) -> None:
    preload.preload([LAYER])
    assert not folder.exists()


def test_nothing_is_searched(folder: Path) -> None:
    remember(FORWARD)
    preload.preload([LAYER])
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("trains", [False, True])
def test_what_is_on_disk_is_read_before_the_first_call(
    folder: Path, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [made for kind in (FORWARD, GRADIENTS) for made in plans_of(kind, "auto")]
    remember(FORWARD)
    remember(GRADIENTS)
    begin_process()
    preload.preload([LAYER._replace(trains=trains)])
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: folder / "elsewhere")
    with disk_cache.only_kept():
        assert plans_of(FORWARD, "auto") == before[:1]
        if trains:
            assert plans_of(GRADIENTS, "auto") == before[1:]
        else:
            with pytest.raises(disk_cache.NotKeptError):
                plans_of(GRADIENTS, "auto")


def test_kernels_on_disk_are_loaded_before_the_first_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = [plan for kind in (GRADIENTS, FORWARD) for plan in plans_of(kind, "auto")]
    remember(FORWARD)
    remember(GRADIENTS)
    missing = {one.kernel for plan in called for one in plan.launches}
    on_disk = set(missing)
    added: list[tuple[Plan, torch.dtype, torch.device, str]] = []
    dropped: list[int] = []

    def add(*arguments: Any) -> int:
        added.append(arguments)
        return len(added)

    def preloaded() -> list[Plan]:
        added.clear()
        dropped.clear()
        preload.preload([LAYER])
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

    assert preloaded() == called
    assert {tuple(rest) for _, *rest in added} == {(torch.float16, torch.device("cuda:3"), "sm_90a")}
    on_disk.remove(called[-1].launches[0].kernel)  # a call compiles it
    assert preloaded() == called[:-1]
    missing.clear()  # they are loaded
    assert preloaded() == []
    missing.update(on_disk)
    monkeypatch.setattr(host, "is_loaded", lambda: False)
    assert preloaded() == []


def test_each_layer_once_and_not_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[CallKind] = []

    def plans(kind: CallKind, backend: str) -> list[Any]:
        planned.append(kind)
        return []

    monkeypatch.setattr(call, "plans_of", plans)
    monkeypatch.setattr(preload, "MAX_CALLS", 3)
    remember(FORWARD)
    remember(OTHER)
    other = GEOMETRY._replace(in_channels=8)
    kinds = [kind._replace(problem=PROBLEM._replace(geometry=other)) for kind in (FORWARD, GRADIENTS)]
    for kind in kinds:
        remember(kind)
    preload.preload([LAYER, LAYER, LAYER._replace(geometry=other)])
    assert planned == [OTHER, FORWARD, kinds[1]]


def test_an_error_is_left_to_the_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned: list[CallKind] = []

    def broken(kind: CallKind, backend: str) -> list[Any]:
        planned.append(kind)
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(call, "plans_of", broken)
    remember(FORWARD)
    remember(GRADIENTS)
    with caplog.at_level("INFO", logger="tconv_swap"):
        preload.preload([LAYER])
    assert planned == [GRADIENTS, FORWARD]
    assert "no plan" in caplog.text


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> list[PreloadedLayer]:
    """What is preloaded."""
    found: list[PreloadedLayer] = []
    monkeypatch.setattr(layer_state, "preload", found.extend)
    return found


def move_to_gpu(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets every tensor seem to lie on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", number))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: number)


def test_layers_on_a_gpu_are_preloaded(
    preloaded: list[PreloadedLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(
        nn.ConvTranspose2d(8, 4, 4, 2, 1),
        nn.ConvTranspose2d(4, 2, 2, 2, bias=False).eval(),
        nn.ConvTranspose1d(4, 2, 2).requires_grad_(False),
    )
    tconv_swap.swap_layers(network, include_1d=True)
    layer_state.expect_calls(network)
    assert preloaded == []  # on the CPU
    move_to_gpu(monkeypatch, 3)
    layer_state.expect_calls(network)
    assert [one.geometry.in_channels for one in preloaded] == [8, 4, 4]
    assert [one.trains for one in preloaded] == [True, False, False]
    assert {(one.device, one.backend) for one in preloaded} == {(3, "auto")}
    preloaded.clear()
    tconv_swap.swap_layers(network, include_1d=True, backend="native")
    layer_state.expect_calls(network)
    assert preloaded == []


def test_layers_that_come_to_a_gpu_are_preloaded(
    preloaded: list[PreloadedLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tconv_swap.swap_layers(nn.ConvTranspose2d(8, 4, 4, 2, 1))

    def move(number: int) -> None:
        """Moves the layer as ``layer.cuda(number)`` does."""
        with monkeypatch.context() as patch:
            layer._apply(lambda tensor: move_to_gpu(patch, number) or tensor)  # type: ignore[no-untyped-call]

    layer.half()
    assert preloaded == []
    move(1)
    move(2)
    assert [one.device for one in preloaded] == [1, 2]
    move_to_gpu(monkeypatch, 2)
    layer.half()
    assert len(preloaded) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_layers_that_are_loaded_on_a_gpu_are_preloaded(
    preloaded: list[PreloadedLayer], monkeypatch: pytest.MonkeyPatch, copied: Any
) -> None:
    layer = tconv_swap.swap_layers(nn.ConvTranspose2d(8, 4, 4, 2, 1))
    copied(layer)
    assert preloaded == []
    set_state = tconv_swap.ConvTranspose2d.__setstate__

    def set_on_gpu(layer: tconv_swap.ConvTranspose2d, state: dict[str, Any]) -> None:
        with monkeypatch.context() as patch:
            move_to_gpu(patch, 1)
            set_state(layer, state)

    monkeypatch.setattr(tconv_swap.ConvTranspose2d, "__setstate__", set_on_gpu)
    copied(layer)
    assert [one.device for one in preloaded] == [1]


def test_layers_on_the_cpu_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked for one cannot fork processes that use it."""
    asked: list[str] = []
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(ahead, "read_sources", lambda: asked.append("sources"))
    layer = tconv_swap.swap_layers(nn.ConvTranspose2d(8, 4, 4, 2, 1))
    copy.deepcopy(layer).half()
    pickle.loads(pickle.dumps(layer)).to(torch.float64).to("meta")
    assert asked == []


def test_a_layer_without_its_attributes_is_loaded(preloaded: list[PreloadedLayer]) -> None:
    layer = tconv_swap.swap_layers(nn.ConvTranspose2d(8, 4, 4, 2, 1))
    del layer.in_channels
    layer_state.expect_calls([layer])
    assert type(copy.deepcopy(layer)) is tconv_swap.ConvTranspose2d
    del layer._parameters
    assert type(copy.deepcopy(layer)) is tconv_swap.ConvTranspose2d
    assert preloaded == []
