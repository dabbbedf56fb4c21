"""Damaged and hostile files and arguments: one clear line, a documented exit code, nothing executed.

`TCONV_SWAP_FUZZ=20000 pytest tests/files/test_fuzz.py` runs that many of each instead of the few hundred of CI
with --exhaustive, and the hundred and fifty without.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from tconv_swap.cli.application import app
from tconv_swap.cli.outcome import ExitCode
from tconv_swap.files.loading import LoadError, load_inputs, load_model
from tconv_swap.verification import Check, VerifyReport

LEGACY = {"_use_new_zipfile_serialization": False}
#: Documented in docs/testing.md.
EXIT_CODES = {int(code) for code in ExitCode}
SPECIAL = [
    *(struct.pack("<I", n) for n in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)),
    struct.pack("<Q", 1 << 62),
    *(b"\x80\x02", b"\x80\x04", b".", b"R", b"(", b"t", b"}", b"0", b"h\x00", b"Q", b"b"),
    *(b"\x8a\xff", b"\x8b\xff\xff\xff\x7f"),
    *(b"cos\nsystem\n", b"cposix\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\ngetattr\n", b"ctorch\nload\n"),
    *(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"../../x", b"\x1b[2J", b"data.pkl", b"constants.pkl"),
]  # fmt: skip


class CreatesFile:
    """Unpickled by a loader that trusts it, this creates the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(2, 3, 2, 2), nn.BatchNorm2d(3), nn.ReLU())


def saved(content: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **how)
    return stream.getvalue()


def safetensors_file() -> bytes:
    header = b'{"0.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    return struct.pack("<Q", len(header)) + header + bytes(24)


def corpus(marker: Path) -> dict[str, bytes]:
    hostile = network()
    hostile.payload = CreatesFile(marker)
    return {
        "network": saved(network()),
        "legacy network": saved(network(), **LEGACY),
        "hostile network": saved(hostile),
        "hostile legacy network": saved(hostile, **LEGACY),
        "hostile network of protocol 4": saved(hostile, pickle_protocol=4),
        "hostile plain pickle": pickle.dumps(CreatesFile(marker)),
        "weights": saved(network().state_dict()),
        "hostile checkpoint": saved({"state_dict": network().state_dict(), "hyper": CreatesFile(marker)}),
        "safetensors": safetensors_file(),
    }


def mutated(content: bytes, others: list[bytes], random: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(data) + 1)
        length = random.choice((1, 1, 2, 4, 8, 64, 512))
        action = random.randrange(7)
        if action == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif action == 1:
            data[at : at + length] = random.randbytes(length)
        elif action == 2:
            piece = random.choice(SPECIAL)
            data[at : at + len(piece)] = piece
        elif action == 3:
            data[at:at] = random.choice(SPECIAL)
        elif action == 4:
            del data[at : at + length]
        elif action == 5:
            data[at:at] = data[at : at + length]
        elif action == 6:
            other = random.choice(others)
            start = random.randrange(len(other))
            data[at : at + length] = other[start : start + length]
        if not data:
            return b"\x80"
    return bytes(data[: random.randrange(len(data))] if random.random() < 0.1 else data)


def mutated_inside(content: bytes, others: list[bytes], random: random.Random) -> bytes:
    """A mutation of one record of a zip archive, with a checksum that fits: what a checksum would hide."""
    if not content.startswith(b"PK"):
        return mutated(content, others, random)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    stream = io.BytesIO()
    target = random.choice([name for name in records if name.endswith("data.pkl")] * 4 + list(records))
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")  # of two records with one name
        for name, data in records.items():
            if name == target:
                data = mutated(data or b"\0", others, random)
                name = name if random.random() < 0.9 else random.choice((name + "x", "../" + name, "a/b.pkl"))
            if random.random() > 0.02:
                archive.writestr(name, data)
    return stream.getvalue()


@pytest.fixture
def runs(exhaustive: bool) -> int:
    return int(os.environ.get("TCONV_SWAP_FUZZ", "400" if exhaustive else "150"))


def outcomes(
    tmp_path: Path, load: Callable[[Path], Any], mutate: Callable[..., bytes], seed: int, runs: int
) -> Iterator[str]:
    """Of every run: `loaded` or what was refused. Fails for any other exception, and if something was executed."""
    marker, path = tmp_path / "executed", tmp_path / "fuzzed.pt"
    files = corpus(marker)
    generator = random.Random(seed)
    for number in range(runs):
        name = generator.choice(list(files))
        content = mutate(files[name], list(files.values()), generator)
        path.write_bytes(content)
        try:
            load(path)
            yield "loaded"
        except LoadError as error:
            message = str(error)
            assert message.isprintable(), (number, name, message)
            assert len(message) < 20_000, (number, name, message)
            yield message
        except BaseException as error:
            raise AssertionError(
                f"run {number} of seed {seed}, {name}: {type(error).__name__}: {error}"
            ) from error
        assert not marker.exists(), (number, name)
        assert path.read_bytes() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fuzzed.pt"]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutate", [mutated, mutated_inside])
