"""Loads networks and inputs from files without executing code that the files contain.

A file is read into records (`records`), these are checked (`trust`, `schema`), and objects are made from them
(`construct`). Executed are only: the modules of trusted names, `__setstate__` and `__reduce__` of their classes, and
the code that the user names as his own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tconv_swap.files import exported, weights
from tconv_swap.files.containers import RefusedError
from tconv_swap.files.content import Content, make, read_content
from tconv_swap.files.fileformat import (
    LoadError,
    TorchFile,
    examine,
    first_line,
    needs_more_memory,
    printable,
)
from tconv_swap.files.known import Meaning, plain_names
from tconv_swap.files.records import GlobalName
from tconv_swap.files.storages import Placing, is_device, on_cpu
from tconv_swap.files.trust import UntrustedError, meanings_of, parse_trust, prepare_for_anything
from tconv_swap.files.usercode import build_network
from tconv_swap.files.wholeness import check_whole
from tconv_swap.inputs import Inputs
from tconv_swap.memory import is_out_of_memory, within_free_memory

__all__ = ["LoadError", "LoadedModel", "UntrustedError", "load_inputs", "load_model", "parse_trust"]


@dataclass(frozen=True)
class LoadedModel:
    """A network as it was in its file.

    Attributes:
        missing_devices: devices of the file's tensors that this machine does not have ("cuda:0"); these tensors are on
            the CPU now.
        notes: lines on how it was loaded, for the user.
        weights: if the file holds weights, those that were taken, as they are in the file.
        left_out: the other keys of that file.
        program: the exported program from which the network was made.
        inputs: the inputs with which the program was exported.
    """

    model: nn.Module
    missing_devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weights: Mapping[str, Tensor] | None = None
    left_out: tuple[str, ...] = ()
    program: ExportedProgram | None = None
    inputs: Inputs | None = None


def load_model(
    path: Path | str,
    *,
    trust: Iterable[str] = (),
    unsafe_pickle: bool = False,
    module: Path | None = None,
    factory: str | None = None,
    key: str | None = None,
) -> LoadedModel:
    """Returns the network in a file, on the devices from which it was saved.

    Args:
        path: a file of `torch.save(model, path)` or of `torch.export.save`; with `factory` a state_dict, a checkpoint
            that holds one, or a safetensors file.
        trust: names, as `module:Class`, that the file may import besides PyTorch's layers. Only those that the file
            uses are imported; importing executes the module's code.
        unsafe_pickle: lets the file import and call anything.
        module: a Python file whose classes the file may use. It is executed if the file uses one of them.
        factory: `package.module:function` or `path.py:function`; executed to build the network, which then
            gets the weights in the file, strictly.
        key: the key of the weights in a file that holds more; None takes those under one of the usual names.

    Raises:
        LoadError: the file is not a saved network, or is damaged.
        UntrustedError: it names something that is not trusted.
    """
    path = Path(path)
    file = examine(path)
    # This is an error even if the file uses no class of it: the given path does not exist.
    if module is not None and not module.exists():
        raise LoadError(f"--module {printable(module)}: no such file")
    if file.format == "pt2":
        return _load_program(file, unsafe_pickle, factory)
    if file.format == "safetensors" and factory is None:
        raise LoadError(
            f"{printable(path)} is a safetensors file (weights without the network): "
            "--model module:factory builds the network"
        )
    content, devices = _read(file, trust, unsafe_pickle, module)
    if factory is not None:
        return _fitted(file, content, devices, factory, key)
    if not isinstance(content, nn.Module):
        raise LoadError(f"{printable(path)} {_other_content(content)}")
    check_whole(path, content)
    return LoadedModel(content, tuple(sorted(devices.missing)))


def _read(file: TorchFile, trust: Iterable[str], unsafe: bool, module: Path | None) -> tuple[Any, _Devices]:
    devices = _Devices()
    if file.format == "safetensors":
        return weights.read_safetensors(file.path), devices
    if unsafe:
        prepare_for_anything(module)
        return _load_anything(file.path, devices), devices
    content = read_content(file)
    meanings = meanings_of(file.path, content.pickle.names, trust, module)
    return _load(file.path, content, meanings, devices), devices


def _fitted(
    file: TorchFile, content: object, devices: _Devices, factory: str, key: str | None
) -> LoadedModel:
    """Returns the network that `factory` builds, with the weights of the file."""
    # Checked before any code of the user runs: for a file without weights none has to.
    found = weights.find_state_dict(file, content, key)
    network = build_network(factory)
    built = weights.dtypes_of(network)
    prefix = weights.load_strictly(network, found.weights, file.path)
    check_whole(file.path, network)
    notes = [f"the weights of {printable(file.path)} are in the network that {printable(factory)}() builds"]
    notes += found.notes
    if prefix:
        notes.append(f"{prefix!r} was removed from the file's keys")
    if (dtypes := weights.dtypes_of(network)) != built:
        notes.append(f"the network has the dtypes of the weights, {dtypes}: it is built in {built}")
    if converted := weights.dtypes_note(network, found.weights, prefix):
        notes.append(converted)
    return LoadedModel(
        network,
        tuple(sorted(devices.missing)),
        tuple(notes),
        weights.as_read(network, found.weights, prefix),
        found.others,
    )


def _load_program(file: TorchFile, unsafe: bool, factory: str | None) -> LoadedModel:
    shown = printable(file.path)
    if factory is not None:
        raise LoadError(f"{shown} is a torch.export archive, with its network: leave out --model")
    if not unsafe:
        raise LoadError(
            f"{shown} is a torch.export archive (.pt2), whose loader can execute what the file says: "
            "--unsafe-pickle loads it; use it only on a file of your own"
        )
    program = exported.load_program(file.path)
    try:
        network, left = exported.lifted(program)
    except Exception as error:  # torch.export has many forms of graphs
        raise LoadError(f"{shown} holds a program that cannot be swapped ({first_line(error)})") from error
    inputs = program.example_inputs
    given = None if inputs is None else Inputs(tuple(inputs[0]), dict(inputs[1]))
    return LoadedModel(network, notes=left, program=program, inputs=given)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Returns the state_dict in a file that holds nothing else, on the CPU.

    Raises:
        LoadError: the file holds something else, or is damaged.
    """
    file = examine(path)
    if file.format == "safetensors":
        return weights.read_safetensors(path)
    return weights.find_state_dict(file, _load_plain(file, "tensors")).weights


