"""Writes figures of matplotlib as SVG whose colours are CSS variables: one drawing for a light and for a dark page."""

from __future__ import annotations

import html
import io
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

__all__ = ["COLOURS", "VARIABLES", "Figure", "inline_svg", "settings", "standalone_svg"]

#: The colours of the drawing. matplotlib has no variables, so each variable has a value that nothing else uses.
COLOURS = {
    "ink": "#010203",
    "muted": "#010204",
    "line": "#010205",
    "before": "#010206",
    "after": "#010207",
    "page": "#010208",
    "other": "#010209",
}

_LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "before": "#818b98",
    "after": "#0969da",
    "page": "#ffffff",
    "other": "#bc4c00",
}
_DARK = {
    "ink": "#e6edf3",
    "muted": "#9ca5af",
    "line": "#3d444d",
    "before": "#7d8590",
    "after": "#4493f8",
    "page": "#0d1117",
    "other": "#f0883e",
}


def _declared(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


#: The CSS variables, light or dark as the reader prefers.
VARIABLES = (
    f":root {{ color-scheme: light dark; {_declared(_LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_declared(_DARK)} }} }}"
)

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def settings() -> Any:
    """Returns matplotlib's settings for our figures, as a context: nothing changes globally."""
    ink, muted, line = COLOURS["ink"], COLOURS["muted"], COLOURS["line"]
    return rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "tconv_swap",
            "font.family": ["DejaVu Sans"],
            "font.size": 10,
            "text.color": ink,
            "axes.labelcolor": muted,
            "axes.edgecolor": line,
            "axes.facecolor": "none",
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "figure.facecolor": "none",
            "savefig.facecolor": "none",
            "grid.color": line,
            "grid.linewidth": 0.6,
            "xtick.color": line,
            "ytick.color": line,
            "xtick.labelcolor": muted,
            "ytick.labelcolor": ink,
            "legend.frameon": False,
        }
    )


def inline_svg(figure: Figure, title: str) -> str:
    """Returns the figure as an element of a page that declares `VARIABLES`; it is as wide as the page allows.

    Args:
        figure: a figure drawn with `COLOURS`, under `settings`.
        title: the text for readers who do not see it.
    """
    return _svg(figure, title, "")


def standalone_svg(figure: Figure, title: str) -> str:
    """Returns the figure as a separate file, for an `<img>`: it is light or dark as the reader prefers."""
    style = f"<style>\n{VARIABLES}\nsvg {{ background: var(--page); }}\n</style>\n"
    return f'<?xml version="1.0" encoding="utf-8"?>\n{_svg(figure, title, style)}'


def _svg(figure: Figure, title: str, style: str) -> str:
    file = io.StringIO()
    with settings():
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    drawing = file.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for name, colour in COLOURS.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    drawing = re.sub(r"(font: [^;]*?px) '[^;\"]*", rf"\1 {FONT}", drawing)
    width = re.search(r'width="([\d.]+)pt"', drawing)
    assert width is not None
    name = html.escape(title)
    attributes = f'role="img" aria-label="{name}" style="width: 100%; max-width: {float(width[1]):.0f}pt; height: auto"'
    drawing = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" width="[\d.]+pt"', attributes, drawing, count=1
    )
    opened = drawing.index(">") + 1
    lines = f"{drawing[:opened]}\n<title>{name}</title>\n{style}{drawing[opened:]}".splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
