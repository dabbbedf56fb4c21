"""Normalisation and the activation behind it: csrc/kernels/norm."""
