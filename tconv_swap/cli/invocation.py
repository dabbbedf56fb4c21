"""Holds the state of one run of the program: its subcommands, and the files that it has written."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Invocation:
    """The state that the commands of one run of the program share.

    Attributes:
        commands: the names of the subcommands.
        finished: the files that are in their places, for the message when a signal ends the run.
    """

    commands: tuple[str, ...] = ()
    finished: list[Path] = field(default_factory=list)

    def near_command(self, word: str) -> str:
        """Returns the subcommand that `word` misspells; empty if there is none, or if `word` is a file."""
        near = difflib.get_close_matches(word, self.commands)
        return near[0] if near and not Path(word).exists() else ""
