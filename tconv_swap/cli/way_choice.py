"""Runs the search of ways that `--way` requests, and applies its result to the file that is written."""

from __future__ import annotations

import time

import torch
from torch import nn

from tconv_swap.cli.parsers import AUTO, KEEP
from tconv_swap.cli.request import Progress, Request, RequestError
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.environment import environment
from tconv_swap.verification import VerifyReport
from tconv_swap.ways.optimize import WaySearch
from tconv_swap.ways.report import WaysReport
from tconv_swap.ways.way import OURS, TODAY, Way, in_layout, parse_way, why_impossible

#: This way needs only the swap.
OURS_TODAY = Way(OURS.name)


def check_request(request: Request, device: torch.device, *, exported: bool) -> None:
    """Checks, before any work is done, that the ways can be tried.

    Raises:
        RequestError: they cannot be tried.
    """
    if request.way == KEEP:
        return
    if exported:
        raise RequestError(f"--way {request.way}: a torch.export archive runs in the way it was exported for")
    if not request.benchmark:
        raise RequestError(f"--way {request.way} times the ways: leave out --no-benchmark")
    if request.way != AUTO and (reason := why_impossible(parse_way(request.way), device)):
        raise RequestError(f"--way {request.way}: {reason}")


def choose_way(
    swapped: nn.Module, inputs: Inputs, request: Request, verification: VerifyReport, progress: Progress
) -> WaysReport | None:
    """Times and verifies the ways; returns None if no ways are requested, or if the swap itself has failed.

    A way that was requested by name and does not compute the same is a failure of `verification`.

    Raises:
        RequestError: the way that was requested by name is not possible.
    """
    if request.way == KEEP or not verification.passed:
        return None
    report = WaysReport()
    begin = time.monotonic()
    named = None if request.way == AUTO else parse_way(request.way)
    for training in (False, True) if request.backward else (False,):
        searched = WaySearch(swapped, inputs, training=training, seed=request.seed)
        if not report.stages:
            report.environment = environment(searched.device)
            report.method = searched.method(request.seconds)
        left = max(request.seconds - (time.monotonic() - begin), 0.0)
        left = left / 2 if request.backward and not training else left
        stage = searched.run(searched.chosen_from(None if named is None else [named]), left, progress, named)
        report.stages.append(stage)
        row = None if named is None else stage.row(named)
        if named is not None and row is not None and row.why_not:
            raise RequestError(f"--way {named}: {row.why_not}")
        if row is not None and row.failure:
            verification.failures.append(f"--way {named}: {row.failure}")
        if searched.search.interrupted:
            break
    return report


def prepared(network: nn.Module, ways: WaysReport | None) -> nn.Module:
    """Returns the network in the memory format of the chosen way, as it is written."""
    return network if ways is None else in_layout(network, ways.chosen.best.layout)


def with_run(snippet: str, ways: WaysReport | None, device: torch.device) -> str:
    """Returns the lines that load the network, and the line that runs it in the chosen way."""
    if ways is None or not ways.stages:
        return snippet
    calls = {
        stage.stage: f"tconv_swap.in_way(model, {stage.best.name!r}, inputs"
        f"{', training=True' if stage.stage == 'step' else ''})"
        for stage in ways.stages
        if stage.best not in (TODAY, OURS_TODAY)
    }
    if not calls:
        return snippet
    where = f".to({str(device)!r})" if device.type != "cpu" else ""
    first, *others = calls.values()
    training = f"  # to train: {others[0]}" if others else ""
    return f"{snippet}{where}\nrun = {first}{training}"
