"""Ends a command: writes the result where the user wants it, and returns an exit code in every case."""

from __future__ import annotations

import enum
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer

from tconv_swap.cli import options
from tconv_swap.cli.console import print_error, progress_shown, silence_stdout, stdout_kept
from tconv_swap.cli.invocation import Invocation
from tconv_swap.cli.places import PlaceError, check_apart, check_not_imported
from tconv_swap.cli.request import Place, Progress, RequestError, Result
from tconv_swap.files.fileformat import first_line, printable
from tconv_swap.files.loading import LoadError
from tconv_swap.files.saving import SaveError, check_target, save_text
from tconv_swap.interruption import describe, handlers_are_installed, ignore_signals, received
from tconv_swap.memory import is_out_of_memory
from tconv_swap.report import SCHEMA_VERSION, make_console, written
from tconv_swap.report.summary import summarise
from tconv_swap.report.terminal import print_summary

DEBUG_VARIABLE = "TCONV_SWAP_DEBUG"
STDOUT = Path("-")

_T = TypeVar("_T")


class ExitCode(enum.IntEnum):
    """The exit codes of the program."""

    VERIFIED = 0
    MISMATCH = 1
    USAGE = 2
    CANNOT_LOAD = 3
    NOTHING_TO_SWAP = 4
    CANNOT_WRITE = 5
    INTERNAL = 70
    INTERRUPTED = 130
    TERMINATED = 143


#: Part of the help of every command that may take long.
SIGNAL_CODES = """130 = interrupted (Ctrl-C, SIGINT), the message names the files that were written, each of them whole;
 143 = terminated (SIGTERM), the same."""

# Typer keeps these line breaks; older versions replace them by spaces. Both are readable.
EXIT_CODES = f"""Exit codes:
 0 = verified (with --dry-run: there is something to swap);
 1 = mismatch, nothing was written;
 2 = wrong usage, or the network does not run on the inputs, or gives nothing that can be compared;
 3 = the file cannot be loaded or is not trusted;
 4 = nothing to swap;
 5 = verified, but the output could not be written;
 70 = an error in tconv-swap itself (TCONV_SWAP_DEBUG=1 shows where);
 {SIGNAL_CODES}"""


