"""Kernels that were written for ``triton.autotune``, as specs: grid and key their own, inputs from a recording."""
