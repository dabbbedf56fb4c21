"""What a person sees of a swap: the plan, the verification and the timing as text, and as JSON for programs.

`print_report` fits 80 columns and is plain text where its console is no terminal; `to_json_dict` has the
same and all details. Neither knows how anything was made or measured.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tconv_swap.files.fileformat import printable
from tconv_swap.measurement.environment import machine_name

if TYPE_CHECKING:
    from tconv_swap.measurement.bench import BenchmarkReport, Comparison, LayerComparison, PeakMemory
    from tconv_swap.measurement.timing import Timing
    from tconv_swap.surgery import LayerPlan, SwapPlan
    from tconv_swap.verification.report import Check, VerifyReport

SCHEMA_VERSION = 1
"""Of the JSON. Grows by one when a field is removed or changes its meaning; new fields do not count."""

MODEL_ITSELF = "(the model itself)"
WIDTH = 80
FAILURES_SHOWN = 10
EQUAL_WITHIN = 0.05


@dataclass(frozen=True)
class Facts:
    """What was swapped, on what, and what came of it, where the other reports do not know."""

    model: str
    """The file, or a name."""
    inputs: str
    """Shapes and dtypes, as `Inputs.describe` gives them."""
    inputs_origin: str
    """How they were found: "--input-shape", "inferred from main.0 (ConvTranspose2d)" ..."""
    device: str
    output: str | None = None
    """The file written; None if none was."""
    load_snippet: str = ""
    """The Python lines that load it."""
    warnings: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    """Swapped layers and stages that PyTorch's operator computes, and why, one line each."""


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console for the report: in colour and as wide as it is on a terminal, plain 80 columns elsewhere.

    Args:
        file: where to write instead of stdout.
        stderr: write to stderr instead of stdout.
    """
    console = Console(file=file, stderr=stderr, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def outcome(plan: SwapPlan, verification: VerifyReport | None) -> str:
    """ "nothing_to_swap", "not_verified", "verified" or "mismatch"."""
    if not plan.swapped:
        return "nothing_to_swap"
    if verification is None:
        return "not_verified"
    return "verified" if verification.passed else "mismatch"


def to_json_dict(
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    facts: Facts,
) -> dict[str, Any]:
    """Everything that is known, as plain values that `json` writes and any parser reads.

    Keys: `schema_version`, `tool`, `outcome` (see `outcome`), `facts`, `plan`, `verification` and
    `benchmark` (null where not done). JSON has no infinities: they and NaN are the strings "inf", "-inf",
    "nan".
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": "tconv-swap",
        "outcome": outcome(plan, verification),
        "facts": _plain(asdict(facts)),
        "plan": _plain(plan.to_dict()),
        "verification": None if verification is None else _plain(verification.to_dict()),
        "benchmark": None if benchmark is None else _plain(benchmark.to_dict()),
    }


def print_report(
    console: Console,
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    facts: Facts,
) -> None:
    """Write the report to `console`; what was not done (None) is said to be so."""
    sections: list[Iterable[RenderableType]] = [
        _heading(plan, verification, benchmark, facts),
        _layers(plan),
        _verification(verification) if plan.swapped else [],
        _timing(benchmark) if plan.swapped else [],
        _notes(plan, verification, benchmark, facts),
    ]
    with console.capture() as capture:
        for renderable in itertools.chain.from_iterable(sections):
            console.print(renderable)
        if facts.load_snippet:
            console.print(Text("Load it", style="bold"))
            for line in facts.load_snippet.strip().splitlines():
                # To be copied: never wrapped, however narrow the console.
                console.print(_text(f"    {line}"), soft_wrap=True)
    # Tables pad every line to their width, which a file or a diff has no use for.
    text = "\n".join(line.rstrip() for line in capture.get().split("\n"))
    console.out(text, end="", highlight=False)


def speedup_text(comparison: Comparison) -> Text:
    """ "1.93x faster", "0.90x (slower)" or "1.00x" where the two are the same within noise.

    "1.31x (noisy)" where the medians are more than 5 % apart, but the samples cannot tell which one is
    faster.
    """
    low, high = comparison.interval
    speedup = comparison.speedup
    number = f"{speedup:.2f}x" if speedup < 100 else f"{speedup:.0f}x"
    noise_explains_it = low <= 1 <= high
    if number == "1.00x" or (noise_explains_it and abs(speedup - 1) <= EQUAL_WITHIN):
        return Text("1.00x")
    if noise_explains_it:
        return Text(f"{number} (noisy)", style="yellow")
    return Text(f"{number} faster", style="green") if speedup > 1 else Text(f"{number} (slower)", style="red")


