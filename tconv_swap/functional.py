"""Finds transposed convolutions that a network calls as functions: they cannot be swapped, but they are reported.

With inputs the network runs, and every call is recorded. Without inputs it is traced with ``torch.fx``, which sees
what a symbolic value reaches and stops at the first branch on such a value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from tconv_swap.input_search import try_modes
from tconv_swap.inputs import Inputs
from tconv_swap.layer import SWAPPED
from tconv_swap.preserving import preserved

_FUNCTIONS: dict[Any, str] = {
    torch.conv_transpose1d: "conv_transpose1d",
    torch.conv_transpose2d: "conv_transpose2d",
    torch.conv_transpose3d: "conv_transpose3d",
}
_LAYERS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS_CODE = {cls.forward.__code__ for cls in (*_LAYERS, *SWAPPED)}
_OUR_FOLDER = os.path.dirname(__file__) + os.sep
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class FunctionalCall:
    """A transposed convolution that the ``forward`` of some module calls as a function.

    Attributes:
        function: such as ``"conv_transpose2d"``.
        module: dotted name of the module that calls it; ``""`` for the network itself.
        where: ``file:line``, or ``""`` where it is not known.
    """

    function: str
    module: str
    where: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        ours = "; tconv_swap.conv_transpose2d takes the same arguments" if "2d" in self.function else ""
        return (
            f"{self.module or '(the model itself)'}{where} calls {self.function} as a function: there is no "
            f"layer to swap{ours}"
        )


def find_functional_calls(model: nn.Module, inputs: Any = None) -> tuple[FunctionalCall, ...]:
    """Returns the transposed convolutions that ``model`` computes outside of any layer, each once.

    Args:
        model: the network. Its buffers, modes and random state are restored afterwards.
        inputs: whatever ``Inputs.of`` takes; None traces the network instead of running it.

    Returns:
        The calls on the path that the inputs (or the tracer) take, in their order. Also empty where the network does
        not run in eval or train mode (or cannot be traced).
    """
    if inputs is not None:
        return tuple(dict.fromkeys(_while_running(model, Inputs.of(inputs))))
    with preserved(model):
        return tuple(dict.fromkeys(_in_graph(model)))


def _while_running(model: nn.Module, inputs: Inputs) -> list[FunctionalCall]:
    watch = _CallRecorder({id(module): name for name, module in model.named_modules()})
    with watch:
        try_modes(model, inputs)
    return watch.found


class _CallRecorder(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.found: list[FunctionalCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FUNCTIONS:
            self._record(_FUNCTIONS[func])
        return func(*args, **(kwargs or {}))

    def _record(self, function: str) -> None:
        caller = None
        for frame in _callers():
            if frame.f_code in _LAYERS_CODE:
                return
            if caller is None and not frame.f_code.co_filename.startswith((_TORCH_FOLDER, _OUR_FOLDER)):
                caller = frame
            name = self.names.get(id(frame.f_locals.get("self")))
            if name is not None:
                where = "" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
                self.found.append(FunctionalCall(function, name, where))
                return


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_graph(model: nn.Module) -> list[FunctionalCall]:
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    try:
        graph = tracer.trace(model)
    except Exception:  # control flow on values, or code of the user that torch.fx cannot trace
        return []
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _FUNCTIONS:
            stack = list(node.meta.get("nn_module_stack", {}).values())
            module = stack[-1][0] if stack else ""
            found.append(FunctionalCall(_FUNCTIONS[node.target], module, _last_line(node.stack_trace)))
    return found


def _last_line(trace: str | None) -> str:
    """Returns ``file:line`` of the innermost frame that is not PyTorch's."""
    for line in reversed((trace or "").splitlines()):
        # File "/a/b.py", line 12, in forward
        path, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and not path.startswith((_TORCH_FOLDER, _OUR_FOLDER)):
            return f"{path}:{rest.partition(',')[0]}"
    return ""
