"""The command line; nothing of the library knows it."""

from tconv_swap.cli.application import app, main

__all__ = ["app", "main"]
