"""`tconv-swap doctor` prints ten lines on what works on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import NoReturn

import typer
from rich.table import Table
from rich.text import Text

from tconv_swap.cli.declare import expanded
from tconv_swap.cli.diagnosis import Finding, diagnose, lines
from tconv_swap.cli.outcome import SIGNAL_CODES, ExitCode, Output, check_targets, leave, write_json
from tconv_swap.files.fileformat import printable
from tconv_swap.report import make_console

EPILOG = f"""Exit codes: 0 = everything works that can work on this machine; 1 = there is a GPU, and something that
its kernels need is missing; {SIGNAL_CODES}"""

STYLES = {"ok": "green", "--": "yellow", "NO": "bold red"}


@expanded(without=("reports", "verbose", "quiet"))
def doctor(output: Output) -> NoReturn:
    """Print ten lines on what works on this machine, what is missing, and what PyTorch's operators compute.

    Compiles one empty kernel; builds and launches nothing. Paste the lines into a bug report.
    """
    check_targets(output)
    findings = diagnose()
    missing = any(finding.verdict == "missing" for finding in findings)

    def write() -> None:
        if output.json_target is not None:
            write_json({"findings": [asdict(finding) for finding in findings]}, output)
        else:
            _print(findings)

    leave(write, ExitCode.MISMATCH if missing else ExitCode.VERIFIED, output.invocation)


def _print(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, mark, text in lines(findings):
        table.add_row(name, Text(mark, style=STYLES[mark]), Text(printable(text)))
    console = make_console()
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
