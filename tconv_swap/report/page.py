"""Writes the report as one self-contained page with charts: without scripts or network access, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from tconv_swap.files.fileformat import printable
from tconv_swap.report.charts import bars, roofline, way_bars
from tconv_swap.report.figures import FONT, VARIABLES
from tconv_swap.report.rows import speedup_text
from tconv_swap.report.summary import summarise
from tconv_swap.report.words import error_text, milliseconds


def page(document: Mapping[str, Any]) -> str:
    """Returns the report of a document that `to_json_dict` made, or that was read back from JSON."""
    summary = summarise(document)
    # The template escapes all text that comes from the user's file.
    templates = Environment(
        loader=PackageLoader("tconv_swap.report", "."),
        autoescape=select_autoescape(("j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"ms": milliseconds, "error": error_text, "printable": printable}
    drawn = [(title, text, chart) for title, text, chart in _charts(summary) if chart is not None]
    benchmark = document["benchmark"]
    return templates.get_template("page.html.j2").render(
        summary=summary,
        charts=[(title, text, Markup(chart)) for title, text, chart in drawn],
        speedup=speedup_text,
        variables=Markup(VARIABLES),
        font=Markup(FONT),
        environment=benchmark["environment"] if benchmark else {},
        method=benchmark["method"] if benchmark else {},
        schema_version=document["schema_version"],
    )


def _charts(summary: Any) -> list[tuple[str, str, str | None]]:
    return [
        (
            "The ways to run it",
            "How many times as fast as today each way is, timed beside today's way; the chosen one in colour.",
            way_bars(summary),
        ),
        (
            "Time of every layer",
            "Each layer alone, on the tensors that reach it in the network. The number is the speedup.",
            bars(summary),
        ),
        (
            "Distance from the chip's limit",
            "Each arrow leads from PyTorch's layer to ours; the line is the limit of this chip, measured in the "
            "same run. The numbers are those of the chart above.",
            roofline(summary),
        ),
    ]
