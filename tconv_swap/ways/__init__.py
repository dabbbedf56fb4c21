"""Runs a network in different ways: layout, compiler and CUDA graphs, all with PyTorch's own means. The ways are timed
and verified, and the fastest is chosen."""
