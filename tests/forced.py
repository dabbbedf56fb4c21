"""A forward plan run by itself on a GPU, as the tests force it: poisoned memory, the same bits again, the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.cuda import call, launch
from tconv_swap.cuda.program import Plan
from tconv_swap.geometry import Geometry


def check_forced_forward(
    made: Plan,
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: tuple[bool, bool],
    with_bias: bool,
    tolerance: float,
    device: str = "cuda",
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Run the plan on random tensors and judge its output; ``channels_last``: of the input and of the weight.

    Returns the input, and a function that runs the plan on it once more.
    """
    handle = launch.add_plan(made, dtype, torch.device(device, 0), call.device_facts(0).architecture)
    formats = (torch.contiguous_format, torch.channels_last)
    x, w = (
        torch.randn(shape, device=device).to(dtype).contiguous(memory_format=formats[last])
        for shape, last in zip((geometry.input_shape, geometry.weight_shape), channels_last, strict=True)
    )
    b = torch.randn(geometry.out_channels, device=device).to(dtype) if with_bias else None

    def run() -> Tensor:
        y: Tensor = torch.ops.tconv_swap.launch.default(handle, x, w, b)[0]
        return y

    run().fill_(float("nan"))  # freed at once: the next call takes its memory
    y = run()
    assert torch.equal(y, run())
    g = geometry
    expected = conv_transpose2d_reference(
        x, w, b, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    assert y.shape == expected.shape
    error = (y.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= tolerance, f"{geometry} {made.why}"
    return x, run
