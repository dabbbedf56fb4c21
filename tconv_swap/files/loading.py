"""Loads networks and inputs out of files without executing what the files say.

A pickle can call anything it can name. So a file is read by `torch.load(weights_only=True)`, which looks
every name up in an allow-list: PyTorch's own layer classes and ours, and what the user trusts by name. A
trusted name is imported, and thereby the code of its module executed; nothing else is.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import _weights_only_unpickler, nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from tconv_swap import layer
from tconv_swap.files.fileformat import GlobalName, LoadError, TorchFile, examine, first_line, printable
from tconv_swap.files.legacy import container_class, readable_by_safe_loader
from tconv_swap.inputs import Inputs

__all__ = ["LoadError", "LoadedModel", "UntrustedError", "load_inputs", "load_model"]

# Functions of a tensor alone, kept as attributes by PyTorch's own transformer layers and by many networks.
_ACTIVATIONS = (
    F.celu, F.elu, F.gelu, F.glu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish,
    F.relu, F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softsign, F.tanh, F.tanhshrink,
)  # fmt: skip
# With one of these a pickle can do anything: trusting it by name would be --unsafe-pickle in disguise.
_UNRESTRAINED_MODULES = (
    "builtins", "code", "codeop", "ctypes", "importlib", "io", "_io", "marshal", "multiprocessing", "nt",
    "operator", "os", "_pickle", "pickle", "posix", "pty", "runpy", "shutil", "socket", "subprocess", "sys",
    "threading", "torch.hub", "torch.utils.cpp_extension", "webbrowser",
)  # fmt: skip
_HARMLESS_BUILTINS = (bool, bytes, dict, float, frozenset, int, list, range, slice, str, tuple)
_MOST_NAMES_SHOWN = 50

_Allowed: TypeAlias = list[Callable[..., Any] | tuple[Callable[..., Any], str]]


class UntrustedError(LoadError):
    """The file imports names that nobody has trusted; `names` are all of them. Nothing was executed."""

    def __init__(self, path: Path, names: Iterable[GlobalName]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(_refusal(path, self.names))


@dataclass(frozen=True)
class LoadedModel:
    """A network as it lies in its file.

    `missing_devices` are the devices its tensors were saved from that this machine lacks ("cuda:0"); those
    tensors are on the CPU now.
    """

    model: nn.Module
    missing_devices: tuple[str, ...] = ()


def load_model(path: Path | str, *, trust: Iterable[str] = (), unsafe_pickle: bool = False) -> LoadedModel:
    """The network in a file that `torch.save(model, path)` wrote, on the devices it was saved from.

    Args:
        path: the file.
        trust: names, as `module:Class`, that the file may import besides PyTorch's layers. Only those that
            the file does name are imported; importing executes the module's code.
        unsafe_pickle: let the file import and call anything.

    Raises:
        LoadError: the file is not a saved network, or is damaged.
        UntrustedError: it names something that is not trusted.
    """
    path = Path(path)
    file = examine(path)
    allowed = _allowed(file, trust, unsafe_pickle)
    devices = _Devices()
    loaded = _load(file, allowed, unsafe_pickle, devices)
    if not isinstance(loaded, nn.Module):
        raise LoadError(f"{printable(path)} {_other_content(loaded)}")
    _check_whole(path, loaded)
    return LoadedModel(loaded, tuple(sorted(devices.missing)))


def load_inputs(path: Path | str) -> Inputs:
    """A tensor, a tuple or list of positional arguments or a dict of keyword arguments, out of `torch.save`.

    Only tensors and plain Python containers are allowed in the file. Tensors land on the CPU.

    Raises:
        LoadError: the file is something else, or is damaged.
    """
    path = Path(path)
    file = examine(path)
    if unknown := {name for name in file.globals if name.dotted not in _torch_allows()}:
        raise LoadError(
            f"{printable(path)} holds more than tensors, tuples, lists and dicts: "
            f"{printable(', '.join(name.dotted for name in sorted(unknown)))}"
        )
    loaded = _load(file, [], False, lambda storage, _: storage)
    try:
        return Inputs.of(loaded)
    except TypeError as error:
        raise LoadError(f"{printable(path)}: {error}") from None


def parse_trust(option: str) -> GlobalName:
    """`pkg.mod:Class` taken apart.

    Raises:
        ValueError: it is not of that form.
    """
    module, colon, name = option.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{option!r} is not of the form module:Class, such as torchvision.models.vgg:VGG")
    return GlobalName(module, name)


class _Devices:
    """`map_location` of torch.load: tensors go where they were saved from, if that exists here."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if location not in self.missing and not _exists(location):
            self.missing.add(location)
        # None: PyTorch restores the location by itself.
        return storage if location in self.missing else None


