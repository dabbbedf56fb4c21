"""The few schedules that a layer keeps for all its sizes: those with the least regret, by its definition."""

from __future__ import annotations

import math
import random

import pytest
from sampling import sampled

from tconv_swap.kernels.common.schedules import MAX_REGRET, select_covering

Times = dict[str, list[float]]


def regret_of(chosen: tuple[str, ...], times: Times, weights: list[float]) -> float:
    """Returns the sum of the logarithms of how many times as long the best chosen one takes as the best of all."""
    total = 0.0
    for size, weight in enumerate(weights):
        best = min(row[size] for row in times.values())
        if best < math.inf:
            reached = min(times[name][size] for name in chosen)
            total += weight * math.log(min(MAX_REGRET, reached / best))
    return total


def random_times(rng: random.Random) -> Times:
    sizes = rng.randint(1, 6)
    return {
        f"tile {index}": [
            math.inf if rng.random() < 0.2 else float(rng.choice((1, 2, 3, 5, 10**6))) for _ in range(sizes)
        ]
        for index in range(rng.randint(1, 7))
    }


@pytest.mark.parametrize("seed", sampled(range(40), 2))
def test_no_other_schedule_added_or_exchanged_has_less_regret(seed: int) -> None:
    rng = random.Random(seed)
    times = random_times(rng)
    weights = [rng.choice((1.0, 0.5, 0.25)) for _ in next(iter(times.values()))]
    first = [name for name in times if rng.random() < 0.4]
    limit = rng.randint(1, 4)
    found = select_covering(times, weights, first, limit)
    assert 1 <= len(found) <= limit
    assert found[0] in (first or times)
    regret = regret_of(found, times, weights)
    if len(found) < limit:
        assert all(regret_of((*found, other), times, weights) >= regret - 1e-9 for other in times)
    # The last one was exchanged last: no other is better in its place.
    others = times if len(found) > 1 else first or times
    assert all(regret_of((*found[:-1], other), times, weights) >= regret - 1e-9 for other in others)
    # It is no worse than the best schedule alone.
    assert regret <= min(regret_of((one,), times, weights) for one in first or times) + 1e-9


def test_of_equals_the_first_is_taken_and_no_more_than_help() -> None:
    times = {"a": [1.0, 9.0], "b": [1.0, 9.0], "c": [9.0, 1.0], "d": [9.0, 1.0]}
    assert select_covering(times, [1.0, 1.0], (), 4) == ("a", "c")
    assert select_covering(times, [1.0, 1.0], ("d",), 4) == ("d", "a")
    assert select_covering(times, [1.0, 2.0], (), 1) == ("c",)
    assert select_covering({}, [], (), 4) == ()


def test_the_best_alone_is_exchanged_where_two_others_are_better_together() -> None:
    times = {"a": [2.0, 2.0], "b": [1.0, 9.0], "c": [9.0, 1.0]}
    assert select_covering(times, [1.0, 1.0], (), 1) == ("a",)
    assert set(select_covering(times, [1.0, 1.0], (), 2)) == {"b", "c"}


def test_a_size_that_nothing_computes_does_not_count() -> None:
    never = math.inf
    assert select_covering({"a": [never, 2.0], "b": [never, 1.0]}, [1.0, 1.0], (), 2) == ("b",)
    assert select_covering({"a": [1.0, never], "b": [5.0, 5.0]}, [1.0, 1.0], (), 1) == ("b",)
