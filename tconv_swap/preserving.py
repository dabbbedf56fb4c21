"""Runs networks and restores their state afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tconv_swap.computed import ComputedState
from tconv_swap.freezing import FrozenState
from tconv_swap.module_state import ModuleState, unique_tensors


@contextmanager
def preserved(*models: nn.Module) -> Iterator[None]:
    """Restores the networks after the block, whatever it does to them and also if it raises.

    Covers parameters and buffers (the same objects with the same values in the same memory, so that a loss computed
    before can still be differentiated), tensors that are computed from them and kept as attributes (`weight` of
    `torch.nn.utils.weight_norm`; the same objects), the frozen layers (`tconv_swap.freeze`), gradients,
    `requires_grad`, training flags, and the random state of Python, of PyTorch's CPU generator and of the generator of
    every GPU that the networks use. Inside, every gradient starts as None, so that gradients of the user are neither
    added to nor freed. Costs one copy of all parameters and buffers, on their own device; on the CPU if they would take
    more than half of the GPU's free memory.

    Not covered: uninitialised (lazy) parameters, and all other attributes that are neither parameters nor
    buffers.
    """
    modules = list({id(m): m for model in models for m in model.modules()}.values())
    flags = [(module, module.training) for module in modules]
    computed = ComputedState(modules)
    tensors = unique_tensors(modules)
    frozen = FrozenState(modules)
    values = ModuleState(modules)
    gradients = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]
    python_random = random.getstate()
    gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=gpus):
        try:
            for tensor, _, _ in gradients:
                tensor.grad = None
            yield
        finally:
            random.setstate(python_random)
            values.put_back()
            computed.put_back()
            for module, training in flags:
                module.training = training
            for tensor, requires_grad, gradient in gradients:
                # Tensors made in inference mode raise even if nothing changes.
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
            frozen.put_back()
