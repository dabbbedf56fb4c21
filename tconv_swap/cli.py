"""The command line: `tconv-swap model.pt --out fast.pt`, and subcommands.

Options become a `workflow.Request`; what comes of it becomes a report, JSON and an exit code. A first
argument that is no subcommand belongs to `swap`, so the word can be left out; a file that is called like a
subcommand is given as `./demo` or `swap demo`.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from typer.core import TyperGroup

import tconv_swap
from tconv_swap import demo as demo_network
from tconv_swap import options, workflow
from tconv_swap.commands import bench, cache, doctor, explain, tune
from tconv_swap.console import prepare_streams, print_error
from tconv_swap.files import saving
from tconv_swap.files.fileformat import first_line
from tconv_swap.interruption import end_at_signals, ignore_signals, is_obeyed, obey_signals, received
from tconv_swap.outcome import (
    EXIT_CODES,
    ExitCode,
    Failure,
    Interrupted,
    Output,
    attempt,
    check_targets,
    finish,
    leave,
    unwritable,
)
from tconv_swap.places import files_read
from tconv_swap.request import Request
from tconv_swap.ways.optimize import SECONDS

DEFAULT_COMMAND = "swap"


class SwapByDefault(TyperGroup):
    """Gives its arguments to `swap` unless they start with a subcommand, misspelt or not, or an option of the group
    itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        # A misspelt word by itself may as well be a file that is not there: `_command_hint`.
        misspelt = len(args) > 1 and args[0].isalpha() and _near_command(args[0], list(self.commands))
        if args and args[0] not in self.commands and args[0] not in own and not misspelt:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Says what was written wherever a signal strikes: typer would leave without a word."""
        saving.finished.clear()
        if is_obeyed():
            obey_signals()
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and received() is None:
                raise
            failure = Interrupted(written=saving.finished)
            print_error(str(failure))
            raise typer.Exit(int(failure.code)) from None


app = typer.Typer(
    cls=SwapByDefault,
    help="Swap every nn.ConvTranspose2d of a saved network for a faster one, prove that it computes the "
    "same, and time it.\n\n`tconv-swap MODEL` is `tconv-swap swap MODEL`.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `tconv-swap` script."""
    end_at_signals()
    prepare_streams()
    try:
        app(prog_name="tconv-swap")
    except OSError as error:  # typer's own words, such as --help
        failure = unwritable(error)
        print_error(str(failure))
        sys.exit(int(failure.code))
    finally:
        ignore_signals()


def _print_version(wanted: bool) -> None:
    if wanted:
        leave(lambda: typer.echo(f"tconv-swap {tconv_swap.__version__}, torch {torch.__version__}"))


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
    autocast: options.Autocast = None,
    channels_last: options.ChannelsLast = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    backend: options.BackendOption = None,
    include_1d: options.Include1d = False,
    fuse: options.FuseOption = "blocks",
    dry_run: options.DryRun = False,
    no_backward: options.NoBackward = False,
    no_benchmark: options.NoBenchmark = False,
    atol: options.Tolerance = None,
    rtol: options.Tolerance = None,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    iters: options.Iters = None,
    way: options.WayOption = "keep",
    seconds: options.Seconds = SECONDS,
    json_target: options.JsonTarget = None,
    reports: options.ReportFiles = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    trust: options.Trust = None,
    unsafe_pickle: options.UnsafePickle = False,
    module: options.UserModule = None,
    factory: options.Factory = None,
    key: options.Key = None,
    out_format: options.OutFormat = "module",
) -> None:
    """Swap the transposed convolutions of a saved network, verify, time, and write the result."""
    request = options.network_request(
        model,
        input_shape=input_shape,
        inputs=inputs,
        device=device,
        dtype=dtype,
        include=include,
        exclude=exclude,
        trust=trust,
        module=module,
        factory=factory,
        key=key,
        channels_last=channels_last,
        include_1d=include_1d,
        no_backward=no_backward,
        unsafe_pickle=unsafe_pickle,
        backend=backend,
    )
    request = replace(
        request,
        out=out,
        autocast=None if autocast is None else options.parse_dtype(autocast),
        fuse=None if fuse == "none" else fuse,
        dry_run=dry_run,
        benchmark=not no_benchmark,
        atol=atol,
        rtol=rtol,
        seed=seed,
        warmup=warmup,
        iters=iters,
        out_format=out_format,
        way=way,
        seconds=seconds,
    )
    _carry_out(request, Output(json_target, tuple(reports or ()), verbose, quiet))


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
    reports: options.ReportFiles = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Build a DCGAN generator, save it, and do to it what `tconv-swap dcgan.pt --out dcgan-fast.pt` does."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None:
        where = options.parsed("--device", torch.device, device)
    output = Output(json_target, tuple(reports or ()), verbose, quiet)
    try:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="tconv-swap-demo-"))
        directory.mkdir(parents=True, exist_ok=True)
        model, out = directory / "dcgan.pt", directory / "dcgan-fast.pt"
        check_targets(output, [("--dir", model)], ("--dir", out))
        demo_network.write_generator(model, seed)
    except (OSError, saving.SaveError) as error:
        finish(Failure(ExitCode.CANNOT_WRITE, f"{directory}: {first_line(error)}"), output)
    request = Request(
        model=model,
        out=out,
        input_shapes=(demo_network.input_shape(where),),
        device=where,
        fuse="blocks",
        backward=not no_backward,
        benchmark=not no_benchmark,
        seed=seed,
        warmup=warmup,
        iters=iters,
    )
    _carry_out(request, output)


def _carry_out(request: Request, output: Output) -> NoReturn:
    """Run a request, print what came of it, and leave with its exit code."""
    check_targets(output, files_read(request), None if request.out is None else ("--out", request.out))
    request = replace(request, written=tuple(output.places))
    outcome = attempt(
        lambda progress: workflow.run(request, progress),
        quiet=output.quiet,
        hint=_command_hint(request.model),
    )
    finish(outcome, output)


def _command_hint(model: Path) -> str:
    """A mistyped subcommand looks like a file that is not there."""
    names = [command.name or "" for command in app.registered_commands]
    names += [group.name or "" for group in app.registered_groups]
    near = _near_command(str(model), names)
    return f"; did you mean the command '{near}'?" if near else ""


def _near_command(word: str, names: list[str]) -> str:
    """The subcommand that a word is meant to be; empty where it is none, or a file."""
    near = difflib.get_close_matches(word, names)
    return near[0] if near and not Path(word).exists() else ""


app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("explain", epilog=explain.EPILOG)(explain.explain)
app.command("tune", epilog=tune.EPILOG)(tune.tune)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(cache.app, name="cache")
