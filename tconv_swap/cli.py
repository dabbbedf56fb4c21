"""The command line: `tconv-swap model.pt --out fast.pt`, and subcommands.

Options become a `workflow.Request`; what comes of it becomes a report, JSON and an exit code. A first
argument that is no subcommand belongs to `swap`, so the word can be left out; a file that is called like a
subcommand is given as `./demo` or `swap demo`.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import torch
import typer
from typer.core import TyperGroup

import tconv_swap
from tconv_swap import demo as demo_network
from tconv_swap import options, workflow
from tconv_swap.console import print_error, progress_shown
from tconv_swap.cuda.choice import check_backend
from tconv_swap.files.fileformat import first_line, printable
from tconv_swap.files.loading import LoadError, parse_trust
from tconv_swap.files.saving import SaveError, check_target
from tconv_swap.files.usercode import parse_factory, parse_file
from tconv_swap.report import SCHEMA_VERSION, make_console, print_report, to_json_dict
from tconv_swap.tuning import TuneReport
from tconv_swap.workflow import Request, RequestError, Result

_T = TypeVar("_T")

DEFAULT_COMMAND = "swap"
DEBUG_VARIABLE = "TCONV_SWAP_DEBUG"
STDOUT = Path("-")


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
 0 = verified (with --dry-run: there is something to swap; tune: measured);
 1 = mismatch, nothing was written;
 2 = wrong usage, or the network does not run on the inputs;
 3 = the file cannot be loaded or is not trusted;
 4 = nothing to swap;
 5 = verified, but the output could not be written;
 70 = an error in tconv-swap itself (TCONV_SWAP_DEBUG=1 shows where);
 130 = interrupted, nothing was written."""


class SwapByDefault(TyperGroup):
    """Gives its arguments to `swap` unless they start with a subcommand or an option of the group itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=SwapByDefault,
    help="Swap every nn.ConvTranspose2d of a saved network for a faster one, prove that it computes the "
    "same, and time it.\n\n`tconv-swap MODEL` is `tconv-swap swap MODEL`.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `tconv-swap` script."""
    # A SIGTERM that raises lets a half-written file be removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(prog_name="tconv-swap")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tconv-swap {tconv_swap.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    pass


@app.command(DEFAULT_COMMAND, epilog=EXIT_CODES)
def swap(
    model: options.ModelArgument,
    out: options.Out = None,
    input_shape: options.InputShape = None,
    inputs: options.InputsFile = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    channels_last: options.ChannelsLast = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    backend: options.BackendOption = None,
    include_1d: options.Include1d = False,
    dry_run: options.DryRun = False,
    no_backward: options.NoBackward = False,
    no_benchmark: options.NoBenchmark = False,
    atol: options.Tolerance = None,
    rtol: options.Tolerance = None,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    iters: options.Iters = None,
    json_target: options.JsonTarget = None,
    quiet: options.Quiet = False,
    trust: options.Trust = None,
    unsafe_pickle: options.UnsafePickle = False,
    module: options.UserModule = None,
    factory: options.Factory = None,
    out_format: options.OutFormat = "module",
) -> None:
    """Swap the transposed convolutions of a saved network, verify, time, and write the result."""
    if inputs is not None and input_shape:
        raise typer.BadParameter("give either --input-shape or --inputs, not both")
    request = Request(
        model=model,
        out=out,
        input_shapes=tuple(
            options.parsed("--input-shape", options.parse_shape, text) for text in input_shape or ()
        ),
        inputs=inputs,
        device=None if device is None else options.parsed("--device", torch.device, device),
        dtype=None if dtype is None else options.parsed("--dtype", options.parse_dtype, dtype),
        channels_last=channels_last,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        backend=None if backend is None else options.parsed("--backend", check_backend, backend),
        include_1d=include_1d,
        dry_run=dry_run,
        backward=not no_backward,
        benchmark=not no_benchmark,
        atol=atol,
        rtol=rtol,
        seed=seed,
        warmup=warmup,
        iters=iters,
        trust=tuple(trust or ()),
        unsafe_pickle=unsafe_pickle,
        module=None if module is None else options.parsed("--module", parse_file, module),
        factory=factory,
        out_format=out_format,
    )
    if factory is not None:
        options.parsed("--model", parse_factory, factory)
    for option in request.trust:
        options.parsed("--trust", parse_trust, option)
    _carry_out(request, json_target, quiet)


