"""`verify` restores networks, and begins every run from the same state."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import tconv_swap
from tconv_swap import module_state
from tconv_swap.module_state import ModuleState

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Codebook(nn.Module):
    """As in a VQ-VAE whose codes follow what they stand for: parameters are replaced, and written to, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(16, 8))
        self.sums = nn.Parameter(torch.randn(16, 8), requires_grad=False)
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.permute(0, 2, 3, 1).reshape(-1, 8)
        chosen = nn.functional.one_hot(torch.cdist(flat, self.codes).argmin(1), 16).float()
        nearest = (chosen @ self.codes).view(x.shape[0], x.shape[2], x.shape[3], 8).permute(0, 3, 1, 2)
        if self.training:
            self.counts = self.counts * 0.9 + 0.1 * chosen.sum(0)
            self.sums.data.copy_(self.sums * 0.9 + 0.1 * chosen.t() @ flat)
            self.codes = nn.Parameter((self.sums / self.counts.unsqueeze(1)).detach())
            self.register_buffer("seen", torch.ones(1))
        return x + (nearest - x).detach()


def autoencoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Codebook(), nn.ConvTranspose2d(8, 3, 4, 2, 1))


def test_parameters_that_a_forward_updates_are_restored() -> None:
    original = autoencoder()
    swapped = tconv_swap.swap_layers(original, inplace=False)
    networks = original, swapped
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    objects = [dict(network.named_parameters()) for network in networks]
    report = tconv_swap.verify(original, swapped, X)
    assert report.passed, report.failures
    assert not any("not deterministic" in note for note in report.notes), report.notes
    for network, values, parameters in zip(networks, before, objects, strict=True):
        assert list(network.state_dict()) == list(values)
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in values.items())
        assert all(parameters[name] is parameter for name, parameter in network.named_parameters())


def test_updates_in_a_forward_excuse_no_error() -> None:
    original = autoencoder()
    swapped = tconv_swap.swap_layers(original, inplace=False)
    swapped[2].register_forward_hook(lambda layer, _, y: y + 0.4 if layer.training else y)
    assert not tconv_swap.verify(original, swapped, X).passed


@pytest.mark.parametrize("modes", [("train", "eval"), ("eval", "train")], ids=" then ".join)
def test_a_frozen_network_is_verified_frozen_and_stays_so(
    modes: tuple[Literal["eval", "train"], Literal["eval", "train"]],
) -> None:
    original = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)).eval()
    swapped = tconv_swap.freeze(tconv_swap.swap_layers(original, inplace=False))
    seen: list[tuple[bool, bool, bool]] = []
    swapped[1].register_forward_hook(
        lambda layer, *_: seen.append((layer.training, torch.is_grad_enabled(), layer.tconv_is_frozen()))
    )
    assert tconv_swap.verify(original, swapped, X, modes=modes).passed
    assert swapped[1].tconv_is_frozen()
    assert (False, False, True) in seen  # as it is served
    assert not any(frozen for training, _, frozen in seen if training)


def test_buffers_that_cannot_be_written_count_as_unchanged() -> None:
    original = nn.Sequential(nn.ConvTranspose2d(3, 3, 4, 2, 1))
    original.register_buffer("scale", torch.ones(1).expand(4))
    report = tconv_swap.verify(original, tconv_swap.swap_layers(original, inplace=False), X)
    assert report.passed, report.failures
    assert not [check for check in report.checks if check.kind == "buffer"]


def test_shared_parameters_are_saved_once() -> None:
    original, swapped = nn.Linear(3, 3), nn.Linear(3, 3)
    swapped.weight = original.weight
    first = ModuleState(original.modules())
    second = ModuleState(swapped.modules(), first)
    kept = [first.value_of(original.weight), first.value_of(original.bias), second.value_of(swapped.bias)]
    assert second.value_of(swapped.weight) is kept[0]
    assert first.value_of(swapped.bias) is None
    assert second.value_of(original.bias) is None
    expected = [value.clone() for value in kept if value is not None]
    with torch.no_grad():
        for parameter in (*original.parameters(), swapped.bias):
            parameter.zero_()
    second.put_back()
    assert torch.equal(swapped.weight, expected[0])
    assert torch.equal(swapped.bias, expected[2])
    assert not original.bias.any()
    first.put_back()
    assert torch.equal(original.bias, expected[1])


def test_verify_keeps_the_parameters_of_a_shared_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    saved = module_state.save
    monkeypatch.setattr(module_state, "save", lambda tensors: copied.extend(tensors) or saved(tensors))
    original = autoencoder()
    shared = {id(parameter): parameter for parameter in original.parameters()}
    swapped = tconv_swap.swap_layers(copy.deepcopy(original, shared))
    report = tconv_swap.verify(original, swapped, X, reference="original")
    assert report.passed, report.failures
    assert {sum(each is parameter for each in copied) for parameter in original.parameters()} == {1}
