"""Python processes of their own that start in milliseconds.

A helper process imports what every command imports, torch above all, and forks for each request. The child has its
own environment, directory, streams and pid, the signal handlers of a new interpreter, and ends as an interpreter ends.
What an interpreter does until torch is imported does not happen here: a test of that starts Python itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from typer.testing import CliRunner

#: With all that a swap imports while it works.
PRELOADED = ("tconv_swap.cli", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
#: A request holds an environment and perhaps code.
REQUEST_BYTES = 1 << 17
#: For `run_python`: the stream goes into the result, or is closed from the start, as by `>&-` in a shell.
CAPTURED, CLOSED = -1, -2


class Forked:
    """A running process, used as a subprocess.Popen is: `with` waits for its end.

    Args:
        words: as behind `python`: `-m MODULE ...`, `-c CODE ...` or `FILE ...`.
        streams: descriptors of stdin, stdout and stderr, or CLOSED.
        stdout, stderr: the reading ends, if these streams are pipes.
    """

    def __init__(
        self,
        words: tuple[str, ...],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._helper = _helper()
        given = {number: stream for number, stream in enumerate(streams) if stream != CLOSED}
        request = json.dumps([words, dict(environment), os.getcwd(), list(given)])
        socket.send_fds(self._helper, [request.encode()], list(given.values()))
        self.pid = int(self._helper.recv(64))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self.send_signal(signal.SIGKILL)
        self.returncode = int(self._helper.recv(64))
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def run_python(
    *words: str, env: Mapping[str, str], stdout: int = CAPTURED, stderr: int = CAPTURED
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` to its end, with an empty stdin."""
    with open(os.devnull) as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        outputs = [
            file.fileno() if wanted == CAPTURED else wanted for file, wanted in ((out, stdout), (err, stderr))
        ]
        with Forked(words, env, (stdin.fileno(), *outputs)) as running:
            pass
        written = []
        for file in (out, err):
            file.seek(0)
            written.append(file.read().decode(errors="backslashreplace"))
    assert running.returncode is not None
    return subprocess.CompletedProcess(words, running.returncode, *written)


def start_python(*words: str, env: Mapping[str, str]) -> Forked:
    """Starts `python WORDS` with pipes as stdout and stderr."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    try:
        with open(os.devnull) as stdin:
            return Forked(words, env, (stdin.fileno(), out_end, err_end), open(out), open(err))
    finally:
        os.close(out_end)
        os.close(err_end)


@functools.cache
def _helper() -> socket.socket:
    """Returns the connection to the helper of this process, which the first call starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C in the terminal of the tests is for the tests.
            start_new_session=True,
        )
    atexit.register(helper.wait)
    atexit.register(ours.close)
    return ours


def _serve(link: socket.socket) -> list[str]:
    """Forks for every request. Returns in each child, which is to run the words that it returns."""
    for name in PRELOADED:
        importlib.import_module(name)
    # Typer imports while it parses.
    CliRunner().invoke(sys.modules["tconv_swap.cli"].app, ["--help"])
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    while True:
        request, descriptors, _, _ = socket.recv_fds(link, REQUEST_BYTES, len(STREAMS))
        if not request:
            os._exit(0)
        child = os.fork()
        if child == 0:
            link.close()
            return _become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        link.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: bytes, descriptors: list[int]) -> list[str]:
    """Makes this process what Python makes of a new one, and returns its words."""
    words, environment, directory, numbers = json.loads(request)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which torch's import has looked up
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    given = dict(zip(numbers, descriptors, strict=True))
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    for number, (name, mode) in enumerate(STREAMS):
        os.close(number)
        stream = None
        if number in given:
            os.dup2(given[number], number)
            os.close(given[number])
            how = errors or ("backslashreplace" if name == "stderr" else "strict")
            buffering = 1 if name == "stderr" or os.isatty(number) else -1
            stream = open(number, mode, buffering, encoding, how, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[0] = directory if words[0] in ("-m", "-c") else str(Path(words[0]).parent)
    # Once Python has ended: the destructors of torch's libraries take longer than most commands, and none is ours.
    library = ctypes.CDLL(None)
    library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)
    return words  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    option = sys.argv[0] if sys.argv[0] in ("-m", "-c") else None
    if option is None:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        what = sys.argv.pop(1)
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
