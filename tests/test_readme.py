"""Checks README, CONTRIBUTING and docs/: their Python runs, their commands work, their links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from benchmarks import readme
from tconv_swap.cli import app
from tconv_swap.runtime import host
from tconv_swap.runtime.cache import cache_directory

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
#: Planners of kernels that prepare the operands of others: no families.
HELPERS = ("pad_images",)
#: Commands that take long, or that need another network or machine: they are parsed, but not run.
LONG = ("bench", "demo", "tune")


def commands(text: str) -> Iterator[str]:
    """Yields indented lines, and lines and pieces in backticks, that begin with one of our programs."""
    found = re.findall(r"^    (.+?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    found += re.findall(r"`([^`\n]+)`", text)
    for line in found:
        for part in line.split(" && "):
            if part.startswith(("tconv-swap ", "python -m benchmarks.", "python examples/", "pytest ")):
                yield part


COMMANDS = list(dict.fromkeys((name, line) for name, text in TEXTS.items() for line in commands(text)))
TCONV_SWAP = [line for _, line in COMMANDS if line.startswith("tconv-swap ")]
BENCHMARKS = [line for _, line in COMMANDS if line.startswith("python -m benchmarks.")]


def test_ci_runs_the_two_lines_at_the_top() -> None:
    lines = re.findall(r"^    (pip install .*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)
    assert len(lines) == 2
    ci = (ROOT / ".ci" / "run").read_text().replace("pip install -q", "pip install")
    for line in lines:
        assert line in ci, line


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "```python" in text])
def test_every_python_snippet_runs(name: str) -> None:
    """They run in the order of the text: a later snippet may use what an earlier one has made."""
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", TEXTS[name], flags=re.DOTALL):
        exec(compile(snippet, name, "exec"), names)


@pytest.fixture
def own_cache(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a cache directory of this test's own. If the line prepares, it has the host part, which all tests share."""
    directory = tmp_path / "cache"
    if line.startswith("tconv-swap prepare"):
        built = host.build().parent
        shutil.copytree(built, directory / built.relative_to(cache_directory()))
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(directory))
    cache_directory.cache_clear()
    yield directory
    cache_directory.cache_clear()


@pytest.mark.parametrize("line", dict.fromkeys(TCONV_SWAP))
def test_tconv_swap_commands_work(
    line: str, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Completion is installed there for the shell that started this process, which may be none.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2)), "model.pt")
    arguments = shlex.split(line.replace("MODEL", "model.pt"))[1:]
    command: Any = typer.main.get_command(app)
    if arguments in ([name] for name in command.commands):  # a word of the text: what it takes is not said
        arguments.append("--help")
    elif arguments[0] in LONG:
        with command.make_context("tconv-swap", arguments) as context:
            name, sub, rest = command.resolve_command(context, context._protected_args + context.args)
            sub.make_context(name, rest, parent=context)
        return
    network = arguments[0] not in command.commands and not arguments[0].startswith("-")
    # The tests of ways time the ways, and compile some of them.
    short = ["--dry-run" if "--way" in arguments else "--no-benchmark"] if network else []
    result = CliRunner().invoke(app, [*arguments, *short])
    assert result.exit_code == 0, result.output
    if line.startswith("tconv-swap prepare model.pt"):
        assert list((own_cache / "kernels").iterdir())


@pytest.mark.parametrize("line", dict.fromkeys(BENCHMARKS))
def test_commands_of_the_benchmarks_are_understood(line: str) -> None:
    module, *arguments = shlex.split(line)[2:]
    found = importlib.import_module(module)
    if hasattr(found, "make_parser"):
        found.make_parser().parse_args(arguments)
    else:
        assert callable(found.main)
        source = Path(found.__file__ or "").read_text()
        assert all(f'"{word}"' in source for word in arguments if word.startswith("--"))


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_files_that_commands_name_are_there(name: str, line: str) -> None:
    for word in shlex.split(line):
        if word.startswith(("tests/", "examples/")):
            assert (ROOT / word).exists(), f"{name}: {word}"


def test_the_report_is_rendered_from_the_committed_run() -> None:
    document = json.loads(readme.RUN.read_text())
    assert "VERIFIED" in readme.rendered(document)
    assert readme.with_report(README, document) == README


def test_the_exit_codes_match_the_help() -> None:
    text = TEXTS["docs/command-line.md"]
    table = text[text.index("| exit code |") :].partition("\n\n")[0]
    documented = re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)
    shown = re.findall(r"^\s*(\d+) = ", CliRunner().invoke(app, ["--help"]).output, flags=re.MULTILINE)
    assert documented == shown


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXTS[name]):
        if not target.startswith("http"):
            assert ((ROOT / name).parent / target).exists(), target


def test_every_document_is_linked() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert f"docs/{path.name}" in README, path.name
    families = ROOT / "docs" / "kernels"
    for path in families.rglob("*.md"):
        name = path.relative_to(families).as_posix()
        assert name == "README.md" or f"]({name})" in TEXTS["docs/kernels/README.md"], name


def test_every_family_has_a_page_of_its_name() -> None:
    """A family has one name: that of its planner, its kernel and its page."""
    planners, kernels = ROOT / "tconv_swap" / "kernels", ROOT / "csrc" / "kernels"
    found = 0
    for path in sorted(planners.glob("*/*.py")):
        stage, name = path.parent.name, path.stem
        has_kernel = (kernels / stage / f"{name}.cu").exists() or name == "implicit_gemm"
        if not has_kernel or name in HELPERS:
            continue
        pages = [f"docs/kernels/{folder}{name}.md" for folder in (f"{stage}/", "gradients/", "")]
        text = next((TEXTS[page] for page in pages if page in TEXTS), "")
        assert f"{stage}/{name}.py`" in text, pages[0]
        found += 1
    assert found >= 20


def test_documents_are_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(TEXTS["benchmarks/README.md"].splitlines()) <= 120
    for name, text in TEXTS.items():
        if name.startswith("docs/"):
            assert len(text.splitlines()) <= 90, name
