"""Plans of the forward pass. Each file plans one family of kernels, or a part of it."""
