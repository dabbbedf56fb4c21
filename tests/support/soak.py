"""Very many calls of random kinds from several threads of one process: their results, and the memory they leave
behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.nn.functional as F
from cuda_cases import DTYPES, TOLERANCE, relative_error
from torch import Tensor

from benchmarks.kernels import compile_ahead
from tconv_swap.cuda import call, choice, tuned
from tconv_swap.kernels import plan
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import Plan

THREADS = 4
#: How many recent kinds a thread draws from.
RECENT = 64
#: The fraction of calls that are compared with float64.
CHECKED = 0.04
#: The pool of numbers for tensors; a tensor begins at a random one of the first.
POOL, BEGINNINGS = 1 << 20, 4096
#: How often the call plans are counted.
COUNTED_EVERY = 500
#: csrc/plan_cache.h keeps two halves of so many.
MAX_CALL_PLANS = 2 * 2048


class Layer(NamedTuple):
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    padding: int
    output_padding: int = 0
    groups: int = 1


@dataclass(frozen=True)
class Kind:
    """A kind of call. ``wanted``: which gradients of input, weight and bias it computes."""

    place: str
    layer: Layer
    batch: int
    height: int
    width: int
    dtype: torch.dtype
    input_layout: str
    weight_layout: str
    has_bias: bool
    wanted: tuple[bool, bool, bool]
    backend: str

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.batch, self.layer.in_channels, self.height, self.width

    @property
    def weight_shape(self) -> tuple[int, ...]:
        k = self.layer.kernel
        return self.layer.in_channels, self.layer.out_channels // self.layer.groups, k, k

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The stride, padding, output_padding and groups."""
        return self.layer[3:]


#: Computes a call of a kind: input, weight, bias.
Caller = Callable[[Kind, Tensor, Tensor, Tensor | None], Tensor]


class Place(NamedTuple):
    """Where calls are computed, and which it may be asked for: a few heights and widths, unless there are none, where
    each is a kernel to compile."""

    device: str
    layers: Sequence[Layer]
    caller: Caller
    sizes: Sequence[tuple[int, int]] = ()
    max_images: int = 4


@dataclass
class Figures:
    """The results of a soak test. ``resident``: bytes of the process after each fifth of the calls."""

    calls: int = 0
    kinds: int = 0
    checked: int = 0
    worst: float = 0.0  # of the errors, in parts of what the dtype allows
    seconds: float = 0.0
    max_plans: int = 0
    resident: list[int] = field(default_factory=list)
    unbounded: list[str] = field(
        default_factory=list
    )  # functions that remember without a bound, and learnt meanwhile
    tensors: int = 0  # that Python holds at the end and did not after a fifth
    bytes_on_device: int = 0  # that are allocated at the end and were not after a fifth

    def __str__(self) -> str:
        return (
            f"{self.calls} calls of {self.kinds} kinds in {self.seconds:.0f} s, {self.checked} compared with float64 "
            f"(worst {self.worst:.2f} of the tolerance); at most {self.max_plans} call plans kept; resident memory "
            f"after each fifth {', '.join(str(one >> 20) for one in self.resident)} MiB"
        )


