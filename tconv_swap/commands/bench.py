"""`tconv-swap bench`: the layer suite on the user's own GPU or CPU."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from tconv_swap import options, workflow
from tconv_swap.cuda.choice import check_backend
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.suite import load_suite
from tconv_swap.outcome import SIGNAL_CODES, Output, attempt, check_targets, finish, leave
from tconv_swap.request import Progress, RequestError, Result
from tconv_swap.suite_run import SuiteRequest, run_suite

EPILOG = f"""Exit codes: 0 = every layer was verified; 1 = a mismatch; 2 = wrong usage; 70 = an error in tconv-swap
itself; {SIGNAL_CODES}"""


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME]", help="These layers instead of all; repeatable. --list shows them."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the layers of the suite.")] = False,
    device: options.Device = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="|".join(MODES),
            help="fp32 is float32 with TF32 off.",
            show_default="tf32 on a GPU, fp32 on a CPU",
        ),
    ] = None,
    channels_last: options.ChannelsLast = False,
    backend: options.BackendOption = None,
    no_backward: options.NoBackward = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Time, but do not check.")] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0.01, help="Of timing for each layer and stage.", callback=options.check_finite),
    ] = 0.5,
    iters: options.Iters = None,
    json_target: options.JsonTarget = None,
    reports: options.ReportFiles = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Check and time transposed convolutions of networks that people use, PyTorch's beside ours, on this machine.

    Each layer is compared with float64 first, then timed by itself, forward and backward, both interleaved in one run.
    On a GPU the whole suite takes about two minutes and up to 30 GB of memory; what does not fit is left out and named.
    """
    suite = load_suite()
    if show:
        lines = [f"{layer.name:16} {layer}  ({layer.network})" for layer in suite.layers]
        leave(lambda: typer.echo("\n".join(lines)))
    wanted = device and options.parsed("--device", torch.device, device)
    ours = None if backend is None else options.parsed("--backend", check_backend, backend)
    output = Output(json_target, tuple(reports or ()), verbose, quiet)
    check_targets(output)

    def work(progress: Progress) -> Result:
        where = workflow.device_of(wanted or None)
        chosen = mode or ("tf32" if where.type == "cuda" else "fp32")
        if chosen not in MODES:
            raise RequestError(f"--dtype {chosen}: expected one of {', '.join(MODES)}")
        names = [name for entry in only or () for name in entry.split(",")]
        try:
            layers = suite.select(names) if names else suite.layers
        except ValueError as error:
            raise RequestError(f"--only: {error}") from None
        request = SuiteRequest(
            layers,
            chosen,
            "channels_last" if channels_last else "nchw",
            where,
            backward=not no_backward,
            verify=not no_verify,
            backend=ours,
            budget_s=seconds,
            iters=iters,
        )
        return run_suite(request, progress)

    finish(attempt(work, quiet=quiet), output)