class Failure(Exception):
    """There is no result: an exit code, and one line that says why."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Interrupted(Failure):
    """A signal ended the work: SIGINT, or SIGTERM if it came.

    `kept`: what remains of the work besides files, if anything remains.
    """

    def __init__(self, kept: str = "", *, written: Sequence[Path] = ()) -> None:
        number = received() or signal.SIGINT
        parts = [describe(number), kept]
        if written:
            parts.append(f"written: {', '.join(printable(path) for path in written)}")
        elif not kept:
            parts.append("no file was written")
        super().__init__(ExitCode(128 + number), "; ".join(part for part in parts if part))
        self.kept = kept

    def with_files(self, output: Output) -> Interrupted:
        """Returns the same with the files that have been written by now, and the JSON file that will contain this
        message."""
        announced = [] if output.json_file is None else [output.json_file]
        return Interrupted(self.kept, written=[*output.invocation.finished, *announced])


@dataclass(frozen=True)
class Output:
    """Says where the result goes, besides the exit code.

    `invocation`: records the files that are written.
    """

    json_target: options.JsonTarget = None
    reports: options.ReportFiles = ()
    verbose: options.Verbose = False
    quiet: options.Quiet = False
    invocation: Invocation = field(default_factory=Invocation)

    @property
    def json_file(self) -> Path | None:
        """Returns the file for the JSON; None if the JSON goes to stdout or nowhere."""
        return None if self.json_target == STDOUT else self.json_target

    @property
    def places(self) -> list[Place]:
        """Returns all files to which the result goes."""
        reports = [("--report", path) for path in self.reports]
        return reports if self.json_file is None else [*reports, ("--json", self.json_file)]


def attempt(work: Callable[[Progress], _T], *, quiet: bool, hint: str = "") -> _T | Failure:
    """Runs `work` and shows its progress. Everything that it raises becomes a failure with its exit code.

    Args:
        work: the work.
        quiet: shows no progress.
        hint: added to the message if a file cannot be loaded.
    """
    outcome = _attempt(work, quiet, hint)
    # Other code may have caught the signal's exception, or raised another one instead.
    return outcome if received() is None else Interrupted()


def _attempt(work: Callable[[Progress], _T], quiet: bool, hint: str) -> _T | Failure:
    try:
        with progress_shown(quiet=quiet) as progress, stdout_kept():
            return work(progress)
    except Failure as failure:
        return failure
    except LoadError as error:
        return Failure(ExitCode.CANNOT_LOAD, f"{error}{hint}")
    except RequestError as error:
        return Failure(ExitCode.USAGE, str(error))
    except SaveError as error:
        return Failure(ExitCode.CANNOT_WRITE, str(error))
    except Exception as error:  # a user must never see a bare traceback
        if is_out_of_memory(error):
            advice = "a smaller --input-shape, --no-backward or --device cpu needs less"
            return Failure(ExitCode.USAGE, f"not enough memory ({first_line(error)}): {advice}")
        return _internal(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not handlers_are_installed():
            return Interrupted()
        # Our code raises these for signals only, so the network's code raised this one, for example by sys.exit.
        return Failure(
            ExitCode.USAGE,
            f"the network's code ends the program ({first_line(error)}) instead of returning something",
        )


def _internal(error: Exception) -> Failure:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    return Failure(
        ExitCode.INTERNAL, f"{first_line(error)} (an error in tconv-swap; {DEBUG_VARIABLE}=1 shows where)"
    )


def check_targets(output: Output, read: Sequence[Place] = (), out: Place | None = None) -> None:
    """Checks, before any work is done, that all outputs can be written and that none overwrites another file; leaves if
    not.

    Args:
        output: says where the JSON and the reports go.
        read: the files that the command reads.
        out: the file for the network.
    """
    network = [] if out is None else [out]
    try:
        _check_targets(output, read, network)
    except RequestError as error:
        # The JSON file gets the error too, unless the error is about this file, which may be the network itself.
        others = [*read, *network, *replace(output, json_target=None).places]
        target = replace(output, reports=())
        try:
            _check_targets(target, others, [])
        except RequestError:
            target = Output(invocation=output.invocation)
        finish(Failure(ExitCode.USAGE, str(error)), target)


def _check_targets(output: Output, read: Sequence[Place], others: Sequence[Place]) -> None:
    for option, target in output.places:
        try:
            if option == "--report":
                written.check(target)
            check_target(target, text=True)
        except (SaveError, written.ReportError) as error:
            raise RequestError(f"{option}: {error}") from None
    try:
        check_apart(read, [*others, *output.places])
    except PlaceError as error:
        raise RequestError(str(error)) from None


def finish(outcome: Result | Failure, output: Output) -> NoReturn:
    """Writes the requested outputs and leaves with the exit code."""
    try:
        check_not_imported(output.places)
    except PlaceError as error:
        output = Output(invocation=output.invocation)
        if not isinstance(outcome, Failure):
            outcome = Failure(ExitCode.USAGE, str(error))
    if isinstance(outcome, Interrupted):
        outcome = outcome.with_files(output)
    code = outcome.code if isinstance(outcome, Failure) else exit_code(outcome)

    def write() -> None:
        target = output.json_target
        if target is not None:
            write_json(_as_json(outcome, code), output)
        if isinstance(outcome, Failure):
            print_error(str(outcome))
            return
        for path in output.reports:
            _save_text("--report", written.render(path, outcome.document()), path, output)
        if not output.quiet and target != STDOUT:
            _print_result(outcome, output)
        elif code == ExitCode.MISMATCH and outcome.verification is not None:
            print_error(f"mismatch: {outcome.verification.failures[0]}")

    leave(write, code, output.invocation)


def leave(
    write: Callable[[], None],
    code: ExitCode = ExitCode.VERIFIED,
    invocation: Invocation | None = None,
) -> NoReturn:
    """Writes the result and leaves; if an output cannot be written, the exit code says so.

    `invocation`: its files are named in the message if a signal comes.
    """
    failure = None
    try:
        write()
        sys.stdout.flush()
        ignore_signals()
    except (SaveError, written.ReportError) as error:
        failure = Failure(ExitCode.CANNOT_WRITE, str(error))
    except OSError as error:
        failure = unwritable(error)
    except (KeyboardInterrupt, SystemExit):
        failure = Interrupted(written=() if invocation is None else invocation.finished)
    except Exception as error:  # as in `attempt`
        failure = _internal(error)
    if failure is not None:
        print_error(str(failure))
        code = failure.code
        ignore_signals()
    raise typer.Exit(int(code))


def unwritable(error: OSError) -> Failure:
    """Returns the failure for a stdout that cannot be written."""
    silence_stdout()
    return Failure(ExitCode.CANNOT_WRITE, f"stdout cannot be written ({error.strerror or error})")


def write_json(document: dict[str, Any], output: Output) -> None:
    """Writes a document to `output.json_target`: to a file, whole or not at all, or to stdout.

    Raises:
        OSError: stdout cannot be written.
        SaveError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False)
    if output.json_file is None:
        typer.echo(text)
    else:
        _save_text("--json", text + "\n", output.json_file, output)


def _save_text(option: str, text: str, target: Path, output: Output) -> None:
    try:
        save_text(text, target, placed=output.invocation.finished.append)
    except OSError as error:  # the error of a pipe or a device does not name it
        reason = error.strerror or error
        raise SaveError(f"{option}: {printable(target)} cannot be written ({reason})") from error


def exit_code(result: Result) -> ExitCode:
    """Returns the exit code of a result."""
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
    # If nobody reads its output, rich ends the process with 1, which would mean a mismatch.
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
