"""What comes of a command: the result where it was asked for, and an exit code, whatever happens on the way."""

from __future__ import annotations

import enum
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer

from tconv_swap.console import Progress, print_error, progress_shown, silence_stdout
from tconv_swap.files import saving
from tconv_swap.files.fileformat import first_line, printable
from tconv_swap.files.loading import LoadError
from tconv_swap.files.saving import SaveError, check_target, save_text
from tconv_swap.memory import is_out_of_memory
from tconv_swap.report import SCHEMA_VERSION, make_console, written
from tconv_swap.report.summary import summarise
from tconv_swap.report.terminal import print_summary
from tconv_swap.request import RequestError, Result

DEBUG_VARIABLE = "TCONV_SWAP_DEBUG"
STDOUT = Path("-")

_T = TypeVar("_T")


class ExitCode(enum.IntEnum):
    """What the shell is told."""

    VERIFIED = 0
    MISMATCH = 1
    USAGE = 2
    CANNOT_LOAD = 3
    NOTHING_TO_SWAP = 4
    CANNOT_WRITE = 5
    INTERNAL = 70
    INTERRUPTED = 130


# Typer keeps these line breaks or, in older versions, puts a space: readable both ways.
EXIT_CODES = """Exit codes:
 0 = verified (with --dry-run: there is something to swap);
 1 = mismatch, nothing was written;
 2 = wrong usage, or the network does not run on the inputs;
 3 = the file cannot be loaded or is not trusted;
 4 = nothing to swap;
 5 = verified, but the output could not be written;
 70 = an error in tconv-swap itself (TCONV_SWAP_DEBUG=1 shows where);
 130 = interrupted, nothing was written but what the message names."""


