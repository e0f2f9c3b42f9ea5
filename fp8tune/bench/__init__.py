"""Our kernels, and the grouped GEMM on them, beside what else there is."""
