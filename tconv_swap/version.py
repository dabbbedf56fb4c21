"""The version of this package; its build reads it here."""

__version__ = "0.1.0"
