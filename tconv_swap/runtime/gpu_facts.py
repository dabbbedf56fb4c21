"""Facts about a GPU, its driver and the CUDA libraries, for reports and for the files that keep measurements."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Returns the GPU, its driver, the libraries and PyTorch's switches, as strings, numbers, booleans and None."""
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
        # The old switch raises once somebody has set one of the new ones; the new ones can always be read.
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
    lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def output_of(*command: str) -> str:
    """Returns the program's standard output, "" if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
