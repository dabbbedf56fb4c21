"""The host part builds from source without a GPU or a CUDA toolkit, is kept, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tconv_swap.runtime import cache, compiler, host
from tconv_swap.runtime.compiler import BuildError


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host, "cache_directory", lambda: tmp_path)
    return tmp_path


def test_another_header_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "csrc_directory", lambda: own_cache)
    for source in host.SOURCES:
        (own_cache / source).write_text('#include "routes.h"')
    paths = set()
    for text in ("", "// changed"):
        (own_cache / "routes.h").write_text(text)
        paths.add(host.library_path())
    assert len(paths) == 2


def test_a_missing_compiler_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*install g\+\+"):
        host.build()


def test_a_missing_ninja_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "g++").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="pip install ninja"):
        host.build()


def test_a_ninja_that_is_installed_beside_python_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes PATH as if no virtual environment were activated."""
    (own_cache / "ninja").write_text("#!/bin/sh")
    (own_cache / "ninja").chmod(0o755)
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR=str(own_cache)))
    monkeypatch.setenv("PATH", "/usr/sbin")
    assert compiler.find_ninja() == own_cache
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr("shutil.which", lambda name, path="": f"{own_cache}/{name}")
    with compiler.tools():
        assert os.environ["PATH"] == f"{own_cache}:/usr/sbin"
    assert os.environ["PATH"] == "/usr/sbin"


@pytest.mark.parametrize(
    ("named", "there", "taken"),
    [
        ("", ["g++", "c++"], "g++"),
        ("", ["c++"], "c++"),
        (None, ["c++"], "c++"),
        ("ccache g++", ["ccache"], "ccache g++"),
        ("clang++", ["clang++", "g++"], "clang++"),
    ],
)
def test_the_compiler_that_is_looked_for_is_the_one_that_runs(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, there: list[str], taken: str
) -> None:
    for name in (*there, "ninja"):
        (own_cache / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    with compiler.tools():
        assert os.environ["CXX"] == taken
    assert os.environ.get("CXX") == named
    (own_cache / there[0]).unlink()
    if there[1:] == []:
        with pytest.raises(BuildError, match="was not found"):
            compiler.find_compiler()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", None])
def test_a_damaged_library_is_built_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """A truncated library crashes the process that loads it."""
    built = []

    def build(directory: Path) -> Path:
        built.append(1)
        (directory / "new.so").write_bytes(b"whole")
        return directory / "new.so"

    monkeypatch.setattr(host, "compile_library", build)
    path = host.build()
    assert host.build() == path
    assert built == [1]
    if content is None:
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes(content)
    assert not host.is_built()
    assert host.build().read_bytes() == b"whole"
    assert built == [1, 1]


def test_a_library_of_another_system_is_built_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = iter([b"theirs", b"ours"])
    loaded = []

    def build(directory: Path) -> Path:
        (directory / "new.so").write_bytes(next(contents))
        return directory / "new.so"

    def load(path: Path) -> None:
        loaded.append(path.read_bytes())
        if loaded[-1] == b"theirs":
            raise OSError("version `GLIBC_2.38' not found")

    monkeypatch.setattr(host, "compile_library", build)
    monkeypatch.setattr(host, "load", load)
    host.build_and_load()
    assert loaded == [b"theirs", b"ours"]


def test_another_machine_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.library_path()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert host.library_path() != here


def test_a_file_system_without_locks(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    def build(directory: Path) -> Path:
        (directory / "new.so").touch()
        return directory / "new.so"

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr(host, "compile_library", build)
    assert host.build().exists()


def test_a_cache_that_cannot_be_written_is_named(own_cache: Path) -> None:
    (own_cache / "host").touch()
    with pytest.raises(BuildError, match=f"cannot be built in {own_cache}/host"):
        host.build()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("call.cpp:3:5: error: no", True),
        ("call.cpp:3:5: fatal error: ATen/x.h: No such file", True),
        ("collect2: error: ld returned 1 exit status", False),
        ("g++: fatal error: Killed signal terminated program cc1plus", False),
    ],
)
def test_what_a_compiler_says_of_a_source(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, words: str, refused: bool
) -> None:
    """The linker reports a full disk, which may have space at the next attempt."""

    def fails(**_: object) -> None:
        raise RuntimeError(f"Error building extension\n{words}\n")

    monkeypatch.setattr("torch.utils.cpp_extension.load", fails)
    with pytest.raises(BuildError) as raised:
        host.build()
    assert isinstance(raised.value, host.RefusedError) == refused


def test_a_build_does_not_load_the_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded the library from another cache would register every op twice, which ends the
    process."""
    for source in host.SOURCES:
        (own_cache / source).write_text("#include <cstdlib>\nstatic int loaded = (std::abort(), 0);\n")
    monkeypatch.setattr(host, "csrc_directory", lambda: own_cache)
    assert host.build().stat().st_size > 0


def test_a_failing_build_shows_the_compilers_words(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in host.SOURCES:
        (own_cache / source).write_text("#error deliberately broken")
    monkeypatch.setattr(host, "csrc_directory", lambda: own_cache)
    with pytest.raises(BuildError, match="deliberately broken"):
        host.build()
    assert not list((own_cache / "host").rglob("*.so"))


def test_a_source_that_does_not_build_is_said_and_not_compiled_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for source in host.SOURCES:
        (own_cache / source).write_text("#error deliberately broken")
    monkeypatch.setattr(host, "csrc_directory", lambda: own_cache)
    monkeypatch.setattr(host, "library", host.build_and_load)
    assert not host.is_available.__wrapped__()
    assert "deliberately broken" in caplog.text
    assert "computed by PyTorch's operator" in caplog.text
    (path,) = own_cache.rglob("tconv_swap.txt")
    assert "deliberately broken" in path.read_text()
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(host, "compile_library", lambda _: pytest.fail("compiled again"))
        assert not host.is_available.__wrapped__()
        assert f"{path} says why, and is to be removed" in caplog.text
        patched.setenv("CXX", "g++")
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            host.build()


def test_a_compiler_that_was_killed_is_asked_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = own_cache / "killed-g++"
    killed.write_text(
        "#!/bin/sh\necho 'g++: fatal error: Killed signal terminated program cc1plus' >&2\nexit 1\n"
    )
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    monkeypatch.setattr(host, "library", host.build_and_load)
    assert not host.is_available.__wrapped__()
    assert "Killed signal" in caplog.text
    assert list(own_cache.rglob("tconv_swap.txt")) == []


def test_kernels_that_stand_in_come_back_where_nothing_is_loaded() -> None:
    """In a process without a compiler, an autocast still casts the tensors of an exported program."""
    code = (
        "import torch, tconv_swap\n"
        "from tconv_swap.runtime import host\n"
        "def line(): return [x for x in torch._C._dispatch_dump('tconv_swap::conv_transpose2d_output').splitlines()"
        " if x.startswith('AutocastCUDA')]\n"
        "before = line()\n"
        "assert len(before) == 1 and not host.is_available() and len(line()) == 1\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TCONV_SWAP_CACHE": cache, "CXX": "no-such-compiler"}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=240)


def test_without_a_writable_home_the_cache_is_temporary_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(blocker / "below"))
    directory = cache.cache_directory.__wrapped__()
    assert directory.is_dir()
    assert cache.ENVIRONMENT_VARIABLE in caplog.text
