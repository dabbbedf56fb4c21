"""Shows results on a terminal: the rows by stage, mode and layout, their means, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.results import Results, Row, Summary, group_rows, summarise
from benchmarks.table import Table, bullets
from tconv_swap.measurement.environment import machine_name
from tconv_swap.measurement.suite import Targets

STAGES = {
    "forward": "forward",
    "frozen": "forward, weights frozen",
    "backward": "backward, all gradients together",
    "grad_input": "gradient of the input alone",
    "grad_weight": "gradient of the weight alone",
    "grad_bias": "gradient of the bias alone",
}


def text(results: Results, targets: Targets) -> str:
    """Returns the tables and findings, at most 110 columns wide."""
    parts = ["\n".join(_origin(results)) + "\n"]
    for (stage, mode, layout), rows in group_rows(results.rows).items():
        parts.append(f"{mode}, {layout}, {STAGES[stage]}\n{_rows_table(rows, targets).text()}")
    parts.append(f"Summary\n{_summary_table(summarise(results.rows, targets)).text()}")
    parts += [f"{heading}\n{found}" for heading, found in _findings(results, targets)]
    return "\n".join(parts)


def progress_line(row: Row) -> str:
    return (
        f"{row.layer} {row.mode} {row.layout} {row.stage}: {_ms(row.pytorch.median_ms)} -> "
        f"{_ms(row.ours.median_ms)} ms, {row.speedup:.2f}x, {row.family}"
    )


def _origin(results: Results) -> list[str]:
    """Returns the machine, its ceilings and the commit."""
    ceilings, settings = results.ceilings, results.settings
    rates = ", ".join(f"{mode} {rate:.0f}" for mode, rate in ceilings.tflops.items())
    return [
        machine_name(results.environment),
        f"Measured ceilings: copy {ceilings.copy_gbps:.0f} GB/s; matrix product {rates} TFLOP/s",
        f"Commit {settings['commit'] or 'unknown'}, {settings['created']}",
    ]


def _rows_table(rows: Sequence[Row], targets: Targets) -> Table:
    headings = ["layer", "kernel", "flag", "PyTorch ms", "ours ms", "speedup"]
    headings += ["TFLOP/s", "GB/s", "roof", "L2 error", "of PyTorch's"]
    table = []
    for row in rows:
        flags = ("" if row.fast(targets) else "S") + ("" if row.accurate(targets) else "E")
        table.append(
            [
                row.layer,
                row.family,
                flags,
                _ms(row.pytorch.median_ms),
                _ms(row.ours.median_ms),
                f"{row.speedup:.2f}x",
                f"{row.tflops:.1f}",
                f"{row.gbps:.0f}",
                f"{row.roof_fraction:.0%}",
                f"{row.error:.1e}",
                f"{row.error_ratio:.2f}",
            ]
        )
    return Table(headings, table, left=3)


def _summary_table(summaries: Iterable[Summary]) -> Table:
    headings = ["stage", "dtype", "layout", "target", "speedup", "aimed at", "least", "of layer"]
    headings += ["roof", "aim", "own", "slower", "inexact"]
    return Table(
        headings,
        [
            [
                summary.stage,
                summary.mode,
                summary.layout,
                "" if summary.target is None else "met" if summary.met else "missed",
                f"{summary.speedup:.2f}x",
                "" if summary.target is None else f"{summary.target:.1f}x",
                f"{summary.slowest.speedup:.2f}x",
                summary.slowest.layer,
                f"{summary.roof_fraction:.0%}",
                "" if summary.roof_target is None else f"{summary.roof_target:.0%}",
                f"{summary.own_rows}/{summary.rows}",
                str(summary.slower_rows),
                str(summary.inaccurate_rows),
            ]
            for summary in summaries
        ],
        left=4,
    )


def _findings(results: Results, targets: Targets) -> list[tuple[str, str]]:
    """Returns what a reader must know first: headings, and the lines below each."""
    rows = results.rows
    own = sum(row.own(targets) for row in rows)
    share = own / len(rows) if rows else 0.0
    findings = [
        (
            f"Fell back to {' or '.join(targets.fallbacks)} kernels ({own}/{len(rows)} rows = {share:.1%} by our "
            f"fast ones, target {targets.own_share:.0%})",
            _by_layer([row for row in rows if not row.own(targets)]),
        ),
        (
            f"S: slower than PyTorch (speedup below {targets.least_speedup})",
            _each((row, f"{row.speedup:.2f}x") for row in rows if not row.fast(targets)),
        ),
        (
            f"E: less accurate than PyTorch (error above {targets.error_factor} times its)",
            _each(
                (row, f"{row.worst_tensor} {row.error:.1e}, {row.error_ratio:.2f} times PyTorch's")
                for row in rows
                if not row.accurate(targets)
            ),
        ),
        (
            "Ours not bitwise repeatable",
            _by_layer([row for row in rows if not row.repeatable_ours]),
        ),
        (
            "PyTorch's not bitwise repeatable",
            _by_layer([row for row in rows if not row.repeatable_pytorch]),
        ),
    ]
    if results.failures:
        findings.append(("Could not be measured", bullets(results.failures, "")))
    return findings


def _each(found: Iterable[tuple[Row, str]]) -> str:
    return bullets(
        (f"{row.stage} {row.layer} {row.mode} {row.layout}: {what} ({row.family})" for row, what in found),
        "none",
    )


def _by_layer(rows: Iterable[Row]) -> str:
    """Returns a line for each stage and layer, with the modes and layouts."""
    where: dict[str, list[str]] = {}
    for row in rows:
        where.setdefault(f"{row.stage} {row.layer}", []).append(f"{row.mode} {row.layout}")
    return bullets((f"{name}: {', '.join(modes)}" for name, modes in where.items()), "none")


def _ms(value: float) -> str:
    """Returns the time with four decimals below 10 ms, with three above."""
    return f"{value:.4f}" if value < 10 else f"{value:.3f}"
