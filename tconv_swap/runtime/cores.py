"""How many cores this process may use."""

from __future__ import annotations

import os


def usable() -> int:
    """Returns the number of cores that this process may run on: in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share() -> int:
    """Returns this process's share of them, at least one: torchrun, which says how many processes it has started on
    this host, starts them together."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, usable() // max(1, int(ranks) if ranks.isdigit() else 1))
