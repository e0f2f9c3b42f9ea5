"""The quantization kernels: one file a kernel, and the device code that several of them share.

What all ``quantize_...`` functions have in common. Shapes and layouts are in the docstring of each function's module.

- ``float8_dtype`` None is the format of the running arch: e4m3fnuz on gfx942, else e4m3fn.
- ``power_of_two``: scales are powers of two. ``scale_mode`` of MXFP8: ``rceil`` (nothing is clamped) or ``floor``.
- A NaN makes the scale and the codes of its slice or block NaN.
- The kernel launches once, with the exported table's config for these sizes, and waits for nothing: a GPU does not
  check the values in ``offs``. Scratch, where a function says so, is zeroed by a launch before.
- On a CPU without Triton's interpreter the plain torch ``reference`` runs.
- ValueError, before any launch: a wrong dtype, rank, stride or device of a tensor, a dtype that is not written, an
  unknown ``scale_mode``; on a CPU, ``offs`` that decrease or pass the rows.
"""
