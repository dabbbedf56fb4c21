"""Writes the files of ``--save``: a picture of the outputs of an example's networks, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import tconv_swap
from tconv_swap.report import Facts, to_json_dict
from tconv_swap.report.written import render

#: The number of images in a row.
COLUMNS = 6


def save_picture(path: Path, rows: Mapping[str, Tensor]) -> None:
    """Draws rows of images below each other: the first images of each ``[count, 1 or 3, height, width]`` in [-1, 1]."""
    from matplotlib.figure import Figure  # imported here: importing it takes a second

    columns = min(COLUMNS, *(len(images) for images in rows.values()))
    figure = Figure(figsize=(0.9 + columns, len(rows)), dpi=80)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for place, image in zip(line, images, strict=False):
            values = ((image.detach().float().cpu().clamp(-1, 1) + 1) / 2).expand(3, -1, -1)
            place.imshow(values.permute(1, 2, 0).numpy(), interpolation="nearest")
            place.set_xticks([])
            place.set_yticks([])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.subplots_adjust(left=0.9 / (0.9 + columns), right=1, top=1, bottom=0, wspace=0.05, hspace=0.05)
    figure.savefig(path, pil_kwargs={"optimize": True})


def save_report(
    path: Path,
    title: str,
    plan: tconv_swap.SwapPlan,
    inputs: Any,
    verification: tconv_swap.VerifyReport | None = None,
    timing: tconv_swap.BenchmarkReport | None = None,
    ways: tconv_swap.WaysReport | None = None,
) -> None:
    """Writes the same report as the command line, as Markdown."""
    given = tconv_swap.Inputs.of(inputs)
    device = next((str(tensor.device) for _, tensor in given.named_tensors()), "cpu")
    facts = Facts(title, given.describe(), "made by the example", device)
    document = to_json_dict(plan, verification, timing, facts, ways=ways)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(path, document), encoding="utf-8")
