"""Measures what runtime sizes cost in kernels: ``python -m benchmarks.sizes COMMIT``.

Times a stage of those layers of the suite that are computed by kernels with runtime sizes (TF32 and float16, NCHW and
channels_last), with this tree's library and with that of COMMIT, a commit whose kernels have the sizes compiled in.
Each library runs in separate processes, which first compile with several cores; L2 is flushed before every call, and
the two libraries take turns, ``--rounds`` times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tconv_swap.measurement.environment import environment
from tconv_swap.runtime.cache import ENVIRONMENT_VARIABLE, write_atomically

ROOT = Path(__file__).parents[1]
#: For each stage, the families whose kernels get the sizes at their launch.
FAMILIES = {
    "forward": {
        *("implicit_gemm", "narrow_mma", "col2im", "narrow_mma", "stride1", "gemm", "general"),
    },
    "grad_input": {"implicit_gemm", "implicit_gemm_tma", "im2col"},
    "grad_weight": {
        "implicit_gemm",
        "implicit_gemm_tma",
        "im2col_nhwc",
    },  # of the last only the tile in place
}
#: For each stage, the gradients that it computes.
MASKS = {"grad_input": (True, False, False), "grad_weight": (False, True, False)}
MODES = {"tf32": torch.float32, "fp16": torch.float16}
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
FLUSHED_BYTES = 256 << 20
CALLS = 15
WORKERS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 done, 2 usage or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("commit", help="a commit whose kernels have the sizes compiled in")
    parser.add_argument("--json", type=Path, help="write the microseconds of every row to this file")
    parser.add_argument("--stage", choices=FAMILIES, default="forward")
    parser.add_argument(
        "--families", help="some of the families, separated by commas (default: all of the stage)"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.sizes needs an NVIDIA GPU", file=sys.stderr)
        return 2
    families = set(options.families.split(",")) if options.families else FAMILIES[options.stage]
    if not families <= FAMILIES[options.stage]:
        parser.error(
            f"--families: the stage {options.stage} has {', '.join(sorted(FAMILIES[options.stage]))}"
        )
    if options.child:
        print(json.dumps(times(options.stage, families)))
        return 0
    before, after = measure(options.commit, options.stage, families, options.rounds)
    rows = [
        {"row": name, "before_us": before[name], "after_us": after[name]} for name in before if name in after
    ]
    print(table(rows))
    if options.json:
        document = {
            "benchmark": "sizes",
            "commit": options.commit,
            "stage": options.stage,
            "environment": environment("cuda"),
            "rows": rows,
        }
        write_atomically(options.json, json.dumps(document, indent=1).encode())
    return 0


def measure(
    commit: str, stage: str, families: set[str], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the microseconds of each row with the commit's library and with this one: the smallest of the rounds."""
    from benchmarks.varying import build_host_parts, link_host_parts  # the other tree does not have it

    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    build_host_parts()
    with tempfile.TemporaryDirectory(prefix="tconv-swap-sizes-") as directory:
        old = Path(directory) / "tree"
        cache = Path(directory) / "cache"
        old.mkdir()
        cache.mkdir()
        link_host_parts(cache)
        archive = subprocess.run(
            ["git", "archive", commit, "tconv_swap", "csrc"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", str(old)], input=archive.stdout, check=True)
        # The same program times the same rows.
        (old / "benchmarks").mkdir()
        for name in ("__init__.py", Path(__file__).name):
            (old / "benchmarks" / name).write_bytes((Path(__file__).parent / name).read_bytes())
        for _ in range(rounds):
            for tree, times_of in zip((old, ROOT), found, strict=True):
                for row, time in _in_a_process(tree, cache, stage, families).items():
                    times_of[row] = min(time, times_of.get(row, math.inf))
    return found


def _in_a_process(tree: Path, cache: Path, stage: str, families: set[str]) -> dict[str, float]:
    environment_of = {**os.environ, "PYTHONPATH": str(tree), ENVIRONMENT_VARIABLE: str(cache)}
    command = [sys.executable, "-m", "benchmarks.sizes", "-", "--child", "--stage", stage]
    command += ["--families", ",".join(sorted(families))]
    done = subprocess.run(
        command, cwd=tree, env=environment_of, check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def times(stage: str, families: set[str]) -> dict[str, float]:
    """Returns the microseconds of each row that one of the families computes with this process's library: medians of
    calls."""
    from tconv_swap import conv_transpose2d
    from tconv_swap.cuda import call
    from tconv_swap.kernels import plan
    from tconv_swap.measurement.suite import load_suite

    torch.backends.cudnn.allow_tf32 = True
    facts = call.device_facts(0)
    rows: list[tuple[str, Any, torch.dtype, torch.memory_format]] = []
    kernels: dict[Any, None] = {}
    for layer in load_suite().layers:
        for mode, dtype in MODES.items():
            for layout, form in LAYOUTS.items():
                last = form == torch.channels_last
                problem = plan.Problem(
                    layer.geometry, dtype, "tf32" if mode == "tf32" else "ieee", last, last
                )
                forward_plan = made = plan.plan_forward(problem, layer.bias, facts)
                if stage in MASKS:
                    made = plan.plan_backward(problem, MASKS[stage], facts)
                if families & set(made.family.split(", ")):
                    rows.append((f"{layer.name} {mode} {layout}", layer, dtype, form))
                    launches = {*made.launches, *forward_plan.launches}
                    kernels.update(dict.fromkeys(one.kernel for one in launches))
    _compile(list(kernels), facts.architecture)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    found = {}
    for name, layer, dtype, form in rows:
        g = layer.geometry
        x = torch.randn(g.input_shape, device="cuda").to(dtype).contiguous(memory_format=form)
        w = torch.randn(g.weight_shape, device="cuda").to(dtype).contiguous(memory_format=form)
        b = torch.randn(g.out_channels, device="cuda").to(dtype) if layer.bias else None

        def forward(x: Any = x, w: Any = w, b: Any = b, g: Any = g) -> torch.Tensor:
            return conv_transpose2d(
                x, w, b, g.stride, g.padding, g.output_padding, g.groups, g.dilation, backend="kernel"
            )

        if stage == "forward":
            with torch.no_grad():
                found[name] = _median(forward, flushed)
            continue
        leaf = x if stage == "grad_input" else w
        leaf.requires_grad_()
        y = forward()
        grad = torch.randn_like(y)

        def gradient(y: Any = y, leaf: Any = leaf, grad: Any = grad) -> None:
            torch.autograd.grad(y, leaf, grad, retain_graph=True)

        found[name] = _median(gradient, flushed)
    return found


def _compile(kernels: Sequence[Any], architecture: str) -> None:
    """Compiles all kernels into the cache on disk, in several processes."""
    from tconv_swap.runtime import jit

    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(jit.compile_kernel, kernels, [architecture] * len(kernels)))


def _median(run: Any, flushed: torch.Tensor) -> float:
    seen: list[float] = []
    for i in range(CALLS + 3):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            seen.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(seen)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each row, the largest slowdown first, and the geometric mean of before / after."""
    ratios = [(row["before_us"] / row["after_us"], row) for row in rows]
    lines = [f"{'row':40}{'before us':>12}{'after us':>12}{'before/after':>14}"]
    for ratio, row in sorted(ratios, key=lambda one: one[0]):
        lines.append(f"{row['row']:40}{row['before_us']:>12.1f}{row['after_us']:>12.1f}{ratio:>14.3f}")
    if ratios:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
        lines.append(f"{'geometric mean':64}{mean:>14.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
