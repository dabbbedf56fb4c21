"""`tconv-swap tune MODEL` measures on this GPU what computes each swapped layer fastest, and keeps the result."""

from __future__ import annotations

from typing import NoReturn

from tconv_swap.cli import workflow
from tconv_swap.cli.cached_result import epilog, run_cached
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import Output
from tconv_swap.cli.request import NetworkRequest

EPILOG = epilog("tuned", "measured")


@expanded(without=("backend", "reports", "verbose"))
def tune(request: NetworkRequest, output: Output) -> NoReturn:
    """Measure on this GPU what computes each swapped layer fastest. Every later run on it uses the result."""
    run_cached(
        workflow.tune_layers,
        request,
        output,
        verb="tune",
        outcome="tuned",
        done="measured",
        lines=lambda report: str(report).splitlines(),
    )
