"""Resolves the names in a file: PyTorch's layers and ours, and classes that the user trusts.

A trusted class is imported, which executes the code of its module. Nothing else that a file names is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tconv_swap.files.fileformat import LoadError, printable
from tconv_swap.files.known import BOX_IOU, Kind, Meaning, network_names
from tconv_swap.files.records import GlobalName
from tconv_swap.files.usercode import (
    defined_classes,
    defines_class,
    find,
    import_file,
    let_working_directory_be_imported,
)

# Of Python itself, only classes that hold data are allowed. With other classes a file could execute anything.
_OF_PYTHON = frozenset(
    {
        "argparse.Namespace", "collections.defaultdict", "collections.deque", "datetime.date", "datetime.datetime",
        "datetime.time", "datetime.timedelta", "datetime.timezone", "decimal.Decimal", "fractions.Fraction",
        "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
        "pathlib.WindowsPath", "types.SimpleNamespace", "uuid.UUID",
    }
)  # fmt: skip
# Modules of PyTorch and its dependencies that load, compile or call code.
_UNRESTRAINED_MODULES = (
    "cloudpickle", "dill", "joblib", "torch._C", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.hub",
    "torch.jit", "torch.multiprocessing", "torch.package", "torch.serialization", "torch.utils.cpp_extension",
)  # fmt: skip
_MAX_NAMES_SHOWN = 50


class UntrustedError(LoadError):
    """The file imports names that the user has not trusted; `names` are all of them. Nothing in the file was executed.

    `module` is the user's file that does not define them; the message says why it does not help.
    """

    def __init__(self, path: Path, names: Iterable[GlobalName], module: Path | None = None) -> None:
        self.names = tuple(sorted(names))
        super().__init__(_refusal(path, self.names, module))


def parse_trust(option: str) -> GlobalName:
    """Splits `pkg.mod:Class` into module and class.

    Raises:
        ValueError: it has another form, or names a class of Python itself that does more than hold data.
    """
    name = _taken_apart(option)
    if _is_unrestrained(name):
        raise ValueError(
            f"with {name.dotted} a file can do anything: only classes of data and layers can be trusted"
        )
    return name


def _taken_apart(option: str) -> GlobalName:
    module, colon, name = option.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{option!r} is not of the form module:Class, such as torchvision.models.vgg:VGG")
    return GlobalName(module, name)


def meanings_of(
    path: Path, names: Iterable[GlobalName], trust: Iterable[str], module: Path | None = None
) -> Mapping[GlobalName, Meaning]:
    """Returns the meaning of every name in a file. Imports trusted classes (and `module`) if they are among the names.

    Raises:
        LoadError: a trusted name cannot be imported.
        UntrustedError: there is another name, or one that is refused although the user trusts it: it is not a class, or
            it is one of Python's own with which a file can do anything.
    """
    known = network_names()
    foreign = {name for name in names if name not in known}
    trusted = {name for name in map(_taken_apart, trust) if not _is_unrestrained(name)}
    if BOX_IOU in foreign and any(name.module.startswith("torchvision.") for name in trusted & foreign):
        trusted.add(BOX_IOU)
    theirs = {name for name in foreign - trusted if module is not None and _may_be_of(name, module)}
    if refused := foreign - trusted - theirs:
        raise UntrustedError(path, refused, None if theirs else module)
    classes = defined_classes(import_file(module)) if module is not None and theirs else {}
    if refused := {name for name in theirs if name.name not in classes}:
        raise UntrustedError(path, refused, module)
    return {
        **known,
        **{
            name: _meaning(path, name, classes[name.name] if name in theirs else find(name.module, name.name))
            for name in sorted(foreign)
        },
    }


def _meaning(path: Path, name: GlobalName, found: Any) -> Meaning:
    if name == BOX_IOU:
        return Meaning(Kind.FUNCTION, found)
    # A harmless module may lead to a harmful one: some.module:os.system.
    own = GlobalName(str(getattr(found, "__module__", "")), str(getattr(found, "__qualname__", "")))
    if own in network_names():
        return network_names()[own]
    if _is_unrestrained(own):
        raise UntrustedError(path, [own])
    if not isinstance(found, type):
        raise UntrustedError(path, [name])
    if issubclass(found, nn.Module):
        return Meaning(Kind.LAYER, found, trusted=True)
    return Meaning(Kind.TENSOR if issubclass(found, Tensor) else Kind.OBJECT, found, trusted=True)


def prepare_for_anything(module: Path | None) -> None:
    """Lets an unrestricted unpickler find the user's own classes: it executes `module`."""
    let_working_directory_be_imported()
    if module is not None:
        _let_scripts_classes_be_found(import_file(module))


def _is_unrestrained(name: GlobalName) -> bool:
    if name.module.partition(".")[0] in sys.stdlib_module_names:
        return name.dotted not in _OF_PYTHON
    return any(
        name.module == module or name.module.startswith(f"{module}.") for module in _UNRESTRAINED_MODULES
    )


def _may_be_of(name: GlobalName, module: Path) -> bool:
    """Returns whether a class of this name may come from the user's file, which may also have been run as a script."""
    return name.module == "__main__" or name.module.rpartition(".")[2] == module.stem


def _let_scripts_classes_be_found(module: ModuleType) -> None:
    main = sys.modules["__main__"]
    for name, cls in defined_classes(module).items():
        if "." not in name and not hasattr(main, name):
            setattr(main, name, cls)


def _refusal(path: Path, names: tuple[GlobalName, ...], module: Path | None) -> str:
    shown = [printable(name.dotted) for name in names[:_MAX_NAMES_SHOWN]]
    if len(names) > _MAX_NAMES_SHOWN:
        shown.append(f"{len(names) - _MAX_NAMES_SHOWN} more")
    text = f"{printable(path)} would execute code that is not PyTorch's own: {', '.join(shown)}."
    # --module may define a class of a script; Python's own module __main__ does not.
    anything = [name for name in names if name.module != "__main__" and _is_unrestrained(name)]
    scripts = [name for name in names if name.module == "__main__"]
    if anything:
        return (
            f"{text} With {printable(anything[0].dotted)} it can do anything, so --trust does not take it; "
            "--unsafe-pickle executes whatever the file contains: use it only on a file of your own"
        )
    if module is not None and any(_may_be_of(name, module) for name in names):
        lacking = ", ".join(printable(name.name) for name in names[:_MAX_NAMES_SHOWN])
        return f"{text} {printable(module)} defines no class {lacking}"
    if module is not None:
        text += (
            f" {printable(module)} does not help: it defines classes of the module {module.stem!r} or of a "
            "script only."
        )
    if scripts:
        return (
            f"{text} {printable(scripts[0].name)} was defined in the script that saved the file and cannot "
            "be imported: give that script with --module, if importing it only defines things, or save the "
            "network again with its class imported from a module"
        )
    no_classes = [name for name in names if not defines_class(name.module, name.name)]
    if no_classes:
        return (
            f"{text} --trust takes classes only, and {printable(no_classes[0].dotted)} is not a class; "
            "--model builds a network and loads weights into it, and --unsafe-pickle executes whatever the file "
            "contains: use it only on a file of your own"
        )
    options = " ".join(f"--trust {printable(name.option)}" for name in names[:_MAX_NAMES_SHOWN])
    return f"{text} If you trust it, add: {options}"
