"""Which machine, versions and switches a measurement was made with: numbers mean nothing without them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tconv_swap.version import __version__


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine as a flat dict of strings, numbers, booleans and None (unknown here), ready for JSON.

    Args:
        device: where the work runs; a CUDA device adds the GPU, its driver and the switches of cuDNN.
    """
    device = torch.device(device)
    facts: dict[str, Any] = {
        "device": str(device),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "tconv_swap": __version__,
        "torch": str(torch.__version__),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts |= _cuda_facts(device)
    else:
        facts["mkldnn"] = torch.backends.mkldnn.is_available()
    return facts


def machine_name(facts: dict[str, Any]) -> str:
    """Returns one line of what `environment` gave: the chip that did the work, the driver and the libraries."""
    if "gpu" in facts:
        parts = [f"{facts['gpu']} (sm_{str(facts['compute_capability']).replace('.', '')})"]
        if facts["driver"]:
            parts.append(f"driver {facts['driver']}")
        parts += [f"CUDA {facts['cuda']}", f"cuDNN {facts['cudnn']}"]
    else:
        threads = facts["torch_threads"]
        parts = [f"{facts['cpu']} ({facts['cpu_capability']}), {threads} thread{'s' if threads != 1 else ''}"]
    return ", ".join([*parts, f"torch {facts['torch']}"])


def cpu_name() -> str:
    """Returns the CPU's marketing name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                name = line.partition(":")[2].strip()
                if name and name != "unknown":
                    return name
    except OSError:
        pass
    if platform.system() == "Darwin" and (name := _output_of("sysctl", "-n", "machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine() or "unknown CPU"


def _usable_cores() -> int | None:
    """Returns how many cores this process may run on: in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cuda_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "cudnn_enabled": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        # The old switch refuses to answer once somebody has used the new ones, and the other way round is
        # fine.
        "cudnn_allow_tf32": _or_none(lambda: cudnn.allow_tf32),
        "cudnn_conv_fp32_precision": _or_none(lambda: cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
        "matmul_fp32_precision": _or_none(lambda: torch.backends.cuda.matmul.fp32_precision),
    }


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _cudnn_version() -> str | None:
    version = torch.backends.cudnn.version()
    if version is None:
        return None
    # cuDNN 9 counts 10000 / 100 / 1, cuDNN 8 counted 1000 / 100 / 1.
    unit = 10000 if version >= 90000 else 1000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


def _driver_version() -> str | None:
    """Returns the driver's own version ("580.65.06"), which the CUDA runtime does not tell."""
    # Containers often hide /proc/driver, and slim ones have no nvidia-smi: neither is an error.
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for word in text.partition("\n")[0].split():
        if word[0].isdigit() and word.count(".") >= 1:
            return word
    lines = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _output_of(*command: str) -> str:
    """Returns the program's standard output, "" if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
