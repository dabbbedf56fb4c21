"""The host part builds from source without a GPU or a CUDA toolkit, is kept, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tconv_swap.cuda import cache, compiler, launch, node, plan, program
from tconv_swap.cuda.compiler import BuildError
from tconv_swap.geometry import Geometry


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(launch, "cache_directory", lambda: tmp_path)
    return tmp_path


def test_the_host_part_builds_once_and_is_kept(tmp_path: Path) -> None:
    # In processes of their own: one that has loaded it does not load another copy.
    code = (
        "from tconv_swap.cuda import launch; assert launch._library().tconv_add_plan; print(launch.build())"
    )
    words = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TCONV_SWAP_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        for _ in range(2)
    ]
    assert ["building the CUDA launcher" in each.stderr for each in words] == [True, False]
    assert words[0].stdout == words[1].stdout
    (library,) = tmp_path.rglob("launch.so")
    assert str(library) == words[0].stdout.strip()
    assert sorted(path.name for path in library.parent.iterdir()) == ["launch.sha256", "launch.so", "lock"]


def test_another_header_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "csrc_directory", lambda: own_cache)
    (own_cache / "node.cpp").write_text('#include "routes.h"')
    paths = set()
    for text in ("", "// changed"):
        (own_cache / "routes.h").write_text(text)
        paths.add(launch.library_path("node.cpp"))
    assert len(paths) == 2


def test_a_missing_compiler_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*install g\+\+"):
        launch.build()


def test_a_missing_ninja_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "g++").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="pip install ninja"):
        launch.build()


def test_a_ninja_that_is_installed_beside_python_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a virtual environment is not activated."""
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
    """Half of one kills whoever loads it."""
    built = []

    def build(source: str, what: str, directory: Path) -> Path:
        built.append(source)
        (directory / "new.so").write_bytes(b"whole")
        return directory / "new.so"

    monkeypatch.setattr(launch, "_built", build)
    path = launch.build()
    assert launch.build() == path
    assert built == ["launch.cpp"]
    if content is None:
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes(content)
    assert not launch.is_built()
    assert launch.build().read_bytes() == b"whole"
    assert built == ["launch.cpp"] * 2


def test_a_library_of_another_system_is_built_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = iter([b"theirs", b"ours"])
    loaded = []

    def build(source: str, what: str, directory: Path) -> Path:
        (directory / "new.so").write_bytes(next(contents))
        return directory / "new.so"

    def load(path: Path) -> None:
        loaded.append(path.read_bytes())
        if loaded[-1] == b"theirs":
            raise OSError("version `GLIBC_2.38' not found")

    monkeypatch.setattr(launch, "_built", build)
    monkeypatch.setattr(launch, "_load", load)
    launch.load()
    assert loaded == [b"theirs", b"ours"]


def test_another_machine_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = launch.library_path()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert launch.library_path() != here


def test_a_file_system_without_locks(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    def build(source: str, what: str, directory: Path) -> Path:
        (directory / "new.so").touch()
        return directory / "new.so"

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr(launch, "_built", build)
    assert launch.build().exists()


def test_a_cache_that_cannot_be_written_is_named(own_cache: Path) -> None:
    (own_cache / "host").touch()
    with pytest.raises(BuildError, match=f"cannot be built in {own_cache}/host"):
        launch.build()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("node.cpp:3:5: error: no", True),
        ("node.cpp:3:5: fatal error: ATen/x.h: No such file", True),
        ("collect2: error: ld returned 1 exit status", False),
        ("g++: fatal error: Killed signal terminated program cc1plus", False),
    ],
)
def test_what_a_compiler_says_of_a_source(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, words: str, refused: bool
) -> None:
    """The linker's words are of a full disk, which another time has room."""

    def fails(**_: object) -> None:
        raise RuntimeError(f"Error building extension\n{words}\n")

    monkeypatch.setattr("torch.utils.cpp_extension.load", fails)
    with pytest.raises(BuildError) as raised:
        launch.build()
    assert isinstance(raised.value, launch.RefusedError) == refused


@pytest.mark.parametrize(
    ("architecture", "overlaps"), [("sm_80", 0), ("sm_89", 0), ("sm_90a", 1), ("sm_120", 1)]
)
def test_kernels_that_do_not_wait_overlap_nothing(
    monkeypatch: pytest.MonkeyPatch, architecture: str, overlaps: int
) -> None:
    monkeypatch.setattr(launch, "_kernel", lambda *_: 7)
    kernel = program.Kernel("a.cu", "b", ())
    made = program.Plan("a", "b", (), (program.Launch(kernel, 1, 32, (), overlaps_previous=True),))
    words = launch.plan_words(made, torch.float32, architecture)
    assert words[words.index(7) + 4] == overlaps


