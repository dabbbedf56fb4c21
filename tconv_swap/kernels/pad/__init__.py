"""Padding of images: csrc/kernels/pad."""
