"""The quantization kernels: one file a kernel, and the device code that several of them share."""
