"""The command line where something is wrong: usage, what nobody expected, signals; and as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import command, environment, files, finished, generator, process, run, saved_generator, swap
from forked import CLOSED
from sampling import sampled

import tconv_swap
from tconv_swap.cli import parsers, workflow
from tconv_swap.cli.outcome import ExitCode
from tconv_swap.report import written
from tconv_swap.verification import Check, VerifyReport, runs


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return saved_generator()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that finds nothing wrong, for tests of everything around it."""
    check = Check("eval", "output", "", 0.0, 0.0, 1.0, True)
    monkeypatch.setattr(workflow, "verify", lambda *_, **__: VerifyReport([check]))


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--input-shape", "1,a,2"),
            ("--input-shape", "0,4,1,1"),
            ("--input-shape", "99999999999999999999,4,1,1"),
            ("--input-shape", "9223372036854775807,4,1,1"),
            ("--dtype", "float3"),
            ("--dtype", "int64"),
            ("--dtype", "float8_e4m3fn"),
            ("--seed", "99999999999999999999"),
            ("--seed", str(-(2**63) - 1)),
            ("--device", "nonsense"),
            ("--device", "meta"),
            ("--device", "cuda:99"),
            ("--trust", "no_colon"),
            ("--iters", "0"),
            ("--atol", "-1"),
            ("--no-such-option",),
            ("second.pt",),
            ("--out", "nowhere/fast.pt"),
        ],
    )
    def test_wrong_usage(self, model: Path, arguments: tuple[str, ...]) -> None:
        result = run(model, *arguments)
        assert result.exit_code == ExitCode.USAGE
        assert result.stderr
        assert result.stdout == ""

    @pytest.mark.parametrize("arguments", [("tune", "model.pt"), ("demo", "--dir", "new")])
    def test_every_command_refuses_an_impossible_seed(self, model: Path, arguments: tuple[str, ...]) -> None:
        result = run(*arguments, "--seed", 2**63)
        assert result.exit_code == ExitCode.USAGE
        assert "--seed" in result.stderr
        assert files() == ["model.pt"]

    @pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
    def test_every_other_seed_is_accepted(self, model: Path, seed: int) -> None:
        assert swap(model, "--seed", seed).exit_code == 0

    def test_help_names_every_exit_code(self) -> None:
        for arguments in (["--help"], ["swap", "--help"], ["demo", "-h"], ["model.pt", "--help"]):
            result = run(*arguments)
            assert result.exit_code == 0
            words = result.stdout.split()
            assert all(str(int(code)) in words for code in ExitCode)

    def test_version(self) -> None:
        assert tconv_swap.__version__ in run("--version").stdout

    def test_parsers(self) -> None:
        assert parsers.parse_shape(" 1, 2,3") == (1, 2, 3)
        assert parsers.parse_dtype("torch.half") == torch.float16