def _heading(
    plan: SwapPlan, verification: VerifyReport | None, benchmark: BenchmarkReport | None, facts: Facts
) -> Iterator[RenderableType]:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("model", _text(facts.model))
    rows.add_row("inputs", _text(f"{facts.inputs} ({facts.inputs_origin})"))
    rows.add_row("device", _text(facts.device))
    if benchmark is not None:
        rows.add_row("machine", _text(machine_name(benchmark.environment)))
    rows.add_row("layers", f"{len(plan.swapped)} of {len(plan.layers)} transposed convolutions swapped")
    if plan.swapped:
        rows.add_row("result", _verdict(verification))
    if benchmark is not None and benchmark.network:
        parts = [Text.assemble(f"{c.stage} ", speedup_text(c)) for c in benchmark.network]
        rows.add_row("speed", Text(", ").join(parts))
    if facts.output is not None:
        rows.add_row("written", _text(facts.output))
    yield rows
    yield ""


def _text(foreign: str, style: str = "") -> Text:
    """Names come out of files that anybody may have written: nothing in them may steer the terminal."""
    return Text(printable(foreign), style=style)


def _verdict(verification: VerifyReport | None) -> Text:
    if verification is None:
        return Text("NOT VERIFIED: nothing was compared", style="yellow")
    if not verification.passed:
        count = len(verification.failures)
        return Text(f"MISMATCH: {count} failure{'s' if count != 1 else ''}", style="bold red")
    count, margin = len(verification.checks), verification.margin
    worst = f"the largest error is {1 / margin:.0%} of its limit" if math.isfinite(margin) else "all exact"
    return Text(f"VERIFIED: {count} comparisons, {worst}", style="bold green")


def _title(text: str, explanation: str = "") -> RenderableType:
    return Text.assemble((text, "bold"), (f"  {printable(explanation)}" if explanation else "", "dim"))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), header_style="dim")


def _indented(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (0, 0, 1, 2))


def _layers(plan: SwapPlan) -> Iterator[RenderableType]:
    if not plan.layers:
        yield _title("Nothing to swap")
        yield _indented(Text("The model has no transposed convolution."))
        return
    yield _title("Layers" if plan.swapped else "Nothing to swap")
    table = _table()
    table.add_column("layer", overflow="fold", ratio=3)
    table.add_column("geometry", overflow="fold", ratio=3)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("swapped", overflow="fold", ratio=4)
    for layer in plan.layers:
        swapped = Text("yes", style="green") if layer.swap else _text(f"no: {layer.reason}", "yellow")
        table.add_row(_text(_names(layer)), _text(layer.geometry), f"{layer.parameters:,}", swapped)
    yield _indented(table)


def _names(layer: LayerPlan) -> str:
    return " = ".join(name or MODEL_ITSELF for name in layer.names)


