"""Writes the conclusions from the rows of the ablation as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.ablation_rows import Row, Worth, regrets, verdicts, worst, worths


def report(rows: Sequence[Row]) -> str:
    """Returns tables: the worth of each family in each stage, the verdicts, the regret of the rule."""
    if not rows:
        return "nothing was measured"
    return "\n\n".join((_worths(rows), _verdicts(rows), _regrets(rows), _worst(rows)))


def _worths(rows: Sequence[Row]) -> str:
    lines = [
        "| stage | family | rows | wins | margin | of the stage | suite | random | best mode and layout | best class |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in worths(rows):
        of_class = f"{one.of_class:.2f} {one.layer_class}" if one.of_class > 1 else ""
        of_combination = f"{one.of_combination:.3f} {one.combination}" if one.of_combination > 1 else ""
        lines.append(
            f"| {one.stage} | {one.family} | {one.rows} | {one.wins} | {one.margin:.2f} | {one.of_stage:.3f} "
            f"| {one.of_suite:.3f} | {one.of_random:.3f} | {of_combination} | {of_class} |"
        )
    return "\n".join(["### Worth, with all other families present", "", *lines])


def _verdicts(rows: Sequence[Row]) -> str:
    lines = ["| family | verdict | worth without those dropped above it |", "|---|---|---|"]
    for one in verdicts(rows):
        earned = any(worth.earns for worth in one.worths)
        word = "drop" if not one.keeps else "keep" if earned else "keep (fallback)"
        lines.append(f"| {one.family} | {word} | {'; '.join(map(_briefly, one.worths))} |")
    return "\n".join(["### Verdicts, dropped families first, in that order", "", *lines])


def _briefly(worth: Worth) -> str:
    of_class = f", class {worth.of_class:.2f}" if worth.of_class > 1 else ""
    return f"{worth.stage} {worth.of_stage:.3f}, at most {worth.of_combination:.3f}{of_class}"


def _regrets(rows: Sequence[Row]) -> str:
    lines = ["| stage | rows | geometric mean | largest | above 1.25 |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.stage} | {one.rows} | {one.mean:.3f} | {one.largest:.2f} | {one.above} |"
        for one in regrets(rows)
    ]
    return "\n".join(["### Regret of what the rule takes", "", *lines])


def _worst(rows: Sequence[Row]) -> str:
    lines = ["| layer | mode, layout, stage | taken | fastest | regret |", "|---|---|---|---|---|"]
    for row in worst(rows):
        best = min(row.microseconds, key=lambda name: row.microseconds[name])
        lines.append(
            f"| {row.layer} ({row.geometry}) | {row.mode} {row.layout} {row.stage} "
            f"| {row.chosen} {row.microseconds[row.chosen]:.1f} us | {best} {row.microseconds[best]:.1f} us "
            f"| {row.regret:.2f} |"
        )
    return "\n".join(["### Rows with the largest regret", "", *lines])
