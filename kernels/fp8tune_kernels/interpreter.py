"""Repairs to Triton's interpreter (``TRITON_INTERPRET=1``), which runs the kernels where there is no GPU.

Of Triton 3.6 to 3.9. Casts to float8 round half up and lose the mantissa's carry, those to bfloat16 cut off, those from
bfloat16 and float8 get subnormals or NaN wrong; 3.6 and 3.7 know no cast to ``float8e4b8`` (torch's
``float8_e4m3fnuz``). It patches all of ``triton.language`` again for each call of a device function, and does not take
that back.

It holds bfloat16 as its bits and computes on these bits. Here each operation on bfloat16 is done in float32 and rounded
to bfloat16, as a GPU does each operation that Triton leaves in bfloat16 (``+``, ``-``, ``*``, comparisons, ``fma``);
others Triton itself promotes to float32 (``/``, ``tl.maximum``) or refuses (``tl.exp``). ``tl.dot`` multiplies and adds
in float32. ``tl.sum`` of bfloat16 adds in float32 and rounds once: a GPU rounds each addition, in an order that depends
on the config. ``tl.maximum`` and ``tl.minimum`` ignore a NaN. Not repaired: functions of libdevice, which the
interpreter lacks, and atomic additions to bfloat16.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run on the interpreter; Triton decides it when a kernel is decorated."""

if INTERPRETED:
    import numpy as np  # nothing else here needs it

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
    interpreter._patch_lang_tensor = _indexing_by_one_element(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    _mend_arithmetic(interpreter.InterpreterBuilder)
    interpreter._implicit_cvt = _converting_floats(interpreter._implicit_cvt)
    interpreter._counted = _counted  # kernels see the names of that module
    interpreter.FunctionRewriter.ast_transformer = _counting(interpreter.ASTTransformer)
    interpreter.ReduceOps.sum = _sum_in_float32(interpreter.ReduceOps.sum)
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
        if source.primitive_bitwidth == 8:
            return of_codes(source, target)[values.view("uint8")]
        return converted(values, source, target)

    def converted(values: Any, source: Any, target: Any) -> Any:
        argument = torch.tensor(values).view(_FLOATS[source]).float()
        if target == tl.float8e4nv:  # as GPUs do and torch from 2.13 on: before, larger values became NaN
            argument = argument.clamp(-448, 448)
        bits = argument.to(_FLOATS[target]).view(_BITS[target.primitive_bitwidth]).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}")

    @functools.cache
    def of_codes(source: Any, target: Any) -> Any:
        return converted(np.arange(256, dtype="uint8"), source, target)

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


def _indexing_by_one_element(patch_tensor: Any) -> Any:
    """Take the one element of a scalar as a loop's bound: Triton 3.6 converts the array, which numpy 2.4 refuses."""

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _once_a_launch(patch_language: Any) -> Any:
    """Patch the language modules that a function sees once a launch, which takes it back: the device functions it calls
    would patch them again each time, and never take it back."""
    applied: dict[frozenset[str], Any] = {}
    nothing = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def seen(function: Any) -> frozenset[str]:
        return frozenset(lang.__name__ for lang in (tl, tl.core) if lang in function.__globals__.values())

    def patch(function: Any) -> Any:
        if seen(function) in applied:
            return nothing
        scope, is_launch = patch_language(function), not applied
        applied[seen(function)] = scope
        return SimpleNamespace(restore=restore) if is_launch else scope

    def restore() -> None:
        while applied:  # the last first
            applied.popitem()[1].restore()

    return patch


def _converting_floats(convert: Any) -> Any:
    """Make tensors of arguments that are Python floats too, as compiled kernels get them: they have ``.to``. A truth
    value is held as the result of a comparison is."""
    from triton.runtime import interpreter

    @functools.wraps(convert)
    def converted(argument: Any) -> Any:
        if isinstance(argument, bool):
            return tl.tensor(interpreter.TensorHandle(np.array([argument]), tl.int1), tl.int1)
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    return converted


