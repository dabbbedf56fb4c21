"""Where the cache is, who may read it, and which faults are found before anything is compiled."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tconv_swap.runtime import cache


@pytest.fixture(autouse=True)
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache.cache_directory.cache_clear()
    yield tmp_path / "temporary"
    cache.cache_directory.cache_clear()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        cache.write_atomically(tmp_path / "kernels" / "a.cubin", b"code")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == b"code"
    assert file.stat().st_mode & 0o777 == mode


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    cache.write_atomically(tmp_path / "kernels" / "a", b"old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="quota"):
        cache.write_atomically(tmp_path / "kernels" / "a", b"new")
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == b"old"


def test_threads_write_while_the_cache_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    stop = threading.Event()

    def write(thread: int) -> int:
        count = 0
        while not stop.is_set():
            cache.write_atomically(tmp_path / "cache" / "kernels" / f"{thread}-{count % 50}", bytes(5000))
            count += 1
            time.sleep(0.001)
        return count

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, thread) for thread in range(4)]
        try:
            for _ in range(30):
                time.sleep(0.02)
                assert cache.clear_cache() == []
        finally:
            stop.set()
        assert all(one.result() for one in writing)


def test_a_file_written_before_each_removal_of_a_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    kernels = tmp_path / "cache" / "kernels"
    cache.write_atomically(kernels / "old", b"old")
    remove = os.rmdir

    def write_and_remove(path: str, **named: int) -> None:
        cache.write_atomically(kernels / "new", b"new")
        remove(path, **named)

    monkeypatch.setattr(os, "rmdir", write_and_remove)
    assert cache.clear_cache() == []
    assert [file.name for file in kernels.iterdir()] == ["new"]


# Faults that are found first


class Full:
    """A file on a disk that has space for names, but not for content."""

    def __init__(self, **named: object) -> None:
        pass

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, content: bytes) -> None:
        if content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        pass


def test_a_full_disk_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(tmp_path / "cache"))
    assert cache.cache_problem() == ""
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    assert "cannot be used (No space left on device)" in cache.cache_problem()


@pytest.mark.parametrize("part", cache.COMPILED)
def test_a_part_that_is_anothers_is_found_out(
    part: str, own_temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / part).mkdir(parents=True)
    real = tempfile.TemporaryFile

    def of_another(*, dir: Path) -> object:
        if dir.name == part:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))
        return real(dir=dir)

    assert cache.cache_problem() == ""
    monkeypatch.setattr(tempfile, "TemporaryFile", of_another)
    assert f"cannot be used ({part}: Permission denied)" in cache.cache_problem()
    assert cache.cache_directory().parent == own_temporary


# Which directory is used


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TCONV_SWAP_CACHE", "~/mine")
    assert cache.cache_directory.__wrapped__() == tmp_path / "mine"
    monkeypatch.delenv("TCONV_SWAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache.cache_directory.__wrapped__() == tmp_path / "xdg" / "tconv_swap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_directory.__wrapped__() == tmp_path / ".cache" / "tconv_swap"
    assert not (tmp_path / "~").exists()


def test_a_relative_directory_stays_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TCONV_SWAP_CACHE", "cache")
    assert cache.cache_directory() == tmp_path / "cache"


def test_a_user_without_a_home_has_a_temporary_one(
    own_temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TCONV_SWAP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with caplog.at_level(logging.WARNING, logger="tconv_swap"):
        assert cache.cache_directory().parent == own_temporary
    assert "this user has no home directory" in caplog.text
    assert list(tmp_path.iterdir()) == [own_temporary]


def test_a_directory_that_was_removed_under_the_process(
    own_temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TCONV_SWAP_CACHE", "cache")
    assert cache.cache_directory().parent == own_temporary
