"""Times callables (timing) and networks and their layers (bench), and records the machine (environment)."""
