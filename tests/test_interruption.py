"""A signal ends the command even where a library swallows the exception that it raises."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SWALLOWED = """
import signal, sys
from tconv_swap.console import Progress
from tconv_swap.interruption import obey_signals

signal.signal(signal.SIGINT, signal.default_int_handler)
obey_signals()
try:
    signal.raise_signal(int(sys.argv[1]))
except BaseException:  # as the modules do that numpy is made of, while they are imported
    print("swallowed", flush=True)
Progress(quiet=True)("the next thing")
print("it goes on")
"""


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, ""), (None, "")]
)
def test_what_swallows_the_exception_does_not_swallow_the_signal(number: int | None, raised: str) -> None:
    argument = str(int(number or signal.SIGCONT))
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, argument], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == ("it goes on\n" if number is None else "swallowed\n")
    assert raised in done.stderr
    assert done.returncode == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143, None: 0}[number]
