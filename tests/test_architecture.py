"""Reads from the source that the package consists of layers, one above the other, and that no state is hidden."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tconv_swap

PACKAGE = Path(tconv_swap.__file__).parent

#: From below to above: a module imports from its own layer and from those before it. A name is a module or a folder.
LAYERS = (
    (
        "foundations",
        "version interruption memory bits patterns leaf layer_description dispatch geometry checks",
    ),
    ("runtime", "runtime"),
    ("kernels", "kernels"),
    ("cuda", "cuda"),
    ("cpu", "cpu"),
    ("op", "graph autograd op flops"),
    ("layer", "layer_state layer freezing module_state computed inputs preserving"),
    ("blocks", "blocks"),
    ("surgery", "surgery"),
    ("running", "input_search functional"),
    ("files", "files"),
    ("measurement", "measurement"),
    ("verification", "verification"),
    ("choosing", "layer_calls block_calls explanation tuning preparation ways"),
    ("report", "report"),
    ("library", "__init__"),
    ("command line", "cli __main__"),
)
#: The files of the command line, from below to above. An `__init__` stands above the rest of its folder.
CLI = [
    "console",
    "invocation",
    "parsers",
    "declare",
    "options",
    "request",
    "device",
    "places",
    "way_choice",
    "block_choice",
    "network_file",
    "demo_network",
    "diagnosis",
    "networks",
    "network_inputs",
    "workflow",
    "suite_run",
    "outcome",
    "cached_result",
    "commands",
    "application",
    "__init__",
]

#: The state in modules' own variables, with the reason; all other values are passed as arguments.
STATE = {
    "interruption._received": "signals belong to the process, and a handler gets no argument",
    "interruption._handled": "the same",
    "graph._library": "PyTorch's registry of operators",
    "op._library": "the same",
    "graph._bias_is_cast": "a context variable: PyTorch calls the op between, which has no argument for it",
    "cuda.call.observers": "csrc/call.cpp calls from any thread; `recording` adds and removes",
    "cuda.call._library": "PyTorch's registry of operators",
    "cuda.expected._lock": "guards the layers that the networks of this process will call",
    "cuda.expected._layers": "the same",
    "cuda.first_use.measures": "`tuning`, which is above the kernels, sets the function that measures",
    "cuda.first_use._lock": "only one thread times at a time",
    "cuda.first_use._untimed": "problems that could not be timed in this process, and are not tried for every size",
    "cuda.first_use._unwritten": "winners that could not be written to disk, for the rest of the process",
    "runtime.host._stand_ins": "the ops that are registered until the host part is loaded, once per process",
    "runtime.host._registered": "the same",
    "runtime.jit._lock": "guards the kernels that threads of this process are compiling",
    "runtime.jit._being_compiled": "the same",
    "runtime.ahead._lock": "guards the jobs that run in the background of this process",
    "runtime.ahead._jobs": "the same",
    "runtime.ahead._ended": "the same",
    "runtime.ahead._waiting": "the same, for kernels",
    "runtime.ahead._numbers": "the same",
    "runtime.disk_cache._thread": "who makes the searches of a thread",
    "runtime.disk_cache._locks": "guards results of planning, of which each is made once",
    "runtime.worker_pool._lock": "guards the processes that compile and plan for this one",
    "runtime.worker_pool._idle": "the same",
    "runtime.worker_pool._is_watched": "the same",
    "runtime.worker_pool._cannot_start": "whether such processes can be started, which is the same for all callers",
    "runtime.launch._lock": "guards the handles, which belong to the process: csrc/launch.cpp keeps the kernels",
    "runtime.launch._kernels": "the same",
    "blocks.call.observers": "the verification observes blocks, which the network calls",
    "blocks.call.recorders": "the same, for `prepare`",
    "blocks.call.block_observers": "the same",
    "blocks.evaluation._library": "PyTorch's registry of operators",
    "blocks.handed._proofs": "a cache of what the `forward` of each class proves",
    "blocks.handed._running": "the state of each thread: PyTorch calls the modules, which have no argument for it",
    "blocks.kernels._library": "PyTorch's registry of operators",
    "blocks.padding._library": "the same",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yields the modules of this package that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package != "tconv_swap":
                continue
            # `rest` may be a module, a folder, or a name in either.
            places = [rest, f"{rest}.__init__", rest.rpartition(".")[0] or "__init__"]
            places.append(f"{rest.rpartition('.')[0]}.__init__")
            yield next(place for place in places if place in modules())


@cache
def imports() -> dict[str, list[str]]:
    return {name: sorted(set(imported(tree))) for name, tree in modules().items()}


LAYER_OF = {name: height for height, (_, names) in enumerate(LAYERS) for name in names.split()}


def test_every_module_belongs_to_one_layer() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(LAYER_OF)
    assert {name.split(".")[1] for name in modules() if name.startswith("cli.")} == set(CLI)


def test_a_module_imports_from_its_own_layer_and_those_below() -> None:
    for name, others in imports().items():
        height = LAYER_OF[name.partition(".")[0]]
        assert not [other for other in others if LAYER_OF[other.partition(".")[0]] > height], name


def test_a_file_of_the_command_line_imports_those_below() -> None:
    for name, others in imports().items():
        if name.startswith("cli."):
            height = CLI.index(name.split(".")[1])
            # `demo` ends as `swap` does.
            below = [other for other in others if other.startswith("cli.") and other != "cli.commands.swap"]
            assert not [other for other in below if CLI.index(other.split(".")[1]) >= height], name


def test_no_modules_import_each_other() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports in a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in imports()[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def variables(tree: ast.Module) -> Iterator[str]:
    """Yields the variables of a module: containers and objects in lower case, and everything that it declares
    `global`."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            kept = isinstance(
                node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.Call
            )
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if kept and name.strip("_").islower())
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def test_no_hidden_state() -> None:
    found = {f"{name}.{variable}" for name, tree in modules().items() for variable in variables(tree)}
    # Functions, the library's logger, typer's applications, a module under another name.
    plain = (
        "logger",
        "_log",
        "app",
        "cached_geometry",
        "apply_untransformed",
        "_apply",
        "__all__",
        "tomllib",
    )
    kept = {name for name in found if name.rpartition(".")[2] not in plain}
    assert kept == set(STATE), "add a reason to STATE, or pass the value as an argument"