@functools.cache
def _exists(location: str) -> bool:
    try:
        torch.empty(0, device=location)
    except (RuntimeError, AssertionError, NotImplementedError):  # AssertionError: PyTorch built without CUDA
        return False
    return True


def _load(file: TorchFile, allowed: _Allowed, unsafe: bool, map_location: Callable[[Any, str], Any]) -> Any:
    path = file.path
    try:
        source: Path | IO[bytes] = path
        if file.format == "legacy" and not unsafe:
            with open(path, "rb") as stream:
                source = readable_by_safe_loader(stream)
        # Warnings about the pickle protocol, storages and changed sources say nothing the user can act on.
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            return torch.load(source, map_location=map_location, weights_only=not unsafe)
    except Exception as error:  # a damaged pickle may fail in any way; so may the code of a trusted class
        reason = str(error)
        if "Unsupported operand" in reason:
            raise LoadError(
                f"{printable(path)} is damaged, or was saved with another pickle protocol than torch.save's "
                "default (2), the one that PyTorch's safe loader reads: save it again, or, if you trust it, "
                "use --unsafe-pickle"
            ) from error
        raise LoadError(f"{printable(path)} cannot be loaded ({_inner_reason(error)})") from error


def _inner_reason(error: Exception) -> str:
    """One line; torch.load wraps the unpickler's own message in several paragraphs of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if "WeightsUnpickler error:" not in line and "documentation" not in line]
    wrapped = "Weights only load failed" in str(error)
    return printable(inner[-1]) if wrapped and inner else first_line(error)


def _allowed(file: TorchFile, trust: Iterable[str], unsafe: bool) -> _Allowed:
    """`(object, its name in the file)` for everything this file may import."""
    if unsafe:
        _let_working_directory_be_imported()
        return []
    known = _own_names()
    foreign = {
        name for name in file.globals if name.dotted not in known and name.dotted not in _torch_allows()
    }
    trusted = {parse_trust(option) for option in trust}
    trusted = {name for name in trusted if not _is_unrestrained(name)}
    if refused := foreign - trusted:
        raise UntrustedError(file.path, refused)
    allowed: _Allowed = [(found, name) for name, found in known.items()]
    for name in sorted(foreign):
        found = _import(name)
        allowed.append((found, name.dotted))
        if _has_swapped_form(found):
            # layer._new_swapped_layer makes the class of such a layer; the unpickler must know the result.
            allowed.append((layer.swapped_class(found), f"{name.dotted} (swapped)"))
    return allowed


def _has_swapped_form(found: Any) -> bool:
    plain = (nn.ConvTranspose2d, nn.ConvTranspose1d)
    return isinstance(found, type) and issubclass(found, plain) and not issubclass(found, layer.SWAPPED)


@functools.cache
def _own_names() -> dict[str, Any]:
    """PyTorch's layers and ours: classes whose construction and `__setstate__` only fill in attributes."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.nn.modules."):
            for value in vars(module).values():
                if (
                    isinstance(value, type)
                    and issubclass(value, nn.Module)
                    and value.__module__ == module_name
                ):
                    found[f"{module_name}.{value.__qualname__}"] = value
    pruning = [v for v in vars(prune).values() if isinstance(v, type) and v.__module__ == prune.__name__]
    extra: tuple[Any, ...] = (
        frozenset,
        slice,
        nn.modules.module._WrappedHook,
        nn.parameter.UninitializedParameter,
        nn.parameter.UninitializedBuffer,
        RemovableHandle,
        DataParallel,
        WeightNorm,
        SpectralNorm,
        SpectralNormStateDictHook,
        SpectralNormLoadStateDictPreHook,
        *layer.SWAPPED,
        layer._new_swapped_layer,
        container_class,
        *pruning,
    )
    found |= {f"{value.__module__}.{value.__qualname__}": value for value in extra}
    # gelu, logsigmoid and softplus are C functions: they pickle under the name of torch._C._nn.
    return found | {f"{f.__module__}.{f.__name__}": f for f in _ACTIVATIONS}


