"""`tconv-swap prepare MODEL` compiles all kernels that the swapped layers of a saved network will need."""

from __future__ import annotations

from typing import NoReturn

from tconv_swap.cli import workflow
from tconv_swap.cli.cached_result import epilog, run_cached
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import Output
from tconv_swap.cli.request import PrepareRequest

EPILOG = epilog("prepared", "compiled")


@expanded(without=("backward", "reports", "verbose"))
def prepare(request: PrepareRequest, output: Output) -> NoReturn:
    """Compile the kernels that the swapped layers need, so that no later run compiles them: before a server's first
    request, or while an image is built, without a GPU.

    With inputs, the calls of the layers are observed. Without, each layer is prepared for representative sizes.
    """
    run_cached(
        workflow.prepare_layers,
        request,
        output,
        verb="prepare",
        outcome="prepared",
        done="compiled",
        lines=lambda report: [str(report)],
    )
