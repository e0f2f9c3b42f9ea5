"""Tune the kernels of a program: what to sweep, what two runs measured, and the diff."""