def _verification(verification: VerifyReport | None) -> Iterator[RenderableType]:
    if verification is None:
        return
    yield _title("Verification", f"largest error of each kind; reference: {verification.reference}")
    worst: dict[tuple[str, str], Check] = {}
    for check in verification.checks:
        key = (check.kind, check.mode)
        if key not in worst or (check.passed, check.margin) < (worst[key].passed, worst[key].margin):
            worst[key] = check
    table = _table()
    table.add_column("compared", overflow="fold", ratio=3)
    table.add_column("mode", no_wrap=True)
    table.add_column("largest at", overflow="fold", ratio=3)
    for column in ("PyTorch", "ours", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for (kind, mode), check in worst.items():
        table.add_row(
            Text(kind.replace("_", " ")),
            mode,
            _text(check.name or (MODEL_ITSELF if kind.startswith("layer_") else "")),
            _error(check.error_original),
            Text(_error(check.error_swapped), style="green" if check.passed else "bold red"),
            _error(check.limit),
        )
    if worst:
        yield _indented(table)
    if verification.passed:
        return
    failures = [_text(line, "red") for line in verification.failures[:FAILURES_SHOWN]]
    if (more := len(verification.failures) - FAILURES_SHOWN) > 0:
        failures.append(Text(f"and {more} more"))
    if verification.first_divergence:
        failures.append(_text(f"first layer that diverges: {verification.first_divergence}", "bold"))
    yield from _bullets("Failures", failures)


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _timing(benchmark: BenchmarkReport | None) -> Iterator[RenderableType]:
    if benchmark is None:
        return
    yield _title("Time", "median of interleaved runs in ms, +- half of the interquartile range")
    table = _table()
    table.add_column("", overflow="fold", ratio=1)
    table.add_column("stage", no_wrap=True)
    table.add_column("PyTorch", justify="right", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("speedup", no_wrap=True)
    for comparison in benchmark.network:
        label = "whole network" if comparison is benchmark.network[0] else ""
        _add_comparison(table, Text(label, style="bold"), comparison)
    for (name, form), group in itertools.groupby(benchmark.layers, lambda c: (c.name, _form(c))):
        stages = list(group)
        # The second stage's row has room for what the layer was given.
        labels = [_text(name or MODEL_ITSELF), Text(form, style="dim")]
        table.add_section()
        for cell, layer in itertools.zip_longest(labels, stages):
            if layer is None:
                table.add_row(cell)
            else:
                _add_comparison(table, cell or Text(), layer)
    if table.row_count:
        yield _indented(table)
    facts = [Text(line) for line in (*_shares(benchmark), *map(_memory, benchmark.peak_memory or ()))]
    if facts:
        yield from (_indented_line(fact) for fact in facts)
        yield ""


def _add_comparison(table: Table, label: Text, comparison: Comparison) -> None:
    original, swapped = _milliseconds(comparison.original), _milliseconds(comparison.swapped)
    table.add_row(label, comparison.stage, original, swapped, speedup_text(comparison))


def _form(layer: LayerComparison) -> str:
    shape = "x".join(map(str, layer.input_shape))
    form = "" if layer.memory_format == "contiguous" else f" {layer.memory_format}"
    calls = f", {layer.calls} calls" if layer.calls > 1 else ""
    return f"{shape} {layer.dtype}{form}{calls}"


def _milliseconds(timing: Timing) -> str:
    """Three significant digits and the spread in percent: "0.0412 +-1%", "12.3 +-4%"."""
    digits = max(0, 2 - math.floor(math.log10(timing.median_ms))) if timing.median_ms > 0 else 2
    return f"{timing.median_ms:.{min(digits, 4)}f} +-{max(1, round(timing.spread * 100))}%"


def _shares(benchmark: BenchmarkReport) -> Iterator[str]:
    shares = [(stage, benchmark.transposed_share(stage)) for stage in ("forward", "backward")]
    known = [f"{share:.0%} of the {stage} pass" for stage, share in shares if share is not None]
    if known:
        yield f"These layers are about {' and '.join(known)} of the original network."


def _memory(peak: PeakMemory) -> str:
    return f"Peak memory, {peak.stage}: PyTorch {_bytes(peak.original)}, ours {_bytes(peak.swapped)}."


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _notes(
    plan: SwapPlan, verification: VerifyReport | None, benchmark: BenchmarkReport | None, facts: Facts
) -> Iterator[RenderableType]:
    lines = [*facts.warnings, *facts.native]
    lines += [plan.describe_unused(pattern) for pattern in plan.unused_patterns]
    lines += verification.notes if verification is not None else []
    lines += benchmark.notes if benchmark is not None else ["not timed"] if plan.swapped else []
    if benchmark is not None and (unsteady := benchmark.unsteady):
        count = len(benchmark.network) + len(benchmark.layers)
        lines.append(f"{len(unsteady)} of {count} timings are unsteady: the machine was busy; measure again")
    # The command line hands on warnings that the plan may know as well.
    yield from _bullets("Notes", [_text(line) for line in dict.fromkeys(lines)])


def _bullets(title: str, lines: list[Text]) -> Iterator[RenderableType]:
    if not lines:
        return
    yield _title(title)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", line)
    yield _indented(grid)


def _indented_line(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))


def _plain(value: Any) -> Any:
    """`value` out of dicts, lists and JSON's own scalars."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
