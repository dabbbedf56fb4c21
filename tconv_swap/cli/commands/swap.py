"""`tconv-swap swap MODEL` swaps, verifies, times, reports and writes; `tconv-swap MODEL` is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from tconv_swap.cli import workflow
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import Output, attempt, check_targets, finish
from tconv_swap.cli.places import files_read
from tconv_swap.cli.request import Request


@expanded()
def swap(request: Request, output: Output) -> NoReturn:
    """Swap the transposed convolutions of a saved network, verify, time, and write the result."""
    run_request(request, output)


def run_request(request: Request, output: Output) -> NoReturn:
    """Runs a request, prints its result, and leaves with its exit code."""
    check_targets(output, files_read(request), None if request.out is None else ("--out", request.out))
    request = replace(request, written=tuple(output.places))
    near = output.invocation.near_command(str(request.model))
    outcome = attempt(
        lambda progress: workflow.run(request, progress, output.invocation.finished.append),
        quiet=output.quiet,
        # A misspelt subcommand looks like a file that does not exist.
        hint=f"; did you mean the command '{near}'?" if near else "",
    )
    finish(outcome, output)
