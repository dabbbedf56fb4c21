"""The bridge to csrc/node.cpp: routes that are gone without Python."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from tconv_swap.cuda import launch
from tconv_swap.cuda.cache import write_atomically
from tconv_swap.cuda.call import Arguments, Call
from tconv_swap.cuda.choice import Mask
from tconv_swap.cuda.compiler import BuildError

logger = logging.getLogger("tconv_swap")

SOURCE = "node.cpp"
#: In place of a plan: PyTorch's operator.
_PYTORCH = -1
#: Routes are never taken away: one that is made again, after a switch was thrown to and fro, is the one that was.
_numbers: dict[tuple[Any, ...], int] = {}
_FORMATS = {None: -1, torch.contiguous_format: 0, torch.channels_last: 1}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    # The compiler's words, so that it is not asked by every process; another one is.
    refusal, compiler = launch.library_path(SOURCE).with_suffix(".txt"), os.environ.get("CXX", "")
    try:
        if refusal.exists() and refusal.read_text().startswith(f"{compiler}\n"):
            raise BuildError(
                f"csrc/{SOURCE} does not build with this torch; {refusal} says why, and is to be removed to try again"
            )
        library = launch.load(SOURCE)
    except (BuildError, OSError) as error:
        if isinstance(error, launch.RefusedError):
            with suppress(OSError):
                write_atomically(refusal, f"{compiler}\n{error}".encode())
        logger.warning(
            "tconv_swap: a layer's gradients, and compiled graphs, take their way through Python, some 20 us "
            "longer: %s",
            error,
        )
        return None
    library.tconv_add_route.restype = ctypes.c_int64
    library.tconv_use_launcher(ctypes.c_void_p(launch.relaunch_address()))
    return library


def is_built() -> bool:
    """Whether asking for csrc/node.cpp's way has nobody wait for a compiler."""
    return launch.is_built(SOURCE)


def _words(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def add_route(
    key: Hashable,
    handle: int | None,
    strides: tuple[Any, ...],
    has_bias: bool,
    precision: str | None,
    cast: torch.dtype | None,
    arguments: Arguments,
    backend: str,
) -> int | None:
    """The number that ``torch.ops.tconv_swap.differentiable`` takes; None where csrc/node.cpp cannot be built.

    Args:
        key: a route of another call is another route, though its words are the same: its gradients may go another way.
        handle: of the plan; None: PyTorch's operator, for tensors with ``strides``.
        precision: the state of the switch that this holds for; None: any.
        cast: what an autocast wanted operands to be; they come as they were before.
    """
    library = _library()
    if library is None:
        return None
    stride, padding, output_padding, groups, dilation = arguments
    tf32 = -1 if precision is None else int(precision == "tf32")
    words = [_PYTORCH if handle is None else handle, tf32]
    words += [-1 if cast is None else launch.DTYPE_CODES[cast], int(has_bias)]
    words += [*stride, *padding, *output_padding, groups, *dilation, *strides[0], *strides[1]]
    known = (key, *words, backend)
    if known not in _numbers:
        _numbers[known] = library.tconv_add_route(_words(words), backend.encode())
    return _numbers[known]


def add_gradients(number: int, mask: Mask, form: torch.memory_format | None, calls: Sequence[Call]) -> None:
    """How the route ``number`` computes the gradients of ``mask`` from now on: grad_output is brought to ``form``."""
    library = _library()
    assert library is not None
    words = [*map(int, mask), _FORMATS[form], len(calls)]
    for one in calls:
        words += [_PYTORCH if one.handle is None else one.handle, *map(int, one.mask)]
    library.tconv_add_gradients(ctypes.c_int64(number), _words(words))


def add_answer(number: int, form: torch.memory_format, key: Sequence[int]) -> None:
    """A compiled graph's calls with this ``key`` take the route ``number`` from now on; results lie in ``form``."""
    library = _library()
    assert library is not None
    library.tconv_add_answer(
        ctypes.c_int64(number), ctypes.c_int64(_FORMATS[form]), _words(key), ctypes.c_size_t(len(key))
    )


def forget_routes() -> None:
    """What is added from now on is chosen anew."""
    _numbers.clear()


def forget_answers() -> None:
    """Compiled graphs ask Python again. Only where a route was added before is there anything to forget."""
    if (library := _library()) is not None:
        library.tconv_forget_answers()
