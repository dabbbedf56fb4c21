"""Plans of the gradient of the input. Each file plans one family of kernels, or a part of it."""
