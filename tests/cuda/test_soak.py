"""100,000 calls of random sizes, layouts, dtypes and threads in one process: right, and in bounded memory.

    pytest tests/cuda/test_soak.py --soak-calls 100000 -rP

prints what it found; without the option it makes as many calls as take some seconds.
"""

from __future__ import annotations

import pytest
import torch
from pretended_gpu import pretended_gpu
from soak import (
    BEGINNINGS,
    MAX_CALL_PLANS,
    POOL,
    Figures,
    Kind,
    Layer,
    Place,
    Soak,
    compile_kernels,
    laid_out,
)
from torch import Tensor

from tconv_swap import conv_transpose2d
from tconv_swap.cuda import call
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import jit

#: Growth during the last three fifths of the calls: a leak of a kilobyte for each of 100,000 calls is 60 MB.
MAX_GROWTH = 64 << 20

PRETENDED = [Layer(16, 8, 4, 2, 1), Layer(24, 5, 4, 2, 1), Layer(64, 32, 4, 2, 1)]
LAYERS = [
    Layer(16, 8, 4, 2, 1),
    Layer(64, 32, 3, 2, 1, 1),
    Layer(32, 16, 2, 2, 0),
    Layer(24, 3, 4, 2, 1),
    Layer(12, 12, 4, 2, 1, 0, 12),
]

ON_A_GPU = [Layer(64, 32, 3, 2, 1, 1), Layer(12, 12, 4, 2, 1, 0, 12)]
SIZES = [(5, 6), (8, 8)]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-calls"))


def as_a_layer_calls(kind: Kind, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    stride, padding, output_padding, groups = kind.arguments
    return conv_transpose2d(x, w, b, stride, padding, output_padding, groups, backend=kind.backend)  # type: ignore[arg-type]


def check(figures: Figures, calls: int) -> None:
    print(figures)
    assert figures.calls > calls - 25  # what fifths and threads leave over
    assert figures.checked > calls / 40
    assert 0 < figures.max_plans <= MAX_CALL_PLANS
    assert figures.resident[-1] - figures.resident[1] < MAX_GROWTH
    assert figures.tensors <= 0
    assert figures.bytes_on_device <= 0
    assert figures.unbounded == []


def test_without_a_gpu(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU and on a pretended GPU in parallel."""
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as gpu:

        def on_the_gpu(kind: Kind, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            del gpu.launched[:-1], gpu.planned[:-1]  # which would grow by every call
            return gpu.differentiable(x, w, b, kind.backend)

        places = {"cpu": Place("cpu", LAYERS, as_a_layer_calls), "gpu": Place("cpu", PRETENDED, on_the_gpu)}
        soak = Soak(places, new=0.15)
        figures = soak.run(calls)
    assert gpu.launched
    check(figures, calls)
    if calls >= 100_000:  # then more is asked than may be kept
        assert figures.max_plans > MAX_CALL_PLANS / 2


def test_the_pool_holds_every_tensor() -> None:
    pool = torch.empty(POOL, device="meta")
    for layer in ON_A_GPU:
        for height, width in SIZES:
            like = torch.empty(32, layer.in_channels, height, width, device="meta")
            weight = torch.empty(
                layer.in_channels,
                layer.out_channels // layer.groups,
                layer.kernel,
                layer.kernel,
                device="meta",
            )
            output = torch.nn.functional.conv_transpose2d(like, weight, None, *layer[3:])
            for shape in (like.shape, output.shape):
                for layout in ("strided", "misaligned"):
                    assert laid_out(pool, tuple(shape), layout, BEGINNINGS).shape == shape


@pytest.mark.gpu
def test_on_a_gpu(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From streams of their own; every kernel is compiled and loaded once. Without cuDNN, of which each thread keeps a
    plan for each size that it meets."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    places = {"cuda": Place("cuda", ON_A_GPU, as_a_layer_calls, SIZES, max_images=32)}
    compiled: list[object] = []
    compile_kernel = jit.compile_kernel

    def counted(*kernel: object) -> bytes:
        compiled.append(kernel)
        return compile_kernel(*kernel)  # type: ignore[arg-type]

    with MODES["fp32"].switched_on():
        soak = Soak(places, new=0.03)
        compile_kernels(soak, calls, call.device_facts(0))
        monkeypatch.setattr(jit, "compile_kernel", counted)
        call.forget()
        figures = soak.run(calls)
    print(f"{len(compiled)} kernels loaded")
    check(figures, calls)
    assert len(compiled) == len(set(compiled))
