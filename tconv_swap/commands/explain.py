"""`tconv-swap explain MODEL`: which kernels would compute each layer, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tconv_swap import options, workflow
from tconv_swap.explanation import DEVICES
from tconv_swap.files.fileformat import printable
from tconv_swap.outcome import (
    SIGNAL_CODES,
    ExitCode,
    Failure,
    Output,
    attempt,
    check_targets,
    finish,
    leave,
    write_json,
)
from tconv_swap.places import files_read
from tconv_swap.request import Explained, Progress, RequestError

EPILOG = f"""Exit codes: 0 = explained; 2 = wrong usage, or the network does not run on the inputs; 3 = the file cannot
be loaded or is not trusted; 4 = nothing to swap; 70 = an error in tconv-swap itself; {SIGNAL_CODES}"""


def explain(
    model: options.ModelArgument,
    input_shape: options.InputShape = None,
    inputs: options.InputsFile = None,
    device: options.Device = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="|".join(DEVICES),
            help="Plan for such a GPU, whether or not there is one here.",
        ),
    ] = None,
    dtype: options.Dtype = None,
    channels_last: options.ChannelsLast = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    include_1d: options.Include1d = False,
    backend: options.BackendOption = None,
    no_backward: options.NoBackward = False,
    json_target: options.JsonTarget = None,
    trust: options.Trust = None,
    unsafe_pickle: options.UnsafePickle = False,
    module: options.UserModule = None,
    factory: options.Factory = None,
    key: options.Key = None,
) -> None:
    """Say what would compute each layer of a saved network: kernels, tiles, why, work, and what bounds it.

    No kernel runs and nothing is compiled. Shapes are followed through the network without numbers; only a network that
    depends on numbers, or one on a GPU that is here, is run once.
    """
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
        backend=backend,
        channels_last=channels_last,
        include_1d=include_1d,
        no_backward=no_backward,
        unsafe_pickle=unsafe_pickle,
    )

    output = Output(json_target)
    check_targets(output, files_read(request))
    request = replace(request, written=tuple(output.places))

    def work(progress: Progress) -> Explained:
        if architecture is not None and architecture not in DEVICES:
            raise RequestError(f"--arch {architecture}: expected one of {', '.join(DEVICES)}")
        return workflow.explain_request(request, architecture, progress)

    outcome = attempt(work, quiet=False)
    if isinstance(outcome, Failure):
        finish(outcome, output)
    code = ExitCode.VERIFIED if outcome.plan.swapped else ExitCode.NOTHING_TO_SWAP
    leave(lambda: _write(outcome, json_target), code)


def _write(found: Explained, json_target: Path | None) -> None:
    if json_target is not None:
        document: dict[str, Any] = {
            "plan": found.plan.to_dict(),
            "explanation": None if found.explanation is None else found.explanation.to_dict(),
            "inputs": found.inputs,
            "inputs_origin": found.inputs_origin,
            "notes": list(found.notes),
        }
        write_json(document, json_target)
        return
    lines = [f"inputs: {found.inputs} ({found.inputs_origin})", "", *str(found.explanation).splitlines(), ""]
    if found.explanation is None:
        lines = []
    lines += [str(layer) for layer in found.plan.skipped] or ([] if found.explanation else [str(found.plan)])
    for line in (*lines, *(f"note: {note}" for note in found.notes)):
        typer.echo(printable(line))
