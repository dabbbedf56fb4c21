"""Which norms of a module are followed by an activation and by nothing else, proven from the module's own ``forward``.

``torch.fx`` records what ``forward`` calls. That holds for other calls too where ``forward`` is plain: one argument, no
state but what the module itself holds, nothing kept. Its byte code says so; ``Proofs`` sees when that state changes.
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from tconv_swap.blocks.form import NORMS, activation_of


class Pair(NamedTuple):
    """``source``: the module that computes what the norm is given; None: something else does."""

    source: nn.Module | None
    norm: nn.Module
    activation: nn.Module


#: Where a class that a swap has made keeps the user's ``forward``.
OWN_FORWARD = "_tconv_own_forward"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def pairs_of(parent: nn.Module) -> tuple[Pair, ...]:
    """The norms that ``parent.forward`` calls once, and whose outputs nothing but one activation is given; none where
    ``forward`` is not plain or does not trace, as the module is now."""
    if not _is_plain(parent):
        return ()
    modules = dict(parent.named_modules(remove_duplicate=False))
    try:
        tracer = _Tracer()
        # What a swap has put before it is not what is proven.
        tracer.traced_func_name = OWN_FORWARD if hasattr(type(parent), OWN_FORWARD) else "forward"
        nodes = list(tracer.trace(parent).nodes)
    except Exception:  # a foreign forward may raise anything for what is no tensor
        return ()
    called = [modules[str(node.target)] for node in nodes if node.op == "call_module"]
    found = []
    for node in nodes:
        norm = modules[str(node.target)] if node.op == "call_module" else None
        # One that stands elsewhere too may be called there while the parent runs.
        alone = called.count(norm) == 1 == list(modules.values()).count(norm) if norm is not None else False
        if norm is None or not isinstance(norm, tuple(NORMS)) or not alone:
            continue
        following = next(iter(node.users), None)
        if len(node.users) != 1 or following is None or following.op != "call_module":
            continue
        activation = modules[str(following.target)]
        if activation_of(activation) is None or following.args != (node,) or following.kwargs:
            continue
        before = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        source: nn.Module | None = None
        if isinstance(before, fx.Node) and before.op == "call_module":
            source = modules[str(before.target)]
        found.append(Pair(source, modules[str(node.target)], activation))
    return tuple(found)


#: What would keep something, or ask for something that is not the module's.
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
    """The ``forward`` that somebody wrote, below what a swap has put before it."""
    for base in cls.__mro__:
        found = vars(base).get("forward")
        if found is not None and not base.__module__.startswith("tconv_swap.blocks"):
            return found
    return None


def _is_torchs(value: object) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return isinstance(name, str) and (name == "torch" or name.startswith("torch."))


def _is_known(parent: nn.Module, name: str) -> bool:
    """Whether it is state of the module, or a function of PyTorch's or of tensors."""
    if name in vars(parent) or any(
        name in held for held in (parent._modules, parent._parameters, parent._buffers)
    ):
        return True
    return hasattr(Tensor, name) or hasattr(torch, name) or hasattr(nn.functional, name)


class Proofs:
    """What ``pairs_of`` found for a module in each state that it was called in."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[
            nn.Module, dict[tuple[int, ...], tuple[Any, dict[int, nn.Module]]]
        ]
        self._found = weakref.WeakKeyDictionary()

    def activations(self, parent: nn.Module) -> dict[int, nn.Module]:
        """By the ``id`` of a norm, the activation that alone gets its output."""
        held = (*vars(parent).values(), *parent._modules.values())
        key = tuple(map(id, held))
        known = self._found.get(parent)
        if known is None:
            known = self._found[parent] = {}
        if key not in known:
            if len(known) > 8:  # a module whose state is new at every call
                known.clear()
            # The values are kept, so that no other can have their ids.
            known[key] = held, {id(pair.norm): pair.activation for pair in pairs_of(parent)}
        return known[key][1]
