"""A search for the best way where there is too little memory for the verification or for the last comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import generator, images

import tconv_swap
from tconv_swap.measurement.timing import Timing
from tconv_swap.verification import VerifyReport
from tconv_swap.ways import check, optimize
from tconv_swap.ways.run import Running
from tconv_swap.ways.way import Way


@pytest.mark.parametrize("failing", [1, 2])
def test_a_way_for_whose_verification_memory_is_missing_is_verified_alone_or_not_chosen(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The first verification has no memory, and in the second case neither has the one that follows it."""
    monkeypatch.setattr(optimize, "network_variant", lambda running, *_: running)
    monkeypatch.setattr(optimize, "time_interleaved", faster_in_channels_last)
    built: list[set[str]] = []

    def verify_way(*arguments: Any, **options: Any) -> VerifyReport:
        built.append({made.name for made in searched.search.built})
        if len(built) <= failing:
            raise torch.OutOfMemoryError
        return check.verify_way(*arguments, **options)

    monkeypatch.setattr(optimize, "verify_way", verify_way)
    searched = optimize.WaySearch(generator(), images(), training=False)
    ways = ["pytorch+channels_last", "ours", "ours+channels_last"]
    found = searched.fastest(searched.chosen_from(ways), None)
    assert built[0] == {"pytorch", "pytorch+channels_last", "ours+channels_last"}
    assert built[1] == {"pytorch", "pytorch+channels_last"}
    assert found.best.name == ("pytorch+channels_last" if failing == 1 else "ours+channels_last")
    failures = [row.failure for row in found.rows if row.failure]
    assert failures == ([] if failing == 1 else ["not enough memory to verify it"])


def test_ways_that_do_not_fit_side_by_side_have_no_last_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(variants: dict[str, Running], **options: Any) -> dict[str, Timing]:
        if len(variants) > 2:
            raise torch.OutOfMemoryError
        return faster_in_channels_last(variants)

    monkeypatch.setattr(optimize, "network_variant", lambda running, *_: running)
    monkeypatch.setattr(optimize, "time_interleaved", time)
    monkeypatch.setattr(optimize, "bound_of", lambda *_: "")
    _, run, report = tconv_swap.optimize(generator(), images(), ways=["pytorch+channels_last", "ours"])
    (stage,) = report.stages
    assert stage.best.name == "pytorch+channels_last"
    assert stage.finals == {}
    assert stage.notes == ["not enough memory to time the best ways side by side"]
    assert "side by side" in str(report)
    assert run.way == stage.best


def test_what_does_not_fit_side_by_side_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen way is profiled next, and needs the memory of the others."""

    def time(variants: dict[str, Running], **_: Any) -> dict[str, Timing]:
        if len(variants) > 2:
            raise torch.OutOfMemoryError
        return faster_in_channels_last(variants)

    monkeypatch.setattr(optimize, "network_variant", lambda running, *_: running)
    monkeypatch.setattr(optimize, "time_interleaved", time)
    searched = optimize.WaySearch(generator(), images(), training=False)
    found = searched.fastest(searched.chosen_from(["pytorch+channels_last", "ours"]), None)
    searched.compare(found)
    assert {way.name for way in searched.search.built} == {"pytorch", found.best.name}


def faster_in_channels_last(variants: dict[str, Running], **_: Any) -> dict[str, Timing]:
    """Stands in for `time_interleaved` of networks; PyTorch's layers are the fastest."""

    def milliseconds(found: Way) -> float:
        return (1.0 if found.layout == "channels_last" else 2.0) + 0.5 * (found.layers == "ours")

    found = {name: milliseconds(running.way) for name, running in variants.items()}
    return {name: Timing(ms, ms, ms, 5, (ms,) * 5) for name, ms in found.items()}