@app.command("tune", epilog=EXIT_CODES)
def tune(
    model: options.ModelArgument,
    input_shape: options.InputShape = None,
    inputs: options.InputsFile = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    channels_last: options.ChannelsLast = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    include_1d: options.Include1d = False,
    no_backward: options.NoBackward = False,
    seed: options.Seed = 0,
    json_target: options.JsonTarget = None,
    quiet: options.Quiet = False,
    trust: options.Trust = None,
    unsafe_pickle: options.UnsafePickle = False,
    module: options.UserModule = None,
    factory: options.Factory = None,
) -> None:
    """Measure on this GPU what computes each swapped layer fastest; every later use of them here goes by it."""
    if inputs is not None and input_shape:
        raise typer.BadParameter("give either --input-shape or --inputs, not both")
    request = Request(
        model=model,
        input_shapes=tuple(
            options.parsed("--input-shape", options.parse_shape, text) for text in input_shape or ()
        ),
        inputs=inputs,
        device=None if device is None else options.parsed("--device", torch.device, device),
        dtype=None if dtype is None else options.parsed("--dtype", options.parse_dtype, dtype),
        channels_last=channels_last,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        include_1d=include_1d,
        backward=not no_backward,
        seed=seed,
        trust=tuple(trust or ()),
        unsafe_pickle=unsafe_pickle,
        module=None if module is None else options.parsed("--module", parse_file, module),
        factory=factory,
    )
    if factory is not None:
        options.parsed("--model", parse_factory, factory)
    for option in request.trust:
        options.parsed("--trust", parse_trust, option)
    outcome = _attempt(request, lambda progress: workflow.tune_layers(request, progress), quiet)
    if outcome is None:
        outcome = _Failure(ExitCode.NOTHING_TO_SWAP, "nothing to swap, and so nothing to tune")
    _finish(outcome, json_target, quiet)


@app.command("demo", epilog=EXIT_CODES)
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where to write dcgan.pt and dcgan-fast.pt.",
            show_default="a new one",
        ),
    ] = None,
    device: options.Device = None,
    no_backward: options.NoBackward = False,
    no_benchmark: options.NoBenchmark = False,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    iters: options.Iters = None,
    json_target: options.JsonTarget = None,
    quiet: options.Quiet = False,
) -> None:
    """Build a DCGAN generator, save it, and do to it what `tconv-swap dcgan.pt --out dcgan-fast.pt` does."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None:
        where = options.parsed("--device", torch.device, device)
    try:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="tconv-swap-demo-"))
        directory.mkdir(parents=True, exist_ok=True)
        model = directory / "dcgan.pt"
        demo_network.write_generator(model, seed)
    except (OSError, RuntimeError) as error:
        _finish(_Failure(ExitCode.CANNOT_WRITE, f"{directory}: {first_line(error)}"), json_target, quiet)
    request = Request(
        model=model,
        out=directory / "dcgan-fast.pt",
        input_shapes=(demo_network.input_shape(where),),
        device=where,
        backward=not no_backward,
        benchmark=not no_benchmark,
        seed=seed,
        warmup=warmup,
        iters=iters,
    )
    _carry_out(request, json_target, quiet)


class _Failure(Exception):
    """No result: an exit code, and one line that says why."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _carry_out(request: Request, json_target: Path | None, quiet: bool) -> NoReturn:
    """Run a request, print what came of it, and leave with its exit code."""
    try:
        _check_json_target(request, json_target)
    except RequestError as error:
        # Without the target: it may well be the network itself.
        _finish(_Failure(ExitCode.USAGE, str(error)), None, quiet)
    _finish(_attempt(request, lambda progress: workflow.run(request, progress), quiet), json_target, quiet)