@pytest.mark.parametrize(
    "load",
    [
        load_model,
        lambda path: load_model(path, factory="torch.nn:Identity"),
        load_inputs,
    ],
    ids=["network", "weights", "inputs"],
)
def test_damaged_and_hostile_files(
    tmp_path: Path, load: Callable[[Path], Any], mutate: Callable[..., bytes], runs: int
) -> None:
    seen = list(outcomes(tmp_path, load, mutate, 20261121, runs))
    assert len(seen) == runs
    # The mutations reach different depths: some files stay whole, most are refused, for many reasons.
    assert len({text.partition("fuzzed.pt")[2][:60] for text in seen}) > 10


def test_the_hostile_files_execute_if_they_are_trusted(tmp_path: Path) -> None:
    for name, content in corpus(tmp_path / "executed").items():
        if "hostile" not in name or "checkpoint" in name or "plain" in name:
            continue
        (tmp_path / "model.pt").write_bytes(content)
        load_model(tmp_path / "model.pt", unsafe_pickle=True)
        assert (tmp_path / "executed").exists(), name
        (tmp_path / "executed").unlink()


OPTIONS = [
    "--out", "-o", "--input-shape", "--inputs", "--device", "--dtype", "--channels-last", "--include", "--exclude",
    "--include-1d", "--dry-run", "--no-backward", "--no-benchmark", "--atol", "--rtol", "--seed", "--warmup", "--iters",
    "--json", "--quiet", "-q", "--trust", "--unsafe-pickle", "--module", "--model", "--key", "--out-format", "--help",
    "--version", "--", "-", "--nothing", "-x", "swap",
]  # fmt: skip
VALUES = [
    "model.pt", "hostile.pt", "weights.pt", "nothing.pt", ".", "", "/dev/null", "a\0b", "\x1b[2J", "-1", "0", "1",
    "1e9", "nan", "inf", "1,2,3,3", "2x2x4x4", "1,2,0,3", "1,2,99999999999999999999,1", "x" * 5000, "cpu", "cuda",
    "cuda:7", "meta", "mps", "float16", "int8", "complex64", "float7", "**", "0", "[", "a..b", "os:system",
    "builtins:eval", "module", "state_dict", "net.py", "net.py:build", "torch.nn:Identity", "out.pt", "nowhere/out.pt",
    "\udcff", "é",
]  # fmt: skip


@pytest.mark.timeout(0)
def test_random_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Any arguments end in a documented exit code and no traceback; nothing hostile is executed."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "executed"
    files = corpus(marker)
    sources = {
        "model.pt": files["network"],
        "hostile.pt": files["hostile network"],
        "weights.pt": files["weights"],
    }
    for name, content in sources.items():
        Path(name).write_bytes(content)
    # Verification itself is slow, and not what is fuzzed.
    check = Check("eval", "output", "", 0.0, 0.0, 1.0, True)
    monkeypatch.setattr("tconv_swap.cli.workflow.verify", lambda *_, **__: VerifyReport([check]))
    monkeypatch.setattr("tconv_swap.cli.workflow.benchmark", lambda *_, **__: None)
    # As in a process of its own, the options are declared once.
    command_line = typer.main.get_command(app)
    monkeypatch.setattr("typer.testing._get_command", lambda _: command_line)
    generator = random.Random(7)
    codes = set()
    for number in range(runs):
        command = generator.choice([[], [], [], ["swap"], ["tune"]])
        arguments = [
            *command,
            generator.choice(["model.pt", "model.pt", "hostile.pt", "weights.pt", *VALUES]),
        ]
        for _ in range(generator.randrange(6)):
            arguments.append(generator.choice(OPTIONS + VALUES[:3]))
            if generator.random() < 0.7:
                arguments.append(generator.choice(VALUES))
        if "--unsafe-pickle" in arguments and "hostile.pt" in arguments:
            continue
        result = CliRunner().invoke(app, arguments)
        shown = (number, arguments, result.output[-500:])
        assert result.exception is None or isinstance(result.exception, SystemExit), (shown, result.exception)
        assert result.exit_code in EXIT_CODES - {ExitCode.INTERNAL}, shown
        assert "Traceback" not in result.output, shown
        assert not marker.exists(), shown
        targets = [b for a, b in itertools.pairwise(arguments) if a in ("--json", "--out", "-o")]
        for name, content in sources.items():
            if name in targets and name != arguments[len(command)]:
                Path(name).write_bytes(content)  # somebody wanted it overwritten
            assert Path(name).read_bytes() == content, shown
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")], shown
        codes.add(result.exit_code)
    assert codes >= {0, 2, 3}
