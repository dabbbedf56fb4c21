"""What users expect of a library: it logs under its name, prints nothing, and documents its variables."""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import re
from pathlib import Path

import pytest

import tconv_swap
from tconv_swap.runtime import cache

PACKAGE = Path(tconv_swap.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
#: Where environment variables are documented.
TABLE = ROOT / "docs" / "command-line.md"


def test_the_version_is_written_once() -> None:
    assert importlib.metadata.version("tconv-swap") == tconv_swap.__version__
    assert "\nversion =" not in (ROOT / "pyproject.toml").read_text()


def test_every_environment_variable_is_in_the_table() -> None:
    files = [*SOURCES, *(ROOT / "csrc").rglob("*.c*"), *(ROOT / "csrc").rglob("*.h")]
    used = {
        name
        for path in files
        for name in re.findall(r"\bTCONV_SWAP_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    table = re.findall(r"^\| `(\w+)` \|", TABLE.read_text(), flags=re.MULTILINE)
    ours = [name for name in table if name.startswith("TCONV_SWAP_")]
    assert used
    assert set(ours) == used
    assert len(ours) == len(set(ours))


def test_the_table_names_variables_of_other_programs_too() -> None:
    read = {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("os.environ.get", "os.getenv")
        and isinstance(node.args[0], ast.Constant)
    }
    readme = TABLE.read_text()
    assert {"CXX", "XDG_CACHE_HOME"} <= read
    for name in read:
        assert re.search(rf"^\| .*`{name}`.* \|", readme, flags=re.MULTILINE), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_print_and_one_logger(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        assert function != "print", f"{path.name}:{node.lineno}"
        if function == "logging.getLogger":
            assert [ast.unparse(argument) for argument in node.args] == ["'tconv_swap'"]
        assert not re.fullmatch(r"logging\.(debug|info|warning|error|basicConfig)", function), (
            "the root logger"
        )


def test_a_warning_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(file / "below"))
    cache.cache_directory.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tconv_swap"):
        first, second = cache.cache_directory(), cache.cache_directory()
    cache.cache_directory.cache_clear()
    assert first == second
    assert [record.name for record in caplog.records] == ["tconv_swap"]
    assert "set TCONV_SWAP_CACHE" in caplog.text


def test_importing_adds_no_log_handlers() -> None:
    """Handlers and levels are the application's business."""
    logger = logging.getLogger("tconv_swap")
    assert logger.level == logging.NOTSET
    assert all(type(handler) is logging.NullHandler for handler in logger.handlers)
