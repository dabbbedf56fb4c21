"""Keeps what ``tune`` and first uses measured on disk: the winner of each problem, for one GPU, driver, torch and set
of kernels.

Measurements hold only for these, so another driver or a changed kernel uses another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tconv_swap import geometry
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import cache_directory, write_atomically
from tconv_swap.runtime.gpu_facts import gpu_facts

logger = logging.getLogger("tconv_swap")

SCHEMA = 1
_KINDS = (("native", bool), ("kernel", str), ("why", str), ("family", str))


@dataclass(frozen=True, slots=True)
class Winner:
    """The result for one problem, or for a class of sizes of one layer and stage (``first_use``).

    Attributes:
        native: whether PyTorch's operator was the fastest.
        kernel: ``Plan.digest`` of the fastest plan of ours, of a class ``Plan.kernels_digest``; ``""`` where none ran.
        why: one readable clause with the times.
        family: of the fastest plan of ours, for a class.
    """

    native: bool
    kernel: str
    why: str
    family: str = ""


Winners = Mapping[str, Winner]
NONE: Winners = {}


def problem_key(problem: Problem, mask: tuple[bool, ...], has_bias: bool, sizes: str = "") -> str:
    """Returns one stage of a problem in words: the key of its winner. An empty ``mask`` means the forward pass.
    ``sizes``: in place of the problem's own."""
    wanted = [name for name, one in zip(("input", "weight", "bias"), mask, strict=False) if one]
    stage = f"gradient of {' and '.join(wanted)}" if mask else "forward" + (" with bias" if has_bias else "")
    shape = sizes or "x".join(map(str, problem.geometry.input_shape))
    layout = "channels_last" if problem.channels_last else "contiguous"
    dtype = str(problem.dtype).removeprefix("torch.")
    dtype = problem.precision if problem.precision == "tf32" else dtype
    if problem.weight_channels_last != problem.channels_last:
        layout += ", weight " + ("channels_last" if problem.weight_channels_last else "contiguous")
    return f"{stage}: {shape}, {problem.geometry}, {dtype} {layout}"


@lru_cache(maxsize=64)
def winners(device: int) -> Winners:
    """Returns the winners for a GPU; empty if nothing was tuned, or only with another driver, torch or set of
    kernels."""
    directory = cache_directory() / "tuned"
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return NONE
    except OSError as error:
        logger.warning("what was tuned is not used: %s cannot be read (%s)", directory, error.strerror)
        return NONE
    path = path_for(machine(device))
    if path.name in names:
        return load(path, machine(device))
    # Compare the whole name: an RTX 3080 is not an RTX 3080 Ti.
    of_this_gpu = re.compile(re.escape(_slug(device)) + r"-[0-9a-f]{16}\.json")
    if any(of_this_gpu.fullmatch(name) for name in names):
        logger.warning(
            "what was tuned for this %s is of another driver, torch or set of kernels and is not used: tune again",
            torch.cuda.get_device_name(device),
        )
    return NONE


def keep(device: int, new: Winners, *, replacing: bool = True) -> Path:
    """Adds winners to those on disk; with ``replacing`` they replace those of the same problems. Returns the file.

    Raises:
        OSError: it cannot be written, or an existing file cannot be read. That file is left as it is.
    """
    of = machine(device)
    path = path_for(of)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            known = _read(path, of)
        except FileNotFoundError:
            known = NONE
        except _MALFORMED as error:
            _warn_of(path, error)
            known = NONE
        merged = {**known, **new} if replacing else {**new, **known}
        document = {
            "schema": SCHEMA,
            "machine": of,
            "winners": {key: asdict(winner) for key, winner in sorted(merged.items())},
        }
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    winners.cache_clear()
    return path


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Inside, no other process reads, merges and writes here. On a file system without locks there is no lock."""
    handle = None
    try:
        # The directory itself is locked: a lock file would be one of the cache's files, and could belong to another
        # user.
        with suppress(OSError):
            handle = os.open(directory, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)  # released by the system however the process ends
        yield
    finally:
        if handle is not None:
            os.close(handle)


def load(path: Path, of: Mapping[str, str]) -> Winners:
    """Returns what ``keep`` wrote for a machine. If the file holds something else, it warns and returns nothing."""
    try:
        return _read(path, of)
    except (OSError, *_MALFORMED) as error:
        _warn_of(path, error)
        return NONE


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)


def _read(path: Path, of: Mapping[str, str]) -> Winners:
    """Raises OSError if the file cannot be read, and one of ``_MALFORMED`` if it holds something else."""
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if document["schema"] != SCHEMA or document["machine"] != of:
        raise ValueError("it was written by another version or for another machine")
    found = {str(key): Winner(**entry) for key, entry in document["winners"].items()}
    if any(type(getattr(w, name)) is not kind for w in found.values() for name, kind in _KINDS):
        raise ValueError("a winner has a field of another type")
    return found


def _warn_of(path: Path, error: Exception) -> None:
    logger.warning("%s is ignored (%s: %s)", path, type(error).__name__, error)


@lru_cache(maxsize=64)
def machine(device: int) -> dict[str, str]:
    """Returns what a measurement depends on. The number of multiprocessors is included, since MPS and green
    contexts may give a process only some of them."""
    facts = gpu_facts(torch.device("cuda", device)) | {"torch": torch.__version__}
    names = ("gpu", "compute_capability", "multiprocessors", "driver", "torch", "cudnn")
    return {**{name: str(facts[name]) for name in names}, "kernels": _sources()}


def path_for(of: Mapping[str, str]) -> Path:
    """Returns the file that keeps the winners of a machine."""
    digest = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / "tuned" / f"{_as_slug(of['gpu'])}-{digest}.json"


def _slug(device: int) -> str:
    return _as_slug(torch.cuda.get_device_name(device))


def _as_slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


@lru_cache(maxsize=1)
def _sources() -> str:
    """Returns a digest of everything that determines a plan: planners and kernels."""
    digest = hashlib.sha256(jit.sources_digest())
    for path in (Path(geometry.__file__), *sorted(Path(__file__).parent.rglob("*.py"))):
        digest.update(f"{path.name}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:16]