class _Count(int):
    """A loop's count: a tensor in compiled kernels, here a Python integer that can be cast as one."""

    def to(self, dtype: Any) -> Any:
        from triton.runtime import interpreter

        return interpreter.interpreter_semantic.to_tensor(int(self)).to(dtype)


def _counted(counts: Iterable[Any]) -> Iterator[Any]:
    return (_Count(item) if type(item) is int else item for item in counts)


def _counting(transformer: type[ast.NodeTransformer]) -> ast.NodeTransformer:
    """Rewrite kernels as before, and ``for i in range(n)`` to ``for i in _counted(range(n))``."""

    class Counting(transformer):  # type: ignore[misc, valid-type]
        def visit_For(self, node: ast.For) -> ast.AST:  # noqa: N802 -- ast calls it by this name
            self.generic_visit(node)
            node.iter = ast.Call(ast.Name("_counted", ast.Load()), [node.iter], [])
            return node

    return Counting()


def _mend_arithmetic(builder: Any) -> None:
    """Compute on the values of bfloat16 and float8, which the interpreter holds as their bits."""
    builder.binary_op = _in_float32(builder.binary_op)
    builder.unary_op = _in_float32(builder.unary_op)
    builder.create_fma = _rounded_once
    dot = builder.create_dot
    builder.create_dot = lambda self, a, b, *more: dot(self, _widened(a), _widened(b), *more)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.get_bf16 = lambda self, value: _handle(np.array([value], np.float32), tl.bfloat16)


_HELD_AS_BITS = {tl.bfloat16, *TORCH_DTYPES}


def _is_bits(handle: Any) -> bool:
    """Return True if the bits of floating-point values are held; not so the result of comparing them."""
    held = handle.data.dtype
    return held.kind == "u" and held.itemsize <= 2 and handle.dtype.scalar in _HELD_AS_BITS


def _widened(handle: Any) -> Any:
    """Return the values in float32, if their bits are held."""
    from triton.runtime import interpreter

    if not _is_bits(handle):
        return handle
    data = interpreter._convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _handle(values: Any, dtype: Any) -> Any:
    """Values of float32, rounded to a type whose bits are held; what a comparison found is int1."""
    from triton.runtime import interpreter

    if values.dtype == bool:
        return interpreter.TensorHandle(values, tl.int1)
    return interpreter.TensorHandle(interpreter._convert_float(values, tl.float32, dtype, None), dtype)


def _in_float32(operate: Any) -> Any:
    """Do an operation on bfloat16 or float8 in float32 and round; on other types as before. Comparisons give int1."""

    @functools.wraps(operate)
    def operation(self: Any, *argument: Any) -> Any:
        first, *others = argument
        if not _is_bits(first):
            result = operate(self, *argument)
            if result.data.dtype == bool:
                result.dtype = tl.int1  # else it is the operands' type, to which a scalar is cast as it is broadcast
            return result
        widened = (_widened(item) if hasattr(item, "data") else item for item in others)
        return _handle(operate(self, _widened(first), *widened).data, first.dtype.scalar)

    return operation


def _rounded_once(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` in float64, where the product is exact."""
    from triton.runtime import interpreter

    factor, second, term = (_widened(item).data.astype(np.float64) for item in (x, y, z))
    total = factor * second + term
    if _is_bits(z):
        return _handle(total.astype(np.float32), z.dtype.scalar)
    return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def _sum_in_float32(add: Any) -> Any:
    @functools.wraps(add)
    def total(self: Any, argument: Any) -> Any:
        if not _is_bits(argument.handle):
            return add(self, argument)
        answer = np.asarray(np.sum(_widened(argument.handle).data, axis=self.axis, keepdims=self.keep_dims))
        return self.to_tensor(_handle(answer, argument.dtype).data, argument.dtype)

    return total
