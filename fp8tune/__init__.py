"""fp8tune: check, time, record and export launch configs for FP8 mixture-of-experts Triton kernels."""

__version__ = "0.1.0"
