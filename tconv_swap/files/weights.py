"""Reads, fits and writes weights without a network: state_dicts, checkpoints of Lightning, safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from tconv_swap import op
from tconv_swap.bits import same_bits
from tconv_swap.files.fileformat import LoadError, TorchFile, first_line, printable

#: The keys under which checkpoints keep the state_dict; the first is Lightning's.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "weights", "params_ema", "params")
#: Prefixes that wrappers put in front of every key.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "network.")
_MAX_KEYS_SHOWN = 3


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, on the CPU.

    Raises:
        LoadError: the file is damaged, or the package safetensors is not installed.
    """
    library = _safetensors(path)
    try:
        return library.load_file(path)  # type: ignore[no-any-return]
    except Exception as error:  # SafetensorError, or another error from the sizes of a crafted header
        raise LoadError(f"{printable(path)} is truncated or damaged ({first_line(error)})") from error


def write_safetensors(weights: Mapping[str, Tensor], stream: IO[bytes]) -> None:
    """Raises LoadError if safetensors is not installed."""
    # The format has no strides and no shared storages, so each tensor is written separately.
    separate = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }
    stream.write(_safetensors(Path("safetensors")).save(separate))


def _safetensors(path: Path) -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise LoadError(f"{printable(path)} needs the package safetensors: pip install safetensors") from None
    return safetensors.torch


def is_state_dict(value: object) -> bool:
    """Returns whether ``value`` maps names to tensors and to nothing else."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


@dataclass(frozen=True)
class Found:
    """Weights in a file.

    Attributes:
        weights: the state_dict.
        key: its key in the file; None if the file holds nothing else.
        others: the other keys of the file.
        candidates: the other keys that hold a state_dict too.
    """

    weights: dict[str, Tensor]
    key: str | None = None
    others: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Returns notes for the user on which weights were taken."""
        if self.key is None:
            return []
        line = f"the weights are those under {printable(repr(self.key))} in the file"
        others = f"; there are some under {_quoted(self.candidates)} too (--key)" if self.candidates else ""
        return [line + others]


def find_state_dict(file: TorchFile, content: object, key: str | None = None) -> Found:
    """Returns the state_dict in the content of a file: the value under `key` if one is given, else the whole content,
    or the value under one of the usual keys.

    Raises:
        LoadError: there is no state_dict.
    """
    shown = printable(file.path)
    if isinstance(content, nn.Module):
        raise LoadError(f"{shown} holds a whole network: leave out --model")
    if is_state_dict(content) and key is None:
        return Found(dict(content))  # type: ignore[call-overload]
    if not isinstance(content, Mapping):
        raise LoadError(f"{shown} holds no state_dict, but a {type(content).__name__}")
    candidates = [name for name, value in content.items() if isinstance(name, str) and is_state_dict(value)]
    taken = next((name for name in (_USUAL_KEYS if key is None else (key,)) if name in candidates), None)
    if taken is not None:
        return Found(
            dict(content[taken]),
            taken,
            tuple(str(name) for name in content if name != taken),
            tuple(name for name in candidates if name != taken),
        )
    if is_state_dict(content):
        raise LoadError(f"{shown} is a state_dict as a whole: leave out --key")
    where = "" if key is None else f" under {printable(repr(key))}"
    advice = f": --key NAME takes the weights under {_quoted(candidates)}" if candidates else ""
    raise LoadError(
        f"{shown} holds no state_dict{where}, but a dict with {_quoted(content) or 'no keys'}{advice}"
    )


