"""Imports code that the user names on the command line: a file of classes, or a factory that builds a network.

Importing a file executes it, so nothing here is called for a file that the user has not named.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tconv_swap.files.fileformat import LoadError, first_line, printable


def import_module(name: str) -> ModuleType:
    """Returns an installed module, or one in the working directory.

    Raises:
        LoadError: it does not exist, or raises while it is executed.
    """
    let_working_directory_be_imported()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise LoadError(f"cannot import {printable(name)} ({first_line(error)})") from error


def import_file(path: Path) -> ModuleType:
    """Imports the Python file ``path`` as a module of its name, as a script in the same directory would.

    Raises:
        LoadError: there is no such file, its name is not a valid module name or belongs to another module, or it
            raises.
    """
    shown = printable(path)
    name = path.stem
    try:
        parse_file(str(path))
    except ValueError as error:
        raise LoadError(str(error)) from None
    loaded = sys.modules.get(name)
    if loaded is not None or name in sys.stdlib_module_names:
        if loaded is not None and _is_file_of(loaded, path):
            return loaded
        raise LoadError(f"{shown} cannot be imported: another module has the name {name!r}; rename the file")
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise LoadError(f"{shown} is not a regular file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{shown} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise LoadError(f"{shown} cannot be imported ({first_line(error)})") from error
    return module


def parse_file(text: str) -> Path:
    """Returns ``text`` as the path of a Python file.

    Raises:
        ValueError: it is not a possible name of a module.
    """
    path = Path(text)
    if path.suffix != ".py" or not path.stem.isidentifier() or "\0" in text:
        raise ValueError(f"{printable(text)} is not the name of a Python file such as network.py")
    return path


def build_network(factory: str) -> nn.Module:
    """Calls the factory ``package.module:function`` or ``path.py:function`` without arguments and returns its network.

    Raises:
        LoadError: it cannot be imported or called, or does not return a network.
    """
    build: Any = find(*parse_factory(factory))
    try:
        network = build()
    except (Exception, SystemExit) as error:
        raise LoadError(f"{printable(factory)}() raises {first_line(error)}") from error
    if not isinstance(network, nn.Module):
        raise LoadError(
            f"{printable(factory)}() returns a {type(network).__name__}, not a network (an nn.Module)"
        )
    return network


def parse_factory(option: str) -> tuple[str, str]:
    """Splits ``pkg.mod:factory`` or ``path.py:factory`` into module or file, and name.

    Raises:
        ValueError: it has neither form.
    """
    place, colon, name = option.rpartition(":")
    modular = all(part.isidentifier() for part in place.split("."))
    if (
        not colon
        or not (place.endswith(".py") or modular)
        or not all(p.isidentifier() for p in name.split("."))
    ):
        raise ValueError(f"{option!r} is not of the form module:factory or path.py:factory")
    return place, name


def find(place: str, name: str) -> Callable[..., Any]:
    """Returns the object ``name`` of a module or a Python file.

    Raises:
        LoadError: there is no such object.
    """
    found: Any = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{printable(place)} has no {printable(name)}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def defined_classes(module: ModuleType) -> dict[str, type]:
    """Returns the classes that ``module`` itself defines, by name, without those that it imports."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return {cls.__qualname__: cls for cls in classes if cls.__module__ == module.__name__}


def defines_class(module: str, name: str) -> bool:
    """Returns whether the source of a module defines a class of this name. The module is not imported."""
    if module in sys.modules:
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part, None)
        return isinstance(found, type)
    let_working_directory_be_imported()
    place: Sequence[str] | None = None
    spec = None
    for part in itertools.accumulate(module.split("."), "{}.{}".format):
        # importlib.util.find_spec would import the packages that contain the module.
        spec = PathFinder.find_spec(part, place)
        place = None if spec is None else spec.submodule_search_locations
        if spec is None or (place is None and part != module):
            return False
    try:
        source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
        body: list[ast.stmt] = ast.parse(source).body
    except (OSError, ValueError, SyntaxError):
        return False
    for part in name.split("."):
        classes = [node for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.ClassDef)]
        found = next((node for node in classes if node.name == part), None)
        if found is None:
            return False
        body = found.body
    return True


def let_working_directory_be_imported() -> None:
    """Adds the working directory to the search path, as `python script.py` adds the script's. The path of the console
    script has only its bin directory."""
    # It comes last, so that no file in it can replace an installed package.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _is_file_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    try:
        return file is not None and os.path.samefile(file, path)
    except OSError:
        return False
