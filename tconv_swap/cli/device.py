"""Finds the device that a command works on."""

from __future__ import annotations

import torch

from tconv_swap.cli.request import RequestError
from tconv_swap.files.fileformat import first_line


def device_of(wanted: torch.device | None) -> torch.device:
    """Returns the wanted device; None gives a GPU if there is one, else the CPU.

    Raises:
        RequestError: this machine has no such device, or our layers do not run on it.
    """
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type not in ("cpu", "cuda"):
        raise RequestError(f"--device {wanted}: swapped layers run on cpu and cuda only")
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"--device {wanted} is not available ({first_line(error)})") from None
    return wanted
