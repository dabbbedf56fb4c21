"""Holds the commands, one per file."""
