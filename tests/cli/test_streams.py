"""What the streams of a real process cannot take, and what a foreign network puts into them."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from cli_cases import environment, finished, saved_generator
from forked import run_python
from sampling import sampled
from torch import nn

from tconv_swap.cli.outcome import ExitCode

CPU = ("--device", "cpu", "--no-benchmark", "--no-backward")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return saved_generator()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("model.pt", *CPU), 0),
        (("none.pt",), ExitCode.CANNOT_LOAD),
        (("model.pt", "--nonsense"), ExitCode.USAGE),
    ],
    ids=["verified", "not loaded", "usage"],
)
def test_a_stderr_that_cannot_be_written_changes_no_exit_code(
    model: Path, words: tuple[str, ...], code: int
) -> None:
    with open("/dev/full", "wb") as full:
        done = finished(*words, stderr=full.fileno())
    assert done.returncode == code
    assert ("VERIFIED" in done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("words", "letters"),
    sampled(
        itertools.product((("--help",), ("bench", "--list"), ("model.pt", "--help")), ("utf-8", "ascii")), 3
    ),
)
def test_a_reader_that_stops_changes_no_exit_code(model: Path, words: tuple[str, ...], letters: str) -> None:
    # The reader is gone before the first letter is written.
    reading, writing = os.pipe()
    os.close(reading)
    done = finished(*words, stdout=writing, PYTHONIOENCODING=letters)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("columns", ["0", "wide"])
def test_an_impossible_width_is_ignored(model: Path, columns: str) -> None:
    done = finished("model.pt", *CPU, COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.search(r"^result +VERIFIED", done.stdout, re.MULTILINE)
    assert 60 < max(map(len, lines)) <= 80


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_device_that_is_full_is_named(model: Path, option: str) -> None:
    os.symlink("/dev/full", "full.md")
    target = "/dev/full" if option == "--json" else "full.md"
    done = finished("model.pt", *CPU, option, target)
    assert done.returncode == ExitCode.CANNOT_WRITE
    last = done.stderr.splitlines()[-1]
    assert last == f"tconv-swap: error: {option}: {target} cannot be written (No space left on device)"


PRINTING = """
import os
import subprocess
import torch
from torch import nn

print("imported")

class Printing(nn.Sequential):
    def forward(self, x):
        print("said by Python")
        os.write(1, b"said by the system\\n")
        subprocess.run(["echo", "said by a process"])
        return super().forward(x)
"""


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_output_of_a_network_is_not_in_the_result(model: Path, quiet: tuple[str, ...]) -> None:
    Path("printing.py").write_text(PRINTING)
    make = (
        "import torch, printing; torch.save(printing.Printing(torch.nn.ConvTranspose2d(4, 3, 2)), 'model.pt')"
    )
    assert run_python("-c", make, env=environment()).returncode == 0
    done = finished("model.pt", "--module", "printing.py", "--json", "-", *CPU, *quiet)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "verified"
    for words in ("imported", "said by Python", "said by the system", "said by a process"):
        assert words in done.stderr
    report = finished("explain", "model.pt", "--module", "printing.py", "--device", "cpu")
    assert report.stdout.startswith("inputs: ")
    assert "said" not in report.stdout


def test_output_before_and_after_the_work_goes_to_stdout(model: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2)), "model.pt")
    done = finished("model.pt")
    assert done.returncode == ExitCode.NOTHING_TO_SWAP
    assert "nothing to swap" in done.stdout
