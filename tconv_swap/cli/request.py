"""Defines what a user can request, and the results: plain data between the commands and the workflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tconv_swap.blocks.modules import Fuse
from tconv_swap.cli import options
from tconv_swap.cli.parsers import KEEP
from tconv_swap.explanation import Explanation
from tconv_swap.measurement.bench import BenchmarkReport
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.report import Facts, to_json_dict
from tconv_swap.surgery import SwapPlan
from tconv_swap.verification import VerifyReport
from tconv_swap.ways.optimize import SECONDS
from tconv_swap.ways.report import WaysReport

#: The name that the user knows a file by (an option), and its path.
Place: TypeAlias = tuple[str, Path]


class Progress(Protocol):
    """Shows the next step in a few words, and how much of this kind of work is done."""

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None: ...


class RequestError(Exception):
    """The request cannot be carried out; the message is one line."""


@dataclass(frozen=True)
class NetworkRequest:
    """A saved network, the inputs on which it is run, and the layers that are swapped.

    `device`, `dtype` and `channels_last` say how the network runs while it is verified and timed. They do not change
    what is saved: `out` has the devices, dtypes and memory formats of the file. `written` are other output files of the
    command: loading must not have read them.

    Raises:
        ValueError: two of the options exclude each other, or one needs another.
    """

    model: options.Model
    input_shapes: options.InputShapes = ()
    inputs: options.InputsFile = None
    device: options.Device = None
    dtype: options.Dtype = None
    channels_last: options.ChannelsLast = False
    include: options.Include = ()
    exclude: options.Exclude = ()
    backend: options.ChosenBackend = None
    include_1d: options.Include1d = False
    fuse: Fuse = None
    backward: options.Backward = True
    seed: options.Seed = 0
    trust: options.Trust = ()
    unsafe_pickle: options.UnsafePickle = False
    module: options.UserModule = None
    factory: options.Factory = None
    key: options.Key = None
    written: tuple[Place, ...] = ()

    def __post_init__(self) -> None:
        if self.inputs is not None and self.input_shapes:
            raise ValueError("give either --input-shape or --inputs, not both")
        if self.key is not None and self.factory is None:
            raise ValueError("--key is for weights: it needs --model")


@dataclass(frozen=True)
class Request(NetworkRequest):
    """One swap: load, plan, verify, time, write."""

    fuse: options.ChosenFuse = "blocks"
    out: options.Out = None
    autocast: options.Autocast = None
    dry_run: options.DryRun = False
    benchmark: options.Benchmark = True
    atol: options.Atol = None
    rtol: options.Rtol = None
    warmup: options.Warmup = None
    iters: options.Iters = None
    way: options.ChosenWay = KEEP
    seconds: options.WaySeconds = SECONDS
    out_format: options.OutFormat = "module"


@dataclass(frozen=True)
class ExplainRequest(NetworkRequest):
    """An explanation: nothing is verified, timed or written."""

    architecture: options.Architecture = None


@dataclass(frozen=True)
class PrepareRequest(NetworkRequest):
    """A preparation: kernels are compiled, and nothing is verified, timed or written."""

    input_shapes: options.PreparedShapes = ()
    fuse: options.ChosenFuse = "blocks"
    architecture: options.Architecture = None
    training: options.Training = False
    autocast: options.PreparedAutocast = None


@dataclass(frozen=True)
class Result:
    """The result of a request; parts that were not done are None. `ceilings` are those of the GPU, measured in the
    same run."""

    plan: SwapPlan
    facts: Facts
    verification: VerifyReport | None = None
    benchmark: BenchmarkReport | None = None
    explanation: Explanation | None = None
    ceilings: Ceilings | None = None
    ways: WaysReport | None = None

    def document(self) -> dict[str, Any]:
        """Returns the document from which the reports are made: see `report.to_json_dict`."""
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
    """The explanation of a network; `explanation` is None if there is nothing to swap."""

    plan: SwapPlan
    inputs: str = "none"
    inputs_origin: str = "nothing to swap"
    explanation: Explanation | None = None
    notes: tuple[str, ...] = ()
