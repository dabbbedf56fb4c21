"""`tconv-swap cache` shows what is kept between processes, and removes it."""

from __future__ import annotations

from typing import Annotated

import typer

from tconv_swap.cli.outcome import ExitCode, Failure, Output, finish, leave
from tconv_swap.files.fileformat import printable
from tconv_swap.runtime.cache import CacheUse, cache_problem, cache_use, clear_cache

app = typer.Typer(
    help="Show or clear what is kept between runs: compiled kernels, the launcher, the results of `tune`.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def show(context: typer.Context) -> None:
    """Show where the cache is and how large it is. `tconv-swap cache clear` empties it."""
    if context.invoked_subcommand is None:
        leave(lambda: typer.echo(printable(cache_problem() or cache_use())))


@app.command("clear")
def clear(
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Only compiled kernels and the launcher, not the results of `tune`."),
    ] = False,
) -> None:
    """Remove everything that tconv-swap keeps. Nothing else in that directory is removed.

    Kernels that are needed again are compiled at the first call of each layer, in 0.2 to 1.5 seconds each.
    """
    if problem := cache_problem():
        finish(Failure(ExitCode.CANNOT_WRITE, f"nothing was removed: {problem}"), Output())
    before = cache_use()
    failed = clear_cache(tuned=not kernels)
    after = cache_use()
    freed = CacheUse(
        before.directory, before.files - after.files, before.bytes - after.bytes, before.tuned - after.tuned
    )
    lines = [f"removed: {freed.describe()} from {before.directory}", *failed]
    leave(lambda: typer.echo("\n".join(lines)), ExitCode.CANNOT_WRITE if failed else ExitCode.VERIFIED)
