"""``fp8tune bench``: kernels and operations beside what other libraries have, in one run on one GPU."""