def test_a_failing_build_shows_the_compilers_words(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = own_cache / "launch.cpp"
    source.write_text("#error deliberately broken")
    monkeypatch.setattr(launch, "csrc_directory", lambda: own_cache)
    with pytest.raises(BuildError, match="deliberately broken"):
        launch.build()
    assert not list((own_cache / "host").rglob("*.so"))


def test_the_node_builds() -> None:
    assert node._library() is not None
    arguments = [a.name for a in torch.ops.tconv_swap.differentiable.default._schema.arguments]
    assert arguments == ["route", "input", "weight", "bias"]


def test_a_node_that_does_not_build_is_said_and_not_tried_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (own_cache / node.SOURCE).write_text("#error deliberately broken")
    monkeypatch.setattr(launch, "csrc_directory", lambda: own_cache)
    assert node._library.__wrapped__() is None
    assert "deliberately broken" in caplog.text
    assert "take their way through Python" in caplog.text
    (path,) = own_cache.rglob("node.txt")
    assert "deliberately broken" in path.read_text()
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(launch, "build", lambda _: pytest.fail("asked again"))
        assert node._library.__wrapped__() is None
    assert f"{path} says why, and is to be removed" in caplog.text
    # Another compiler may take it.
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert node._library.__wrapped__() is None
    assert "'no-such-compiler' was not found" in caplog.text


def test_a_compiler_that_was_killed_is_asked_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = own_cache / "killed-g++"
    killed.write_text(
        "#!/bin/sh\necho 'g++: fatal error: Killed signal terminated program cc1plus' >&2\nexit 1\n"
    )
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    assert node._library.__wrapped__() is None
    assert "Killed signal" in caplog.text
    assert list(own_cache.rglob("node.txt")) == []


def test_without_a_writable_home_the_cache_is_temporary_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(blocker / "below"))
    directory = cache.cache_directory.__wrapped__()
    assert directory.is_dir()
    assert cache.ENVIRONMENT_VARIABLE in caplog.text


def test_plan_words_are_what_launch_cpp_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_kernel", lambda kernel, architecture: 77)
    problem = plan.Problem(Geometry(2, 4, 5, 6, 3, (3, 3)), torch.float32, "ieee", True, True)
    made = plan.plan_forward(problem, True, plan.Device("sm_75", 30, 48 << 10))
    words = launch.plan_words(made, torch.float32, "sm_75")
    assert words[:3] == [6, made.workspace_bytes, 1]
    assert words[3:13] == [6, 4, 2, 3, 7, 8, 168, 1, 24, 3]
    assert words[13:15] == [len(made.launches), 77]
    one = made.launches[0]
    assert words[15:20] == [one.grid, one.block, one.shared_bytes, 0, len(one.arguments)]
    assert words[-1] == 0
    inputs = (torch.empty(2, 4).t(), torch.empty(3), None)
    told = launch.plan_words(made, torch.float32, "sm_75", inputs)
    assert told == [*words[:-1], 3, 1, 2, 4, 2, 1, 4, 1, 1, 3, 1, 0, 0]


def test_tensor_maps_and_structs_are_told_after_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_kernel", lambda kernel, architecture: 77)
    boxed = program.TensorMap(
        program.workspace(32),
        program.ElementKind.BFLOAT16,
        sizes=(64, 10, 9, 2),
        strides=(128, 1280, 11520),
        box=(64, 8, 4, 1),
        steps=(1, 2, 1, 1),
        fetched_bytes=64,
        offset=16,
    )
    one = program.Launch(
        program.Kernel("x.cu", "x", ()),
        1,
        32,
        (program.tensor_map(0),),
        512,
        tensor_maps=(boxed,),
        structs=((7, -1),),
    )
    made = program.Plan("a family", "a reason", (), (one,), workspace_bytes=64)
    words = launch.plan_words(made, torch.bfloat16, "sm_90a")
    expected = [
        4,
        0,
        1,
        2,
        32,
        16,
        9,
        128,
        64,
        4,
        64,
        10,
        9,
        2,
        128,
        1280,
        11520,
        64,
        8,
        4,
        1,
        1,
        2,
        1,
        1,
        1,
        2,
        7,
        -1,
        0,
    ]
    assert words[-len(expected) :] == expected
    moved = program.with_operands(one, lambda argument: program.input_(1))
    assert moved.operands == (program.input_(1), program.input_(1))
