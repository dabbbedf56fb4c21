"""The README tells the truth: its commands are those CI runs, its Python runs, its exit codes are the CLI's."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from tconv_swap.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_two_lines_at_the_top_are_the_ones_ci_runs() -> None:
    lines = re.findall(r"^    (pip install .*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)
    assert len(lines) == 2
    ci = (ROOT / ".ci" / "run").read_text().replace("pip install -q", "pip install")
    for line in lines:
        assert line in ci, line


def test_every_python_snippet_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_exit_codes_are_those_of_the_help() -> None:
    documented = re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)
    shown = re.findall(r"^\s*(\d+) = ", CliRunner().invoke(app, ["--help"]).output, flags=re.MULTILINE)
    assert documented == shown


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
