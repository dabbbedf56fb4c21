"""Runs a network in float64 with the random numbers of another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SameDraws(TorchDispatchMode):
    """Lets a float64 run draw the random numbers that the same network draws in `dtype`.

    Most generators give other numbers in float64 (and dropout another mask on a GPU); a float64 run with other noise is
    not the truth.
    """

    def __init__(self, dtype: torch.dtype, default_dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._default_dtype = default_dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        dropout = func is torch.ops.aten.native_dropout.default and args[2] is not False
        if dropout and args[0].dtype == torch.float64:
            # Only the mask is random, and it must not reduce the accuracy of the tensor that it is applied to.
            scaled, mask = func(torch.ones_like(args[0], dtype=self._dtype), *args[1:], **kwargs)
            keep = 1.0 - args[1]
            return args[0] * mask / keep if keep > 0 else args[0] * scaled, mask
        schema = func._schema
        dtype = next((a for a in schema.arguments if a.name == "dtype"), None)
        # Without a dtype, randint and randperm give int64, and rand_like the dtype of its argument.
        defaulted = dtype is not None and dtype.default_value is None and kwargs.get("dtype") is None
        if kwargs.get("dtype") is torch.float64:
            kwargs = {**kwargs, "dtype": self._dtype}
        elif defaulted and not any(isinstance(a, Tensor) for a in args):
            kwargs = {**kwargs, "dtype": self._default_dtype}
        narrowed = [self._narrow(a) for a in args]
        drawn = func(*narrowed, **{k: self._narrow(v) for k, v in kwargs.items()})
        for argument, given, used in zip(schema.arguments, args, narrowed, strict=False):
            if used is not given and argument.alias_info is not None and argument.alias_info.is_write:
                given.copy_(used)
        for given, used in zip(args, narrowed, strict=True):
            if drawn is used:
                return given
        return torch.utils._pytree.tree_map_only(Tensor, self._widen, drawn)

    def _narrow(self, value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.to(self._dtype) if narrow else value

    def _widen(self, value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value


@contextmanager
def in_float64(dtype: torch.dtype, devices: list[torch.device]) -> Iterator[None]:
    """Makes the tensors that a network creates float64 too; random numbers are those that it draws in `dtype`."""
    default = torch.get_default_dtype()
    kinds = sorted({device.type for device in devices} | {"cpu"})
    off = [torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext() for kind in kinds]
    torch.set_default_dtype(torch.float64)
    try:
        with SameDraws(dtype, default):
            for context in off:
                context.__enter__()
            try:
                yield
            finally:
                for context in reversed(off):
                    context.__exit__(None, None, None)
    finally:
        torch.set_default_dtype(default)
