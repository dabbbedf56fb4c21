"""The gradient of the weight of NCHW tensors in 16 bits from copies in channels_last (sm_90a): which layers and sizes
it computes, and its expected time. gradients/nchw_to_nhwc.py plans the launches that copy. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.nchw_to_nhwc import Matrices
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import Schedule
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import ranked as ranked_schedules
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import Fastest
from tconv_swap.kernels.problem import Device, Problem

#: Clocks of the copies and the product together beside those of each (100 times of an H200, whose logarithm then has a
#: standard deviation of 0.08).
BETWEEN_CLOCKS = 5000


def supports_some_size(layer: Problem, device: Device) -> bool:
    """Returns whether the kernels that read copies compute sizes of a layer."""
    return (
        device.architecture == "sm_90a"
        and layer.dtype.itemsize == 2
        and not layer.channels_last
        and grad_weight_tma.supports(problem_of_copies(layer), device)
    )


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether copies of this size are possible."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    weight = Matrices(geometry.in_channels, geometry.out_channels_per_group, geometry.taps, problem.dtype)
    if not supports_some_size(problem, device) or not weight.supported:
        return False
    return tensor_bytes(geometry, item) + weight.bytes <= MAX_COPY_BYTES


@lru_cache(maxsize=256)
def problem_of_copies(problem: Problem) -> Problem:
    """Returns the problem that the copies pose. The weight's gradient is in channels_last, whose lines are whole, or a
    launch that adds up partial sums stores any layout."""
    return problem._replace(channels_last=True, weight_channels_last=True)


def ranked(among: Iterable[Schedule], problem: Problem, device: Device) -> list[Ranked]:
    """Returns the parts that read copies of grad_output and the input in channels_last, with their expected clocks with
    those of the launches that copy both, the one that is expected to be the fastest first."""
    if not supports(problem, device):
        return []
    copies = problem_of_copies(problem)
    reduced = problem.weight_channels_last
    return [
        Ranked(
            expected(problem, best),
            partial(grad_weight_tma.lower, copies, schedule, best.stage, best.splits, False, reduced),
        )
        for best, schedule in ranked_schedules(tuple(among), problem.geometry, device)
    ]


def expected(problem: Problem, product: Fastest, copied_share: float = 1.0) -> float:
    """Returns the expected clocks of the launches that compute (``product``) and of those that copy the input and
    grad_output, and the gradient of a single split to NCHW. ``copied_share``: of the copy of grad_output, which the
    gradient of the input may read too."""
    g = problem.geometry
    of_input = 2 * g.batch * g.in_channels * g.height * g.width
    of_grad_output = tensor_bytes(g, 2) - of_input
    back = product.splits == 1 and not problem.weight_channels_last
    of_gradient = 2 * g.in_channels * g.out_channels_per_group * g.taps if back else 0
    copied = of_input + copied_share * of_grad_output + of_gradient
    return product.clocks + BETWEEN_CLOCKS + copy_clocks(2 * copied, 1 + copied_share + back)
