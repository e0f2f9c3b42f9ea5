"""Make Triton's interpreter (``TRITON_INTERPRET=1``) quicker, with the same results.

A kernel there is thousands of operations on a few hundred numbers each, so what takes the time is not numpy but what
surrounds it: types and shapes that are built anew for each operation. Those are kept here. Of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl

__all__ = ["install"]


def install() -> None:
    """Quicken the interpreter of this process. Call it once, before a kernel is launched."""
    from triton.runtime import interpreter

    core, semantic = tl.core, type(interpreter.interpreter_semantic)
    core._unwrap_if_constexpr = _leaving_plain_values(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _same_is_equal(core.dtype.__eq__)
    _keep_block_types(core.block_type)
    core.tensor.__init__ = _with_the_shape_of_its_type(core.tensor.__init__)
    semantic.cast = _leaving_its_type(semantic.cast)
    semantic.computation_type_impl = _kept_by_names(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _comparing_plain_sizes(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _with_kept_constants(semantic.binary_op_type_checking_impl)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = _checking_sizes_by_name(interpreter.TensorHandle)
    interpreter._patch_attr = _calling_once(interpreter)
    interpreter._patch_builtin = _finding_them_once(interpreter)


_TYPES = 4096
"""What is kept of as many types at most: each launch makes new ones for its pointers."""


class _Kept:
    """A dictionary for each type object. Not in the type, which would no longer be one that can be copied."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def __call__(self, of: Any) -> dict[Any, Any]:
        found = self._of.get(id(of))
        if found is None:
            if len(self._of) >= _TYPES:
                self._of.clear()
            found = self._of[id(of)] = of, {}  # the type too, so that no other takes its id
        return found[1]


# Types


def _leaving_plain_values(unwrap: Any) -> Any:
    constexpr, plain = tl.constexpr, frozenset((int, bool, float, str, type(None), tl.tensor))

    @functools.wraps(unwrap)
    def unwrapped(given: Any) -> Any:
        kind = type(given)
        if kind in plain:
            return given
        return given.value if kind is constexpr else unwrap(given)

    return unwrapped


def _same_is_equal(equal: Any) -> Any:
    @functools.wraps(equal)
    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    return is_equal


def _keep_block_types(block_type: Any) -> None:
    """Make one object for each element type and shape, so that equal types are the same one."""
    kept: dict[Any, Any] = {}
    build = block_type.__init__

    def new(cls: Any, *given: Any, **named: Any) -> Any:
        if len(given) != 2:  # of copying, or by keywords
            return object.__new__(cls)
        element, shape = given
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element.name, getattr(element, "address_space", None), sizes
        if key not in kept:
            made = object.__new__(cls)
            build(made, element, list(sizes))
            made._sizes = sizes
            kept[key] = made
        return kept[key]

    def init(self: Any, *given: Any, **named: Any) -> None:
        if "shape" not in self.__dict__:
            build(self, *given, **named)
            self._sizes = tuple(map(tl.core._unwrap_if_constexpr, self.shape))

    block_type.__new__, block_type.__init__ = new, init


