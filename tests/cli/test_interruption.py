"""A signal has an exit code and one true line, from the first import to the last of its teardown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import REPOSITORY, command, environment, files, process, run, saved_generator
from forked import run_python

from tconv_swap.cli import workflow
from tconv_swap.cli.outcome import ExitCode
from tconv_swap.report import written

SWALLOWED = """
import signal, sys
from tconv_swap.cli.console import Progress
from tconv_swap.interruption import raise_at_signals

signal.signal(signal.SIGINT, signal.default_int_handler)
raise_at_signals()
try:
    signal.raise_signal(int(sys.argv[1]))
except BaseException:  # as the modules do that numpy is made of, while they are imported
    print("swallowed", flush=True)
Progress(quiet=True)("the next thing")
print("it goes on")
"""


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, ""), (None, "")]
)
def test_code_that_catches_the_exception_does_not_hide_the_signal(number: int | None, raised: str) -> None:
    argument = str(int(number or signal.SIGCONT))
    done = run_python("-c", SWALLOWED, argument, env=environment())
    assert done.stdout == ("it goes on\n" if number is None else "swallowed\n")
    assert raised in done.stderr
    assert done.returncode == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143, None: 0}[number]


#: Stands for torch, whose import takes seconds.
SLOW_TORCH = "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "tconv-swap: error: interrupted; no file was written\n"),
        (signal.SIGTERM, "tconv-swap: error: terminated; no file was written\n"),
    ],
)
@pytest.mark.parametrize("start", ["module", "script"])
def test_no_traceback_while_torch_is_imported(tmp_path: Path, number: int, words: str, start: str) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    script = tmp_path / "tconv-swap"
    script.write_text("import sys\nfrom tconv_swap.cli import main\nsys.exit(main())\n")
    with subprocess.Popen(
        [sys.executable, *(["-m", "tconv_swap"] if start == "module" else [str(script)])],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "importing\n"
        running.send_signal(number)
        assert running.stderr.read() == words
    assert running.returncode == 128 + number


def test_a_program_that_imports_the_library_keeps_its_own_signals() -> None:
    code = (
        "import signal; before = [signal.getsignal(n) for n in (2, 15)]; import tconv_swap.cli\n"
        "assert [signal.getsignal(n) for n in (2, 15)] == before; print('kept')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False)
    assert done.stdout == b"kept\n", done.stderr


TEARDOWN = """
import atexit, os, time
from torch import nn

def tell(write=os.write, sleep=time.sleep):
    write(2, b"teardown\\n")
    sleep(1.0)

class Late:
    def __del__(self, tell=tell):
        tell()

class Net(nn.Sequential):
    pass

"""


def interpreter(*words: str) -> subprocess.Popen[str]:
    """Starts the command as `process` does, by an interpreter that starts too."""
    return subprocess.Popen(
        command(*words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # If the tests were started in the background, SIGINT is ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("number", "late", "start"),
    [
        (signal.SIGINT, "atexit.register(tell)", process),
        (signal.SIGTERM, "late = Late()", process),
        pytest.param(signal.SIGINT, "late = Late()", interpreter, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_during_the_teardown_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    late: str,
    start: Callable[..., Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        TEARDOWN + late + "\ndef build():\n    return Net(nn.ConvTranspose2d(4, 3, 2))\n"
    )
    torch.save(torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 3, 2)).state_dict(), "weights.pt")
    short = ("--dry-run", "--no-backward", "--device", "cpu")
    words = ("weights.pt", "--model", "net.py:build", "--json", "r.json", *short)
    with start(*words) as running:
        assert "teardown\n" in iter(running.stderr.readline, "")
        running.send_signal(number)
        rest = running.stderr.read()
    assert (running.returncode, rest) == (0, "")
    assert Path("r.json").exists()


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_the_message_names_exactly_the_files_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_generator()
    words = ("model.pt", "--out", "fast.pt", "--json", "r.json", "--device", "cpu", "--iters", "1000000")
    with process(*words) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "timing" in line:
                break
        running.send_signal(number)
        rest = running.stderr.read()
    assert running.returncode == code
    assert rest.endswith(f"tconv-swap: error: {word}; written: r.json\n")
    assert "Traceback" not in rest
    assert files() == ["model.pt", "r.json"]
    assert f'"exit_code": {code}' in Path("r.json").read_text()


def test_the_codes_are_in_every_help() -> None:
    for name in ("swap", "demo", "bench", "explain", "tune", "doctor"):
        words = run(name, "--help").stdout.split()
        assert {"130", "143"} <= set(words), name


class TestSignalsOfThisProcess:
    """Without the entry point: a KeyboardInterrupt is Ctrl-C's here."""

    @pytest.fixture
    def model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        return saved_generator()

    def test_after_the_json_was_written_the_message_names_it(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(written, "render", interrupt)
        result = run(model, "--dry-run", "--json", "r.json", "--report", "r.md")
        assert result.exit_code == ExitCode.INTERRUPTED
        assert result.stderr.endswith("interrupted; written: r.json\n")
        assert files() == ["model.pt", "r.json"]

    @pytest.mark.parametrize("target", ["-", None])
    def test_the_message_says_that_nothing_was_written(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, target: str | None
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(workflow, "load_model", interrupt)
        result = run(model, *(() if target is None else ("--json", target)))
        assert result.exit_code == ExitCode.INTERRUPTED
        assert result.stderr.endswith("interrupted; no file was written\n")
        assert files() == ["model.pt"]

    def test_sigterm_waits_until_a_file_is_renamed_and_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tconv_swap.files import saving

        assert threading.current_thread() is threading.main_thread()
        replace = os.replace

        def terminated(*paths: Path) -> None:
            signal.raise_signal(signal.SIGTERM)
            replace(*paths)

        def handler(*_: Any) -> None:
            raise SystemExit(143)

        monkeypatch.setattr(os, "replace", terminated)
        placed: list[Path] = []
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with pytest.raises(SystemExit):
                saving.save_text("whole", tmp_path / "r.md", placed=placed.append)
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)
        assert placed == [tmp_path / "r.md"]
        assert (tmp_path / "r.md").read_text() == "whole"
