"""Speed of Triton's interpreter, which runs checks without a GPU. What makes FP8 right there is in the kernels."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util


@functools.cache
def install() -> None:
    """Repair and speed up the interpreter of this process, once, before a kernel is launched.

    The kernels of another checkout, in a worker of ``compare``, may bring a speed-up of their own, or no repair.
    """
    if importlib.util.find_spec("fp8tune_kernels.quick_interpreter") is None:
        importlib.import_module("fp8tune.interpreter.quick").install()  # it imports Triton
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("fp8tune_kernels.interpreter").install()
