"""What the tests of ways share: CUDA graphs without a GPU."""

from __future__ import annotations

import pytest
import torch
from graph_cases import Stand

from tconv_swap.ways import way


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    found = Stand()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", found)
    monkeypatch.setattr(way, "GRAPH_DEVICES", ("cpu", "cuda"))
    return found
