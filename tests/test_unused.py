"""Everything that the package, the benchmarks and the kernels define is used, by more than tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tconv_swap

ROOT = Path(tconv_swap.__file__).parents[1]
#: What tests alone call, because nothing else can show what they look at.
FOR_TESTS = {"tconv_swap.runtime.launch.count_plans": "how many plans the C++ cache holds"}
#: What defines a function, a type or a constant in CUDA C++.
DEFINITION = re.compile(
    r"\b(?:constexpr|struct|class|using|enum|int|bool|float|void|auto|u32)\s+(\w+)\s*[=({;:]"
)


def python_trees() -> dict[str, ast.Module]:
    files = (*(ROOT / "tconv_swap").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            file.read_text(encoding="utf-8")
        )
        for file in files
    }


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the functions, classes, constants and types of a module. What is decorated may be registered."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not node.decorator_list or isinstance(node, ast.ClassDef):
                yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((one.id, node) for one in targets if isinstance(one, ast.Name))


def unused(trees: dict[str, ast.Module], prose: str) -> set[str]:
    """Returns what no module uses and no page names."""
    elsewhere: set[object] = set(re.findall(r"\w+", prose))
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                elsewhere.update((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute):
                elsewhere.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                elsewhere.add(node.value)
    found = set()
    for module, tree in trees.items():
        loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        loads = [node for node in loads if isinstance(node.ctx, ast.Load)]
        for name, node in defined(tree):
            first, last = node.lineno, node.end_lineno or node.lineno
            inside = any(one.id == name and not first <= one.lineno <= last for one in loads)
            if not (inside or name.startswith("__") or {name, (module, name)} & elsewhere):
                found.add(f"{module}.{name}")
    return found


def test_every_name_of_python_is_used() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "pyproject.toml"]
    prose = "\n".join(page.read_text(encoding="utf-8") for page in (*pages, *(ROOT / "csrc").glob("*.cpp")))
    assert unused(python_trees(), prose) == set(FOR_TESTS)


def test_what_is_not_used_is_found() -> None:
    trees = {
        "a": ast.parse("USED = LEFT = 1\nOTHER = USED\ndef alone(): return alone()\nclass Named: pass"),
        "b": ast.parse("from a import OTHER"),
    }
    assert unused(trees, "`Named` is documented") == {"a.LEFT", "a.alone"}


def test_every_name_of_the_kernels_is_used() -> None:
    files = [*(ROOT / "csrc" / "kernels").rglob("*.cu"), *(ROOT / "csrc" / "kernels").rglob("*.cuh")]
    code = [re.sub(r"//.*", "", file.read_text(encoding="utf-8")) for file in files]
    words = Counter(word for text in code for word in re.findall(r"\w+", text))
    planners = "\n".join(map(ast.dump, python_trees().values()))
    named = {name for text in code for name in DEFINITION.findall(text)}
    assert len(named) > 1000
    assert not {name for name in named if words[name] == 1 and name not in planners}
