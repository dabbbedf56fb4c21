"""Records the machine, the versions and the switches of a measurement: without them its numbers mean nothing."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from tconv_swap.runtime import cores
from tconv_swap.runtime.gpu_facts import gpu_facts, output_of
from tconv_swap.version import __version__


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Returns the machine as a flat dict of strings, numbers, booleans and None (unknown), ready for JSON.

    Args:
        device: the device of the work; a CUDA device adds the GPU, its driver and the switches of cuDNN.
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
        "cpu_cores": cores.usable(),
        "torch_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts |= gpu_facts(device)
    else:
        facts["mkldnn"] = torch.backends.mkldnn.is_available()
    return facts


def machine_name(facts: dict[str, Any]) -> str:
    """Returns one line from the result of `environment`: the chip that did the work, the driver and the libraries."""
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
    """Returns the CPU's product name if the system knows it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                name = line.partition(":")[2].strip()
                if name and name != "unknown":
                    return name
    except OSError:
        pass
    if platform.system() == "Darwin" and (name := output_of("sysctl", "-n", "machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine() or "unknown CPU"
