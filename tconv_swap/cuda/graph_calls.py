"""What the two ops of a compiled graph compute on CUDA (``graph.py``), the way they went before.

csrc/node.cpp asks this for calls that it does not know; from its second time on, it answers such a call itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tconv_swap.checks import output_memory_format
from tconv_swap.cuda import call, launch, node, route
from tconv_swap.cuda.call import Arguments
from tconv_swap.cuda.choice import Mask

_OUTPUT, _GRADIENTS = 0, 1


def output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Sequence[int],
    arguments: Arguments,
    backend: str,
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]``.

    Args:
        geometry: ``arguments`` as the graph writes them.

    Raises:
        RuntimeError, ValueError: as ``call.forward``.
    """
    key = key_of(_OUTPUT, input, weight, bias is not None, geometry, backend)
    known = route.find(key)
    if known is not None:
        computed = known.forward(input, weight, bias)
        if computed is not None:
            _answer(known, key, input, weight)
            return computed
    computed = call.forward(input, weight, bias, arguments, backend)
    route.remember(key, input, weight, bias, None, arguments, backend)
    return computed


def gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Sequence[int],
    arguments: Arguments,
    mask: Mask,
    backend: str,
) -> list[Tensor]:
    """Those of the input, the weight and the bias that ``mask`` asks for, in that order.

    Raises:
        RuntimeError, ValueError: as ``call.backward``.
    """
    key = key_of(_GRADIENTS, input, weight, False, geometry, backend)
    known = route.find(key)
    way = known or route.of_gradients(key, input, weight, arguments, backend)
    computed = way.backward(grad_output, input, weight, mask)
    if known is None:
        route.keep(way)
    else:
        _answer(known, key, input, weight)
    return computed


def key_of(
    op: int, input: Tensor, weight: Tensor, has_bias: bool, geometry: Sequence[int], backend: str
) -> tuple[int, ...]:
    """Of a call, as csrc/node.cpp makes it."""
    sizes = *input.shape, *input.stride(), *weight.shape, *weight.stride()
    dtype = launch.DTYPE_CODES.get(input.dtype, -1)
    return (op, input.get_device(), dtype, int(has_bias), *sizes, *geometry, *backend.encode())


def _answer(known: route.Route, key: tuple[int, ...], input: Tensor, weight: Tensor) -> None:
    number = known.told()
    if number is None:
        return
    node.add_answer(number, output_memory_format(input, weight), key)
    # Forgotten meanwhile, by another thread: what is chosen anew must be asked for.
    if route.find(key) is not known:
        node.forget_answers()