class Failure(Exception):
    """No result: an exit code, and one line that says why."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Output:
    """Where the result goes beside the exit code."""

    json_target: Path | None = None
    reports: tuple[Path, ...] = ()
    verbose: bool = False
    quiet: bool = False


def attempt(work: Callable[[Progress], _T], *, quiet: bool, hint: str = "") -> _T | Failure:
    """Do `work`, with its progress shown; whatever it raises becomes a failure with its exit code.

    Args:
        work: what to do.
        quiet: show no progress.
        hint: put behind the message where a file cannot be loaded.
    """
    try:
        with progress_shown(quiet=quiet) as progress:
            return work(progress)
    except Failure as failure:
        return failure
    except LoadError as error:
        return Failure(ExitCode.CANNOT_LOAD, f"{error}{hint}")
    except RequestError as error:
        return Failure(ExitCode.USAGE, str(error))
    except SaveError as error:
        return Failure(ExitCode.CANNOT_WRITE, str(error))
    except KeyboardInterrupt:
        return interrupted()
    except Exception as error:  # the last resort, so that a user never meets a bare traceback
        if is_out_of_memory(error):
            advice = "a smaller --input-shape, --no-backward or --device cpu needs less"
            return Failure(ExitCode.USAGE, f"not enough memory ({first_line(error)}): {advice}")
        return _internal(error)


def interrupted() -> Failure:
    """What Ctrl-C comes to: files that were in their place by then stay there, and are named."""
    names = ", ".join(map(str, saving.finished))
    before = f"; written before that: {names}" if names else ", nothing was written"
    return Failure(ExitCode.INTERRUPTED, f"interrupted{before}")


def _internal(error: Exception) -> Failure:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    return Failure(
        ExitCode.INTERNAL, f"{first_line(error)} (an error in tconv-swap; {DEBUG_VARIABLE}=1 shows where)"
    )


def check_targets(output: Output, sources: Iterable[Path | None] = (), out: Path | None = None) -> None:
    """Find out before any work is done whether the JSON and the reports can be written; leave if not.

    Args:
        output: where they go.
        sources: files that must not be written over.
        out: the network's own target.
    """
    others = [source for source in (*sources, out) if source is not None]
    try:
        _check_targets(output, others, out)
    except RequestError as error:
        told = replace(output, reports=())
        places = [os.path.realpath(path) for path in output.reports]
        try:
            # The JSON says what is wrong, unless that is the JSON: it may well be the network itself.
            _check_targets(told, others, out)
            usable = output.json_target is not None and os.path.realpath(output.json_target) not in places
        except RequestError:
            usable = False
        finish(Failure(ExitCode.USAGE, str(error)), told if usable else replace(told, json_target=None))


def _check_targets(output: Output, others: Sequence[Path], out: Path | None) -> None:
    targets = [("--report", path) for path in output.reports]
    if output.json_target not in (None, STDOUT):
        targets.append(("--json", output.json_target))
    taken = {} if out is None else {os.path.realpath(out): "--out"}
    for option, target in targets:
        try:
            if option == "--report":
                written.check(target)
            for other in others or (None,):
                check_target(target, other, text=True)
        except (SaveError, written.ReportError) as error:
            raise RequestError(f"{option}: {error}") from None
        place = os.path.realpath(target)
        if place in taken:
            raise RequestError(f"{option} and {taken[place]} name the same file")
        taken[place] = option


def finish(outcome: Result | Failure, output: Output) -> NoReturn:
    """Write what was asked for and leave with the exit code."""
    code = outcome.code if isinstance(outcome, Failure) else exit_code(outcome)

    def write() -> None:
        target = output.json_target
        if target is not None:
            write_json(_as_json(outcome, code), target)
        if isinstance(outcome, Failure):
            print_error(str(outcome))
            return
        for path in output.reports:
            save_text(written.render(path, outcome.document()), path)
        if not output.quiet and target != STDOUT:
            _print_result(outcome, output)
        elif code == ExitCode.MISMATCH and outcome.verification is not None:
            print_error(f"mismatch: {outcome.verification.failures[0]}")

    leave(write, code)


def leave(write: Callable[[], None], code: ExitCode = ExitCode.VERIFIED) -> NoReturn:
    """Write the last words and leave; an output that cannot be written has an exit code of its own."""
    failure = None
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more (`| head`): what was found out stays true.
        silence_stdout()
    except (SaveError, written.ReportError) as error:
        failure = Failure(ExitCode.CANNOT_WRITE, str(error))
    except OSError as error:
        failure = unwritable(error)
    except KeyboardInterrupt:
        failure = interrupted()
    except Exception as error:  # as in `attempt`
        failure = _internal(error)
    if failure is not None:
        print_error(str(failure))
        code = failure.code
    raise typer.Exit(int(code))


def unwritable(error: OSError) -> Failure:
    """What an output that cannot be written comes to, a file or stdout."""
    silence_stdout()
    return Failure(
        ExitCode.CANNOT_WRITE, f"{error.filename or 'stdout'} cannot be written ({error.strerror or error})"
    )


def write_json(document: dict[str, Any], target: Path) -> None:
    """To a file, whole or not at all, or to stdout.

    Raises:
        OSError, SaveError: it cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False)
    if target == STDOUT:
        typer.echo(text)
    else:
        save_text(text + "\n", target)


def exit_code(result: Result) -> ExitCode:
    """What a result means to the shell."""
    if not result.plan.swapped:
        return ExitCode.NOTHING_TO_SWAP
    if result.verification is not None and not result.verification.passed:
        return ExitCode.MISMATCH
    return ExitCode.VERIFIED


def _print_result(result: Result, output: Output) -> None:
    if result.verification is None and result.benchmark is None:
        for line in (*str(result.plan).splitlines(), *result.facts.warnings):
            typer.echo(printable(line))
        return
    console = make_console()
    # Rich ends the process with 1, a mismatch, when nobody reads its output.
    with console.capture() as captured:
        print_summary(console, summarise(result.document()), verbose=output.verbose)
        for path in output.reports:
            console.print(f"report written to {printable(str(path))}", soft_wrap=True)
    sys.stdout.write(captured.get())


def _as_json(outcome: Result | Failure, code: ExitCode) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        known = {
            "schema_version": SCHEMA_VERSION,
            "tool": "tconv-swap",
            "outcome": "error",
            "error": str(outcome),
        }
        return {**known, "exit_code": int(code)}
    return {**outcome.document(), "exit_code": int(code)}
