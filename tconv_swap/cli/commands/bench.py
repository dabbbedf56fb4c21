"""`tconv-swap bench` measures the layer suite on the user's own GPU or CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import typer

from tconv_swap.cli import options
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import SIGNAL_CODES, Output, attempt, check_targets, finish, leave
from tconv_swap.cli.suite_run import SuiteRequest, run_suite
from tconv_swap.measurement.suite import load_suite

EPILOG = f"""Exit codes: 0 = every layer was verified; 1 = a mismatch; 2 = wrong usage; 70 = an error in tconv-swap
itself; {SIGNAL_CODES}"""


@dataclass(frozen=True)
class BenchRequest(SuiteRequest):
    """Says what to measure, or only to list the layers."""

    show: options.ListLayers = False


@expanded()
def bench(request: BenchRequest, output: Output) -> NoReturn:
    """Check and time transposed convolutions of well-known networks, PyTorch's beside ours, on this machine.

    Each layer is first compared with float64, then timed by itself, forward and backward, both sides alternately in one
    run. On a GPU the whole suite takes about two minutes and up to 30 GB of memory; layers that do not fit are left out
    and named.
    """
    if request.show:
        lines = [f"{layer.name:16} {layer}  ({layer.network})" for layer in load_suite().layers]
        leave(lambda: typer.echo("\n".join(lines)))
    check_targets(output)
    finish(attempt(lambda progress: run_suite(request, progress), quiet=output.quiet), output)
