"""The commands about this machine: doctor, cache; and what they say of a cache that cannot be used."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from cli_cases import run
from forked import run_python

from tconv_swap.cli import diagnosis
from tconv_swap.runtime.cache import cache_directory


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(tmp_path / "cache"))
    cache_directory.cache_clear()
    yield tmp_path / "cache"  # type: ignore[misc]
    cache_directory.cache_clear()


class TestDoctor:
    def test_ten_lines_of_80_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        result = run("doctor")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        names = [line.split()[0] for line in lines if not line.startswith(" ")]
        assert names == [
            "tconv-swap",
            "torch",
            "CUDA",
            "GPU",
            "NVRTC",
            "compiler",
            "cache",
            "charts",
            "PyTorch's",
            "verdict",
        ]
        assert torch.__version__ in result.stdout
        assert str(cache_directory())[:20] in result.stdout

    def test_as_json(self) -> None:
        findings = json.loads(run("doctor", "--json", "-").stdout)["findings"]
        assert len(findings) == 10
        assert {finding["verdict"] for finding in findings} <= {"ok", "note", "missing"}

    def test_a_missing_requirement_has_an_exit_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> diagnosis.Finding:
            raise OSError("the driver is broken\nmore")

        monkeypatch.setattr(diagnosis, "_gpu", broken)
        result = run("doctor")
        assert result.exit_code == 1
        flat = " ".join(result.stdout.split())
        assert "GPU NO checking it raises OSError: the driver is broken" in flat
        assert "verdict NO the kernels cannot run here: see GPU" in flat

    def test_no_compiler(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        (finding,) = [finding for finding in diagnosis.diagnose() if finding.name == "compiler"]
        assert "'no-such-compiler' was not found; install g++" in finding.text

    @pytest.mark.gpu
    def test_on_a_gpu(self) -> None:
        result = run("doctor")
        assert result.exit_code == 0, result.output
        assert torch.cuda.get_device_name() in " ".join(result.stdout.split())
        assert "the kernels run here" in result.stdout


class TestCache:
    @pytest.fixture
    def filled(self, own_cache: Path) -> Path:
        for name in ("kernels/a.cubin", "host/torch-2/launch.so", "tuned/h200.json", "somebody/else.txt"):
            (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
            (own_cache / name).write_bytes(b"x" * 2**20)
        return own_cache

    def test_cache_shows_its_size(self, filled: Path) -> None:
        result = run("cache")
        assert result.exit_code == 0
        assert result.stdout.strip() == f"{filled}: 3 files, 3.0 MiB"

    def test_clear(self, filled: Path) -> None:
        result = run("cache", "clear")
        assert result.exit_code == 0
        assert result.stdout.strip() == f"removed: 3 files, 3.0 MiB from {filled}"
        left = [path.name for path in filled.rglob("*") if path.is_file()]
        assert left == ["else.txt"], "what is not ours stays"
        assert "0 files" in run("cache").stdout

    def test_clearing_kernels_keeps_the_results_of_tune(self, filled: Path) -> None:
        assert "removed: 2 files" in run("cache", "clear", "--kernels").stdout
        assert (filled / "tuned/h200.json").exists()

    def test_files_that_cannot_be_removed_are_reported(
        self, filled: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: str, **_: int) -> None:
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr(os, "unlink", refuse)
        result = run("cache", "clear")
        assert result.exit_code == 5
        file = filled / "kernels" / "a.cubin"
        assert f"{file} was not removed (Permission denied)" in result.stdout.replace("\n", "")

    def test_a_link_in_place_of_a_part_is_reported(self, own_cache: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        own_cache.mkdir(exist_ok=True)
        (own_cache / "kernels").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        result = run("cache", "clear")
        assert result.exit_code == 5
        said = f"{own_cache / 'kernels'} was not removed (Cannot call rmtree on a symbolic link)"
        assert said in result.stdout.replace("\n", "")


class TestUnusableCache:
    @pytest.fixture
    def blocked(self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        own_cache.touch()
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        return own_cache

    def test_doctor_and_cache_report_the_consequences(self, blocked: Path) -> None:
        (finding,) = [finding for finding in diagnosis.diagnose() if finding.name == "cache"]
        assert finding.verdict == "note"
        shown = run("cache")
        assert shown.exit_code == 0
        for text in (finding.text, shown.stdout):
            assert f"{blocked} cannot be used (it is no directory)" in text
            assert "every process compiles its kernels again" in text
            assert "what `tune` finds out is lost" in text

    def test_there_is_nothing_to_clear(self, blocked: Path) -> None:
        result = run("cache", "clear")
        assert result.exit_code == 5
        assert result.stdout == ""
        assert f"nothing was removed: {blocked} cannot be used" in result.stderr

    def test_the_temporary_cache_is_removed_with_the_process(self, blocked: Path, tmp_path: Path) -> None:
        code = (
            "import os; from tconv_swap.runtime.cache import cache_directory as c; (c() / 'kernels').mkdir()\n"
            "if os.fork() == 0: raise SystemExit\n"
            "os.wait(); assert (c() / 'kernels').is_dir(); print(c())"
        )
        done = run_python("-c", code, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).parent == tmp_path / "temporary"
        assert list((tmp_path / "temporary").iterdir()) == []
