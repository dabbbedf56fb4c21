"""Timing that can be believed: of callables (timing), of networks and layers (bench), on what (environment)."""
