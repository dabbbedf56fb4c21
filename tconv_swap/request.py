"""What a user can ask for, and what comes of it: plain data between the commands and the workflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from tconv_swap.blocks.modules import Fuse
from tconv_swap.cuda.choice import Backend
from tconv_swap.report import Facts, to_json_dict

if TYPE_CHECKING:
    from tconv_swap.explanation import Explanation
    from tconv_swap.measurement.bench import BenchmarkReport
    from tconv_swap.measurement.roof import Ceilings
    from tconv_swap.places import Place
    from tconv_swap.surgery import SwapPlan
    from tconv_swap.verification import VerifyReport
    from tconv_swap.ways.report import WaysReport


class Progress(Protocol):
    """Shows what comes next, in a few words, and how much of that kind of work is done."""

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None: ...


class RequestError(Exception):
    """What was asked for cannot be done as asked; the message is one line."""


@dataclass(frozen=True)
class Request:
    """Everything a user can ask of one swap.

    `device`, `dtype` and `channels_last` say how the network runs while it is verified and timed. They do not
    touch what is saved: `out` has the devices, dtypes and memory formats of the file. `written` are files that
    are written beside it: loading must not have read them.
    """

    model: Path
    out: Path | None = None
    input_shapes: tuple[tuple[int, ...], ...] = ()
    inputs: Path | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    channels_last: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    backend: Backend | None = None
    include_1d: bool = False
    fuse: Fuse = None
    dry_run: bool = False
    backward: bool = True
    benchmark: bool = True
    atol: float | None = None
    rtol: float | None = None
    seed: int = 0
    warmup: int | None = None
    iters: int | None = None
    trust: tuple[str, ...] = ()
    unsafe_pickle: bool = False
    module: Path | None = None
    factory: str | None = None
    key: str | None = None
    out_format: Literal["module", "state_dict"] = "module"
    written: tuple[Place, ...] = ()
    way: str = "keep"
    seconds: float | None = None


@dataclass(frozen=True)
class Result:
    """What came of a request; what was not done is None. `ceilings`: of the GPU, measured in the same run."""

    plan: SwapPlan
    facts: Facts
    verification: VerifyReport | None = None
    benchmark: BenchmarkReport | None = None
    explanation: Explanation | None = None
    ceilings: Ceilings | None = None
    ways: WaysReport | None = None

    def document(self) -> dict[str, Any]:
        """What the reports are drawn from: see `report.to_json_dict`."""
        return to_json_dict(
            self.plan,
            self.verification,
            self.benchmark,
            self.facts,
            self.explanation,
            self.ceilings,
            self.ways,
        )


@dataclass(frozen=True)
class Explained:
    """What would compute a network; `explanation` is None where there is nothing to swap."""

    plan: SwapPlan
    inputs: str = "none"
    inputs_origin: str = "nothing to swap"
    explanation: Explanation | None = None
    notes: tuple[str, ...] = ()
