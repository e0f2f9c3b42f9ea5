"""Facts about compiled kernels, read without running them."""
