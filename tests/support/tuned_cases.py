"""What the tests of tuned winners share: a GPU that is not there, and a cache directory of its own."""

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
    """``facts``, which the test may change, are what the machine's measurements hold for."""
    monkeypatch.setattr(tuned, "cache_directory", lambda: directory)
    monkeypatch.setattr(tuned, "machine", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: facts["gpu"])
    tuned.winners.cache_clear()
    try:
        yield facts
    finally:
        tuned.winners.cache_clear()
