"""The launch of csrc/kernels/forward/implicit_gemm_split_k.cu, which adds up what the splits of a sum computed."""

from __future__ import annotations

from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, input_, output, struct, workspace

_THREADS = 256


def reduce_launch(problem: TileProblem, splits: int, offset: int, count: int) -> Launch:
    """Returns the launch that adds up the ``count`` outputs of every split, which begin ``offset`` bytes into the
    workspace."""
    geometry = problem.geometry
    vector = 4 if geometry.out_channels % 4 == 0 else 1
    kernel = Kernel(
        "forward/implicit_gemm_split_k.cu",
        "forward_implicit_gemm_split_k",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("OUT_CHANNELS", geometry.out_channels),
            ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
            *bias_alone(problem.has_bias),
            ("VECTOR", vector),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=ceil_div(count, _THREADS * vector),
        block=_THREADS,
        arguments=(workspace(offset), input_(2), output(0), struct(0)),
        overlaps_previous=True,
        structs=((count, splits, *divisor(geometry.out_height * geometry.out_width)),),
    )
