"""What planning keeps in memory from one plan to the next."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from tconv_swap import kernels


def remembering() -> list[Any]:
    """Returns the functions of planning whose results are kept in memory."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    ]
    values = (value for module in modules for value in vars(module).values())
    return list({id(one): one for one in values if isinstance(one, functools._lru_cache_wrapper)}.values())


def kept_functions() -> list[Any]:
    """Returns those of them whose results are kept on disk, too."""
    return [one for one in remembering() if hasattr(one.__wrapped__, "__wrapped__")]


def forget() -> None:
    """Forgets what is in memory, as a new process does."""
    for function in remembering():
        function.cache_clear()


def forget_plans() -> None:
    """Forgets everything but which kernels layers have."""
    kept = {id(one) for one in kept_functions()}
    for function in remembering():
        if id(function) not in kept:
            function.cache_clear()
