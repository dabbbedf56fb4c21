"""Finds out by trying what works on this machine, for `tconv-swap doctor`."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from tconv_swap.cuda import call, first_use, tuned
from tconv_swap.cuda.choice import FORWARD, Mask, choose_backward, choose_forward
from tconv_swap.files.fileformat import first_line
from tconv_swap.kernels.problem import Problem
from tconv_swap.measurement.environment import cpu_name, environment
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.suite import load_suite
from tconv_swap.runtime import compiler, host, nvrtc, worker_pool
from tconv_swap.runtime.cache import cache_problem, cache_use
from tconv_swap.version import __version__

Verdict = Literal["ok", "note", "missing"]

#: This is compiled to check NVRTC; it takes 25 ms.
EMPTY_KERNEL = 'extern "C" __global__ void empty() {}'
ANY_ARCHITECTURE = "sm_80"


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, what was found, and whether that is enough for the kernels.

    `missing`: the kernels do not run on this GPU without it. `note`: everything works, but the user should know this.
    """

    name: str
    verdict: Verdict
    text: str


def diagnose() -> list[Finding]:
    """Checks everything that the kernels need. Compiles an empty kernel; builds and launches nothing."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("tconv-swap", _package),
        ("torch", _torch),
        ("CUDA", _cuda),
        ("GPU", _gpu),
        ("NVRTC", _nvrtc),
        ("compiler", _compiler),
        ("cache", _cache),
        ("charts", _charts),
        ("PyTorch's", _fallbacks),
    )
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Exception as error:  # the user wants to know what is broken, whatever it raises
            findings.append(Finding(name, "missing", f"checking it raises {first_line(error)}"))
    return [*findings, _conclusion(findings)]


def _package() -> Finding:
    return Finding(
        "tconv-swap", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    )


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def _cuda() -> Finding:
    if torch.cuda.is_available():
        facts = environment("cuda")
        return Finding("CUDA", "ok", f"driver {facts['driver'] or 'unknown'}, cuDNN {facts['cudnn']}")
    if torch.version.cuda is None:
        return Finding("CUDA", "note", "not available: this torch was built without it")
    return Finding("CUDA", "note", "not available: no GPU, or no driver for it")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "note", f"none; CPU: {cpu_name()} ({torch.backends.cpu.get_cpu_capability()})")
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = call.device_facts(index).architecture
        memory = properties.total_memory / 2**30
        found.append(f"{properties.name} ({architecture}, {memory:.0f} GiB)")
    counted = [f"{count} x {name}" if count > 1 else name for name, count in Counter(found).items()]
    oldest = min(torch.cuda.get_device_capability(index) for index in range(len(found)))
    text = ", ".join(counted)
    how = dict.fromkeys(first_use.describe(call.device_facts(index)) for index in range(len(found)))
    if oldest < (7, 5):
        return Finding("GPU", "missing", f"{text}: the kernels need compute capability 7.5")
    return Finding("GPU", "ok", f"{text}; {'; '.join(how)}")


def _nvrtc() -> Finding:
    here = torch.cuda.is_available()
    architecture = call.device_facts(torch.cuda.current_device()).architecture if here else ANY_ARCHITECTURE
    try:
        version = ".".join(map(str, nvrtc.version()))
        begin = time.perf_counter()
        nvrtc.compile_cubin(EMPTY_KERNEL, "empty.cu", {}, [f"--gpu-architecture={architecture}"])
    except (nvrtc.NvrtcMissingError, nvrtc.CompileError) as error:
        return Finding("NVRTC", "missing" if here else "note", first_line(error))
    took_ms = (time.perf_counter() - begin) * 1e3
    where = "in a process beside this one" if worker_pool.can_start() else "in this process: no other starts"
    compiles = f"compiles an empty kernel for {architecture} in {took_ms:.0f} ms {where}"
    return Finding("NVRTC", "ok", f"{version}, {compiles}")


def _compiler() -> Finding:
    if host.is_built():
        return Finding("compiler", "ok", "not needed: the host part for this torch is built")
    missing: Verdict = "missing" if torch.cuda.is_available() else "note"
    try:
        command = compiler.words(compiler.find_compiler())
        compiler.find_ninja()
    except compiler.BuildError as error:
        return Finding("compiler", missing, f"{error} (only for a GPU)")
    version = subprocess.run(
        [*command, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False
    )
    found = " ".join([shutil.which(command[0]) or command[0], *command[1:]])
    return Finding(
        "compiler", "ok", f"{found} {version.stdout.strip()}; builds the host part at its first use"
    )


def _cache() -> Finding:
    if problem := cache_problem():
        return Finding("cache", "note", problem)
    use = cache_use()
    return Finding("cache", "ok", f"{use}, {use.tuned} of them tuned" if use.tuned else str(use))


def _charts() -> Finding:
    if importlib.util.find_spec("matplotlib") is None:
        return Finding("charts", "note", "no matplotlib: --report FILE.html needs pip install matplotlib")
    return Finding("charts", "ok", "--report FILE.html works")


def _fallbacks() -> Finding:
    if not torch.cuda.is_available():
        text = "all, in what is fastest on a CPU: no GPU for the kernels"
        return Finding("PyTorch's", "note", text)
    index = torch.cuda.current_device()
    facts = call.device_facts(index)

    def winners(problem: Problem, mask: Mask, has_bias: bool) -> tuned.Winners:
        return first_use.winners(problem, mask, has_bias, index, facts, "known")

    layers = load_suite().layers
    found = []
    reasons: Counter[str] = Counter()
    for mode in ("tf32", "fp16"):
        for stage in ("forward", "backward"):
            count = 0
            for layer in layers:
                problem = Problem(layer.geometry, MODES[mode].dtype, MODES[mode].precision, False, False)
                if stage == "forward":
                    known = winners(problem, FORWARD, layer.bias)
                    steps = [choose_forward(problem, layer.bias, facts, "auto", known)]
                else:
                    mask = (True, True, layer.bias)
                    known = winners(problem, mask, False)
                    steps = [*choose_backward(problem, mask, facts, "auto", known)]
                native = [step.why for step in steps if step.plan is None]
                count += bool(native)
                reasons.update(native)
            if count:
                found.append(f"{mode} {stage} {count}")
    if not found:
        return Finding("PyTorch's", "ok", f"none of the suite's {len(layers)} layers in tf32 and fp16")
    why = f"; mostly: {reasons.most_common(1)[0][0]}"
    return Finding("PyTorch's", "note", f"in part, of {len(layers)} suite layers: {', '.join(found)}{why}")


def _conclusion(findings: list[Finding]) -> Finding:
    missing = [finding.name for finding in findings if finding.verdict == "missing"]
    if missing:
        return Finding("verdict", "missing", f"the kernels cannot run here: see {', '.join(missing)}")
    if not torch.cuda.is_available():
        return Finding("verdict", "note", "works on the CPU; the kernels need an NVIDIA GPU")
    return Finding("verdict", "ok", "the kernels run here; `tconv-swap bench` shows how fast")


def lines(findings: list[Finding]) -> Iterator[tuple[str, str, str]]:
    """Yields name, mark and text of each finding, ready to be printed."""
    marks = {"ok": "ok", "note": "--", "missing": "NO"}
    for finding in findings:
        yield finding.name, marks[finding.verdict], finding.text
