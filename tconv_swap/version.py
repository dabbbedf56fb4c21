"""Holds the version of this package; the build reads it here."""

__version__ = "0.1.0"
