"""Plans of csrc/kernels/common/cast.cu, which casts the tensors of one layer for an autocast by one launch. Pure
functions of data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, Output, Plan, input_, output, struct

MAX_TENSORS = 3
_THREADS = 256
#: Mirrors ELEMENTS of common/cast.cu.
_ELEMENTS = 8


def plan_cast(copies: Sequence[Output], source: torch.dtype) -> Plan | None:
    """Returns the plan that casts the k-th of up to three inputs from ``source`` to the k-th copy; both lie alike in
    memory.

    Returns:
        None if the kernel does not support them.
    """
    (target,) = {copy.dtype for copy in copies}
    counts = [math.prod(copy.shape) for copy in copies]
    if source not in DTYPES or target not in DTYPES or not any(counts) or max(counts) >= INT32_LIMIT:
        return None
    absent = MAX_TENSORS - len(copies)
    blocks = [ceil_div(count, _THREADS * _ELEMENTS) for count in counts]
    ends = [sum(blocks[: place + 1]) for place in range(len(blocks))]
    places = [*range(len(copies)), *[0] * absent]
    kernel = Kernel(
        "common/cast.cu",
        "cast",
        (("From", ELEMENT_TYPES[source]), ("To", ELEMENT_TYPES[target]), ("THREADS", _THREADS)),
    )
    launch = Launch(
        kernel,
        ends[-1],
        _THREADS,
        (*map(input_, places), *map(output, places), struct(0)),
        structs=((*counts, *[0] * absent, *ends, *[ends[-1]] * absent),),
    )
    return Plan("cast", "what an autocast casts, at once", tuple(copies), (launch,))
