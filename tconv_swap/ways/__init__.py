"""The ways to run a network: layout, compiler and CUDA graphs, all by PyTorch's own means. They are timed and
verified, and the fastest is chosen."""
