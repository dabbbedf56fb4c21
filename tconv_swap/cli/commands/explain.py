"""`tconv-swap explain MODEL` prints which kernels would compute each layer, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import typer

from tconv_swap.cli import workflow
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import (
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
from tconv_swap.cli.places import files_read
from tconv_swap.cli.request import Explained, ExplainRequest
from tconv_swap.files.fileformat import printable

EPILOG = f"""Exit codes: 0 = explained; 2 = wrong usage, or the network does not run on the inputs; 3 = the file cannot
be loaded or is not trusted; 4 = nothing to swap; 70 = an error in tconv-swap itself; {SIGNAL_CODES}"""


@expanded(without=("seed", "reports", "verbose", "quiet"))
def explain(request: ExplainRequest, output: Output) -> NoReturn:
    """Show what would compute each layer of a saved network: kernels, tiles, reason, work, and what bounds its time.

    No kernel runs and nothing is compiled. Shapes are propagated through the network without data. The network is run
    once only if its shapes depend on data or if it is on a GPU of this machine.
    """
    check_targets(output, files_read(request))
    request = replace(request, written=tuple(output.places))
    outcome = attempt(lambda progress: workflow.explain_request(request, progress), quiet=False)
    if isinstance(outcome, Failure):
        finish(outcome, output)
    code = ExitCode.VERIFIED if outcome.plan.swapped else ExitCode.NOTHING_TO_SWAP
    leave(lambda: _write(outcome, output), code, output.invocation)


def _write(found: Explained, output: Output) -> None:
    if output.json_target is not None:
        document: dict[str, Any] = {
            "plan": found.plan.to_dict(),
            "explanation": None if found.explanation is None else found.explanation.to_dict(),
            "inputs": found.inputs,
            "inputs_origin": found.inputs_origin,
            "notes": list(found.notes),
        }
        write_json(document, output)
        return
    lines = [f"inputs: {found.inputs} ({found.inputs_origin})", "", *str(found.explanation).splitlines(), ""]
    if found.explanation is None:
        lines = []
    lines += [str(layer) for layer in found.plan.skipped] or ([] if found.explanation else [str(found.plan)])
    for line in (*lines, *(f"note: {note}" for note in found.notes)):
        typer.echo(printable(line))
