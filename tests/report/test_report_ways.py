"""The table of ways in every form of the report."""

from __future__ import annotations

import io
from typing import Any

import pytest
from report_cases import full_case

from tconv_swap.report import make_console, to_json_dict
from tconv_swap.report.charts import way_bars
from tconv_swap.report.markdown import markdown
from tconv_swap.report.page import page
from tconv_swap.report.summary import summarise
from tconv_swap.report.terminal import print_summary
from tconv_swap.report.ways import WayLine

HEADLINE = (
    "The training step as ours+graph is 2.00 times as fast as today and 1.20 times as fast as PyTorch's best way "
    "(pytorch+graph), measured side by side."
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return to_json_dict(**full_case())


def terminal(document: dict[str, Any], width: int) -> str:
    stream = io.StringIO()
    console = make_console(stream)
    console.width = width
    print_summary(console, summarise(document))
    return stream.getvalue()


def test_rows(document: dict[str, Any]) -> None:
    _, step = summarise(document).ways
    assert step.title == "training step"
    assert step.headline == HEADLINE
    assert step.lines[0] == WayLine("pytorch", 2.0, 2.0, "", "", "today", False)
    chosen = next(line for line in step.lines if line.chosen)
    assert (chosen.name, chosen.speedup, chosen.verdict) == ("ours+graph", "2.00x faster", "faster")
    assert chosen.remark == "chosen, verified, ours in the same way"
    remarks = {line.name: line.remark for line in step.lines}
    assert remarks["pytorch+graph"] == "PyTorch's best"
    assert remarks["pytorch+compile+graph"] == "RuntimeError: no compiler"
    assert remarks["ours+channels_last"].startswith("does not compute the same")
    assert any("static shapes" in line for line in step.needs)


def test_the_headline_if_no_way_is_faster() -> None:
    case = full_case()
    case["ways"].stages[0].best = case["ways"].stages[0].rows[0].way
    first = summarise(to_json_dict(**case)).ways[0]
    assert first.headline == "No way was found in which the forward pass is faster than it is today."
    assert first.lines[0].chosen
    assert first.needs == ()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_on_a_terminal(document: dict[str, Any], width: int) -> None:
    text = terminal(document, width)
    assert "Ways to run it, training step" in text
    assert HEADLINE in " ".join(text.split())
    assert "It is bound by normalisation" in " ".join(text.split())
    if width >= 80:
        for name in ("pytorch+compile+graph", "pytorch+channels_last", "ours+graph"):
            assert f"  {name} " in text
        assert "2.00x faster" in text
    if width != 40:
        assert all(len(line) <= width for line in text.splitlines() if "load" not in line)
    assert (["way", "today", "ms"] in [line.split() for line in text.splitlines()]) == (width >= 100)


def test_a_note_says_why_a_way_was_not_chosen(document: dict[str, Any]) -> None:
    assert "ways, forward pass: ours+channels_last is not chosen: eval: output 0: error 7.7e-02" in (
        summarise(document).notes
    )


def test_as_markdown_and_as_a_page(document: dict[str, Any]) -> None:
    text, html = markdown(document), page(document)
    assert "## Ways to run it: training step" in text
    assert "| **ours+graph** | 2.00 | 1.00 | 2.00x faster | chosen, verified, ours in the same way |" in text
    assert "<h2>Ways to run it: training step</h2>" in html
    assert "The ways to run it" in html
    assert "2.00x faster" in html


def test_the_chart_shows_the_timed_ways(document: dict[str, Any]) -> None:
    chart = way_bars(summarise(document))
    assert chart is not None
    assert "ours+graph" in chart
    assert "pytorch+compile+graph" not in chart
    assert way_bars(summarise(to_json_dict(**(full_case() | {"ways": None})))) is None
