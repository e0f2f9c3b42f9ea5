"""Sweeps: from options to stored results, by a coarse pass and a confirmation."""