def _attempt(request: Request, work: Callable[[workflow.Progress], _T], quiet: bool) -> _T | _Failure:
    """What ``work`` gives back, or why it gives back nothing."""
    try:
        with progress_shown(quiet=quiet) as progress:
            return work(progress)
    except LoadError as error:
        return _Failure(ExitCode.CANNOT_LOAD, f"{error}{_command_hint(request.model)}")
    except RequestError as error:
        return _Failure(ExitCode.USAGE, str(error))
    except SaveError as error:
        return _Failure(ExitCode.CANNOT_WRITE, str(error))
    except torch.OutOfMemoryError as error:
        advice = "a smaller --input-shape, --no-backward or --device cpu needs less"
        return _Failure(ExitCode.USAGE, f"not enough memory ({first_line(error)}): {advice}")
    except KeyboardInterrupt:
        return _Failure(ExitCode.INTERRUPTED, "interrupted, nothing was written")
    except Exception as error:  # the last resort, so that a user never meets a bare traceback
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        return _Failure(
            ExitCode.INTERNAL, f"{first_line(error)} (an error in tconv-swap; {DEBUG_VARIABLE}=1 shows where)"
        )


def _check_json_target(request: Request, target: Path | None) -> None:
    if target is None or target == STDOUT:
        return
    try:
        for other in (request.model, request.inputs, request.out):
            if other is not None:
                check_target(target, other)
    except SaveError as error:
        raise RequestError(f"--json: {error}") from None
    if request.out is not None and os.path.realpath(target) == os.path.realpath(request.out):
        raise RequestError("--json and --out name the same file")


def _command_hint(model: Path) -> str:
    """A mistyped subcommand looks like a file that is not there."""
    near = difflib.get_close_matches(str(model), [command.name or "" for command in app.registered_commands])
    return f"; did you mean the command '{near[0]}'?" if near and not model.exists() else ""


def _finish(outcome: Result | TuneReport | _Failure, json_target: Path | None, quiet: bool) -> NoReturn:
    code = outcome.code if isinstance(outcome, _Failure) else _exit_code(outcome)
    try:
        if json_target is not None:
            text = json.dumps(_as_json(outcome, code), indent=2, allow_nan=False)
            if json_target == STDOUT:
                typer.echo(text)
            else:
                json_target.write_text(text + "\n", encoding="utf-8")
        if isinstance(outcome, _Failure):
            print_error(str(outcome))
        elif not quiet and json_target != STDOUT:
            _print_result(outcome)
        elif isinstance(outcome, Result) and code == ExitCode.MISMATCH and outcome.verification is not None:
            print_error(f"mismatch: {outcome.verification.failures[0]}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more (`| head`): what was found out stays true. Keeps Python from flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print_error(f"{json_target or 'stdout'} cannot be written ({error.strerror or error})")
        code = ExitCode.CANNOT_WRITE
    raise typer.Exit(int(code))


def _exit_code(result: Result | TuneReport) -> ExitCode:
    if isinstance(result, TuneReport):
        return ExitCode.VERIFIED
    if not result.plan.swapped:
        return ExitCode.NOTHING_TO_SWAP
    if result.verification is not None and not result.verification.passed:
        return ExitCode.MISMATCH
    return ExitCode.VERIFIED


def _print_result(result: Result | TuneReport) -> None:
    if isinstance(result, TuneReport):
        for line in str(result).splitlines():
            typer.echo(printable(line))
        return
    if result.verification is None:
        for line in (*str(result.plan).splitlines(), *result.facts.warnings):
            typer.echo(printable(line))
        return
    console = make_console()
    # Rich ends the process with 1, a mismatch, when nobody reads its output.
    with console.capture() as captured:
        print_report(console, result.plan, result.verification, result.benchmark, result.facts)
    sys.stdout.write(captured.get())


def _as_json(outcome: Result | TuneReport | _Failure, code: ExitCode) -> dict[str, Any]:
    if isinstance(outcome, _Failure):
        known = {
            "schema_version": SCHEMA_VERSION,
            "tool": "tconv-swap",
            "outcome": "error",
            "error": str(outcome),
        }
        return {**known, "exit_code": int(code)}
    if isinstance(outcome, TuneReport):
        head = {"schema_version": SCHEMA_VERSION, "tool": "tconv-swap", "outcome": "tuned"}
        return {**head, **outcome.to_dict(), "exit_code": int(code)}
    known = to_json_dict(outcome.plan, outcome.verification, outcome.benchmark, outcome.facts)
    return {**known, "exit_code": int(code)}
