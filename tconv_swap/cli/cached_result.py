"""Runs the commands whose result stays in the cache: `tune` and `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

import typer

from tconv_swap.cli.console import print_error
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
from tconv_swap.cli.request import NetworkRequest, Progress
from tconv_swap.files.fileformat import printable
from tconv_swap.report import SCHEMA_VERSION
from tconv_swap.runtime.cache import cache_problem


class CachedResult(Protocol):
    """The report of such a command; `not_kept` says why its result is not in the cache, or is empty."""

    @property
    def not_kept(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


_Request = TypeVar("_Request", bound=NetworkRequest)
_Report = TypeVar("_Report", bound=CachedResult)


def epilog(outcome: str, done: str) -> str:
    """Returns the exit codes for the help of a command; `outcome` and `done` as in `run_cached`."""
    return (
        f"Exit codes: 0 = {outcome}; 2 = wrong usage, or the network does not run on the inputs; 3 = the file cannot "
        f"be loaded or is not trusted; 4 = nothing to swap; 5 = {done}, but it could not be kept or written; 70 = an "
        f"error in tconv-swap itself; {SIGNAL_CODES} What was {done} until then is kept."
    )


def run_cached(
    work: Callable[[_Request, Progress], _Report | None],
    request: _Request,
    output: Output,
    *,
    verb: str,
    outcome: str,
    done: str,
    lines: Callable[[_Report], Iterable[str]],
) -> NoReturn:
    """Runs a command, prints its report, and leaves with its exit code.

    Args:
        work: the command; returns None if there is nothing to swap.
        request: its argument.
        output: says where the report goes.
        verb: the name of the command.
        outcome: the word for success in the JSON.
        done: the word for what was done with each part of the result.
        lines: returns the lines of the report for the terminal.
    """
    check_targets(output, files_read(request))
    request = replace(request, written=tuple(output.places))
    result = attempt(lambda progress: work(request, progress), quiet=output.quiet)
    if result is None:
        result = Failure(ExitCode.NOTHING_TO_SWAP, f"nothing to swap, and so nothing to {verb}")
    if isinstance(result, Failure):
        if isinstance(result, Interrupted) and not cache_problem():
            result = Interrupted(f"what was {done} until then is kept")
        finish(result, output)
    report: _Report = result
    code = ExitCode.CANNOT_WRITE if report.not_kept else ExitCode.VERIFIED

    def write() -> None:
        if output.json_target is not None:
            head = {"schema_version": SCHEMA_VERSION, "tool": "tconv-swap", "outcome": outcome}
            write_json({**head, **report.to_dict(), "exit_code": int(code)}, output)
        if not output.quiet and output.json_target != STDOUT:
            for line in lines(report):
                typer.echo(printable(line))
        if report.not_kept:
            print_error(f"what was {done} is not kept: {report.not_kept}")

    leave(write, code, output.invocation)
