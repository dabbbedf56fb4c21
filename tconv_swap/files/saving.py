"""Writes files atomically: each is either complete or does not exist."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch
from torch import nn

from tconv_swap.files.fileformat import first_line


class SaveError(Exception):
    """The network was not written; the message is one line, and no file was left."""


def check_target(target: Path, source: Path | None = None, *, text: bool = False) -> None:
    """Checks, before any work is done, that `target` can be written.

    Args:
        target: the file to write.
        source: a file that must not be overwritten.
        text: whether it is for `save_text`, which also writes to a pipe or a device.

    Raises:
        SaveError: `target` is `source` (also by another name, a symbolic or a hard link), a directory or a device, or
            its directory does not exist or is not writable.
    """
    try:
        if target.exists():
            if source is not None and source.exists() and os.path.samefile(target, source):
                raise SaveError(f"{target} is the input itself: give --out another name")
            mode = target.stat().st_mode
            if stat.S_ISDIR(mode):
                raise SaveError(f"{target} is a directory: give --out the name of a file")
            if text and not stat.S_ISREG(mode) and os.access(target, os.W_OK):
                return
            if not stat.S_ISREG(mode):
                raise SaveError(f"{target} is not a regular file")
        directory = _destination(target).parent
        if not directory.is_dir():
            raise SaveError(f"{target} cannot be written: {directory} is not a directory")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise SaveError(f"{target} cannot be written: no permission to write in {directory}")
    except (OSError, ValueError) as error:
        raise SaveError(f"{target} cannot be written ({error})") from None


def save_model(
    model: nn.Module,
    target: Path,
    *,
    check: Callable[[Path], None] | None = None,
    placed: Callable[[Path], None] | None = None,
) -> None:
    """Does `torch.save(model, target)` through `save_whole`."""
    save_whole(lambda stream: torch.save(model, stream), target, check=check, placed=placed)


def save_whole(
    write: Callable[[IO[bytes]], object],
    target: Path,
    *,
    check: Callable[[Path], None] | None = None,
    placed: Callable[[Path], None] | None = None,
) -> None:
    """Writes a file atomically: until the last moment `target` stays as it was.

    Args:
        write: called with the stream to write to.
        target: an existing file is replaced and keeps its permissions; a symbolic link is followed.
        check: called with the complete temporary file before that replaces `target`; may raise to prevent this.
        placed: called with `target` after the replacement. SIGINT and SIGTERM are delayed until it has returned.

    Raises:
        SaveError: the file could not be written (disk full, no permission), or its content could not be pickled.
    """
    destination = _destination(target)
    # In the same directory: os.replace is atomic only within one file system.
    temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
        with os.fdopen(descriptor, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if check is not None:
            check(temporary)
        if destination.exists():
            os.chmod(temporary, stat.S_IMODE(destination.stat().st_mode))
        with _interrupts_held():
            os.replace(temporary, destination)
            if placed is not None:
                placed(target)
        _sync_directory(destination.parent)
    except OSError as error:
        raise SaveError(f"{target} cannot be written ({error.strerror or error})") from error
    except (RuntimeError, TypeError, AttributeError, ValueError, pickle.PickleError) as error:
        # torch's zip writer reports a full disk as a RuntimeError; pickling refuses lambdas and the like.
        raise SaveError(f"{target} cannot be written ({first_line(error)})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def save_text(text: str, target: Path, *, placed: Callable[[Path], None] | None = None) -> None:
    """Writes a report as `save_whole` does, or directly into a pipe or a device.

    Raises:
        OSError, SaveError: it could not be written; no file was left.
    """
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
    else:
        save_whole(lambda stream: stream.write(text.encode()), target, placed=placed)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the end of the block: no signal may come between the renaming and its record."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if None in before.values() or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waiting in came:
            signal.raise_signal(waiting)


def _destination(target: Path) -> Path:
    return Path(os.path.realpath(target))


def _sync_directory(directory: Path) -> None:
    """Makes the renaming survive a power failure, on systems that allow to open a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
