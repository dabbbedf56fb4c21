"""Proves from a module's own ``forward`` which norms are followed by an activation, or by a sum and an activation, and
by nothing else.

``torch.fx`` records what ``forward`` calls. The record holds for other calls too if ``forward`` is plain: it has one
argument, uses no state but the module's own, and keeps nothing. Its byte code shows this; ``Proofs`` notices when
that state changes.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from tconv_swap.blocks.form import NORMS, activation_of


class Pair(NamedTuple):
    """``source``: the module that computes the norm's input, or None. ``sums``: whether the norm's output is added to
    something else before the activation."""

    source: nn.Module | None
    norm: nn.Module
    activation: nn.Module
    sums: bool = False


#: Modules that return a new tensor, which only its consumers can change.
_FRESH = (nn.modules.conv._ConvNd, nn.Linear)


#: The attribute in which a class made by a swap keeps the user's ``forward``.
OWN_FORWARD = "_tconv_own_forward"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def pairs_of(parent: nn.Module) -> tuple[Pair, ...]:
    """Returns the norms that ``parent.forward`` calls once and whose outputs only one activation consumes; none if
    ``forward`` is not plain, or cannot be traced with the present state of the module."""
    if not _is_plain(parent):
        return ()
    modules = dict(parent.named_modules(remove_duplicate=False))
    try:
        tracer = _Tracer()
        # The proof is about the user's forward, not about the class that a swap put before it.
        tracer.traced_func_name = OWN_FORWARD if hasattr(type(parent), OWN_FORWARD) else "forward"
        nodes = list(tracer.trace(parent).nodes)
    except Exception:  # a foreign forward may raise anything for a value that is not a tensor
        return ()
    called = [modules[str(node.target)] for node in nodes if node.op == "call_module"]
    found = []
    taken: set[fx.Node] = set()
    for node in nodes:
        norm = modules[str(node.target)] if node.op == "call_module" else None
        # A module that has another parent too may be called there while this parent runs.
        alone = called.count(norm) == 1 == list(modules.values()).count(norm) if norm is not None else False
        if norm is None or not isinstance(norm, tuple(NORMS)) or not alone:
            continue
        before = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        source: nn.Module | None = None
        if isinstance(before, fx.Node) and before.op == "call_module":
            source = modules[str(before.target)]
        last = node
        sums = isinstance(source, _FRESH) and len(before.users) == 1 and _is_in_a_sum(parent, node)  # type: ignore[union-attr]
        if sums:
            last = next(iter(node.users))
            if last in taken:  # a sum of two norms: the first waits for the second
                continue
            taken.add(last)
        following = next(iter(last.users), None)
        if len(last.users) != 1 or following is None or following.op != "call_module":
            continue
        activation = modules[str(following.target)]
        if activation_of(activation) is None or following.args != (last,) or following.kwargs:
            continue
        found.append(Pair(source, modules[str(node.target)], activation, sums))
    return tuple(found)


def _is_in_a_sum(parent: nn.Module, node: fx.Node) -> bool:
    """Returns whether its only consumer is a sum with the output of another node, and the sum is not in place there."""
    users = list(node.users)
    if len(users) != 1 or users[0].target not in (operator.add, operator.iadd) or users[0].kwargs:
        return False
    first, second = users[0].args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return False
    # A trace records ``a += b`` as ``a + b``.
    return first is node or not _has_sum_in_place(parent)


def _has_sum_in_place(parent: nn.Module) -> bool:
    forward = inspect.unwrap(_plain_forward(type(parent)))
    return any(
        "INPLACE" in instruction.opname or instruction.argrepr == "+="
        for instruction in dis.get_instructions(forward)
    )


#: Instructions that would keep something, or read something that is not the module's.
_FORBIDDEN = (
    "STORE_ATTR",
    "STORE_GLOBAL",
    "STORE_DEREF",
    "STORE_SUBSCR",
    "IMPORT",
    "DELETE",
    "YIELD",
    "MAKE",
)


def _is_plain(parent: nn.Module) -> bool:
    forward = inspect.unwrap(_plain_forward(type(parent)))
    if not isinstance(forward, types.FunctionType) or "forward" in vars(parent):
        return False
    code = forward.__code__
    has_one_argument = code.co_argcount == 2 and not code.co_kwonlyargcount and not code.co_flags & 12
    if not has_one_argument or forward.__defaults__ or code.co_freevars or code.co_cellvars:
        return False
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(_FORBIDDEN):
            return False
        name = str(instruction.argval)
        if instruction.opname.startswith("LOAD_GLOBAL") and not _is_torchs(forward.__globals__.get(name)):
            return False
        if instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and not _is_known(parent, name):
            return False
    return True


def _plain_forward(cls: type[nn.Module]) -> Any:
    """Returns the ``forward`` that the user wrote, below the class that a swap has put before it."""
    for base in cls.__mro__:
        found = vars(base).get("forward")
        if found is not None and not base.__module__.startswith("tconv_swap.blocks"):
            return found
    return None


def _is_torchs(value: object) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return isinstance(name, str) and (name == "torch" or name.startswith("torch."))


def _is_known(parent: nn.Module, name: str) -> bool:
    """Returns whether a name is state of the module, or a function of PyTorch or of tensors."""
    if name in vars(parent) or any(
        name in held for held in (parent._modules, parent._parameters, parent._buffers)
    ):
        return True
    return hasattr(Tensor, name) or hasattr(torch, name) or hasattr(nn.functional, name)


class Proofs:
    """The results of ``pairs_of`` for a module in each state in which it was called."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], tuple[Any, dict[int, Pair]]]]
        self._found = weakref.WeakKeyDictionary()

    def pairs(self, parent: nn.Module) -> dict[int, Pair]:
        """Returns the only consumer of the output of each norm, by the ``id`` of the norm."""
        held = (*vars(parent).values(), *parent._modules.values())
        key = tuple(map(id, held))
        known = self._found.get(parent)
        if known is None:
            known = self._found[parent] = {}
        if key not in known:
            if len(known) > 8:  # the module has another state at every call
                known.clear()
            # The values are kept, so that no other object can get their ids.
            known[key] = held, {id(pair.norm): pair for pair in pairs_of(parent)}
        return known[key][1]
