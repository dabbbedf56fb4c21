"""Times each block (a norm, and the activation behind it) by itself, with PyTorch's modules and with our kernels, on
the tensors that reach it in the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.modules import AllBlocks
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.bench import Comparison
from tconv_swap.measurement.modes import cudnn_benchmark
from tconv_swap.measurement.timing import Variant, time_interleaved
from tconv_swap.preserving import preserved

#: Seconds for both sides of one stage of a block.
BUDGET_S = 0.3


@dataclass
class BlockTimes:
    """The observations and measurements of ``time_blocks``.

    Attributes:
        computed: the dotted names of the norms that our kernels compute on these inputs.
        complete: whether the network ran in each requested mode, so that ``computed`` has all norms.
        comparisons: for each of them ``forward`` in eval mode and ``step``, forward and backward in train mode; blocks
            with equal calls are measured once.
        notes: what could not be measured, and why.
    """

    computed: set[str] = field(default_factory=set)
    complete: bool = True
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Alike:
    """Blocks with equal calls: the names of norm and activation of each, the input of the first, and the added
    tensor."""

    names: list[tuple[str, str]]
    x: Tensor
    added: Tensor | None


def time_blocks(
    original: nn.Module,
    swapped: nn.Module,
    inputs: Inputs,
    *,
    backward: bool,
    timed: bool = True,
    warmup: int | None = None,
    iters: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> BlockTimes:
    """Finds the blocks of ``swapped`` that our kernels compute, and times them beside the modules of ``original``.

    The state of both networks is restored.

    Args:
        original, swapped: the networks; their modules have the same names.
        backward: also times them in train mode.
        timed: False only finds the blocks.
        warmup, iters: as in ``time_interleaved``.
        progress: called with the next step.
    """
    found = BlockTimes()
    settings = {"warmup": warmup, "iters": iters, "budget_s": BUDGET_S}
    with preserved(original, swapped), cudnn_benchmark():
        for training in (False, True) if backward else (False,):
            original.train(training), swapped.train(training)
            try:
                groups = _seen(swapped, inputs, training)
            except Exception as error:  # a user's forward may raise anything; the verification reports more
                found.complete = False
                mode = "train" if training else "eval"
                found.notes.append(
                    f"blocks in {mode} mode not timed: the swapped network raises {_reason(error)}"
                )
                continue
            found.computed |= {name for group in groups for name, _ in group.names}
            for group in groups if timed else ():
                progress(f"timing block {group.names[0][0]}")
                try:
                    times = time_interleaved(
                        {
                            "original": _variant(_block(original, group, ours=False), group, training),
                            "swapped": _variant(_block(swapped, group, ours=True), group, training),
                        },
                        device=group.x.device,
                        **settings,  # type: ignore[arg-type]
                    )
                except torch.AcceleratorError:  # the GPU has failed: no later result can be trusted
                    raise
                except Exception as error:
                    found.notes.append(f"block {group.names[0][0]} not timed: {_reason(error)}")
                    continue
                found.comparisons += [
                    Comparison(name, "step" if training else "forward", times["original"], times["swapped"])
                    for name, _ in group.names
                ]
    return found


def _seen(swapped: nn.Module, inputs: Inputs, training: bool) -> list[_Alike]:
    """Returns the blocks that our kernels compute in one forward pass."""
    names = {id(module): name for name, module in swapped.named_modules()}
    groups: dict[Any, _Alike] = {}
    seen: set[str] = set()

    def observe(
        norm: nn.Module,
        activation: nn.Module | None,
        x: Tensor,
        output: Tensor,
        before: dict[str, Tensor],
        added: Tensor | None = None,
    ) -> None:
        name = names.get(id(norm))
        if name is None or name in seen:
            return
        seen.add(name)
        key = (str(norm), norm.training, str(activation), x.shape, x.stride(), x.dtype, added is None)
        if key not in groups:
            groups[key] = _Alike([], x.detach(), None if added is None else added.detach())
        groups[key].names.append((name, names.get(id(activation), "")))

    call.observers.append(observe)
    try:
        with torch.set_grad_enabled(training):
            inputs.map(torch.clone)(swapped)
    finally:
        call.observers.remove(observe)
    return list(groups.values())


class _Sum(nn.Module):
    """A norm and an activation with a sum between them."""

    def __init__(self, norm: nn.Module, activation: nn.Module, ours: bool) -> None:
        super().__init__()
        self.norm, self.activation, self.ours = norm, activation, ours

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        output = call.computed(self.norm, self.activation, x, added) if self.ours else None
        return self.activation(self.norm(x) + added) if output is None else output


def _block(model: nn.Module, group: _Alike, *, ours: bool) -> nn.Module:
    modules = [model.get_submodule(name) for name in group.names[0] if name]
    if group.added is not None:
        return _Sum(modules[0], modules[1], ours)
    return (AllBlocks if ours else nn.Sequential)(*modules)


def _variant(block: nn.Module, group: _Alike, training: bool) -> Variant:
    given = [one for one in (group.x, group.added) if one is not None]
    if not training:

        def evaluate(_: object) -> Tensor:
            with torch.no_grad():
                output: Tensor = block(*given)
            return output

        return Variant(evaluate)
    gradient: list[Tensor] = []

    def step(leaves: list[Tensor]) -> object:
        with torch.enable_grad():
            output = block(*leaves)
        if not gradient:
            gradient.append(torch.randn_like(output))
        wanted = [*leaves, *(p for p in block.parameters() if p.requires_grad)]
        return torch.autograd.grad(output, wanted, gradient)

    return Variant(step, lambda: [one.detach().requires_grad_() for one in given])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
