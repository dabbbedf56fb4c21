"""The file of winners while other processes write it too, and when it cannot be read."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tuned_cases import pretended_machine

from tconv_swap.cuda import tuned
from tconv_swap.cuda.tuned import Winner

MACHINE = {"gpu": "NVIDIA GeForce RTX 3080", "driver": "1.2", "kernels": "0"}
WINNERS = {"forward: some problem": Winner(True, "", "PyTorch's operator 8.0 us")}
machine_of = tuned.machine.__wrapped__
TUNERS, EACH = 6, 4


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    with pretended_machine(monkeypatch, tmp_path, dict(MACHINE)) as facts:
        yield facts


def test_those_who_tune_at_once_keep_what_each_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: a lock of the system also holds between threads that open the file separately."""
    real = tuned.write_atomically

    def slowly(path: Path, content: bytes) -> None:
        time.sleep(0.01)
        real(path, content)

    monkeypatch.setattr(tuned, "write_atomically", slowly)

    def keep_some(who: int) -> None:
        for number in range(EACH):
            tuned.keep(0, {f"{who}.{number}": Winner(True, "", "")})

    with ThreadPoolExecutor(TUNERS) as pool:
        list(pool.map(keep_some, range(TUNERS)))
    assert len(tuned.winners(0)) == TUNERS * EACH


def test_a_file_system_without_locks_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    tuned.keep(0, WINNERS)
    assert tuned.winners(0) == WINNERS


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **named: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)


def test_winners_that_cannot_be_read_are_not_written_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuned.keep(0, WINNERS)
    with monkeypatch.context() as patched:
        refuse_to_read(patched)
        assert tuned.winners(0) == {}
        assert "Permission denied" in caplog.text
        with pytest.raises(PermissionError):
            tuned.keep(0, {"another": Winner(False, "", "")})
    tuned.winners.cache_clear()
    assert tuned.winners(0) == WINNERS


def test_a_directory_that_cannot_be_read_has_no_winners(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    tuned.keep(0, WINNERS)
    monkeypatch.setattr(os, "listdir", refuse)
    for _ in range(2):
        assert tuned.winners(0) == {}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "what was tuned is not used"
    ]


def test_another_gpu_of_a_longer_name_is_not_spoken_of(
    machine: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    machine["gpu"] += " Ti"
    tuned.keep(0, WINNERS)
    machine["gpu"] = MACHINE["gpu"]
    assert tuned.winners(0) == {}
    assert not caplog.records


def test_a_part_of_a_gpu_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gpu", "compute_capability", "multiprocessors", "driver", "torch", "cudnn")
    found = []
    for multiprocessors in (132, 66):
        facts = {**dict.fromkeys(names, "?"), "multiprocessors": multiprocessors}
        monkeypatch.setattr(tuned, "gpu_facts", lambda device, facts=facts: facts)
        found.append(machine_of(0))
    assert found[0] != found[1]
    assert set(found[0]) == {*names, "kernels"}