def _with_the_shape_of_its_type(init: Any) -> Any:
    """What a tensor says of itself, but for its values, follows from its type."""
    kept = _Kept()

    @functools.wraps(init)
    def of_type(self: Any, handle: Any, type: Any) -> None:
        known = kept(type)
        if not known:
            init(self, handle, type)
            known |= {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    return of_type


# What surrounds an operation


def _leaving_its_type(cast: Any) -> Any:
    @functools.wraps(cast)
    def cast_to(self: Any, given: Any, to: Any, *more: Any, **named: Any) -> Any:
        return given if given.dtype is to.scalar else cast(self, given, to, *more, **named)

    return cast_to


def _kept_by_names(find: Any) -> Any:
    kept: dict[Any, Any] = {}

    @functools.wraps(find)
    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in kept:
            kept[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return kept[key]

    return computation_type


def _comparing_plain_sizes(broadcast: Any) -> Any:
    """Blocks of one shape stay as they are, one beside a scalar too; of two dimensions the larger one counts."""

    def to(semantic: Any, given: Any, sizes: tuple[int, ...], have: tuple[int, ...]) -> Any:
        if sizes == have:
            return given
        of = tl.core.block_type(given.dtype, sizes)
        if have:
            return tl.tensor(semantic.builder.create_broadcast(given.handle, sizes), of)
        return tl.tensor(semantic.builder.create_splat(of, given.handle), of)

    @functools.wraps(broadcast)
    def broadcast_both(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = (getattr(each.type, "_sizes", ()) for each in (lhs, rhs))
        if left == right:
            return lhs, rhs
        if left and right:
            if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
                return broadcast(self, lhs, rhs)
            sizes = tuple(map(max, left, right))
        else:
            sizes = left or right
        return to(self, lhs, sizes, left), to(self, rhs, sizes, right)

    return broadcast_both


_CONSTANTS = 256
"""As many constants a type keeps at most."""

_NUMBERS = 2**14
"""And of as many numbers each: with large blocks it is numpy that takes the time."""


def _with_kept_constants(check: Any) -> Any:
    """Two tensors of one element type need no cast. What a Python number becomes beside a tensor is kept with
    the tensor's type: its array, as operations may put another one into the handle, but never write to one."""
    from triton.runtime import interpreter

    constants = _Kept()

    def stays(semantic: Any, scalar: Any, arithmetic_check: bool, div_or_mod: bool) -> bool:
        if scalar.is_ptr():
            return False
        return (
            not arithmetic_check or semantic.computation_type_impl(scalar, False, scalar, False, div_or_mod) is scalar
        )

    @functools.wraps(check)
    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs), type(rhs)
        if left is right is tl.tensor:
            if lhs.dtype is rhs.dtype and stays(self, lhs.dtype, arithmetic_check, div_or_mod):
                return (lhs, rhs) if lhs.type is rhs.type else self.broadcast_impl_value(lhs, rhs)
            return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        beside, number = (lhs, rhs) if left is tl.tensor else (rhs, lhs)
        if type(beside) is not tl.tensor or type(number) not in (int, float) or number != number:
            return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        kept = constants(beside.type)
        key = number, type(number), left is tl.tensor, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if key in kept:
            array, scalar, of = kept[key]
            constant = tl.tensor(interpreter.TensorHandle(array, scalar), of)
            return (lhs, constant) if left is tl.tensor else (constant, rhs)
        pair = check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        same, constant = pair if left is tl.tensor else pair[::-1]
        if same is beside and len(kept) < _CONSTANTS and constant.handle.data.size <= _NUMBERS:
            kept[key] = constant.handle.data, constant.handle.dtype, constant.type
        return pair

    return checked


def _kept_by_name(get: Any) -> Any:
    kept: dict[str, Any] = {}

    @functools.wraps(get)
    def np_dtype(given: Any) -> Any:
        name = given.scalar.name
        if name not in kept:
            kept[name] = get(given)
        return kept[name]

    return np_dtype


def _checking_sizes_by_name(handle: Any) -> Any:
    """The greatest size of an element follows from its type; where one is larger, the check that was there raises."""
    most: dict[str, float] = {}

    @functools.wraps(handle.__init__)
    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        name = dtype.name
        if name not in most:
            most[name] = float("inf") if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > most[name]:
            self.__post_init__()

    return init


def _calling_once(interpreter: Any) -> Any:
    """Call what is inside ``tl.core.builtin``, whose one check is whether ``_semantic`` is there."""
    checks, semantic = tl.core.builtin(lambda: None).__code__, interpreter.interpreter_semantic

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        is_operator = owner is tl.tensor and name in _OPERATORS
        scope.set_attr(owner, name, _at_once(*_OPERATORS[name], call, interpreter) if is_operator else call)

    return patch_attr


_NUMERIC = frozenset(("int32", "int64", "fp32"))
_INTEGERS = frozenset(("int1", "int32", "int64"))
_OPERATORS: dict[str, tuple[Any, Any, frozenset[str]]] = {
    "__add__": (np.add, int | float, _NUMERIC),
    "__radd__": (lambda x, y: np.add(y, x), int | float, _NUMERIC),
    "__sub__": (np.subtract, int | float, _NUMERIC),
    "__rsub__": (lambda x, y: np.subtract(y, x), int | float, _NUMERIC),
    "__mul__": (np.multiply, int | float, _NUMERIC),
    "__rmul__": (lambda x, y: np.multiply(y, x), int | float, _NUMERIC),
    "__lt__": (np.less, int, _NUMERIC),
    "__le__": (np.less_equal, int, _NUMERIC),
    "__gt__": (np.greater, int, _NUMERIC),
    "__ge__": (np.greater_equal, int, _NUMERIC),
    "__eq__": (np.equal, int, _NUMERIC),
    "__ne__": (np.not_equal, int, _NUMERIC),
    "__and__": (np.bitwise_and, (), _INTEGERS),
    "__or__": (np.bitwise_or, (), _INTEGERS),
}
"""Operators -> the function of arrays, the Python numbers that it takes beside a tensor, and the types it is quick
for: those that numpy holds as they are."""


def _at_once(function: Any, numbers: Any, types: frozenset[str], slowly: Any, interpreter: Any) -> Any:
    """An operator that checks and broadcasts what it is given, and then calls numpy without a detour."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    compares = function in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

    def operate(self: Any, other: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        if self.dtype.name not in types or builder.options.debug:
            return slowly(self, other)
        if type(other) is tl.tensor:
            if other.dtype.name not in types:
                return slowly(self, other)
        elif type(other) is bool or not isinstance(other, numbers):
            return slowly(self, other)
        lhs, rhs = semantic.binary_op_type_checking_impl(self, other)
        of, scalar = lhs.type, lhs.handle.dtype.scalar
        if of is not rhs.type or lhs.dtype.name not in types:
            return slowly(self, other)
        found = function(lhs.handle.data, rhs.handle.data)
        if not compares and found.itemsize != lhs.handle.data.itemsize:  # numpy has found a wider type
            return slowly(self, other)
        return tl.tensor(interpreter.TensorHandle(found, scalar), of.with_element_ty(tl.int1) if compares else of)

    return operate


def _finding_them_once(interpreter: Any) -> Any:
    """Which members of a module or class are builtins, looked up at the first launch."""

    @functools.cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    return patch_builtin
