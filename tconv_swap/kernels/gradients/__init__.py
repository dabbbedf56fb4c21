"""Plans of several gradients in one pass, and what families of both gradients share."""
