"""Norms and the activations behind them, alone and in networks: ``python -m benchmarks.blocks --json FILE``.

First the kernels by themselves: normalisation and ReLU, and reflection padding, forward and backward, beside PyTorch's
(cuDNN's) and beside a copy of as many bytes, from a cold L2. Then DCGAN-64, DCGAN-256, a pose network and CycleGAN: an
eager training step and an eager evaluation, PyTorch's network, ours, ours with ``fuse="blocks"`` and with ``"all"``,
each layout in a process of its own: wall clock, and the GPU's time by kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tconv_swap
from benchmarks.layers import commit_of_tree
from benchmarks.networks import NETWORKS, Network, _dcgan, _example, _latents
from tconv_swap.blocks import call
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.measurement.timing import time_interleaved
from tconv_swap.runtime.cache import write_atomically

#: Batch, channels, height, width; and whether every image is normalised separately.
SHAPES: tuple[tuple[tuple[int, int, int, int], bool], ...] = (
    ((128, 512, 4, 4), False),
    ((128, 256, 8, 8), False),
    ((128, 128, 16, 16), False),
    ((128, 64, 32, 32), False),
    ((64, 256, 32, 32), False),
    ((64, 128, 64, 64), False),
    ((64, 64, 128, 128), False),
    ((32, 256, 64, 48), False),
    ((32, 2048, 8, 6), False),
    ((8, 256, 64, 64), True),
    ((8, 128, 128, 128), True),
    ((8, 64, 256, 256), True),
)
#: Batch, channels, height, width; and the padding on every side: CycleGAN's.
PADS: tuple[tuple[tuple[int, int, int, int], int], ...] = (((8, 256, 64, 64), 1), ((8, 64, 256, 256), 3))
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def _dcgan_256(tiny: bool) -> nn.Module:
    return _example("dcgan").build_generator(256, 8 if tiny else 64)  # type: ignore[no-any-return]


MEASURED = {
    "dcgan-64": Network("dcgan-64", "DCGAN-64", _dcgan, _latents, 128),
    "dcgan-256": Network("dcgan-256", "DCGAN-256", _dcgan_256, _latents, 64),
    "pose": NETWORKS["simplebaseline"],
    "cyclegan": NETWORKS["cyclegan"],
}
VARIANTS = ("pytorch", "none", "blocks", "all")
PRECISIONS = {"dcgan-64": ("fp16", "tf32")}
STEPS, ROUNDS, PROFILED, SHOWN = 10, 7, 5, 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 all was measured, 1 something was not, 2 usage or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the file for the rows")
    parser.add_argument("--only", choices=("kernels", *MEASURED), help="measure this part only")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help=argparse.SUPPRESS)  # for the child processes
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.blocks: torch.cuda.is_available() is False: no GPU", file=sys.stderr)
        return 2
    if options.layout:
        rows = [
            _network(options.only, layout=options.layout, precision=p, prepare=options.prepare)
            for p in PRECISIONS.get(options.only, ("fp16",))
        ]
        write_atomically(options.json, json.dumps(rows).encode())
        return 0
    document: dict[str, Any] = {
        "benchmark": "blocks",
        "environment": environment(torch.device("cuda")),
        "commit": commit_of_tree(),
        "kernels": [],
        "pads": [],
    }
    if options.only in (None, "kernels"):
        for row in _kernels():
            document["pads" if "padding" in row else "kernels"].append(row)
            print(_kernel_line(row), flush=True)
            _save(document, options.json)
    names = [name for name in MEASURED if options.only in (None, name)]
    document["networks"], failed = [], 0
    cases = [(name, layout) for name in names for layout in LAYOUTS]
    # Everything is compiled first, into the cache on disk, so that the timed runs compile nothing.
    for prepared in [_process(name, layout, options.json, prepare=True) for name, layout in cases]:
        prepared.wait()
    for name, layout in cases:
        process = _process(name, layout, options.json, prepare=False)
        if process.wait():
            failed += 1
            print(f"{name} {layout}: not measured", flush=True)
            continue
        for row in json.loads(_part(name, layout, options.json).read_text()):
            document["networks"].append(row)
            print(_network_line(row), flush=True)
        _part(name, layout, options.json).unlink()
        _save(document, options.json)
    _save(document, options.json)
    return 1 if failed else 0


def _save(document: dict[str, Any], path: Path) -> None:
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def _part(name: str, layout: str, path: Path) -> Path:
    return path.with_name(f"{path.stem}-{name}-{layout}.part.json")


def _process(name: str, layout: str, path: Path, *, prepare: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.blocks", "--only", name, "--layout", layout]
    command += ["--json", str(_part(name, layout, path)), *(["--prepare"] if prepare else [])]
    return subprocess.Popen(command)


# ---- kernels by themselves ------------------------------------------------------------------------------------------


def _kernels() -> Iterator[dict[str, Any]]:
    copied = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    copy_ms = time_interleaved({"copy": lambda: target.copy_(copied)}, device="cuda", iters=20)[
        "copy"
    ].median_ms
    rate = 2 * copied.numel() / copy_ms * 1e-6
    for shape, per_image in SHAPES:
        for layout, form in LAYOUTS.items():
            for name, dtype in DTYPES.items():
                yield _kernel_row(shape, per_image, layout, form, name, dtype, rate)
    for (shape, padding), (layout, form), (name, dtype) in product(PADS, LAYOUTS.items(), DTYPES.items()):
        row = {"shape": shape, "padding": padding, "layout": layout, "precision": name}
        yield row | _pad_stages(shape, padding, form, dtype, rate)


def _kernel_row(
    shape: tuple[int, ...],
    per_image: bool,
    layout: str,
    form: Any,
    precision: str,
    dtype: torch.dtype,
    rate: float,
) -> dict[str, Any]:
    norm = (nn.InstanceNorm2d if per_image else nn.BatchNorm2d)(shape[1]).cuda()
    activation = nn.ReLU()
    x, grad = (torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form) for _ in range(2))
    x.requires_grad_()

    def ours() -> Tensor:
        output = call.computed(norm, activation, x)
        assert output is not None
        return output

    def theirs() -> Tensor:
        output: Tensor = activation(norm(x))
        return output

    size = x.numel() * x.element_size()
    row: dict[str, Any] = {"shape": shape, "per_image": per_image, "layout": layout, "precision": precision}
    wanted = [x, *norm.parameters()]
    return row | _stages(ours, theirs, wanted, grad, {"forward": 2 * size, "backward": 3 * size}, rate)


def _pad_stages(
    shape: tuple[int, ...], padding: int, form: Any, dtype: torch.dtype, rate: float
) -> dict[str, float]:
    pad = nn.ReflectionPad2d(padding)
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form).requires_grad_()

    def ours() -> Tensor:
        output = call.padded(pad, x)
        assert output is not None
        return output

    grad = torch.randn_like(ours())
    size = (x.numel() + grad.numel()) * x.element_size()
    return _stages(ours, lambda: pad(x), [x], grad, {"forward": size, "backward": size}, rate)


def _stages(
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
    wanted: list[Tensor],
    grad: Tensor,
    moved: dict[str, int],
    rate: float,
) -> dict[str, float]:
    """Returns the microseconds of both passes by our kernels and by PyTorch, and which share of the copy rate ours
    reach. ``moved``: the fewest bytes of each pass."""
    outputs = {"ours": ours(), "pytorch": theirs()}

    def back(output: Tensor) -> Callable[[], object]:
        given = (
            grad.contiguous(memory_format=torch.channels_last)
            if not output.is_contiguous()
            else grad.contiguous()
        )
        return lambda: torch.autograd.grad(output, wanted, given, retain_graph=True)

    timings = time_interleaved(
        {
            "forward ours": ours,
            "forward pytorch": theirs,
            "backward ours": back(outputs["ours"]),
            "backward pytorch": back(outputs["pytorch"]),
        },
        device="cuda",
        budget_s=0.4,
    )
    row: dict[str, float] = {}
    for stage, size in moved.items():
        mine, other = (timings[f"{stage} {whose}"].median_ms for whose in ("ours", "pytorch"))
        row |= {
            f"{stage}_us": round(mine * 1e3, 1),
            f"{stage}_pytorch_us": round(other * 1e3, 1),
            f"{stage}_of_copy": round(size / rate * 1e-6 / mine, 3),
        }
    return row


def _kernel_line(row: dict[str, Any]) -> str:
    parts = [
        f"{stage} {row[f'{stage}_us']:8.1f} us, PyTorch {row[f'{stage}_pytorch_us'] / row[f'{stage}_us']:5.2f}x, "
        f"{row[f'{stage}_of_copy']:4.0%} of copy"
        for stage in ("forward", "backward")
    ]
    kind = f"pad {row['padding']}" if "padding" in row else "instance" if row["per_image"] else "batch"
    name = f"{'x'.join(map(str, row['shape']))} {kind}"
    return f"{name:24s} {row['layout']:13s} {row['precision']}: " + "; ".join(parts)


# ---- networks -------------------------------------------------------------------------------------------------------


def _network(name: str, *, layout: str, precision: str, prepare: bool) -> dict[str, Any]:
    network = MEASURED[name]
    torch.backends.cudnn.benchmark = not prepare
    torch.backends.cudnn.allow_tf32 = True
    device, form = torch.device("cuda"), LAYOUTS[layout]
    torch.manual_seed(0)
    original = network.build(False).to(device).to(memory_format=form)  # type: ignore[call-overload]
    given = network.inputs(network.batch, False, device)
    inputs = [one.contiguous(memory_format=form) for one in given if isinstance(one, Tensor)]
    models = {"pytorch": original}
    for variant in VARIANTS[1:]:
        fuse: Any = None if variant == "none" else variant
        models[variant] = tconv_swap.swap_layers(original, fuse=fuse, inplace=False)
    row: dict[str, Any] = {"network": name, "layout": layout, "precision": precision, "batch": network.batch}
    for stage in ("step", "eval"):
        calls = {which: _work(model, inputs, stage, precision) for which, model in models.items()}
        for work in calls.values():
            for _ in range(1 if prepare else 4):
                work()
        if prepare:
            continue
        row[stage] = _wall(calls)
        row[f"{stage}_gpu"] = {which: _by_kernel(work) for which, work in calls.items()}
    torch.cuda.synchronize()
    return row


def _work(model: nn.Module, inputs: list[Tensor], stage: str, precision: str) -> Callable[[], None]:
    casting = partial(torch.autocast, "cuda", torch.float16) if precision == "fp16" else nullcontext
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with casting():
            output = model(*inputs)
        output.float().square().mean().backward()
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad(), casting():
            model(*inputs)

    def work() -> None:
        if model.training is not (stage == "step"):
            model.train(stage == "step")
        (step if stage == "step" else evaluate)()

    return work


def _wall(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Returns the milliseconds of one call: medians of rounds in turn."""
    times: dict[str, list[float]] = {which: [] for which in calls}
    for _ in range(ROUNDS):
        for which, work in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(STEPS):
                work()
            torch.cuda.synchronize()
            times[which].append((time.perf_counter() - begin) / STEPS * 1e3)
    return {which: round(statistics.median(some), 3) for which, some in times.items()}


def _by_kernel(work: Callable[[], None]) -> dict[str, Any]:
    """Returns the GPU's milliseconds in one call, the launches, and the kernels that take longest."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "ms": round(sum(event.self_device_time_total for event in events) / PROFILED / 1e3, 3),
        "launches": round(sum(event.count for event in events) / PROFILED, 1),
        "kernels": {
            event.key[:90]: round(event.self_device_time_total / PROFILED / 1e3, 4)
            for event in events[:SHOWN]
        },
    }


def _network_line(row: dict[str, Any]) -> str:
    name = f"{row['network']:10s} {row['layout']:13s} {row['precision']}"
    lines = []
    for stage in ("step", "eval"):
        wall = row[stage]
        gpu = {which: row[f"{stage}_gpu"][which]["ms"] for which in VARIANTS}
        parts = [
            f"{which} {wall[which]:7.2f} ms ({wall['pytorch'] / wall[which]:.2f}x, GPU {gpu[which]:.2f})"
            for which in VARIANTS
        ]
        lines.append(f"{name} {stage}: " + "; ".join(parts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
