"""The ways to run a network: layout, compiler and CUDA graph, by PyTorch's own means; timed, verified, chosen."""
