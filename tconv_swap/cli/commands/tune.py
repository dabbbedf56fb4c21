"""`tconv-swap tune MODEL`: measures on this GPU what computes each swapped layer fastest, and keeps the result."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import typer

from tconv_swap.cli import workflow
from tconv_swap.cli.console import print_error
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import (
    SIGNAL_CODES,
    STDOUT,
    ExitCode,
    Failure,
    Interrupted,
    Output,
    attempt,
    check_targets,
    finish,
    leave,
    write_json,
)
from tconv_swap.cli.places import files_read
from tconv_swap.cli.request import NetworkRequest
from tconv_swap.files.fileformat import printable
from tconv_swap.report import SCHEMA_VERSION
from tconv_swap.runtime.cache import cache_problem
from tconv_swap.tuning import TuneReport

EPILOG = f"""Exit codes: 0 = tuned; 2 = wrong usage, or the network does not run on the inputs; 3 = the file cannot
be loaded or is not trusted; 4 = nothing to swap; 5 = measured, but it could not be kept or written; 70 = an error in
tconv-swap itself; {SIGNAL_CODES} What was measured until then is kept."""


@expanded(without=("backend", "reports", "verbose"))
def tune(request: NetworkRequest, output: Output) -> NoReturn:
    """Measure on this GPU what computes each swapped layer fastest. Every later run on it uses the result."""
    check_targets(output, files_read(request))
    request = replace(request, written=tuple(output.places))
    outcome = attempt(lambda progress: workflow.tune_layers(request, progress), quiet=output.quiet)
    if outcome is None:
        outcome = Failure(ExitCode.NOTHING_TO_SWAP, "nothing to swap, and so nothing to tune")
    if isinstance(outcome, Failure):
        if isinstance(outcome, Interrupted) and not cache_problem():
            outcome = Interrupted("what was measured until then is kept")
        finish(outcome, output)
    found = outcome
    code = ExitCode.CANNOT_WRITE if found.not_kept else ExitCode.VERIFIED
    leave(lambda: _write(found, output, code), code, output.invocation)


def _write(found: TuneReport, output: Output, code: ExitCode) -> None:
    if output.json_target is not None:
        head = {"schema_version": SCHEMA_VERSION, "tool": "tconv-swap", "outcome": "tuned"}
        write_json({**head, **found.to_dict(), "exit_code": int(code)}, output)
    if not output.quiet and output.json_target != STDOUT:
        for line in str(found).splitlines():
            typer.echo(printable(line))
    if found.not_kept:
        print_error(f"what was measured is not kept: {found.not_kept}")
