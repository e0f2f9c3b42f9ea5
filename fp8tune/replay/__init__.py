"""Record, launch again and pin kernels that other people wrote."""
