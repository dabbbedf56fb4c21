"""Blocks: normalisation and activation, computed as one behind a transposed convolution or anywhere in a network."""
