"""What runs plans: compiling, keeping, loading and launching kernels. It knows no family."""
