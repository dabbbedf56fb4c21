"""The command line where something is wrong: usage, what nobody expected, signals; and as a process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import command, environment, files, generator, run, saved_generator, swap

import tconv_swap
from tconv_swap import options, workflow
from tconv_swap.cli import ExitCode
from tconv_swap.verification import Check, VerifyReport


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
    def test_every_command_refuses_a_seed_that_no_generator_takes(
        self, model: Path, arguments: tuple[str, ...]
    ) -> None:
        result = run(*arguments, "--seed", 2**63)
        assert result.exit_code == ExitCode.USAGE
        assert "--seed" in result.stderr
        assert files() == ["model.pt"]

    @pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
    def test_every_other_seed_is_taken(self, model: Path, seed: int) -> None:
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
        assert options.parse_shape(" 1, 2,3") == (1, 2, 3)
        assert options.parse_dtype("torch.half") == torch.float16


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

    @pytest.mark.usefixtures("quick")
    def test_ctrl_c(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", interrupt)
        result = swap(model, "-q", "--out", "fast.pt")
        assert result.exit_code == ExitCode.INTERRUPTED
        assert files() == ["model.pt"]


class TestRealEntryPoint:
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
        done = subprocess.run(command(model), env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.CANNOT_LOAD
        assert "posix.system" in done.stderr
        assert "Traceback" not in done.stderr
        assert files() == ["model.pt"]

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_interrupted(self, model: Path, number: int, code: int) -> None:
        arguments = command(model, "--out", "fast.pt", "--device", "cpu", "--iters", 10**9)
        with subprocess.Popen(
            arguments,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            # Whoever started the tests in the background had SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "verifying" in line:
                    process.send_signal(number)
                    break
            rest = process.stderr.read()
        assert process.returncode == code
        assert "Traceback" not in rest
        assert files() == ["model.pt"]

    def test_nobody_reads_the_report(self, model: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        arguments = command(model, "--out", "fast.pt", "--no-benchmark", "--device", "cpu")
        done = subprocess.run(
            arguments, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writing)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert Path("fast.pt").exists()
