"""Describes a transposed convolution in a short line."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def describe_layer(module: Any) -> str:
    """Returns channels and arguments, such as ``"128->64 k4 s2 p1 bias"``, without arguments at their default."""
    if not hasattr(module, "kernel_size"):  # a traced module keeps no attributes
        return "of unknown geometry"
    parts = [f"{module.in_channels or '?'}->{module.out_channels}", f"k{_short(module.kernel_size)}"]
    arguments = (
        ("s", module.stride, 1),
        ("p", module.padding, 0),
        ("op", module.output_padding, 0),
        ("d", module.dilation, 1),
        ("g", module.groups, 1),
    )
    parts += [
        f"{letter}{_short(value)}" for letter, value, default in arguments if _short(value) != str(default)
    ]
    if _has_bias(module):
        parts.append("bias")
    return " ".join(parts)


def _short(value: int | tuple[int, ...]) -> str:
    """Returns ``4`` for (4, 4), ``3x5`` for (3, 5)."""
    values = [str(v) for v in value] if isinstance(value, tuple | list) else [str(value)]
    return values[0] if len(set(values)) == 1 else "x".join(values)


def _has_bias(module: Any) -> bool:
    if is_parametrized(module, "bias"):  # reading it would compute it
        return True
    return (module.bias() if callable(module.bias) else module.bias) is not None  # quantized: a method


def count_parameters(module: nn.Module) -> int:
    """Returns the number of elements of its parameters."""
    return sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))
