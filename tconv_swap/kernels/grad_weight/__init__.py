"""Plans of the gradient of the weight, a family a file."""
