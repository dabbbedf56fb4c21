"""Networks whose buffers and parameters are sparse or nested: swapped, verified, timed and written like any other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_cases import run
from torch import Tensor, nn

from tconv_swap import swap_layers, verify
from tconv_swap.bits import same_bits
from tconv_swap.computed import deep_copy
from tconv_swap.preserving import preserved

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, held, parameter=False):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)
        if parameter:
            self.held = nn.Parameter(held)
        else:
            self.register_buffer("held", held)

    def forward(self, x):
        held = self.held
        if self.training and not held.requires_grad:
            held.mul_(0.5)
        total = sum(part.sum() for part in held.unbind()) if held.is_nested else held.to_dense().sum()
        return self.up(x) * total
"""


def _ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 0.5)], layout=layout)


HELD: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: _ragged(torch.strided),
    "jagged": lambda: _ragged(torch.jagged),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype) s")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "holding", raising=False)
    Path("holding.py").write_text(NETWORK)
    import holding  # type: ignore[import-not-found]

    return holding.Net  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", HELD)
def test_from_file_to_file(network: type[nn.Module], kind: str) -> None:
    torch.save(network(HELD[kind]()), "model.pt")
    arguments = ("--unsafe-pickle", "--device", "cpu", "--warmup", "0", "--iters", "1", "--out", "fast.pt")
    result = run("model.pt", *arguments)
    assert result.exit_code == 0, result.output
    written = torch.load("fast.pt", weights_only=False)
    assert type(written.up).__module__ == "tconv_swap.layer"
    assert same_bits(written.held, HELD[kind]())
    for command in ("explain", "tune"):
        assert run(command, "model.pt", "--unsafe-pickle", "--device", "cpu").exit_code == 0


@pytest.mark.parametrize("kind", ["coo"])
def test_a_sparse_or_nested_parameter(network: type[nn.Module], kind: str) -> None:
    torch.save(network(HELD[kind](), parameter=True), "model.pt")
    result = run("model.pt", "--unsafe-pickle", "--device", "cpu", "--no-benchmark")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", HELD)
def test_a_changed_value_is_found_and_a_run_is_undone(network: type[nn.Module], kind: str) -> None:
    original = network(HELD[kind]())
    swapped = swap_layers(deep_copy(original))
    x = torch.randn(2, 4, 3, 3)
    with preserved(original):
        original.train()(x)
        assert not same_bits(original.held, HELD[kind]())
    assert same_bits(original.held, HELD[kind]())
    assert verify(original, swapped, x).passed
    assert same_bits(swapped.held, HELD[kind]())
    swapped.held.mul_(2.0)
    report = verify(original, swapped, x)
    assert "buffer held has other values than the original's" in report.failures


def test_ragged_tensors_differ_in_their_parts() -> None:
    first, other = (torch.nested.nested_tensor([torch.zeros(size, 3), torch.zeros(4, 3)]) for size in (2, 3))
    assert same_bits(first, first.clone())
    assert not same_bits(first, other)


def test_a_copy_shares_nothing(network: type[nn.Module]) -> None:
    for make in HELD.values():
        model = network(make())
        model.aside = make()
        copied = deep_copy(model)
        assert copied.held is not model.held
        assert copied.aside is not model.aside
        assert same_bits(copied.aside, make())
    shared = network(HELD["csr"]())
    shared.again = shared.held
    copied = deep_copy(shared)
    assert copied.again is copied.held
