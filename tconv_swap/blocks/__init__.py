"""Blocks: a normalisation and the activation behind it, computed by one kernel."""
