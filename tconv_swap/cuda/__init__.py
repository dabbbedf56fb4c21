"""Transposed convolution on CUDA: planned, compiled on demand, launched (call -> plan -> jit -> launch -> csrc)."""