def load_strictly(network: nn.Module, weights: dict[str, Tensor], path: Path) -> str:
    """Loads the weights into the network; every key must match.

    A prefix that a wrapper has added to every key is removed if the keys match without it. A tied weight may be missing
    if the weight that it is tied to is in the file. The network gets the file's dtypes: see `_cast`.

    Returns:
        The prefix that was removed; ``""`` if none was.

    Raises:
        LoadError: keys are missing or unexpected, or a shape differs.
    """
    own = network.state_dict(keep_vars=True)
    prefix, fitted = _without_prefix(weights, own)
    present = {id(own[name]) for name in own.keys() & fitted.keys()}
    missing = [name for name in own if name not in fitted and id(own[name]) not in present]
    unexpected = [name for name in fitted if name not in own]
    for names, what in ((missing, "lacks"), (unexpected, "also has")):
        if names:
            raise LoadError(f"{printable(path)} does not fit the network: it {what} {_shown(names)}")
    for name, tensor in fitted.items():
        if (
            isinstance(own[name], Tensor)
            and not nn.parameter.is_lazy(own[name])  # checked first: a lazy parameter has no shape
            and own[name].shape != tensor.shape
        ):
            raise LoadError(
                f"{printable(path)} does not fit the network: {printable(name)} is {list(tensor.shape)} there and "
                f"{list(own[name].shape)} in the network"
            )
    try:
        _cast(network, fitted)
        network.load_state_dict(fitted, strict=not (own.keys() - fitted.keys()))
    except Exception as error:  # a network's own hooks may raise anything
        raise LoadError(f"{printable(path)} does not fit the network ({first_line(error)})") from error
    return prefix


def as_read(network: nn.Module, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the weights as the file has them, for writing them again.

    Tensors of the network that are equal are taken instead, so that nothing is in memory twice.
    """
    own = network.state_dict()

    def chosen(name: str, tensor: Tensor) -> Tensor:
        loaded = own.get(name.removeprefix(prefix))
        return loaded if isinstance(loaded, Tensor) and _same_tensor(loaded, tensor) else tensor

    return {name: chosen(name, tensor) for name, tensor in weights.items()}


def dtypes_note(network: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> str:
    """Returns a note for the user on which weights were converted to another dtype; empty if none was."""
    own = network.state_dict()
    loaded = (
        (t.dtype, getattr(own.get(name.removeprefix(prefix)), "dtype", None)) for name, t in weights.items()
    )
    changed = {f"{_named(a)} to {_named(b)}" for a, b in loaded if b is not None and a != b}
    if not changed:
        return ""
    return (
        f"to fit the network, weights of the file were converted ({', '.join(sorted(changed))}); "
        "--out-format state_dict writes them as they are in the file"
    )


def dtypes_of(network: nn.Module) -> str:
    """Returns the floating-point dtypes of a network, by name."""
    found = _floating_dtypes((*network.parameters(), *network.buffers()))
    return ", ".join(sorted(map(_named, found)))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Gives the network the dtypes of the weights: loading alone would silently convert the weights to the network's.

    Only floating-point tensors are converted: integers may be indices. A network that mixes dtypes keeps them, since
    its forward depends on them, and so does one whose weights are stored in a dtype in which layers do not compute.
    """
    tensors = (*network.parameters(), *network.buffers())
    stored, held = _floating_dtypes(weights.values()), _floating_dtypes(tensors)
    if len(held) != 1 or not stored <= {*op.SUPPORTED_DTYPES} or stored == held:
        return
    # `to` reaches also tensors that are in no state_dict, but would drop the imaginary part of complex numbers.
    if len(stored) == 1 and not any(tensor.is_complex() for tensor in tensors):
        network.to(dtype=next(iter(stored)))
        return
    own = network.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and isinstance(own[name], Tensor) and own[name].is_floating_point():
            own[name].data = own[name].data.to(tensor.dtype)


def _floating_dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def _without_prefix(weights: dict[str, Tensor], own: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    if weights.keys() & own.keys():
        return "", weights
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in weights):
            shortened = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
            if shortened.keys() & own.keys():
                return prefix, shortened
    return "", weights


def _quoted(names: Iterable[object]) -> str:
    return _shown(repr(name) for name in names)


def _shown(names: Iterable[str]) -> str:
    names = list(names)
    text = ", ".join(printable(name) for name in names[:_MAX_KEYS_SHOWN])
    return f"{text} and {len(names) - _MAX_KEYS_SHOWN} more" if len(names) > _MAX_KEYS_SHOWN else text


def same_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Returns whether names, dtypes and bits are equal. NaN equals NaN."""
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)


def _same_tensor(first: Tensor, second: Tensor) -> bool:
    """Returns whether a file would have the same content for both."""
    places = ((t.device, t.layout, t.stride() if t.layout == torch.strided else ()) for t in (first, second))
    return len({*places}) == 1 and same_bits(first, second)
