"""Which names a file may import: PyTorch's own layers and ours, and what the user trusts.

A pickle can call anything it can name. A trusted name is imported, and thereby the code of its module
executed; nothing else is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

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
from tconv_swap.blocks import handed, modules
from tconv_swap.files.fileformat import GlobalName, LoadError, TorchFile, printable
from tconv_swap.files.legacy import container_class
from tconv_swap.files.usercode import defined_classes, find, import_file, let_working_directory_be_imported

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

Allowed: TypeAlias = list[Callable[..., Any] | tuple[Callable[..., Any], str]]


class UntrustedError(LoadError):
    """The file imports names that nobody has trusted; `names` are all of them. Nothing of it was executed.

    `module` is the user's file that does not help, of which the message says why.
    """

    def __init__(self, path: Path, names: Iterable[GlobalName], module: Path | None = None) -> None:
        self.names = tuple(sorted(names))
        super().__init__(_refusal(path, self.names, module))


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


def allowed_names(file: TorchFile, trust: Iterable[str], unsafe: bool, module: Path | None = None) -> Allowed:
    """`(object, its name in the file)` for everything this file may import; `[]` where it may import anything.

    Imports what is trusted (and `module`) if the file names it.

    Raises:
        LoadError: something trusted cannot be imported.
        UntrustedError: the file names something else.
    """
    if unsafe:
        let_working_directory_be_imported()
        if module is not None:
            _let_scripts_classes_be_found(import_file(module))
        return []
    known = _own_names()
    foreign = {
        name for name in file.globals if name.dotted not in known and name.dotted not in torch_allows()
    }
    trusted = {parse_trust(option) for option in trust}
    trusted = {name for name in trusted if not _is_unrestrained(name)}
    theirs = {name for name in foreign - trusted if module is not None and _may_be_of(name, module)}
    if refused := foreign - trusted - theirs:
        raise UntrustedError(file.path, refused, None if theirs else module)
    classes = defined_classes(import_file(module)) if module is not None and theirs else {}
    if refused := {name for name in theirs if name.name not in classes}:
        raise UntrustedError(file.path, refused, module)
    allowed: Allowed = [(found, name) for name, found in known.items()]
    for name in sorted(foreign):
        found: Any = classes[name.name] if name in theirs else find(name.module, name.name)
        # A harmless module may lead to a harmful one: some.module:os.system.
        own = GlobalName(str(getattr(found, "__module__", "")), str(getattr(found, "__qualname__", "")))
        if _is_unrestrained(own):
            raise UntrustedError(file.path, [own])
        allowed.append((found, name.dotted))
        if _has_swapped_form(found):
            # layer._new_swapped_layer makes the class of such a layer; the unpickler must know the result.
            allowed.append((layer.swapped_class(found), f"{name.dotted} (swapped)"))
        if isinstance(found, type) and issubclass(found, nn.Sequential):
            for fuse in modules.CHOICES:
                if (fused := modules.fused_class(found, fuse)) is not None:
                    allowed.append((fused, f"{name.dotted} ({fuse} fused)"))
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
        *modules.CLASSES,
        modules._new_container,
        handed._new_handing,
        container_class,
        *pruning,
    )
    found |= {f"{value.__module__}.{value.__qualname__}": value for value in extra}
    # gelu, logsigmoid and softplus are C functions: they pickle under the name of torch._C._nn.
    return found | {f"{f.__module__}.{f.__name__}": f for f in _ACTIVATIONS}


@functools.cache
def torch_allows() -> frozenset[str]:
    """What weights_only loading allows by itself: tensors, dtypes, devices, OrderedDict and their like."""
    # No public function tells it for a legacy file: get_unsafe_globals_in_checkpoint reads only zip archives.
    return frozenset(_weights_only_unpickler._get_allowed_globals())


def _is_unrestrained(name: GlobalName) -> bool:
    if name.module == "builtins":
        return name.name not in [harmless.__name__ for harmless in _HARMLESS_BUILTINS]
    return any(
        name.module == module or name.module.startswith(f"{module}.") for module in _UNRESTRAINED_MODULES
    )


def _may_be_of(name: GlobalName, module: Path) -> bool:
    """Whether a class of this name may be one of the user's file, which may have been run as a script."""
    return name.module == "__main__" or name.module.rpartition(".")[2] == module.stem


def _let_scripts_classes_be_found(module: ModuleType) -> None:
    main = sys.modules["__main__"]
    for name, cls in defined_classes(module).items():
        if "." not in name and not hasattr(main, name):
            setattr(main, name, cls)


def _refusal(path: Path, names: tuple[GlobalName, ...], module: Path | None) -> str:
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
    if module is not None and any(_may_be_of(name, module) for name in names):
        lacking = ", ".join(printable(name.name) for name in names[:_MOST_NAMES_SHOWN])
        return f"{text} {printable(module)} defines no class {lacking}"
    if module is not None:
        text += (
            f" {printable(module)} does not help: it stands for classes of the module {module.stem!r} or of a "
            "script only."
        )
    if scripts:
        return (
            f"{text} {printable(scripts[0].name)} was defined in the script that saved the file and cannot "
            "be imported: give that script with --module, if importing it only defines things, or save the "
            "network again with its class imported from a module"
        )
    options = " ".join(f"--trust {printable(name.option)}" for name in names[:_MOST_NAMES_SHOWN])
    return f"{text} If you trust it, add: {options}"
