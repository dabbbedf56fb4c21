"""Holds the command line. The library does not import it."""

from tconv_swap.cli.application import app, main

__all__ = ["app", "main"]
