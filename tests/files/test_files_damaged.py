"""Files that are damaged, too large, no files at all, and disks that are full."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from file_cases import exported_network, one_line, run
from forked import run_python
from torch import nn

import tconv_swap
from tconv_swap.cli import workflow


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(exported_network()[1], path)
    whole = path.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        assert one_line(run(path, "--unsafe-pickle"), 3)


# --- what takes more than there is --------------------------------------------------------------------------


def test_a_tensor_that_is_huge_only_when_copied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model.register_buffer("bomb", torch.zeros(1).expand(1 << 45))
    torch.save(model, tmp_path / "model.pt")
    assert "its tensors would need 131072 GiB" in one_line(run(tmp_path / "model.pt"), 3)


WITH_64_MIB_FREE = """
import sys
from tconv_swap import memory
from tconv_swap.cli import main
memory.free_bytes, memory.MIN_FREE_BYTES = lambda device: 1 << 26, 0
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_file_that_unpacks_to_more_than_the_memory(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data + bytes(1 << 28 if "data.pkl" in name else 0))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    torch.save(torch.nn.Linear(1 << 14, 1 << 12), tmp_path / "big.pt")
    for name in ("bomb.pt", "big.pt"):
        # In a process of its own: one that has run other tests may hold as much as the file needs, free already.
        words = (str(tmp_path / name), "--no-benchmark")
        result = run_python("-c", WITH_64_MIB_FREE, *words, env={**os.environ, "HOME": str(tmp_path)})
        assert (result.returncode, result.stdout) == (3, ""), result.stderr
        assert "needs more memory than is free" in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr


HEADS = [b"PK\x03\x04", b"\x80\x02", b"\x80\x02X\xff\xff\xff\x0f", (2).to_bytes(8, "little") + b"{}"]


@pytest.mark.parametrize("head", HEADS)
def test_a_file_larger_than_any_memory(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(1 << 42)  # of which the disk holds a few bytes
    assert one_line(run(path), 3)
    assert one_line(run(path, "--model", "torch.nn:Identity"), 3)


def test_names_in_an_archive_are_never_paths(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        for name in (
            "../escaped",
            "plain/../../escaped",
            "/tmp/escaped-tconv-swap",
            "plain/data/../../escaped",
        ):
            archive.writestr(name, b"escaped")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(tmp_path / "model.pt").exit_code in (0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (tmp_path.parent / "escaped").exists()
    assert not Path("/tmp/escaped-tconv-swap").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_device_files_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "model.pt")
    for device in ("/dev/zero", "/dev/full", "/dev/null"):
        assert "is not a regular file" in one_line(run(device), 3)
        assert "is not a regular file" in one_line(run(tmp_path / "model.pt", "--out", device), 2)
        assert "is not the name of a Python file" in one_line(
            run(tmp_path / "model.pt", "--module", device), 2
        )


def test_the_two_networks_share_their_parameters_and_nothing_that_a_run_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.BatchNorm2d(3))
    original, swapped = workflow.original_and_swapped(model, workflow.Request(tmp_path), torch.device("cpu"))
    assert all(a is b for a, b in zip(original.parameters(), swapped.parameters(), strict=True))
    assert not any(a is b for a, b in zip(original.buffers(), swapped.buffers(), strict=True))
    assert not any(a is b for a, b in zip(original.modules(), swapped.modules(), strict=True))
    assert not any(a is b for a, b in zip(original.parameters(), model.parameters(), strict=True))
    assert [type(network[0]) for network in (model, original, swapped)] == [
        *[nn.ConvTranspose2d] * 2,
        tconv_swap.ConvTranspose2d,
    ]


WITH_A_FULL_DISK = """
import resource
from tconv_swap.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
main()
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The system itself refuses to write more than 4 KiB: exit code 5, and nothing is left behind."""
    source, out = tmp_path / "model.pt", tmp_path / "fast.pt"
    torch.save(nn.Sequential(nn.ConvTranspose2d(16, 16, 4)), source)
    words = (str(source), "--out", str(out), "--no-benchmark")
    result = run_python("-c", WITH_A_FULL_DISK, *words, env={**os.environ, "HOME": str(tmp_path)})
    assert result.returncode == 5, result.stderr
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt"]
