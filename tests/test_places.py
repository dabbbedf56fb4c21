"""No output may be a file that the command reads, nor another output, under any name; this is checked before any
work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_cases import files, run, saved_generator
from sampling import sampled

import tconv_swap
from tconv_swap.cli import networks, workflow
from tconv_swap.cli.places import PlaceError, check_apart
from tconv_swap.runtime.cache import cache_directory

NETWORK = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.ConvTranspose2d(4, 3, 2))\n"


def _upwards(path: str) -> str:
    Path("folder").mkdir()
    return f"folder/../{path}"


def _through_a_linked_directory(path: str) -> str:
    os.symlink(".", "there")
    return f"there/{path}"


def _linked(make: Callable[[str, str], None]) -> Callable[[str], str]:
    def link(path: str) -> str:
        name = f"link{Path(path).suffix}"
        make(path, name)
        return name

    return link


#: The same file by another name.
NAMES: dict[str, Callable[[str], str]] = {
    "the same": lambda path: path,
    "absolute": lambda path: str(Path(path).absolute()),
    "dot": lambda path: f"./{path}",
    "upwards": _upwards,
    "symbolic": _linked(os.symlink),
    "hard": _linked(os.link),
    "directory": _through_a_linked_directory,
}


@pytest.fixture
def unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes all files that a command may read; loading any of them would be an internal error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workflow, "load_model", None)
    saved_generator()
    torch.save(torch.zeros(1, 4, 2, 2), "inputs.pt")
    Path("net.py").write_text(NETWORK)
    Path("package/inner").mkdir(parents=True)
    for name in ("package/__init__.py", "package/inner/__init__.py", "package/inner/net.py"):
        Path(name).write_text(NETWORK)
    return tmp_path


READ = [
    ("model.pt", ()),
    ("inputs.pt", ("--inputs", "inputs.pt")),
    ("net.py", ("--module", "net.py")),
    ("net.py", ("--model", "net.py:build")),
    ("net.py", ("--model", "net:build")),
    ("net.py", ("--trust", "net:Class")),
    ("package/inner/net.py", ("--model", "package.inner.net:build")),
    ("package/__init__.py", ("--model", "package.inner.net:build")),
    ("package/inner/__init__.py", ("--trust", "package.inner.net:Class")),
]


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("read", "given", "name"),
    sampled(((*one, name) for one in READ for name in NAMES), 2),
    ids=str,
)
def test_an_output_that_is_also_read_is_refused(
    unused: Path, read: str, given: tuple[str, ...], name: str
) -> None:
    target = NAMES[name](read)
    before = _contents(unused)
    for command, option in [("swap", "--out"), ("swap", "--json"), ("tune", "--json"), ("explain", "--json")]:
        result = run(command, "model.pt", *given, option, target)
        assert result.exit_code == 2, result.output
        assert f"{option}: {Path(target)} is " in result.stderr
        assert f"give {option} another name" in result.stderr
    assert _contents(unused) == before


def test_a_report_that_is_also_the_input_is_refused(unused: Path) -> None:
    os.link("model.pt", "r.md")
    before = _contents(unused)
    result = run("model.pt", "--report", "r.md")
    assert result.exit_code == 2
    assert "--report: r.md is the input itself" in result.stderr
    assert _contents(unused) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [("--out", "--json"), ("--out", "--report"), ("--json", "--report"), ("--report", "--report")]
)
def test_two_outputs_with_the_same_file_are_refused(
    unused: Path, options: tuple[str, str], name: str
) -> None:
    Path("old.md").write_text("as before")
    target = NAMES[name]("old.md")
    before = _contents(unused)
    result = run("model.pt", options[0], "old.md", options[1], target)
    assert result.exit_code == 2
    assert "name the same file" in result.stderr
    assert _contents(unused) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [("r.md", "R.MD"), ("stra\xdfe.md", "STRASSE.md"), ("\xe9.md", "e\u0301.md"), ("new.md", "there/new.md")],
)
def test_two_new_outputs_that_differ_only_in_case_are_refused(unused: Path, first: str, second: str) -> None:
    os.symlink(".", "there")
    before = files()
    result = run("model.pt", "--report", first, "--report", second)
    assert result.exit_code == 2
    assert "--report and --report name the same file" in result.stderr
    assert files() == before


def test_a_dangling_link_counts_as_its_target(unused: Path) -> None:
    os.symlink("new.md", "link.md")
    assert run("model.pt", "--report", "link.md", "--json", "new.md").exit_code == 2
    assert run("model.pt", "--report", "new.md", "--json", "link.md").exit_code == 2


def test_existing_files_that_differ_only_in_case_are_two_files(unused: Path) -> None:
    Path("a.md").write_text("one")
    Path("A.md").write_text("other")
    if len([name for name in files() if name.lower() == "a.md"]) == 1:
        with pytest.raises(PlaceError):
            check_apart([], [("--report", Path("a.md")), ("--json", Path("A.md"))])
    else:
        check_apart([("MODEL", Path("a.md"))], [("--json", Path("A.md")), ("--out", Path("new.pt"))])
    # An output that does not exist is not a file that is read.
    check_apart([("MODEL", Path("model.pt"))], [("--out", Path("MODEL-2.pt"))])


def test_files_of_the_program_and_its_cache_are_not_overwritten(
    unused: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(unused / "cache"))
    cache_directory.cache_clear()
    kept = unused / "cache/tuned/h200.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (unused / "cache/mine.json").write_text("{}")
    suite = Path(tconv_swap.__file__).parent / "measurement/layers.toml"
    before = suite.read_bytes()
    for words, target, whose in [
        (("bench", "--only", "dcgan1"), suite, "tconv-swap itself"),
        (("doctor",), kept, "the cache of tconv-swap"),
        (("tune", "model.pt"), kept, "the cache of tconv-swap"),
        (("model.pt",), kept, "the cache of tconv-swap"),
    ]:
        result = run(*words, "--json", target)
        assert result.exit_code == 2, result.output
        assert f"belongs to {whose}: give --json another name" in result.stderr
    assert (suite.read_bytes(), kept.read_text()) == (before, "{}")
    check_apart([], [("--json", unused / "cache/mine.json"), ("--out", unused / "cache/new.pt")])
    cache_directory.cache_clear()


class TestImported:
    """The imports of a file are known only after it was executed, but still before anything is run."""

    @pytest.fixture
    def helper(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        for name in ("helper_of_places", "net_of_places"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "path", [*sys.path])
        Path("helper_of_places.py").write_text(NETWORK)
        Path("net_of_places.py").write_text("from helper_of_places import build\n")
        network = torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 3, 2))
        torch.save(network.state_dict(), "weights.pt")
        monkeypatch.setattr(networks, "plan_swap", None)
        return Path("helper_of_places.py")

    @pytest.mark.parametrize(
        ("command", "option"),
        [("swap", "--out"), ("swap", "--json"), ("tune", "--json"), ("explain", "--json")],
    )
    def test_a_module_imported_by_the_factory_is_not_overwritten(
        self, helper: Path, command: str, option: str
    ) -> None:
        result = run(command, "weights.pt", "--model", "net_of_places.py:build", option, helper)
        assert result.exit_code == 2, result.output
        assert f"{option} names the file of the module helper_of_places" in result.stderr
        assert helper.read_text() == NETWORK


def test_the_demo_checks_its_targets_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dcgan.pt", "dcgan-fast.pt"):
        result = run("demo", "--dir", "new", "--json", f"new/{name}")
        assert result.exit_code == 2
        assert list(Path("new").iterdir()) == []
    (tmp_path / "new/dcgan.pt").write_text("mine")
    os.symlink("dcgan.pt", "new/dcgan-fast.pt")
    assert run("demo", "--dir", "new").exit_code == 2
    assert (tmp_path / "new/dcgan.pt").read_text() == "mine"
