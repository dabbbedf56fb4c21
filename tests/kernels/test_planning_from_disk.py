"""What is kept of planning on disk: a new process plans without a search, and the same. No GPU."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered import forget, kept_functions
from size_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.layer_sizes import other_sizes, usual_sizes
from tconv_swap.kernels.grad_weight.selection import layer_of
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.runtime import disk_cache, worker_pool

SUITE = {layer.name: layer for layer in load_suite().layers}
#: Together they have kernels of every family that searches, each in one of the modes.
LAYERS = ("kb57", "kb75", "dcgan3", "dcgan5", "cyclegan2", "unet1", "maskrcnn", "centernet_dw", "hifigan_up1")
MODES = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float16, "ieee"))


def digests(layers: tuple[str, ...], every: bool = True) -> list[str]:
    """Returns the plans of layers in both layouts, or unless ``every`` in one of them in turn."""
    found = []
    for (place, (name, (dtype, precision))), last in itertools.product(
        enumerate(zip(layers, itertools.cycle(MODES), strict=False)), (False, True)
    ):
        if not every and last != place % 2:
            continue
        layer = SUITE[name]
        problem = plan.Problem(layer.geometry, dtype, precision, last, last)
        found.append(plan.plan_forward(problem, layer.bias, H200).digest)
        for mask in ((True, False, False), (False, True, False), (True, True, layer.bias)):
            found.append(plan.plan_backward(problem, mask, H200).digest)
    return found


def test_a_new_process_plans_the_same_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exhaustive: bool
) -> None:
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    forget()
    searched = digests(LAYERS, exhaustive)
    on_disk = {path.name.rpartition("-")[0] for path in (tmp_path / "plans").iterdir()}
    assert on_disk == {
        f"{one.__module__}.{one.__name__}".removeprefix("tconv_swap.kernels.") for one in kept_functions()
    }
    forget()
    monkeypatch.setattr(disk_cache, "write_atomically", lambda path, content: pytest.fail(f"searches {path}"))
    assert digests(LAYERS, exhaustive) == searched
    forget()


def test_processes_beside_this_one_search_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    searched: dict[str, int] = {}

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        found = worker_pool.call(function, *arguments)
        assert repr(found) == repr(function(*arguments))
        searched[arguments[1]] = searched.get(arguments[1], 0) + 1
        return found

    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(disk_cache._thread, "call", call, raising=False)
    forget()
    with caplog.at_level("INFO", "tconv_swap"):
        digests(("centernet_dw", "unet1", "dcgan5"))
    forget()
    assert not caplog.text
    assert searched.keys() == {one.__module__ for one in kept_functions()}
    assert min(searched.values()) >= 2


def test_a_process_that_reads_other_sources_does_not_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sources were changed after this process had read them."""
    (function,) = (one for one in kept_functions() if "grad_weight" in one.__module__)
    layer = layer_of(plan.Problem(SUITE["dcgan5"].geometry, torch.float16, "ieee", False, False))
    wanted = function.__module__, function.__name__, (layer, H200)
    expected = repr(function(layer, H200))
    monkeypatch.setattr(disk_cache, "sources_digest", lambda: b"before")
    with caplog.at_level("INFO", "tconv_swap"):
        assert repr(worker_pool.call(disk_cache.search, b"before", *wanted)) == expected
    assert "search fails in a process beside this one (RuntimeError: the sources of planning" in caplog.text


def test_of_threads_that_need_the_same_search_one_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        searched.append(arguments)
        time.sleep(0.05)
        return function(*arguments)

    def plan_as_others(_: int) -> str:
        disk_cache.search_by(call)
        return plan.plan_forward(problem, False, H200).digest

    problem = plan.Problem(SUITE["unet1"].geometry, torch.float32, "tf32", False, False)
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    forget()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(plan_as_others, range(4)))) == 1
    forget()
    assert len(searched) == 1


def sizes_of(layer: Layer, count: int) -> Iterator[Geometry]:
    rng, g = random.Random(layer.name), layer.geometry
    one_row = g.kernel[0] == g.stride[0] == 1
    for _ in range(count):
        height, width = (1, rng.randint(2, 4000)) if one_row else (rng.randint(2, 200), rng.randint(2, 200))
        size = g._replace(batch=rng.choice((1, 2, 4, 16, 37, 100)), height=height, width=width)
        if min(size.out_height, size.out_width) > 0 and size.elements <= 1 << 28:
            yield size


def test_few_sizes_need_a_kernel_that_no_usual_size_has() -> None:
    """In the background a new layer is planned for the usual sizes."""
    known = other = 0
    for name in LAYERS:
        layer = SUITE[name]
        problem = plan.Problem(layer.geometry, torch.float32, "tf32", False, False)

        def kernels_of(size: Geometry, problem: plan.Problem = problem, bias: bool = layer.bias) -> set[Any]:
            posed = problem._replace(geometry=size)
            plans = (
                plan.plan_forward(posed, bias, H200),
                plan.plan_backward(posed, (True, True, bias), H200),
            )
            return {one.kernel for made in plans for one in made.launches}

        usual = set().union(*map(kernels_of, usual_sizes(layer.geometry)))
        needed = [kernels_of(size) <= usual for size in sizes_of(layer, 15)]
        known, other = known + sum(needed), other + len(needed) - sum(needed)
    assert known + other > 90
    assert known >= 0.9 * (known + other)


def test_other_sizes_begin_with_those_beside_a_size() -> None:
    size = SUITE["unet1"].geometry
    found = other_sizes(size)
    changes = [
        (one.batch / size.batch, one.height / size.height, one.width / size.width) for one in found[:8]
    ]
    assert changes == [
        *((0.5, 1, 1), (1, 0.5, 1), (1, 1, 0.5), (2, 1, 1), (1, 2, 1), (1, 1, 2)),
        *((1, 0.5, 0.5), (1, 2, 2)),
    ]
    assert set(usual_sizes(size)) <= set(found)
    assert len(found) == len(set(found))
    factors = [
        abs(math.log2(one.batch / size.batch))
        + abs(math.log2(one.height * one.width / size.height / size.width))
        for one in found[8:]
    ]
    assert factors == sorted(factors)


@pytest.mark.parametrize("batch", [0, 1])
def test_other_sizes_of_one_pixel_have_an_output(batch: int) -> None:
    found = other_sizes(Geometry(batch, 8, 1, 1, 8, (2, 2), (2, 2), (1, 1)))
    assert found
    assert all(min(*one.output_shape) > 0 for one in found)
