"""Defines the program `tconv-swap model.pt --out fast.pt` and its subcommands.

Options become a request; its result becomes a report, JSON and an exit code. If the first argument is no subcommand,
the arguments belong to `swap`, so this word can be left out. A file that has the name of a subcommand is given as
`./demo` or `swap demo`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from tconv_swap.cli.commands import bench, cache, demo, doctor, explain, prepare, swap, tune
from tconv_swap.cli.console import prepare_streams, print_error
from tconv_swap.cli.invocation import Invocation
from tconv_swap.cli.outcome import EXIT_CODES, Interrupted, leave, unwritable
from tconv_swap.interruption import (
    end_at_signals,
    handlers_are_installed,
    ignore_signals,
    raise_at_signals,
    received,
)
from tconv_swap.version import __version__

DEFAULT_COMMAND = "swap"


class SwapByDefault(TyperGroup):
    """Passes the arguments to `swap`, unless they start with a subcommand, perhaps misspelt, or with an option of the
    group itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        invocation = ctx.obj = Invocation(tuple(self.commands))
        # A single misspelt word may also be a missing file: `swap` reports it, and names the command that the user
        # probably meant.
        misspelt = len(args) > 1 and args[0].isalpha() and invocation.near_command(args[0])
        if args and args[0] not in self.commands and args[0] not in own and not misspelt:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command. If a signal ends it, the error names the files that were written; typer would print
        nothing."""
        if handlers_are_installed():
            raise_at_signals()
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and received() is None:
                raise
            failure = Interrupted(written=ctx.obj.finished)
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
    """Runs the `tconv-swap` script."""
    end_at_signals()
    prepare_streams()
    try:
        app(prog_name="tconv-swap")
    except OSError as error:  # raised where typer itself prints, such as --help
        failure = unwritable(error)
        print_error(str(failure))
        sys.exit(int(failure.code))
    finally:
        ignore_signals()


def _print_version(wanted: bool) -> None:
    if wanted:
        leave(lambda: typer.echo(f"tconv-swap {__version__}, torch {torch.__version__}"))


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    pass


app.command(DEFAULT_COMMAND, epilog=EXIT_CODES)(swap.swap)
app.command("demo", epilog=EXIT_CODES)(demo.demo)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("explain", epilog=explain.EPILOG)(explain.explain)
app.command("tune", epilog=tune.EPILOG)(tune.tune)
app.command("prepare", epilog=prepare.EPILOG)(prepare.prepare)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(cache.app, name="cache")