class TestUnexpected:
    def test_an_internal_error_is_one_line(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("two\nlines")

        monkeypatch.setattr(workflow, "verify", fail)
        monkeypatch.delenv("TCONV_SWAP_DEBUG", raising=False)
        result = swap(model, "-q", "--out", "fast.pt")
        assert result.exit_code == ExitCode.INTERNAL
        assert result.stderr.startswith("tconv-swap: error: ZeroDivisionError: two (an error in tconv-swap")
        assert result.stderr.count("\n") == 1
        assert files() == ["model.pt"]
        monkeypatch.setenv("TCONV_SWAP_DEBUG", "1")
        assert "Traceback" in swap(model, "-q").stderr

    def test_out_of_memory_says_what_helps(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        monkeypatch.setattr(workflow, "verify", fail)
        result = swap(model, "-q")
        assert result.exit_code == ExitCode.USAGE
        assert "--input-shape" in result.stderr

    @pytest.mark.parametrize("command", ["swap", "explain"])
    def test_out_of_cpu_memory_is_the_same(self, model: Path, command: str) -> None:
        result = run(command, model, "--device", "cpu", "--input-shape", "10000000,4,100000,1000")
        assert result.exit_code == ExitCode.USAGE
        assert "not enough memory (RuntimeError: " in result.stderr
        assert "a smaller --input-shape" in result.stderr

    def test_out_of_memory_in_the_original_is_not_a_mismatch(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            torch.empty(2**60, dtype=torch.int8)

        monkeypatch.setattr(runs.Runner, "run", fail)
        result = swap(model, "-q", "--out", "fast.pt")
        assert result.exit_code == ExitCode.USAGE
        assert "not enough memory (RuntimeError: " in result.stderr
        assert files() == ["model.pt"]

    @pytest.mark.usefixtures("quick")
    def test_ctrl_c(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", interrupt)
        result = swap(model, "-q", "--out", "fast.pt")
        assert result.exit_code == ExitCode.INTERRUPTED
        assert files() == ["model.pt"]


@pytest.mark.usefixtures("quick")
class TestInterruptedWhileWriting:
    def test_written_files_are_named(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(written, "render", interrupt)
        result = swap(model, "--out", "fast.pt", "--json", "r.json", "--report", "r.md")
        assert result.exit_code == ExitCode.INTERRUPTED
        assert result.stderr.endswith("interrupted; written: fast.pt, r.json\n")
        assert files() == ["fast.pt", "model.pt", "r.json"]

    def test_a_file_is_renamed_and_named_or_neither(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace = os.replace

        def interrupted(*paths: Path) -> None:
            signal.raise_signal(signal.SIGINT)
            replace(*paths)

        monkeypatch.setattr(os, "replace", interrupted)
        # Whoever started the tests in the background had it ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = swap(model, "--out", "fast.pt")
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert result.exit_code == ExitCode.INTERRUPTED
        assert result.stderr.endswith("interrupted; written: fast.pt\n")
        assert files() == ["fast.pt", "model.pt"]

    def test_a_signal_before_any_work(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("tconv_swap.cli.commands.doctor.diagnose", interrupt)
        result = run("doctor")
        assert result.exit_code == ExitCode.INTERRUPTED
        assert result.stderr == "tconv-swap: error: interrupted; no file was written\n"

    def test_an_error_in_the_report_is_not_a_mismatch(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("in the charts")

        monkeypatch.setattr(written, "render", fail)
        result = swap(model, "-q", "--report", "r.md")
        assert result.exit_code == ExitCode.INTERNAL
        assert result.stderr.startswith("tconv-swap: error: ZeroDivisionError: in the charts (an error in")


class TestProcess:
    def test_from_file_to_file(self, model: Path) -> None:
        arguments = command(model, "--out", "fast.pt", "--no-benchmark", "--device", "cpu")
        done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "VERIFIED" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr
        assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["tconv-swap"] * 4
        assert files() == ["fast.pt", "model.pt"]

    def test_a_hostile_file_executes_nothing(self, model: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.system, ("touch executed",)

        torch.save([generator(), Bomb()], model)
        done = finished(model)
        assert done.returncode == ExitCode.CANNOT_LOAD
        assert "posix.system" in done.stderr
        assert "Traceback" not in done.stderr
        assert files() == ["model.pt"]

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_interrupted(self, model: Path, number: int, code: int) -> None:
        with process(model, "--out", "fast.pt", "--device", "cpu", "--iters", 10**9) as running:
            assert running.stderr is not None
            for line in running.stderr:
                if "verifying" in line:
                    running.send_signal(number)
                    break
            rest = running.stderr.read()
        assert running.returncode == code
        assert "Traceback" not in rest
        assert files() == ["model.pt"]

    def test_a_closed_pipe_changes_no_exit_code(self, model: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        done = finished(model, "--out", "fast.pt", "--no-benchmark", "--device", "cpu", stdout=writing)
        os.close(writing)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert Path("fast.pt").exists()

    def test_names_that_the_encoding_lacks_are_escaped(self, model: Path) -> None:
        os.rename(model, "модель.pt")
        words = ("модель.pt", "--out", "fast.pt", "--no-benchmark", "--device", "cpu")
        done = finished(*words, PYTHONIOENCODING="latin-1")
        assert done.returncode == 0, done.stderr
        assert "\\u043c\\u043e\\u0434" in done.stdout
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("words", "closed"),
        sampled(
            [
                (("model.pt", "--dry-run"), True),
                (("bench", "--list"), False),
                (("model.pt", "--dry-run"), False),
                (("--version",), False),
            ],
            2,
        ),
    )
    def test_a_stdout_that_cannot_be_written(self, model: Path, closed: bool, words: tuple[str, ...]) -> None:
        with open("/dev/full", "wb") as full:
            done = finished(*words, stdout=CLOSED if closed else full.fileno())
        self.check_that_stdout_cannot_be_written(done)

    @pytest.mark.exhaustive
    def test_an_interpreter_that_starts_without_a_stdout(self, model: Path) -> None:
        script = 'exec "$0" -m tconv_swap --help >&-'
        arguments = ["sh", "-c", script, sys.executable]
        done = subprocess.run(arguments, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
        self.check_that_stdout_cannot_be_written(done)

    @staticmethod
    def check_that_stdout_cannot_be_written(done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == ExitCode.CANNOT_WRITE
        assert "tconv-swap: error: stdout cannot be written (" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr

    def test_a_closed_stderr(self, model: Path) -> None:
        assert finished("nothing.pt", stderr=CLOSED).returncode == ExitCode.CANNOT_LOAD
