"""Kernels by family: which launches compute something, as plain data."""
