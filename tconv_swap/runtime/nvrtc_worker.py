"""Compiles CUDA C++ to machine code by NVRTC. As a script it compiles what its standard input requests, until that
ends.

``nvrtc_pool`` starts it without site-packages: it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: What the script writes when it has started.
READY = b"ready\n"


class Request(NamedTuple):
    """What is compiled: the text, its name in messages, the text of each file that it may include, by its name in the
    ``#include``, and options of NVRTC, among them ``--gpu-architecture=sm_XX``."""

    source: str
    name: str
    headers: Mapping[str, str]
    options: Sequence[str]


class Reply(NamedTuple):
    """The cubin, the compiler's log, and what is wrong: empty if it compiles."""

    cubin: bytes
    log: str
    error: str


def compile_program(library_path: str, request: Request) -> Reply:
    """Compiles a program by the NVRTC of this path."""
    # Calls by PyDLL keep the interpreter's lock, which all but the compilation need for microseconds.
    compiling, library = ctypes.CDLL(library_path), ctypes.PyDLL(library_path)
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(request.headers))(*(text.encode() for text in request.headers.values()))
    names = (ctypes.c_char_p * len(request.headers))(*(key.encode() for key in request.headers))
    options = (ctypes.c_char_p * len(request.options))(*(option.encode() for option in request.options))
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), request.source.encode(), request.name.encode(), len(names), texts, names
    )
    if code:
        return Reply(b"", "", f"nvrtcCreateProgram: {describe(library, code)}")
    try:
        code = compiling.nvrtcCompileProgram(program, len(options), options)
        log = _result(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if code:
            return Reply(b"", log, f"{request.name} does not compile ({' '.join(request.options)}):\n{log}")
        return Reply(_result(library, "CUBIN", program), log, "")
    except RuntimeError as error:
        return Reply(b"", "", str(error))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def describe(library: ctypes.CDLL, code: int) -> str:
    """Returns NVRTC's text for an error."""
    function = library.nvrtcGetErrorString
    function.restype = ctypes.c_char_p
    text: bytes = function(code)
    return text.decode()


def _result(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if code := library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)):
        raise RuntimeError(f"nvrtcGet{what}Size: {describe(library, code)}")
    found = ctypes.create_string_buffer(size.value)
    if code := library[f"nvrtcGet{what}"](program, found):
        raise RuntimeError(f"nvrtcGet{what}: {describe(library, code)}")
    return found.raw


def main(library_path: str) -> None:
    # Ctrl-C reaches all processes of a terminal; this one ends with its parent, which closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # NVRTC opens its built-in functions by their name, which the loader need not find.
    for path in Path(library_path).parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(path))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(READY)
    replies.flush()
    while True:
        try:
            request = Request(*pickle.load(requests))
        except EOFError:
            return
        pickle.dump(tuple(compile_program(library_path, request)), replies)
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
