"""Plans of the forward pass, a family a file."""
