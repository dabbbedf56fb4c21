"""`tconv-swap prepare MODEL`: compiles all that the swapped layers of a saved network will need."""

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
from tconv_swap.cli.request import PrepareRequest
from tconv_swap.files.fileformat import printable
from tconv_swap.preparation import PrepareReport
from tconv_swap.report import SCHEMA_VERSION
from tconv_swap.runtime.cache import cache_problem

EPILOG = f"""Exit codes: 0 = prepared; 2 = wrong usage, or the network does not run on the inputs; 3 = the file cannot
be loaded or is not trusted; 4 = nothing to swap; 5 = compiled, but it could not be kept or written; 70 = an error in
tconv-swap itself; {SIGNAL_CODES} What was compiled until then is kept."""


@expanded(without=("backward", "reports", "verbose"))
def prepare(request: PrepareRequest, output: Output) -> NoReturn:
    """Compile the kernels that the swapped layers need, so that no later run does: before a server's first request, or
    while an image is built, without a GPU.

    With inputs, what reaches the layers is observed. Without, each layer is prepared for sizes that stand for all.
    """
    check_targets(output, files_read(request))
    request = replace(request, written=tuple(output.places))
    outcome = attempt(lambda progress: workflow.prepare_layers(request, progress), quiet=output.quiet)
    if outcome is None:
        outcome = Failure(ExitCode.NOTHING_TO_SWAP, "nothing to swap, and so nothing to prepare")
    if isinstance(outcome, Failure):
        if isinstance(outcome, Interrupted) and not cache_problem():
            outcome = Interrupted("what was compiled until then is kept")
        finish(outcome, output)
    found = outcome
    code = ExitCode.CANNOT_WRITE if found.not_kept else ExitCode.VERIFIED
    leave(lambda: _write(found, output, code), code, output.invocation)


def _write(found: PrepareReport, output: Output, code: ExitCode) -> None:
    if output.json_target is not None:
        head = {"schema_version": SCHEMA_VERSION, "tool": "tconv-swap", "outcome": "prepared"}
        write_json({**head, **found.to_dict(), "exit_code": int(code)}, output)
    if not output.quiet and output.json_target != STDOUT:
        typer.echo(printable(found))
    if found.not_kept:
        print_error(f"what was compiled is not kept: {found.not_kept}")
