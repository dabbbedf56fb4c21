"""The way that a call went before, to be gone again: what it asks of the tensors is compared in C++, by the plan."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tconv_swap.cuda import call, native, node
from tconv_swap.cuda.call import Arguments, Call
from tconv_swap.cuda.choice import Mask


class Route:
    """How a forward call is computed while its tensors lie as they did, and the gradients that followed it.

    Attributes:
        key: that calls which may go this way are found by.
        handle: of the plan, or None where PyTorch's operator computes the output of tensors with these ``strides``.
        all_native: it computes every gradient too.
        precision: the state of the switch that this holds for; None: any.
        arguments, backend, has_bias: of the call.
        cast: what an autocast wanted operands to be; None: there was none.
        gradients: by mask: the steps, and the format that grad_output is brought to.
        number: in csrc/node.cpp, which knows what is known here; None before it is ``told``.
    """

    __slots__ = (
        "all_native",
        "arguments",
        "backend",
        "cast",
        "gradients",
        "handle",
        "has_bias",
        "key",
        "number",
        "precision",
        "strides",
    )

    def __init__(
        self,
        key: Hashable,
        handle: int | None,
        strides: tuple[Any, ...],
        all_native: bool,
        precision: str | None,
        arguments: Arguments,
        backend: str,
        has_bias: bool,
        cast: torch.dtype | None,
    ) -> None:
        self.key = key
        self.handle = handle
        self.strides = strides
        self.all_native = all_native
        self.precision = precision
        self.arguments = arguments
        self.backend = backend
        self.has_bias = has_bias
        self.cast = cast
        self.gradients: dict[Mask, tuple[tuple[Call, ...], torch.memory_format | None]] = {}
        self.number: int | None = None

    def differentiable(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The output, with a way back if one is wanted; None where the tensors lie otherwise, or Python has to make it.

        Takes the tensors as they were before an autocast, as no other function here does.
        """
        number = self.told()
        if number is None:
            return None
        outputs = torch.ops.tconv_swap.differentiable.default(number, input, weight, bias)
        return outputs[0] if outputs else None

    def told(self) -> int | None:
        """``number``, after telling csrc/node.cpp what is known here if it has not been told; None: it cannot be."""
        if self.number is None:
            self.number = node.add_route(
                self.key,
                self.handle,
                self.strides,
                self.has_bias,
                self.precision,
                self.cast,
                self.arguments,
                self.backend,
            )
            if self.number is not None:
                _numbered[self.number] = self
                for mask, (calls, form) in list(self.gradients.items()):  # other threads add to them
                    node.add_gradients(self.number, mask, form, calls)
        return self.number

    def holds(self) -> bool:
        """Whether the switch is as it was."""
        return self.precision is None or self.precision == call.precision()

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The output; None where the tensors lie otherwise, and nothing has happened."""
        if self.handle is None:
            if (input.stride(), weight.stride()) != self.strides:
                return None
            return native.forward(input, weight, bias, self.arguments)
        outputs = torch.ops.tconv_swap.relaunch.default(self.handle, input, weight, bias)
        return outputs[0] if outputs else None

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Mask) -> list[Tensor]:
        """The gradients of ``mask``, remembered or not."""
        known = self.gradients.get(mask)
        if known is not None and self.holds():
            calls, form = known
            # The gradient of a sum is one number, expanded.
            laid_out = grad_output if form is None else grad_output.contiguous(memory_format=form)
            found = [self._gradients(one, laid_out, input, weight) for one in calls]
            if all(found):
                return call.in_order(calls, found)
        gradients, calls = call.backward_and_calls(
            grad_output, input, weight, self.arguments, mask, self.backend
        )
        forms = {one.formats[0] for one in calls if one.handle is not None} or {None}
        # What a switch asks for that has changed since the forward pass is not what the next pass will ask for.
        if len(forms) == 1 and not any(form for one in calls for form in one.formats[1:]) and self.holds():
            steps = calls, forms.pop()
            # A gradient that begins where no plan may read it is asked for anew, and found the same, every time.
            if steps != known:
                self.gradients[mask] = steps
                if self.number is not None:
                    node.add_gradients(self.number, mask, steps[1], calls)
        return gradients

    def _gradients(self, one: Call, grad_output: Tensor, input: Tensor, weight: Tensor) -> list[Tensor]:
        """Of one step; none where the tensors lie otherwise."""
        if one.handle is None:
            return native.backward(grad_output, input, weight, self.arguments, one.mask)
        return torch.ops.tconv_swap.relaunch.default(one.handle, grad_output, input, weight)  # type: ignore[no-any-return]


#: As many as a program with ever new shapes is allowed to leave behind.
MOST_ROUTES = 4096
_routes: dict[Hashable, Route] = {}
#: Those that csrc/node.cpp knows. A graph may refer to any of them, however long ago it was made.
_numbered: dict[int, Route] = {}

_library = torch.library.Library("tconv_swap", "FRAGMENT")
_library.define(
    "gradients_anew(int route, Tensor grad_output, Tensor input, Tensor weight, bool[3] mask) -> Tensor[]"
)


def _gradients_anew(
    number: int, grad_output: Tensor, input: Tensor, weight: Tensor, mask: list[bool]
) -> list[Tensor]:
    # What node.cpp asks for whose steps it does not know yet, or whose tensors lie otherwise this time.
    return _numbered[number].backward(grad_output, input, weight, tuple(mask))


_library.impl("gradients_anew", _gradients_anew, "CUDA")


def find(key: Hashable) -> Route | None:
    """That of an earlier call with this key: shapes, dtype, arguments and backend as the caller wrote them."""
    found = _routes.get(key)
    return found if found is not None and found.holds() else None


def remember(
    key: Hashable,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    arguments: Arguments,
    backend: str,
) -> None:
    """Take the same way next time, for tensors that were just computed with, after an autocast to ``dtype``."""
    (made,) = call.forward_calls(input, weight, bias, arguments, backend)
    if any(made.formats):
        return
    strides = input.stride(), weight.stride()
    with suppress(TypeError):  # a list among the arguments cannot be hashed
        way = Route(
            key,
            made.handle,
            strides,
            made.all_native,
            _switch(input),
            arguments,
            backend,
            bias is not None,
            dtype,
        )
        keep(way)
        # It casts more cheaply; but nobody waits for a compiler for that.
        if dtype is not None and node.is_built():
            way.told()


def of_gradients(key: Hashable, input: Tensor, weight: Tensor, arguments: Arguments, backend: str) -> Route:
    """A way for ``Route.backward`` alone, of which nothing is known yet, nor kept."""
    strides = input.stride(), weight.stride()
    return Route(key, None, strides, False, _switch(input), arguments, backend, False, None)


def _switch(input: Tensor) -> str | None:
    return call.precision() if input.dtype == torch.float32 else None


def keep(made: Route) -> None:
    """``find`` gives it out from now on."""
    if len(_routes) >= MOST_ROUTES:
        _forget_routes()
    _routes[made.key] = made


def _forget_routes() -> None:
    _routes.clear()
    if _numbered:
        node.forget_answers()


def forget() -> None:
    """Choose anew how each call is computed."""
    _forget_routes()
    node.forget_routes()
    call.forget()
