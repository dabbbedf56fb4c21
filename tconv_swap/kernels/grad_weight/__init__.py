"""Plans of the gradient of the weight. Each file plans one family of kernels, or a part of it."""