def load_inputs(path: Path | str) -> Inputs:
    """Returns the inputs in a file of `torch.save`: a tensor, a tuple or list of positional arguments, or a dict of
    keyword arguments.

    Only tensors and plain Python containers are allowed in the file. Tensors are loaded to the CPU.

    Raises:
        LoadError: the file is something else, or is damaged.
    """
    path = Path(path)
    file = examine(path)
    if file.format not in ("zip", "legacy"):
        raise LoadError(f"{printable(path)} was not written by torch.save")
    loaded = _load_plain(file, "tensors, tuples, lists and dicts")
    try:
        return Inputs.of(loaded)
    except TypeError as error:
        raise LoadError(f"{printable(path)}: {error}") from None


class _Devices:
    """`map_location` for torch.load: puts tensors on the device from which they were saved, if this machine has it."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if location not in self.missing and not _exists(location):
            self.missing.add(location)
        # None makes PyTorch restore the location by itself.
        return storage if location in self.missing else None


@functools.cache
def _exists(location: str) -> bool:
    if not is_device(location):
        return False
    try:
        torch.empty(0, device=location)
    except (RuntimeError, AssertionError):  # AssertionError: PyTorch built without CUDA
        return False
    return True


def _load_plain(file: TorchFile, what: str) -> Any:
    """Returns the content of a file of tensors and Python's containers; its tensors are loaded to the CPU."""
    content = read_content(file)
    if unknown := {name for name in content.pickle.names if name not in plain_names()}:
        raise LoadError(
            f"{printable(file.path)} holds more than {what}: "
            f"{printable(', '.join(name.dotted for name in sorted(unknown)))}"
        )
    return _load(file.path, content, plain_names(), on_cpu)


def _load(path: Path, content: Content, meanings: Mapping[GlobalName, Meaning], place: Placing) -> Any:
    _start_cuda()
    try:
        with warnings.catch_warnings(), within_free_memory():
            warnings.simplefilter("ignore")
            return make(content, meanings, place)
    except RefusedError as error:
        raise LoadError(f"{printable(path)} holds a damaged network ({printable(error)})") from error
    except Exception as error:  # the code of a trusted class may raise anything
        raise _cannot_be_loaded(path, error) from error


def _load_anything(path: Path, place: Placing) -> Any:
    """Executes whatever the file says."""
    _start_cuda()
    try:
        # The user can do nothing about warnings of storages and changed sources.
        with warnings.catch_warnings(), within_free_memory():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=place, weights_only=False)  # type: ignore[arg-type]
    except Exception as error:  # a damaged pickle may fail in any way
        raise _cannot_be_loaded(path, error) from error


def _start_cuda() -> None:
    if torch.cuda.is_available():
        _exists("cuda")  # the memory that CUDA maps at its start does not count as the file's


def _cannot_be_loaded(path: Path, error: Exception) -> LoadError:
    if is_out_of_memory(error) or "can't allocate memory" in str(error):
        return LoadError(needs_more_memory(path))
    return LoadError(f"{printable(path)} cannot be loaded ({first_line(error)})")


def _other_content(loaded: Any) -> str:
    advice = "--model module:factory (or path.py:factory) builds the network and loads the weights into it"
    if isinstance(loaded, Mapping):
        networks = [key for key, value in loaded.items() if isinstance(value, nn.Module)]
        if networks:
            return f"holds a dict with the network under {networks[0]!r}: torch.save that network by itself"
        if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
            return f"holds a state_dict, which is weights without the network: {advice}"
        keys = ", ".join(printable(repr(key)) for key in list(loaded)[:5])
        return f"holds a checkpoint (a dict with {keys or 'no keys'}), not a network: {advice}"
    return f"holds a {type(loaded).__name__}, not a network (an nn.Module)"
