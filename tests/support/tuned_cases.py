"""Shared by the tests of tuned winners: a GPU that this machine lacks, and an empty cache directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tconv_swap.cuda import tuned


@contextmanager
def pretended_machine(
    monkeypatch: pytest.MonkeyPatch, directory: Path, facts: dict[str, str]
) -> Iterator[dict[str, str]]:
    """``facts``, which the test may change, describe the machine for which the measurements are valid."""
    monkeypatch.setattr(tuned, "cache_directory", lambda: directory)
    monkeypatch.setattr(tuned, "machine", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: facts["gpu"])
    tuned.winners.cache_clear()
    try:
        yield facts
    finally:
        tuned.winners.cache_clear()
