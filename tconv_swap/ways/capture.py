"""A network in CUDA graphs: `torch.cuda.make_graphed_callables`, and what it leaves to its caller.

PyTorch's graphs hold the activations, outputs and gradients of one call, in memory that the next replay writes to. Here
outputs and gradients are copies, so that they stay what they are, and gradients may be accumulated; a backward pass
through a call that is not the last one is refused. What warming up and capturing changes, buffers and random states, is
put back.
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
    """A backward pass through a call whose activations are gone."""


class Captured:
    """The forward pass of a network, and its backward pass, for inputs of one shape."""

    def __init__(self, network: nn.Module, inputs: Inputs, *, training: bool) -> None:
        """
        Args:
            network: in the mode that it is to run in; stays as it is, also its buffers.
            inputs: which require gradients as those of the calls will.
            training: with a backward pass.

        Raises:
            NotCapturableError: it waits for the GPU in its forward or backward pass.
            Exception: whatever the network or the capture raises.
        """
        self._surface = _Surface(network, inputs)
        tensors = tuple(_static(tensor) for _, tensor in inputs.named_tensors())
        with preserved(network), torch.set_grad_enabled(training), _no_autocast(tensors):
            _check_no_wait(self._surface, tensors, training=training)
            self._replay = _graphed(self._surface, tensors)
        self._calls = 0

    def __call__(self, inputs: Inputs) -> Any:
        """What the network gives for inputs of the captured shapes."""
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
        return self._surface.rebuilt([output.clone() for output in outputs])


def _graphed(surface: _Surface, tensors: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    try:
        graphed: Any = torch.cuda.make_graphed_callables(surface, tensors, allow_unused_input=True)
    except torch.AcceleratorError as error:
        for device in {tensor.device for tensor in tensors}:
            # Raises where the capture has taken the GPU, or its random numbers, with it.
            torch.rand(1, device=device).item()
        reason = str(error).strip().partition("\n")[0]
        raise NotCapturableError(f"the capture failed ({reason})") from error
    return graphed  # type: ignore[no-any-return]


class _Surface(nn.Module):
    """The network as a function from tensors to tensors, which is all that can be captured."""

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
        # What a network casts under an autocast of its own, with a cache, is kept until the outermost one ends: a
        # capture would read the weights of the run before it, for ever.
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
        """The network's output with these tensors in it; what is no tensor is as it was at the capture."""
        found = iter(tensors)
        return map_tensors(lambda _: next(found), self._output)


def compiled_nodes(output: Any) -> list[Any]:
    """The nodes of autograd behind the output of a compiled network that are compiled graphs."""
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


def own_gradients(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """A hook of a node: copies, since the next replay writes to what the graph returns."""
    there = [gradient for gradient in gradients if gradient is not None]
    # Times 1 is a copy, of all of them in few launches.
    copies = iter(torch._foreach_mul(there, 1) if there else ())
    return tuple(None if gradient is None else next(copies) for gradient in gradients)


def _static(tensor: Tensor) -> Tensor:
    """What every call's input is copied to."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _autocast_of(kind: str) -> torch.autocast:
    """The caller's autocast. Without its cache, whose weights would be those of the capture for ever."""
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


@contextmanager
def _no_autocast(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """The backward pass is not autocast: only the network's forward pass is."""
    off = [torch.autocast(kind, enabled=False) for kind in {tensor.device.type for tensor in tensors}]
    for context in off:
        context.__enter__()
    try:
        yield
    finally:
        for context in reversed(off):
            context.__exit__(None, None, None)


def _check_no_wait(surface: _Surface, tensors: tuple[Tensor, ...], *, training: bool) -> None:
    """Find out before the capture whether the network waits for the GPU: a failed capture may take the GPU along."""

    def run() -> None:
        outputs = surface(*tensors)
        if training:
            sum_of_squares(outputs).backward()
            surface.zero_grad(set_to_none=True)
            for tensor in tensors:
                tensor.grad = None

    run()  # compiles, and lets cuDNN try its algorithms, which may wait
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
