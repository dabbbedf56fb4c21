"""Finds the transposed convolutions of exported programs (torch.export, ``.pt2``), swaps them, and swaps them back.

A program is a graph without layers. ``lifted`` makes a network with layers from it, which computes the same: every
transposed convolution over a parameter becomes an ``nn.ConvTranspose2d`` under its old name, or our layer if the
program calls our operator. This network is planned, verified and timed like any other; the program with our operator in
it is saved.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from tconv_swap import flops, op
from tconv_swap.cuda.choice import Backend, check_backend
from tconv_swap.files.fileformat import LoadError, first_line, printable
from tconv_swap.geometry import from_list
from tconv_swap.layer import ConvTranspose2d

_ATEN = torch.ops.aten
_FORMS = (_ATEN.conv_transpose2d.input, _ATEN.convolution.default)
_DECOMPOSED = torch.ops.tconv_swap.conv_transpose2d_output.default
_OURS = (torch.ops.tconv_swap.conv_transpose2d.default, _DECOMPOSED)


@dataclass(frozen=True)
class _Call:
    """One call of a 2-D transposed convolution in a graph, with all its arguments."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    geometry: tuple[Any, ...]
    """Stride, padding, output_padding, groups, dilation."""
    backend: Backend | None
    """None if it is PyTorch's operator."""

    @property
    def form(self) -> tuple[Any, ...]:
        """Returns what all calls of one layer share, besides weight and bias."""
        return *self.geometry, self.backend


def load_program(path: Path) -> ExportedProgram:
    """Returns the program in a ``.pt2`` file. The loader may execute code in the file: ask the user first.

    Raises:
        LoadError: the file is damaged, or needs something that is not installed.
    """
    try:
        # It is read as a stream, since torch judges a path by its suffix, and a temporary file that is read back has
        # another one.
        with _quiet(), open(path, "rb") as stream:
            return torch.export.load(stream)
    except Exception as error:  # a damaged archive may fail in any way
        raise LoadError(f"{printable(path)} cannot be loaded ({first_line(error)})") from error


def save_program(program: ExportedProgram, stream: IO[bytes]) -> None:
    with _quiet():
        torch.export.save(program, stream)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides torch.export's warnings about torch's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def swap_program(
    program: ExportedProgram, *, names: Collection[str] | None = None, backend: Backend | None = None
) -> ExportedProgram:
    """Returns a copy of ``program`` in which 2-D transposed convolutions run on our operator.

    Args:
        program: a program of ``torch.export``, before or after its decompositions.
        names: the names of the layers that are swapped, such as ``decoder.up``; None swaps every 2-D transposed
            convolution of a supported dtype, also those whose weight the graph computes.
        backend: what computes them, as in ``tconv_swap.conv_transpose2d``, also those that ran on our operator before.
            None leaves the backend of the latter, and gives ``"auto"`` to those that are newly swapped.

    Returns:
        The copy. Only batched calls are swapped; a call with an unbatched input stays as it is.

    Raises:
        ValueError: there is no such backend.
    """
    if backend is not None:
        check_backend(backend)
    result = _copied(program)
    parameters = _parameters(result)
    for call in _calls(result.graph_module.graph):
        owner = _owner(parameters.get(call.weight.name, ""))
        if names is None or owner in names:
            call.node.target = _OURS[0]
            computed_by = backend or call.backend or "auto"
            call.node.args = (call.input, call.weight, call.bias, *call.geometry, computed_by)
            call.node.kwargs = {}
    flops.register()
    result.graph_module.recompile()
    return result


def unswap_program(program: ExportedProgram) -> ExportedProgram:
    """Returns a copy of ``program`` with PyTorch's operator in the place of ours, as ``torch.onnx.export`` needs it."""
    result = _copied(program)
    for node in result.graph_module.graph.nodes:
        if node.target in _OURS:
            call = _call(node)
            node.target, node.kwargs = _ATEN.conv_transpose2d.input, {}
            node.args = (call.input, call.weight, call.bias, *call.geometry)
    result.graph_module.recompile()
    return result


def count_swapped(program: ExportedProgram) -> int:
    """Returns how often ``program`` calls our operator."""
    return sum(node.target in _OURS for node in program.graph_module.graph.nodes)


