"""Captures a network in CUDA graphs with `torch.cuda.make_graphed_callables`, and adds what that function leaves to its
caller.

PyTorch's graphs keep the activations, outputs and gradients of one call in memory that the next replay overwrites. Here
outputs and gradients are copied, so that they keep their values and gradients may be accumulated. A backward pass
through any call but the last one is refused. Warming up and capturing change buffers and random states; both are
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs, map_tensors, named_tensors
from tconv_swap.measurement.stages import sum_of_squares
from tconv_swap.preserving import preserved


class NotCapturableError(RuntimeError):
    """The network cannot be captured in a CUDA graph; the message is one line."""


class StaleGraphError(RuntimeError):
    """A backward pass goes through a call whose activations have been overwritten."""


class Captured:
    """The captured forward and backward pass of a network, for inputs of one shape."""

    def __init__(self, network: nn.Module, inputs: Inputs, *, training: bool) -> None:
        """
        Args:
            network: the network, in the mode in which it runs; it is not changed, nor are its buffers.
            inputs: they require gradients exactly if those of the later calls do.
            training: captures a backward pass too.

        Raises:
            NotCapturableError: the network waits for the GPU in its forward or backward pass.
            Exception: whatever the network or the capture raises.
        """
        self._surface = Surface(network, inputs)
        tensors = tuple(_static(tensor) for _, tensor in inputs.named_tensors())
        with preserved(network), torch.set_grad_enabled(training), _no_autocast(tensors):
            check_no_wait(self._surface, tensors, training=training)
            self._replay = _graphed(self._surface, tensors)
        self._calls = 0

    def __call__(self, inputs: Inputs) -> Any:
        """Returns the network's output for inputs of the captured shapes."""
        outputs = self._replay(*(tensor for _, tensor in inputs.named_tensors()))
        self._calls += 1
        call = self._calls

        def check(_: object) -> None:
            if call != self._calls:
                raise StaleGraphError(
                    "the network was called again before the backward pass of this call: a CUDA graph holds the "
                    "activations of one call. Call backward first, or run one of the two eagerly"
                )

        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(check)
            node.register_hook(own_gradients)
        return self._surface.rebuilt([own_output(output) for output in outputs])


def _graphed(surface: Surface, tensors: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    try:
        with _own_workspaces():
            graphed: Any = torch.cuda.make_graphed_callables(surface, tensors, allow_unused_input=True)
    except torch.AcceleratorError as error:
        for device in {tensor.device for tensor in tensors}:
            # This raises if the failed capture has broken the GPU or its random number generator.
            torch.rand(1, device=device).item()
        reason = str(error).strip().partition("\n")[0]
        raise NotCapturableError(f"the capture failed ({reason})") from error
    return graphed  # type: ignore[no-any-return]


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Lets a capture allocate workspaces for cuBLAS in the memory of its own graphs, and share them with no later one.

    PyTorch keeps one workspace for each stream and captures all graphs on one stream, so a graph would use memory of an
    earlier one. Capturing under torch.compile frees all workspaces; if the earlier graph is gone, the next replay of
    this one would fault (pytorch/pytorch#193402). Freed before and after the capture, as torch.compile does, a
    workspace stays in the memory of the graph that uses it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Surface(nn.Module):
    """The network as a function from tensors to tensors: only such functions can be captured."""

    def __init__(self, network: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.network = network
        self.training = network.training
        self._inputs = inputs.map(torch.Tensor.detach)
        self._autocast = [_autocast_of(kind) for kind in {t.device.type for _, t in inputs.named_tensors()}]
        self._output: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        inputs = self._inputs.map(lambda _: next(given))
        # The cache of an autocast lives until the outermost autocast ends. With the cache of the network's own
        # autocast, a replay would always read the weights that an earlier run had cast.
        torch.clear_autocast_cache()
        for context in self._autocast:
            context.__enter__()
        try:
            output = inputs(self.network)
        finally:
            for context in reversed(self._autocast):
                context.__exit__(None, None, None)
            torch.clear_autocast_cache()
        self._output = map_tensors(torch.Tensor.detach, output)
        return tuple(tensor for _, tensor in named_tensors(output))

    def rebuilt(self, tensors: list[Tensor]) -> Any:
        """Returns the network's output with these tensors in it; values that are not tensors are those of the
        capture."""
        found = iter(tensors)
        return map_tensors(lambda _: next(found), self._output)


def compiled_nodes(output: Any) -> list[Any]:
    """Returns the autograd nodes behind the output of a compiled network that are compiled graphs."""
    waiting = [t.grad_fn for _, t in named_tensors(output) if t.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        node: Any = waiting.pop()
        if type(node).__name__ == "CompiledFunctionBackward":
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def own_output(output: Tensor) -> Tensor:
    """Returns a copy of an output, with its strides, since the next replay overwrites what the graph returns. A part of
    a larger tensor keeps the strides of that tensor, and an expanded output stays expanded, as in eager mode."""
    copy = output.clone()
    if output.layout != torch.strided or output.is_nested or copy.stride() == output.stride():
        return copy
    once = output
    for dim, (size, stride) in enumerate(zip(output.shape, output.stride(), strict=True)):
        once = once.narrow(dim, 0, 1) if size > 1 and stride == 0 else once
    copy = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device).copy_(once)
    return copy.expand(output.shape)


def own_gradients(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """Returns copies of a node's gradients, as its hook, since the next replay overwrites what the graph returns."""
    there = [gradient for gradient in gradients if gradient is not None]
    # Multiplying by 1 copies all of them in few launches.
    copies = iter(torch._foreach_mul(there, 1) if there else ())
    return tuple(None if gradient is None else next(copies) for gradient in gradients)


def _static(tensor: Tensor) -> Tensor:
    """Returns the tensor to which the input of every call is copied."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _autocast_of(kind: str) -> torch.autocast:
    """Returns the caller's autocast without its cache, which would keep the weights of the capture."""
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


@contextmanager
def _no_autocast(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """Disables autocast for the backward pass: it applies to the network's forward pass only."""
    off = [torch.autocast(kind, enabled=False) for kind in {tensor.device.type for tensor in tensors}]
    for context in off:
        context.__enter__()
    try:
        yield
    finally:
        for context in reversed(off):
            context.__exit__(None, None, None)


def check_no_wait(surface: Surface, tensors: tuple[Tensor, ...], *, training: bool) -> None:
    """Checks before the capture that the network does not wait for the GPU: a failed capture may break the GPU's
    context."""

    def run() -> None:
        outputs = surface(*tensors)
        if training:
            sum_of_squares(outputs).backward()
            surface.zero_grad(set_to_none=True)
            for tensor in tensors:
                tensor.grad = None

    run()  # compiles kernels and lets cuDNN try its algorithms, both of which may wait
    if not any(tensor.is_cuda for tensor in tensors):
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise NotCapturableError(f"it waits for the GPU ({reason})") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
