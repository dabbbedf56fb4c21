"""Progress: a bar with what is done and left on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from tconv_swap.cli.console import Progress, progress_shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What every console writes to, as if it were a terminal of 80 columns."""
    stream = io.StringIO()
    original = Console.__init__

    def on_a_terminal(self: Console, **options: object) -> None:
        options |= {"file": stream, "force_terminal": True, "width": 80, "stderr": False}
        original(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Console, "__init__", on_a_terminal)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_bar_if_the_amount_of_work_is_known(terminal: io.StringIO) -> None:
    progress = Progress(quiet=False)
    for done in range(5):
        progress(f"timing layer {done}", done, 8)
    progress.stop()
    shown = plain(terminal)
    assert "timing layer 4" in shown
    assert "4/8" in shown
    assert "━" in shown
    assert re.search(r"--:--|\d:\d\d", shown), "how long is left"


def test_a_spinner_if_the_amount_of_work_is_unknown(terminal: io.StringIO) -> None:
    progress = Progress(quiet=False)
    progress("loading [bold]model.pt")
    progress.stop()
    assert "loading [bold]model.pt" in plain(terminal), "a file's name is no markup"
    assert "━" not in plain(terminal)


def test_log_records_of_the_library_are_shown_as_details(terminal: io.StringIO) -> None:
    logger = logging.getLogger("tconv_swap")
    level = logger.level
    with progress_shown(quiet=False) as progress:
        progress("timing", 1, 2)
        logger.info("compiling forward_gemm for sm_90a")
        logger.warning("the cache is read-only")
    assert "compiling forward_gemm for sm_90a" in plain(terminal)
    assert "tconv-swap: the cache is read-only" in plain(terminal)
    assert logger.level == level
    assert logger.handlers == []


def test_one_line_for_each_kind_of_work_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_shown(quiet=False) as progress:
        progress("loading model.pt")
        for done in range(3):
            progress(f"timing layer {done}", done, 3)
        logging.getLogger("tconv_swap").info("compiling")
    assert capsys.readouterr().err.splitlines() == ["tconv-swap: loading model.pt", "tconv-swap: timing"]


def test_nothing_when_quiet(capsys: pytest.CaptureFixture[str], terminal: io.StringIO) -> None:
    with progress_shown(quiet=True) as progress:
        progress("loading model.pt")
        logging.getLogger("tconv_swap").warning("read-only")
    assert capsys.readouterr().err == ""
    assert terminal.getvalue() == ""
