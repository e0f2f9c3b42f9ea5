"""Repairs to Triton's interpreter (``TRITON_INTERPRET=1``), which runs the kernels where there is no GPU.

Of Triton 3.6 to 3.9. Casts to float8 round half up and lose the mantissa's carry, those to bfloat16 cut off, those from
bfloat16 and float8 get subnormals or NaN wrong; 3.6 and 3.7 know no cast to ``float8e4b8`` (torch's
``float8_e4m3fnuz``). It patches all of ``triton.language`` again for each call of a device function, and looks for
integer overflows that it does not report: each was over a third of a test's time.
"""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "TORCH_DTYPES", "install", "quiet"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run on the interpreter; Triton decides it when a kernel is decorated."""

TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
}
"""Triton's float8 types -> torch's."""


@functools.cache
def install() -> None:
    """Repair the interpreter of this process, once; does nothing where kernels are compiled."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    interpreter._convert_float = _rounding_like_torch(interpreter._convert_float)
    interpreter._patch_lang_core = _knowing_float8e4b8(interpreter._patch_lang_core)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    semantic = interpreter.interpreter_semantic
    semantic.binary_op_sanitize_overflow_impl = _where_it_can_assert(semantic)
    quiet()


def quiet() -> None:
    """Let no arithmetic of the interpreter warn: kernels are checked on infinities and NaN."""
    for module in (r"triton\.runtime\.interpreter", r"numpy\..*"):
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=module)


_FLOATS = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, **TORCH_DTYPES}
_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _rounding_like_torch(convert: Any) -> Any:
    """Convert between the types of kernels as torch does, through float32; with another rounding as before."""

    @functools.wraps(convert)
    def convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return values.astype("uint32") << 16  # both types are held as their bits
        to_nearest = rounding_mode is None or rounding_mode.name == "RTNE"
        if source not in _FLOATS or target not in _FLOATS or not to_nearest:
            return convert(values, source, target, rounding_mode)
        given = torch.tensor(values).view(_FLOATS[source]).float()
        bits = given.to(_FLOATS[target]).view(_BITS[target.primitive_bitwidth]).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}")

    return convert_float


def _knowing_float8e4b8(patch_language: Any) -> Any:
    """Wrap the interpreter's patch of ``tl.dtype.to_ir``, which it applies and takes back around every launch."""

    def patch(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        to_ir = language.dtype.to_ir
        scope.set_attr(
            language.dtype,
            "to_ir",
            lambda self, builder: builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else to_ir(self, builder),
        )

    return patch


def _once_a_launch(patch_language: Any) -> Any:
    """Patch the language modules that a function sees once a launch, which takes it back: the device functions it calls
    would patch them again each time, and never take it back."""
    applied: dict[frozenset[str], Any] = {}

    @functools.cache
    def seen(function: Any) -> frozenset[str]:
        return frozenset(lang.__name__ for lang in (tl, tl.core) if lang in function.__globals__.values())

    def patch(function: Any) -> Any:
        if seen(function) in applied:
            return SimpleNamespace(restore=lambda: None)
        scope, is_launch = patch_language(function), not applied
        applied[seen(function)] = scope
        return SimpleNamespace(restore=restore) if is_launch else scope

    def restore() -> None:
        while applied:  # the last first
            applied.popitem()[1].restore()

    return patch


def _where_it_can_assert(semantic: Any) -> Any:
    """Check integer operations for overflow, five operations more, only where ``device_assert`` reports it."""
    check = semantic.binary_op_sanitize_overflow_impl

    @functools.wraps(check)
    def checked(lhs: Any, rhs: Any, operation: Any) -> None:
        if semantic.builder.options.debug:
            check(lhs, rhs, operation)

    return checked
