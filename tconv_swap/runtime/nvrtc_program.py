"""Compiles one program of CUDA C++ to machine code by NVRTC. ``worker.py`` does it in other processes, so this module
imports the standard library alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """What is compiled: the text, its name in messages, the text of each file that it may include, by its name in the
    ``#include``, and options of NVRTC, among them ``--gpu-architecture=sm_XX``."""

    text: str
    name: str
    headers: Mapping[str, str]
    options: Sequence[str]


class MachineCode(NamedTuple):
    """The cubin, the compiler's log, and what is wrong: empty if it compiles."""

    cubin: bytes
    log: str
    error: str


def compile_program(library_path: str, source: Source) -> MachineCode:
    """Compiles a program by the NVRTC of this path."""
    compiling, library = _libraries(library_path)
    handle = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(source.headers))(*(text.encode() for text in source.headers.values()))
    names = (ctypes.c_char_p * len(source.headers))(*(key.encode() for key in source.headers))
    options = (ctypes.c_char_p * len(source.options))(*(option.encode() for option in source.options))
    code = library.nvrtcCreateProgram(
        ctypes.byref(handle), source.text.encode(), source.name.encode(), len(names), texts, names
    )
    if code:
        return MachineCode(b"", "", f"nvrtcCreateProgram: {describe(library, code)}")
    try:
        code = compiling.nvrtcCompileProgram(handle, len(options), options)
        log = _result(library, "ProgramLog", handle).rstrip(b"\0").decode(errors="replace")
        if code:
            return MachineCode(
                b"", log, f"{source.name} does not compile ({' '.join(source.options)}):\n{log}"
            )
        return MachineCode(_result(library, "CUBIN", handle), log, "")
    except RuntimeError as error:
        return MachineCode(b"", "", str(error))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(handle))


def describe(library: ctypes.CDLL, code: int) -> str:
    """Returns NVRTC's text for an error."""
    function = library.nvrtcGetErrorString
    function.restype = ctypes.c_char_p
    text: bytes = function(code)
    return text.decode()


def _result(library: ctypes.CDLL, what: str, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if code := library[f"nvrtcGet{what}Size"](handle, ctypes.byref(size)):
        raise RuntimeError(f"nvrtcGet{what}Size: {describe(library, code)}")
    found = ctypes.create_string_buffer(size.value)
    if code := library[f"nvrtcGet{what}"](handle, found):
        raise RuntimeError(f"nvrtcGet{what}: {describe(library, code)}")
    return found.raw


@lru_cache(maxsize=1)
def _libraries(path: str) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Returns NVRTC for the compilation, and for all other calls, which take microseconds: they keep the interpreter's
    lock."""
    # NVRTC opens its built-in functions by their name, which the loader need not find.
    for builtins in Path(path).parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path), ctypes.PyDLL(path)
