"""The kernel families: what each claims of the problems, and which tiles it computes them with."""
