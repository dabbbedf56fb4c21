"""Computes transposed convolutions on the CPU with PyTorch's own operators, in the formulation that measures
fastest."""