@functools.cache
def _torch_allows() -> frozenset[str]:
    """What weights_only loading allows by itself: tensors, dtypes, devices, OrderedDict and their like."""
    # No public function tells it for a legacy file: get_unsafe_globals_in_checkpoint reads only zip archives.
    return frozenset(_weights_only_unpickler._get_allowed_globals())


def _is_unrestrained(name: GlobalName) -> bool:
    if name.module == "builtins":
        return name.name not in [harmless.__name__ for harmless in _HARMLESS_BUILTINS]
    return any(
        name.module == module or name.module.startswith(f"{module}.") for module in _UNRESTRAINED_MODULES
    )


def _import(name: GlobalName) -> Any:
    """The object that a trusted name means. This executes the code of its module."""
    _let_working_directory_be_imported()
    try:
        found: Any = importlib.import_module(name.module)
        for part in name.name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs foreign code
        raise LoadError(f"cannot import {printable(name.option)} ({first_line(error)})") from error
    return found


def _let_working_directory_be_imported() -> None:
    """As `python script.py` would: the console script's own path holds only its bin directory."""
    # Last, so that nothing in the directory can stand in for an installed package.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _refusal(path: Path, names: tuple[GlobalName, ...]) -> str:
    shown = [printable(name.dotted) for name in names[:_MOST_NAMES_SHOWN]]
    if len(names) > _MOST_NAMES_SHOWN:
        shown.append(f"{len(names) - _MOST_NAMES_SHOWN} more")
    text = f"{printable(path)} would execute code that is not PyTorch's own: {', '.join(shown)}."
    anything = [name for name in names if _is_unrestrained(name)]
    scripts = [name for name in names if name.module == "__main__"]
    if anything:
        return (
            f"{text} With {printable(anything[0].dotted)} it can do anything, so --trust does not take it; "
            "--unsafe-pickle executes whatever the file contains: use it only on a file of your own"
        )
    if scripts:
        return (
            f"{text} {printable(scripts[0].name)} was defined in the script that saved the file and cannot "
            "be imported: save the network again with its class imported from a module"
        )
    options = " ".join(f"--trust {printable(name.option)}" for name in names[:_MOST_NAMES_SHOWN])
    return f"{text} If you trust it, add: {options}"


def _other_content(loaded: Any) -> str:
    advice = "build the network in Python, load the weights into it and torch.save(model, path)"
    if isinstance(loaded, Mapping):
        networks = [key for key, value in loaded.items() if isinstance(value, nn.Module)]
        if networks:
            return f"holds a dict with the network under {networks[0]!r}: torch.save that network by itself"
        if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
            return f"holds a state_dict, which is weights without the network: {advice}"
        keys = ", ".join(printable(repr(key)) for key in list(loaded)[:5])
        return f"holds a checkpoint (a dict with {keys or 'no keys'}), not a network: {advice}"
    return f"holds a {type(loaded).__name__}, not a network (an nn.Module)"


def _check_whole(path: Path, model: nn.Module) -> None:
    """A pickle may give a module any attributes, or none: find out now and not in the middle of the work."""
    try:
        model.apply(lambda module: None)  # recurses as .to() does: finds a module that contains itself
        for name, module in model.named_modules():
            if not name.isprintable():
                raise ValueError(f"a layer is called {name!r}")
            if not isinstance(module.training, bool):
                raise TypeError("training is not a bool")
            list(module.named_parameters(recurse=False))
            list(module.named_buffers(recurse=False))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{printable(path)} holds a damaged network ({first_line(error)})") from None
