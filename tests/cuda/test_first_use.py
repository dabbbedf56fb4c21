"""On a GPU for which nothing was measured: what is timed at first use, how often, and how the result is used."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import grad_output, operands, pretended_gpu
from tuned_cases import pretended_machine

import tconv_swap
from tconv_swap import tuning
from tconv_swap.cli import diagnosis
from tconv_swap.cuda import call, first_use, tuned
from tconv_swap.cuda.choice import FORWARD, choose_backward, choose_forward
from tconv_swap.cuda.first_use import Timed
from tconv_swap.cuda.tuned import Winner, problem_key
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime import launch

A100 = plan.Device("sm_80", 108, 163 << 10)
H200 = plan.Device("sm_90a", 132, 227 << 10)
MACHINE = {"gpu": "NVIDIA A100", "compute_capability": "8.0", "driver": "1.2", "kernels": "0"}
LAYER = Geometry(8, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
GRADIENTS = (True, True, True)
NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


def problem(height: int = 16, width: int = 16, batch: int = 8, **changes: Any) -> plan.Problem:
    geometry = LAYER._replace(batch=batch, height=height, width=width)
    return plan.Problem(geometry, torch.float16, "ieee", False, False)._replace(**changes)


class Clock:
    """Times nothing: the candidate with the number ``fastest`` wins; None stands for PyTorch's operator."""

    def __init__(self) -> None:
        self.fastest: int | None = None
        self.measured: list[tuple[plan.Problem, tuple[bool, ...]]] = []
        self.capturing = False
        self.error: Exception | None = None
        self.seconds = 0.0

    def measure(
        self, posed: plan.Problem, mask: Any, has_bias: bool, index: int, count: int, budget_s: float
    ) -> Timed | None:
        assert (count, index) == (first_use.CANDIDATES, 0)
        assert 0 < budget_s < 1
        self.measured.append((posed, mask))
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        found = first_use.candidates_of(posed, mask, has_bias, A100, count)
        kernel = found[self.fastest or 0].digest
        return Timed(self.fastest is None, kernel, 12.0, 8.0 if self.fastest is None else 24.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    with pretended_machine(monkeypatch, tmp_path, dict(MACHINE)):
        yield tmp_path


@pytest.fixture
def clock(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.delenv(first_use.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(first_use, "measures", [found.measure])
    monkeypatch.setattr(first_use, "_is_capturing", lambda index: found.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(first_use, "free_bytes", lambda device: 40 << 30)
    monkeypatch.setattr(first_use, "_untimed", set())
    monkeypatch.setattr(first_use, "_unwritten", {})
    return found


def forward(posed: plan.Problem, way: first_use.Way = "time", device: plan.Device = A100) -> Any:
    winners = first_use.winners(posed, FORWARD, True, 0, device, way)
    return choose_forward(posed, True, device, "auto", winners)


def backward(posed: plan.Problem, way: first_use.Way = "time") -> Any:
    winners = first_use.winners(posed, GRADIENTS, False, 0, A100, way)
    return choose_backward(posed, GRADIENTS, A100, "auto", winners)


# What is chosen


def test_pytorchs_operator_is_taken_where_it_was_the_fastest(clock: Clock) -> None:
    assert forward(problem(), "known").plan is not None, "by rule"
    step = forward(problem())
    assert step.plan is None
    assert step.why == "timed at first use, 8x128x16x16: 12.0 us against PyTorch's 8.0 us"
    assert clock.measured == [(problem(), FORWARD)]
    tuned.winners.cache_clear()  # another process
    assert forward(problem(), "known") == forward(problem()) == step
    assert len(clock.measured) == 1


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_plan_that_won_is_taken_and_it_is_said(fastest: int, clock: Clock) -> None:
    clock.fastest = fastest
    step = forward(problem())
    assert step.plan == plan.forward_candidates(problem(), True, A100, 8)[fastest]
    assert step.why.endswith("; timed at first use, 8x128x16x16: 12.0 us against PyTorch's 24.0 us")


def test_gradients_are_timed_apart_and_joined_where_ours_win(clock: Clock) -> None:
    posed = problem()
    (native,) = backward(posed)
    assert (native.plan, native.mask) == (None, GRADIENTS)
    assert [mask for _, mask in clock.measured] == [(True, False, False), (False, True, True)]
    clock.fastest = 0
    other = problem(64, 64)
    (ours,) = backward(other)
    assert ours.plan == plan.plan_backward(other, GRADIENTS, A100)
    assert "timed at first use, 8x128x64x64: 12.0 us" in ours.why
    # There is one way to compute the gradient of a bias, which is a sum.
    before = len(clock.measured)
    first_use.winners(posed, (False, False, True), False, 0, A100, "time")
    assert len(clock.measured) == before


def test_a_measured_gpu_times_nothing(clock: Clock) -> None:
    assert forward(problem(), device=H200) == choose_forward(problem(), True, H200, "auto")
    assert not clock.measured


def test_what_tune_found_comes_first(clock: Clock) -> None:
    key = problem_key(problem(), FORWARD, True)
    tuned.keep(0, {key: Winner(True, "", "tuned: PyTorch's")})
    assert forward(problem()).why == "tuned: PyTorch's"
    assert not clock.measured


# Sizes


def test_forty_sizes_time_a_few_of_them(clock: Clock) -> None:
    clock.fastest = 0
    sizes = [(16 + 5 * i, 24 + 3 * i) for i in range(40)]
    steps = [forward(problem(*size, batch=1)) for size in sizes]
    assert 2 <= len(clock.measured) <= 4
    for size, step in zip(sizes, steps, strict=True):
        assert step.plan in plan.forward_candidates(problem(*size, batch=1), True, A100, 8)
        assert "timed at first use" in step.why


def test_the_same_kernels_compute_every_size_of_a_class(clock: Clock) -> None:
    """Also where other ones are expected to be faster."""
    sizes = [problem(32, 32, batch=4), problem(28, 40, batch=4)]
    of_first, of_second = (
        [[launch.kernel for launch in made.launches] for made in plan.forward_candidates(size, True, A100, 8)]
        for size in sizes
    )
    clock.fastest = next(i for i in range(first_use.CANDIDATES) if of_first[i] in of_second[1:])
    first, second = (forward(size).plan for size in sizes)
    assert len(clock.measured) == 1
    assert [one.kernel for one in first.launches] == [one.kernel for one in second.launches]
    assert first.digest != second.digest
    assert second.digest != plan.plan_forward(sizes[1], True, A100).digest


def test_a_family_whose_kernels_hold_a_size_wins_its_class(clock: Clock) -> None:
    stage = first_use._Stage(problem(), FORWARD, True, 0, A100)
    candidates = plan.forward_candidates(problem(), True, A100, 8)
    wanted = candidates[-1]
    by_family = stage.of_this_size(Winner(False, "other kernels", "w", wanted.family))
    assert by_family is not None
    assert by_family.kernel == next(one.digest for one in candidates if one.family == wanted.family)
    assert stage.of_this_size(Winner(False, "other kernels", "w", "a family that is gone")) is None


def test_rows_pixels_and_maps_are_timed_apart(clock: Clock) -> None:
    for height, width in ((1, 1), (1, 256), (16, 16)):
        forward(problem(height, width, batch=256 // height // width))
    assert len(clock.measured) == 3


def test_classes_are_bounded(clock: Clock) -> None:
    clock.fastest = 0
    for batch in (4**n for n in range(9)):
        assert "timed at first use" in forward(problem(4, 4, batch=batch)).why
    assert len(clock.measured) == first_use.MAX_CLASSES
    # The nearest class is the largest one that was timed.
    assert f"{4 ** (first_use.MAX_CLASSES - 1)}x128x4x4:" in forward(problem(4, 4, batch=4**8)).why


@pytest.mark.parametrize(
    "changed",
    [dict(dtype=torch.bfloat16), dict(channels_last=True), dict(weight_channels_last=True)],
    ids=str,
)
def test_another_dtype_or_layout_is_another_layer(changed: dict[str, Any], clock: Clock) -> None:
    forward(problem())
    forward(problem(**changed))
    assert len(clock.measured) == 2


# When nothing is timed


def test_the_environment_turns_it_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "0")
    assert forward(problem()) == choose_forward(problem(), True, A100, "auto")
    assert not clock.measured
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "1")
    forward(problem())
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "0")
    assert forward(problem()).plan is None, "what was timed before stays"


@pytest.mark.parametrize("switch", ["algorithms", "cudnn"])
def test_who_asks_for_determinism_gets_rules(
    switch: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert forward(problem()).plan is not None
    assert not clock.measured


def test_a_capture_is_not_disturbed_and_the_next_call_asks_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(launch, "forget_plans", lambda: forgotten.append(True))
    clock.capturing = True
    assert forward(problem()).plan is not None
    assert (clock.measured, forgotten) == ([], [True])
    clock.capturing = False
    assert forward(problem()).plan is None
    clock.capturing = True
    assert forward(problem()).plan is None
    assert forgotten == [True]


@pytest.mark.parametrize("error", [NO_MEMORY, RuntimeError("no compiler")])
def test_what_fails_is_left_to_the_rules_once(
    error: Exception, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.error = error
    by_rule = choose_forward(problem(), True, A100, "auto")
    with caplog.at_level(logging.INFO, logger="tconv_swap"):
        assert forward(problem()) == forward(problem()) == by_rule
    assert len(clock.measured) == 1
    assert str(error) in caplog.text


def test_where_memory_is_short_nothing_is_tried(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "free_bytes", lambda device: 1 << 20)
    assert forward(problem()).plan is not None
    assert not clock.measured


def test_an_interruption_goes_through(clock: Clock) -> None:
    clock.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        forward(problem())
    clock.error = None
    assert forward(problem()).plan is None


def test_float64_and_nothing_at_all_are_not_timed(clock: Clock) -> None:
    forward(problem(dtype=torch.float64))
    forward(problem(batch=0))
    assert not clock.measured


# Several threads and processes


def test_threads_that_ask_at_once_time_once(clock: Clock) -> None:
    clock.seconds = 0.05
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(forward(problem()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clock.measured) == 1
    assert len(found) == 6
    assert len(set(found)) == 1


def test_the_process_that_was_first_decides(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock.measure

    def meanwhile(*given: Any) -> Timed | None:
        # Another process writes its winner while this one measures.
        key = first_use._Stage(problem(), FORWARD, True, 0, A100)._key(
            first_use._class_of(problem().geometry)
        )
        tuned.keep(0, {key: Winner(True, "", "theirs", "")})
        clock.fastest = 0
        return real(*given)

    monkeypatch.setattr(first_use, "measures", [meanwhile])
    assert forward(problem()).why == "theirs"


def test_a_disk_that_takes_nothing_leaves_the_winner_in_the_process(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: object, **named: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tuned, "keep", refuse)
    assert forward(problem()).plan is None
    assert forward(problem()).plan is None
    assert len(clock.measured) == 1
    assert "not kept (No space left on device)" in caplog.text


# Calls


class Requests:
    """What calls on a pretended GPU request of ``first_use``: masks, and whether to time."""

    def __init__(self, gpu: Any) -> None:
        self.gpu, self.found = gpu, []

    def winners(self, posed: Any, mask: Any, has_bias: bool, index: int, device: Any, way: str) -> Any:
        self.found.append((mask, way))
        native = Winner(True, "", "timed")
        return {problem_key(posed, one, has_bias and not one): native for one in (FORWARD, mask)}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    with pretended_gpu(monkeypatch) as gpu:
        found = Requests(gpu)
        monkeypatch.setattr(first_use, "winners", found.winners)
        yield found


@pytest.mark.parametrize("backend", ["auto", "rules", "kernel"])
def test_only_auto_times_a_call(backend: str, requests: Requests) -> None:
    x, w, _ = operands()
    way = "time" if backend == "auto" else "known"
    requests.gpu.gradients(grad_output(), x, w, [True, False, False], backend)
    assert requests.found == [((True, False, False), way)]
    with call.recording():
        call.forget()
        requests.gpu.gradients(grad_output(), x, w, [True, False, False], backend)
    assert requests.found[1:] == [((True, False, False), "known")]


def test_a_forward_pass_times_no_gradient(requests: Requests) -> None:
    x, w, b = operands()
    requests.gpu.differentiable(x.requires_grad_(), w, b, "auto")
    assert requests.found == [(FORWARD, "time"), (GRADIENTS, "known")]


def test_rules_and_auto_choose_alike_where_nothing_was_timed() -> None:
    assert choose_forward(problem(), True, A100, "rules") == choose_forward(problem(), True, A100, "auto")
    for dtype in (torch.float16, torch.float64):
        posed = problem(dtype=dtype)
        rules, auto = (choose_backward(posed, GRADIENTS, A100, one) for one in ("rules", "auto"))
        assert rules == auto
    layer = tconv_swap.swap_layers(torch.nn.ConvTranspose2d(4, 4, 2), backend="rules")
    assert layer.tconv_backend == "rules"
    assert layer(torch.randn(1, 4, 3, 3)).shape == (1, 4, 4, 4)


# Messages


def test_the_doctor_says_how_a_gpu_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(first_use.ENVIRONMENT_VARIABLE, raising=False)
    assert first_use.describe(H200) == "'auto' goes by rules measured on an H200"
    assert "times each layer's stages at their first use" in first_use.describe(A100)
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "0")
    assert f"{first_use.ENVIRONMENT_VARIABLE}=0" in first_use.describe(A100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = type("P", (), {"name": "NVIDIA A100", "total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(call, "device_facts", lambda index: A100)
    assert diagnosis._gpu().text == f"NVIDIA A100 (sm_80, 80 GiB); {first_use.describe(A100)}"


def test_tuning_is_what_measures() -> None:
    assert first_use.measures == [tuning._timed]
