"""Plans of the gradient of the input, a family a file."""