def lifted(program: ExportedProgram) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns a network with layers that computes what ``program`` computes, and lines on what could not become a
    layer.

    The parameters are those of ``program`` itself.
    """
    with _quiet():
        source = program.module(check_guards=False)
        network = fx.GraphModule(source, source.graph)
    left: list[str] = []
    layers: dict[str, tuple[Any, ...]] = {}
    for call in _calls(network.graph):
        why = _why_no_layer(network, call, layers)
        if why:
            left.append(f"{_described(call)} is left: {why}")
            continue
        name = _owner(str(call.weight.target))
        if name not in layers:
            layers[name] = call.form
            _replace_submodule(network, name, _layer(network, name, call))
        with network.graph.inserting_before(call.node):
            layer_call = network.graph.call_module(name, (call.input,))
        call.node.replace_all_uses_with(layer_call)
        network.graph.erase_node(call.node)
    left += _elsewhere(network)
    network.recompile()
    return network, tuple(left)


def _copied(program: ExportedProgram) -> ExportedProgram:
    with _quiet():
        result = copy.deepcopy(program)
    # Copying a graph renames nodes that have the name of a builtin ("input"), but the signature refers to the old
    # names.
    for old, new in zip(program.graph_module.graph.nodes, result.graph_module.graph.nodes, strict=True):
        if new.name != old.name:
            new.name = old.name
    return result


def _calls(graph: fx.Graph) -> Iterator[_Call]:
    """Yields each call when it is needed and not before: by then its input may have been replaced."""
    for node in graph.nodes:
        if node.target in _OURS or (node.target in _FORMS and _is_swappable(node)):
            yield _call(node)


def _call(node: fx.Node) -> _Call:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    get: Callable[[str], Any] = (defaults | given).get
    if node.target is _DECOMPOSED:
        arguments = from_list(get("geometry"))
    else:
        arguments = tuple(map(get, ("stride", "padding", "output_padding", "groups", "dilation")))
    stride, padding, output_padding, groups, dilation = arguments
    geometry = _two(stride), _two(padding), _two(output_padding), groups, _two(dilation)
    return _Call(node, get("input"), get("weight"), get("bias"), geometry, get("backend"))


def _two(value: Any) -> list[Any]:
    pair = list(value) if isinstance(value, list | tuple) else [value]
    return pair * 2 if len(pair) == 1 else pair


def _is_swappable(node: fx.Node) -> bool:
    """Returns whether a node is a batched 2-D transposed convolution of a supported dtype."""
    if node.target is _ATEN.convolution.default and not node.args[6]:
        return False
    value = node.meta.get("val")
    return value is not None and value.dim() == 4 and value.dtype in op.SUPPORTED_DTYPES


def _why_no_layer(network: nn.Module, call: _Call, layers: dict[str, tuple[Any, ...]]) -> str:
    if call.weight.op != "get_attr":
        return "the graph computes its weight"
    name = _owner(str(call.weight.target))
    bias = None if call.bias is None else str(call.bias.target)
    if str(call.weight.target) != f"{name}.weight".lstrip(".") or bias not in (
        None,
        f"{name}.bias".lstrip("."),
    ):
        return "its weight and bias are not those of one layer"
    if not name:
        return "its weight belongs to the program itself"
    if not all(isinstance(number, int) for value in call.geometry for number in _two(value)):
        return "its arguments are symbolic"
    if layers.get(name, call.form) != call.form:
        return "its weight is used with other arguments too"
    if bias is None and getattr(network.get_submodule(name), "bias", None) is not None:
        return "its layer's bias is left out"
    return ""


def _described(call: _Call) -> str:
    stack = list((call.node.meta.get("nn_module_stack") or {}).values())
    return printable(stack[-1][0] if stack and stack[-1][0] else call.node.name)


def _elsewhere(network: fx.GraphModule) -> Iterator[str]:
    """Yields the transposed convolutions that are not swapped: 1-D, 3-D, unbatched, of other dtypes, in control
    flow."""
    for name, module in network.named_modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = str(node.target)
            transposed = (
                "aten.conv_transpose" in target
                or node.target in _OURS
                or (node.target is _ATEN.convolution.default and node.args[6])
            )
            where = f"{name}.{node.name}" if name else node.name
            if not transposed:
                continue
            if name:
                yield f"{printable(where)} ({target}) is left: it is in a graph inside the program's (control flow)"
            elif node.target not in _OURS and (node.target not in _FORMS or not _is_swappable(node)):
                yield f"{printable(where)} ({target}) is left: it is not batched, not 2-D, or of an unsupported dtype"


def _layer(network: fx.GraphModule, name: str, call: _Call) -> nn.ConvTranspose2d:
    holder = network.get_submodule(name)
    weight: Any = holder.weight
    stride, padding, output_padding, groups, dilation = call.geometry
    layer = (nn.ConvTranspose2d if call.backend is None else ConvTranspose2d)(
        weight.shape[0],
        weight.shape[1] * groups,
        tuple(weight.shape[2:]),
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        groups,
        call.bias is not None,
        tuple(dilation),
        device="meta",
    )
    for key, tensor in (("weight", weight), ("bias", getattr(holder, "bias", None))):
        delattr(layer, key)
        if key == "bias" and call.bias is None:
            layer.register_parameter(key, None)
        elif isinstance(tensor, nn.Parameter):
            layer.register_parameter(key, tensor)
        else:
            layer.register_buffer(key, tensor)
    if isinstance(layer, ConvTranspose2d) and call.backend is not None:
        layer.tconv_backend = call.backend
    return layer


def _replace_submodule(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, layer)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _parameters(program: ExportedProgram) -> dict[str, str]:
    """Returns the dotted name of the parameter or buffer that each placeholder represents."""
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
