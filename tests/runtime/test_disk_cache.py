"""Results of planning on disk."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward.implicit_gemm_layout import make_problem, of_any_size
from tconv_swap.kernels.forward.selection import kernels_of
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime import disk_cache

H200 = Device("sm_90a", 132, 227 << 10)
LAYER = make_problem(
    Geometry(1, 64, 16, 16, 32, (4, 4), (2, 2), (1, 1)), torch.float16, "ieee", False, False, False
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    return tmp_path / "plans"


class Planner:
    """Counts the searches of a function; ``in_a_new_process`` forgets what is in memory."""

    def __init__(self) -> None:
        self.searches = 0

    def in_a_new_process(self) -> Callable[[Hashable, int], tuple[Hashable, int]]:
        @disk_cache.disk_cache
        def search(layer: Hashable, limit: int) -> tuple[Hashable, int]:
            self.searches += 1
            return layer, limit

        return search


def geometry(channels: int) -> Geometry:
    return Geometry(1, channels, 8, 8, 4, (2, 2))


def test_a_later_process_does_not_search(directory: Path) -> None:
    planner = Planner()
    for _ in range(3):
        search = planner.in_a_new_process()
        assert search(geometry(8), 4) == search(geometry(8), 4) == (geometry(8), 4)
    assert planner.searches == 1
    assert search(geometry(16), 4) == (geometry(16), 4)
    assert search(geometry(8), 3) == (geometry(8), 3)
    assert planner.searches == 3
    assert len(list(directory.iterdir())) == 3


@pytest.mark.parametrize(
    "content", [b"", b"damaged", pickle.dumps(1)[:-1], b"cno_such_module\nno_such_name\n."]
)
def test_a_damaged_file_is_written_anew(content: bytes, directory: Path) -> None:
    planner = Planner()
    planner.in_a_new_process()(geometry(8), 4)
    (file,) = directory.iterdir()
    file.write_bytes(content)
    for _ in range(2):
        assert planner.in_a_new_process()(geometry(8), 4) == (geometry(8), 4)
    assert planner.searches == 2


def test_only_what_is_kept_is_returned(directory: Path) -> None:
    planner = Planner()
    with pytest.raises(disk_cache.NotKeptError), disk_cache.only_kept():
        planner.in_a_new_process()(geometry(8), 4)
    assert planner.searches == 0
    assert not directory.exists()
    planner.in_a_new_process()(geometry(8), 4)
    with disk_cache.only_kept():
        assert planner.in_a_new_process()(geometry(8), 4) == (geometry(8), 4)
    assert planner.in_a_new_process()(geometry(16), 4) == (geometry(16), 4)
    assert planner.searches == 2


def test_without_a_directory_every_process_searches(directory: Path) -> None:
    directory.write_text("no directory")
    planner = Planner()
    for _ in range(2):
        assert planner.in_a_new_process()(geometry(8), 4) == (geometry(8), 4)
    assert planner.searches == 2


def test_other_sources_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner()
    planner.in_a_new_process()(geometry(8), 4)
    monkeypatch.setattr(disk_cache, "sources_digest", lambda: b"of another version")
    planner.in_a_new_process()(geometry(8), 4)
    assert planner.searches == 2


def test_kernels_are_the_same_from_disk() -> None:
    layer = of_any_size(LAYER)
    kernels_of.cache_clear()
    searched = kernels_of(layer, H200)
    kernels_of.cache_clear()
    assert kernels_of(layer, H200) == searched
    assert kernels_of(layer, H200) is not searched
    kernels_of.cache_clear()


def test_what_a_problem_has_computed_does_not_change_its_file(directory: Path) -> None:
    """Properties that are computed once are kept in the problem, but are no part of it."""
    planner, layers = Planner(), [of_any_size(LAYER), of_any_size(LAYER)._replace()]
    planner.in_a_new_process()(layers[0], 4)
    assert (layers[1].flat, layers[1].positions, layers[1].phases) == (False, (64, 64), (2, 2))
    assert layers[0] == layers[1]
    assert planner.in_a_new_process()(layers[1], 4) == (layers[0], 4)
    assert planner.searches == 1
    assert len(list(directory.iterdir())) == 1