def kinds(places: dict[str, Place], seed: int) -> Iterator[Kind]:
    """Yields kinds without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        place = rng.choice(sorted(places))
        _, layers, _, sizes, max_images = places[place]
        layer = rng.choice(layers)
        height, width = rng.choice(sizes) if sizes else (rng.randint(2, 16), rng.randint(2, 16))
        has_bias = rng.random() < 0.5
        wanted = (False,) * 3
        if rng.random() < 0.5:
            wanted = tuple(rng.random() < 0.7 for _ in range(3))  # type: ignore[assignment]
        yield Kind(
            place,
            layer,
            rng.randint(1, max_images),
            height,
            width,
            rng.choice(DTYPES),
            rng.choice(("nchw", "channels_last", "strided", "misaligned")),
            rng.choice(("nchw", "channels_last")),
            has_bias,
            (wanted[0], wanted[1], wanted[2] and has_bias),
            rng.choice(("auto", "kernel", "native")),
        )


def laid_out(pool: Tensor, shape: tuple[int, ...], layout: str, begin: int) -> Tensor:
    """Returns a tensor of numbers of the pool, aligned unless it is ``"misaligned"``."""
    count = math.prod(shape)
    if layout == "misaligned":
        begin += 1
    if layout == "strided":
        return pool[begin : begin + 2 * count].view(*shape, 2)[..., 0]
    part = pool[begin : begin + count]
    if layout == "channels_last":
        n, c, h, w = shape
        return part.view(n, h, w, c).permute(0, 3, 1, 2)
    return part.view(shape)


@dataclass
class Soak:
    """Runs threads in pairs that draw the same kinds at about the same time."""

    places: dict[str, Place]
    new: float  # of all calls: those of a kind that their thread has not drawn before
    seed: int = 0
    figures: Figures = field(default_factory=Figures)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.randn(POOL, dtype=torch.float64, generator=generator)
        self._pools = {
            (place.device, dtype): numbers.to(place.device, dtype)
            for place in self.places.values()
            for dtype in DTYPES
        }
        self._drawn = [kinds(self.places, self.seed + thread // 2) for thread in range(THREADS)]
        self._recent: list[deque[Kind]] = [deque(maxlen=RECENT) for _ in range(THREADS)]
        self._random = [random.Random(self.seed + thread // 2) for thread in range(THREADS)]
        has_gpu = any(place.device == "cuda" for place in self.places.values())
        self._streams = [torch.cuda.Stream() if has_gpu else None for _ in range(THREADS)]
        self._lock = threading.Lock()

    def run(self, calls: int) -> Figures:
        """Raises the exception of a call, or AssertionError for a wrong result."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        began, known = time.perf_counter(), unbounded_caches()
        try:
            on_device: list[int] = []
            held: list[int] = []
            for _ in range(5):
                self._round(calls // 5)
                self.figures.resident.append(resident_bytes())
                on_device.append(_allocated())
                held.append(sum(type(one) is Tensor for one in gc.get_objects()))
            learnt = unbounded_caches().items()
            self.figures.unbounded = [name for name, size in learnt if size > known.get(name, 0) + 8]
            self.figures.tensors = held[-1] - held[0]
            self.figures.bytes_on_device = on_device[-1] - on_device[0]
        finally:
            torch.set_num_threads(threads)
        self.figures.seconds = time.perf_counter() - began
        return self.figures

    def _round(self, calls: int) -> None:
        wrong: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                with torch.cuda.stream(self._streams[thread]):
                    for number in range(calls // THREADS):
                        if wrong:
                            return
                        self._call(thread)
                        if number % COUNTED_EVERY == 0:
                            self._count_plans()
            except BaseException as error:
                wrong.append(error)

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self._count_plans()
        if wrong:
            raise wrong[0]

    def _count_plans(self) -> None:
        with self._lock:
            self.figures.max_plans = max(self.figures.max_plans, launch.count_plans())

    def _call(self, thread: int) -> None:
        rng, recent = self._random[thread], self._recent[thread]
        is_new = not recent or rng.random() < self.new
        if is_new:
            recent.append(next(self._drawn[thread]))
        kind = recent[-1] if is_new else rng.choice(recent)
        place = self.places[kind.place]
        pool = self._pools[place.device, kind.dtype]

        def drawn(shape: tuple[int, ...], layout: str) -> Tensor:
            return laid_out(pool, shape, layout, rng.randrange(0, BEGINNINGS, 8))

        shapes = [kind.input_shape, kind.weight_shape, (kind.layer.out_channels,)][: 2 + kind.has_bias]
        layouts = kind.input_layout, kind.weight_layout, "nchw"
        leaves = [
            drawn(shape, layout).detach().requires_grad_(wanted)
            for shape, layout, wanted in zip(shapes, layouts, kind.wanted, strict=False)
        ]
        y = place.caller(kind, leaves[0], leaves[1], leaves[2] if kind.has_bias else None)
        assert y.dtype == kind.dtype
        assert y.requires_grad == any(kind.wanted)
        grad = drawn(tuple(y.shape), kind.input_layout)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(y, asked, grad) if asked else ()
        for gradient, leaf in zip(found, asked, strict=True):
            assert gradient.shape == leaf.shape
            assert gradient.dtype == leaf.dtype
        is_checked = rng.random() < CHECKED
        error = worst_error(kind, leaves, grad, y, found) if is_checked else 0.0
        assert error <= 1, f"{kind}: {error:.2f} of what is allowed"
        with self._lock:
            self.figures.calls += 1
            self.figures.kinds += is_new and thread % 2 == 0
            self.figures.checked += is_checked
            self.figures.worst = max(self.figures.worst, error)


def worst_error(
    kind: Kind, leaves: Sequence[Tensor], grad: Tensor, y: Tensor, found: Sequence[Tensor]
) -> float:
    """Returns the worst error of output and gradients against PyTorch in float64, as a fraction of the tolerance."""
    wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    stride, padding, output_padding, groups = kind.arguments
    bias = wide[2] if kind.has_bias else None
    expected = F.conv_transpose2d(wide[0], wide[1], bias, stride, padding, output_padding, groups)
    assert y.shape == expected.shape
    errors = [relative_error(y, expected)]
    asked = [leaf for leaf in wide if leaf.requires_grad]
    if asked:
        truths = torch.autograd.grad(expected, asked, grad.double())
        for got, truth in zip(found, truths, strict=True):
            # The gradient of a bias may cancel to 0.
            scale = grad.double().abs().sum((0, 2, 3)) if truth.dim() == 1 else None
            errors.append(relative_error(got, truth, scale))
    return max(errors) / TOLERANCE[kind.dtype]


def resident_bytes() -> int:
    """Returns the resident bytes of this process after Python and the allocator released what they do not need."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    # PyTorch keeps 32 MiB for each thread that multiplied matrices.
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def unbounded_caches() -> dict[str, int]:
    """Returns the number of entries of each unbounded cache of this package's functions."""
    return {
        f"{one.__module__}.{one.__qualname__}": one.cache_info().currsize
        for one in gc.get_objects()
        # isinstance would use __class__, which objects may override
        if type(one) is functools._lru_cache_wrapper
        and one.__module__.startswith("tconv_swap")
        and one.cache_parameters()["maxsize"] is None
    }


# Kernels, which are compiled before the calls


def compile_kernels(soak: Soak, calls: int, device: plan.Device) -> None:
    """Compiles the kernels that ``soak.run(calls)`` will need, on all cores."""
    each = int(1.2 * soak.new * calls / THREADS) + RECENT
    drawn = [
        kind
        for pair in range(THREADS // 2)
        for kind in itertools.islice(kinds(soak.places, soak.seed + pair), each)
        if kind.backend != "native"
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        plans = pool.map(functools.partial(_plans_of, device), drawn, chunksize=32)
        compile_ahead((made for some in plans for made in some), device.architecture)


def _plans_of(device: plan.Device, kind: Kind) -> list[Plan]:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    pool = torch.empty(POOL, dtype=kind.dtype, device="meta")
    stride, padding, output_padding, groups = kind.arguments
    problem = call.problem_of(
        laid_out(pool, kind.input_shape, kind.input_layout, 0),
        laid_out(pool, kind.weight_shape, kind.weight_layout, 0),
        None,
        ((stride,) * 2, (padding,) * 2, (output_padding,) * 2, groups, (1, 1)),
    )
    steps = [choice.choose_forward(problem, kind.has_bias, device, kind.backend, tuned.NONE)]
    if any(kind.wanted):
        posed = plan.with_weight_layout(problem, problem.channels_last)
        steps += choice.choose_backward(posed, kind.wanted, device, kind.backend, tuned.NONE)
    return [step.plan for step in steps if step.plan is not None]
