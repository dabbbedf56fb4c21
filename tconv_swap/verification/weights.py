"""Checks that two networks hold the same parameters and buffers: a swap changes none."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.verification.compare import mismatch
from tconv_swap.verification.runs import same_numbers


def differing_weights(original: nn.Module, swapped: nn.Module) -> list[str]:
    """Returns one line for each parameter or buffer that only one of them has, or that has another dtype, shape or
    value.

    Differences that no input reaches, or that a normalisation or a larger neighbour hides, show only here.
    """
    found = []
    for kind, before, after in (
        ("parameter", original.named_parameters, swapped.named_parameters),
        ("buffer", original.named_buffers, swapped.named_buffers),
    ):
        theirs, ours = (dict(named(remove_duplicate=False)) for named in (before, after))
        for name in dict.fromkeys([*theirs, *ours]):
            wrong = _difference(theirs.get(name), ours.get(name))
            if wrong:
                found.append(f"{kind} {name} {wrong}")
    return found


def _difference(original: Tensor | None, swapped: Tensor | None) -> str:
    if original is swapped:
        return ""
    if original is None or swapped is None:
        return "is missing" if swapped is None else "is one that the original does not have"
    if is_lazy(original) or is_lazy(swapped):
        return ""
    # The sizes of a nested tensor cannot be compared with another's shape.
    nested = original.is_nested and swapped.is_nested
    wrong = "" if nested else mismatch(swapped, original)
    if not wrong and not same_numbers(swapped.detach(), original.detach()):
        wrong = "has other values than the original's"
    return wrong
