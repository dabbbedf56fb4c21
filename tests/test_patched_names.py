"""Every name that a test replaces exists: those of GPU tests are not run without a GPU, and would break unseen."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: The packages whose modules are looked up.
OURS = ("tconv_swap", "benchmarks")


def imported(tree: ast.Module) -> dict[str, str]:
    """Returns what the imports of our packages bind, by name: dotted paths of modules or of their members."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
        elif isinstance(node, ast.Import):
            ours = [one for one in node.names if one.name.split(".")[0] in OURS]
            found.update({one.asname or one.name.split(".")[0]: one.name for one in ours if one.asname})
    return found


def patched(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each module or class that a test patches by name, and the name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) >= 2):
            continue
        target, name = node.args[:2]
        replaces = node.func.attr == "setattr" and isinstance(target, ast.Name) and target.id in names
        if replaces and isinstance(name, ast.Constant) and isinstance(name.value, str):
            assert isinstance(target, ast.Name)
            yield names[target.id], name.value


def test_every_name_that_a_test_replaces_exists() -> None:
    done = 0
    for path in sorted(TESTS.rglob("*.py")):
        for where, name in patched(path):
            try:
                owner = importlib.import_module(where)
            except ModuleNotFoundError:
                module, _, member = where.rpartition(".")
                owner = getattr(importlib.import_module(module), member)
            assert hasattr(owner, name), f"{path.relative_to(TESTS)} replaces {where}.{name}"
            done += 1
    assert done > 50


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_name_is_found(tmp_path: Path, missing: bool) -> None:
    name = "RESIDENT_THREADS_OF_OLD" if missing else "RESIDENT_THREADS"
    path = tmp_path / "test_one.py"
    path.write_text(
        "from tconv_swap.kernels.pad import reflection_pad\n\n\n"
        f'def test(monkeypatch):\n    monkeypatch.setattr(reflection_pad, "{name}", 0)\n'
    )
    ((where, found),) = patched(path)
    assert hasattr(importlib.import_module(where), found) != missing
