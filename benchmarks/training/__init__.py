"""A small mixture-of-experts language model trained in several precisions: ``python -m benchmarks.training``."""
