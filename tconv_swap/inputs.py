"""The container for a network's inputs, which `verify` and `benchmark` take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns `value` with `fn` applied to every tensor in it; containers are rebuilt, anything else is kept.

    Knows tensors, lists, tuples, named tuples, mappings (the class of a dict is kept) and dataclass instances.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(fn, item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: map_tensors(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **changes)
    return value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in nested containers, with a readable path such as `0`, `1.boxes`, `image`."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, `model(*args, **kwargs)`: tensors at any nesting, and anything else."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Makes `Inputs` of a value: a tensor is the only argument, a tuple or list the positional ones, a dict the
        keyword ones.

        A network whose one argument is a list of images therefore needs `([image, image],)`, or an `Inputs`.

        Raises:
            TypeError: for anything else, and for a dict whose keys are not all strings.
        """
        if isinstance(value, Inputs):
            return value
        if isinstance(value, Tensor):
            return cls((value,))
        if isinstance(value, list | tuple):
            return cls(tuple(value))
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(
                    f"inputs given as a dict are keyword arguments, but {wrong[0]!r} is not a string"
                )
            return cls((), dict(value))
        raise TypeError(
            "inputs must be a tensor, a tuple or list of positional arguments, a dict of keyword arguments "
            f"or tconv_swap.inputs.Inputs, not {type(value).__name__}"
        )

    def __call__(self, model: Callable[..., Any]) -> Any:
        """Calls `model(*args, **kwargs)`."""
        return model(*self.args, **self.kwargs)

    def map(self, fn: Callable[[Tensor], Any]) -> Inputs:
        """Returns the same arguments with `fn` applied to every tensor, however deeply nested."""
        return Inputs(map_tensors(fn, self.args), map_tensors(fn, self.kwargs))

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Returns every tensor with its path: `0`, `1.mask` for positional arguments, `image` for keyword ones."""
        return [*named_tensors(self.args), *named_tensors(self.kwargs)]

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Inputs:
        """Returns the arguments with every tensor moved to `device`, floating-point ones to `dtype`, 4-D ones to
        `memory_format`."""

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            moved = tensor.to(device=device, dtype=wanted)
            if memory_format is not None and moved.dim() == 4:
                moved = moved.contiguous(memory_format=memory_format)
            return moved

        return self.map(move)

    def describe(self) -> str:
        """Returns one line for a report: `2x100x1x1 float32` or `image 1x3x64x64 float32, label 1 int64`."""

        def text(name: str, tensor: Tensor) -> str:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            label = "" if name == "0" and len(self.args) == 1 and not self.kwargs else f"{name} "
            return f"{label}{shape} {str(tensor.dtype).removeprefix('torch.')}"

        tensors = [text(name, tensor) for name, tensor in self.named_tensors()]
        return ", ".join(tensors) or "no tensors"


def random_inputs(
    shapes: Sequence[Sequence[int]], model: nn.Module | None = None, *, seed: int = 0, high: int | None = None
) -> Inputs:
    """Returns standard normal tensors, one per positional argument, on the model's device and in its dtype.

    They are drawn on the CPU from a separate generator, so that a seed gives the same numbers on every device and the
    global random state does not change.

    Args:
        shapes: one shape per positional argument.
        model: its first parameter gives the device, its first floating-point one the dtype.
        seed: of the generator.
        high: if given, int64 numbers in `[0, high)` instead (for an embedding).
    """
    device, dtype = model_device(model), model_dtype(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(tuple(shape), generator=generator).to(device, dtype)
        if high is None
        else torch.randint(high, tuple(shape), generator=generator).to(device)
        for shape in shapes
    ]
    return Inputs(tuple(tensors))


def model_device(model: nn.Module | None) -> torch.device:
    """Returns the device of the first parameter or buffer; the CPU if there is none."""
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def model_dtype(model: nn.Module | None) -> torch.dtype:
    """Returns the dtype of the first floating-point parameter or buffer; float32 if there is none."""
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
