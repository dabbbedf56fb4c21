"""The memory format of an output is the one that PyTorch would choose, and computing it is cheap."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch._prims_common import suggest_memory_format

from tconv_swap.checks import output_memory_format

FIRST_CALL = """
import sys, torch
from tconv_swap.checks import output_memory_format
output_memory_format(torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3))
assert "sympy" not in sys.modules
"""


def _anyhow(chance: random.Random) -> torch.Tensor:
    """Returns tensors with up to 5 in every dimension, strides that may overlap or be 0, and often a proper layout."""
    shape = [chance.choice((0, 1, 1, 2, 3, 5)) for _ in range(chance.choice((3, 4, 4, 4)))]
    if chance.random() < 0.5:
        return torch.empty_strided(shape, [chance.choice((0, 1, 1, 2, 3, 5, 10, 30)) for _ in shape])
    tensor = torch.empty(shape)
    if tensor.dim() == 4 and chance.random() < 0.6:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.transpose(*chance.sample(range(tensor.dim()), 2)) if chance.random() < 0.3 else tensor


@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10's own function is not what its operators do of one pixel"
)
def test_the_memory_format_is_pytorchs() -> None:
    chance = random.Random(0)
    plain = torch.empty(2, 3, 4, 5)
    found = []
    for _ in range(2000):
        tensor = _anyhow(chance)
        expected = suggest_memory_format(tensor)
        assert output_memory_format(tensor, plain) == output_memory_format(plain, tensor) == expected
        found.append(expected)
    assert len(set(found)) == 2


def test_a_first_call_imports_no_sympy() -> None:
    """The import would cost every program's first call a second."""
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, timeout=120)
