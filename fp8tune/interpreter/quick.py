"""Make Triton's interpreter (``TRITON_INTERPRET=1``) quicker, with the same results. For Triton 3.6 to 3.9.

A kernel there is thousands of operations on a few hundred numbers each. Most of the time is not spent in numpy but
around it: types and shapes are built anew for each operation. They are remembered here. Triton also looks for integer
overflows that it does not report, which took a third of a test's time.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl

__all__ = ["install"]


def install() -> None:
    """Speed up the interpreter of this process. Call it once, before a kernel is launched."""
    from triton.runtime import interpreter

    quiet()

    core, semantic = tl.core, type(interpreter.interpreter_semantic)
    core._unwrap_if_constexpr = _leaving_plain_values(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _same_is_equal(core.dtype.__eq__)
    _keep_block_types(core.block_type)
    tl.str_to_ty = _keeping_types_of_arguments(tl.str_to_ty)
    core.tensor.__init__ = _with_the_shape_of_its_type(core.tensor.__init__)
    semantic.cast = _leaving_its_type(semantic.cast)
    semantic.computation_type_impl = _kept_by_names(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _comparing_plain_sizes(semantic.broadcast_impl_value)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = _checking_sizes_by_name(interpreter.TensorHandle)
    interpreter._patch_attr = _calling_once(interpreter)
    interpreter._patch_builtin = _finding_them_once(interpreter)
    interpreter.FunctionRewriter.rewrite_ast = _rewriting_once(interpreter)
    of_process = interpreter.interpreter_semantic
    of_process.binary_op_sanitize_overflow_impl = _without_silent_overflows(of_process)


def quiet() -> None:
    """Suppress warnings of this module's arithmetic: kernels are checked on infinities and NaN."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"fp8tune\.interpreter\.quick")


_TYPES = 4096
"""Most types that are remembered: each launch makes new ones for its pointers."""


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


def _keeping_types_of_arguments(find: Any) -> Any:
    """Make one object for the pointers to each element type, launch after launch."""
    kept: dict[str, Any] = {}

    @functools.wraps(find)
    def type_of(name: Any, constant: Any) -> Any:
        if constant is not None or not isinstance(name, str):
            return find(name, constant)
        if name not in kept:
            kept[name] = find(name, None)
        return kept[name]

    return type_of


def _with_the_shape_of_its_type(init: Any) -> Any:
    """Remember the attributes of a tensor by its type; only the values differ."""
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


def _without_silent_overflows(semantic: Any) -> Any:
    """Check integer operations for overflow, five operations more, only where ``device_assert`` reports it."""
    check = semantic.binary_op_sanitize_overflow_impl

    @functools.wraps(check)
    def checked(lhs: Any, rhs: Any, operation: Any) -> None:
        if semantic.builder.options.debug:
            check(lhs, rhs, operation)

    return checked


def _calling_once(interpreter: Any) -> Any:
    """Call what is inside ``tl.core.builtin``, whose one check is whether ``_semantic`` is there. What stands in the
    place of a member is made at the first launch."""
    checks, semantic = tl.core.builtin(lambda: None).__code__, interpreter.interpreter_semantic
    kept: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def calling(owner: Any, name: str, member: Any) -> Any:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        return _quickened(owner, name, call, interpreter)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        found = kept.get((owner, name))
        if found is None or found[0] is not member:
            found = kept[owner, name] = member, calling(owner, name, member)
        scope.set_attr(owner, name, found[1])

    return patch_attr


# Operations


def _quickened(owner: Any, name: str, slowly: Any, interpreter: Any) -> Any:
    """The quick form of an operation; Triton's own way where there is none."""
    if owner is tl.tensor and name in _OPERATORS:
        return _operator(_OPERATORS[name], slowly, interpreter)
    if owner is tl.tensor and name in ("to", "__getitem__"):
        return {"to": _casting, "__getitem__": _indexing}[name](slowly, interpreter)
    if owner in (tl, tl.core, tl.math) and name in _FUNCTIONS:
        return _FUNCTIONS[name](slowly, interpreter)
    return slowly


class _Plans:
    """Plans by the types of an operation's operands: numpy's function that gives the result, and its type.

    The first time Triton's own way is taken too. Types for which numpy gives other bytes are left to it for good. A
    type keeps its place in memory as long as a plan is kept for it.
    """

    def __init__(self, interpreter: Any) -> None:
        self._handle = interpreter.TensorHandle
        self._of: dict[Any, Any] = {}
        self.get = self._of.get
        """The plan for these types. None where they are new; its function is None where Triton's way is to be taken."""

    def learn(self, key: Any, types: tuple[Any, ...], right: Any, function: Any, *arrays: Any) -> Any:
        """Keep a plan if the function's array is that of the right tensor; return the tensor of a plan, else that one.

        Both have the same bytes, but maybe not the same memory layout, which decides the order of sums.
        """
        if len(self._of) >= _TYPES:
            self._of.clear()
        same = False
        if function is not None and type(right) is tl.tensor:
            found, data = function(*arrays), right.handle.data
            same = found.dtype == data.dtype and found.tobytes() == data.tobytes()
        if same:
            known = {name: value for name, value in right.__dict__.items() if name != "handle"}
            self._of[key] = function, found.dtype, right.handle.dtype, known, types
            return self.made(self._of[key], found)
        self._of[key] = (*[None] * 4, types)
        return right

    def made(self, plan: Any, found: Any) -> Any:
        """The tensor of an array that a plan's function has given."""
        _, _, scalar, known, _ = plan
        handle = object.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = found, scalar, {}
        made = object.__new__(tl.tensor)
        made.__dict__.update(known)
        made.handle = handle
        return made


def _truncated(x: Any, y: Any) -> Any:
    """Integer division as Triton has it, rounded towards zero."""
    return (x - np.fmod(x, y)) // y


_NUMERIC = frozenset(("int32", "int64", "fp32"))
_WHOLE = frozenset(("int32", "int64"))
_BITS = frozenset(("int1", "int32", "int64"))
_OPERATORS: dict[str, tuple[Any, frozenset[str]]] = {
    "__add__": (np.add, _NUMERIC),
    "__radd__": (lambda x, y: np.add(y, x), _NUMERIC),
    "__sub__": (np.subtract, _NUMERIC),
    "__rsub__": (lambda x, y: np.subtract(y, x), _NUMERIC),
    "__mul__": (np.multiply, _NUMERIC),
    "__rmul__": (lambda x, y: np.multiply(y, x), _NUMERIC),
    "__truediv__": (np.divide, frozenset(("fp32",))),
    "__rtruediv__": (lambda x, y: np.divide(y, x), frozenset(("fp32",))),
    "__floordiv__": (_truncated, _WHOLE),
    "__rfloordiv__": (lambda x, y: _truncated(y, x), _WHOLE),
    "__mod__": (np.fmod, _WHOLE),
    "__rmod__": (lambda x, y: np.fmod(y, x), _WHOLE),
    "__lshift__": (np.left_shift, _WHOLE),
    "__rshift__": (np.right_shift, _WHOLE),
    "__lt__": (np.less, _NUMERIC),
    "__le__": (np.less_equal, _NUMERIC),
    "__gt__": (np.greater, _NUMERIC),
    "__ge__": (np.greater_equal, _NUMERIC),
    "__eq__": (np.equal, _NUMERIC),
    "__ne__": (np.not_equal, _NUMERIC),
    "__and__": (np.bitwise_and, _BITS),
    "__or__": (np.bitwise_or, _BITS),
}
"""Operators -> the function of arrays and the types it is quick for: those that numpy holds as they are."""

_INTEGERS = range(-(2**31), 2**31)
"""Python integers that Triton takes for int32."""


def _is_number(given: Any) -> bool:
    """A number that numpy takes as Triton does, which makes a negative zero a positive one."""
    kind = type(given)
    if kind is float:
        return given != 0 or math.copysign(1, given) > 0
    return kind is int and given in _INTEGERS


def _operator(operator: tuple[Any, frozenset[str]], slowly: Any, interpreter: Any) -> Any:
    """An operator on tensors, or a tensor and a Python number. Numpy broadcasts as Triton does."""
    function, names = operator
    plans, builder = _Plans(interpreter), interpreter.interpreter_builder

    def quick(x: Any, y: Any) -> Any:
        """The function for these operands; None where they are not numbers that numpy holds as they are."""
        if x.dtype.is_ptr() and function in (np.add, np.subtract):
            size = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
            offsets = type(y) is not tl.tensor or y.dtype.name in _WHOLE
            return (lambda at, by: function(at, size * np.asarray(by).astype(np.uint64))) if offsets else None
        known = x.dtype.name in names and (type(y) is not tl.tensor or y.dtype.name in names)
        return function if known else None

    def operate(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is tl.constexpr:
            other = other.value
            kind = type(other)
        if kind is tl.tensor:
            key: tuple[int, Any] = id(self.type), id(other.type)
            given = other.handle.data
        elif _is_number(other):
            key, given = (id(self.type), kind), other
        else:
            return slowly(self, other)
        plan = plans.get(key)
        if builder.options.debug:  # which looks for overflows
            return slowly(self, other)
        if plan is None:
            right = slowly(self, other)
            types = self.type, getattr(other, "type", None)
            return plans.learn(key, types, right, quick(self, other), self.handle.data, given)
        if plan[0] is None:
            return slowly(self, other)
        found = plan[0](self.handle.data, given)
        return plans.made(plan, found) if found.dtype is plan[1] else slowly(self, other)

    return operate


def _casting(slowly: Any, interpreter: Any) -> Any:
    """``tensor.to`` between integers and float32, from bfloat16, and of bits."""
    plans, held = _Plans(interpreter), interpreter._get_np_dtype

    def quick(source: Any, to: Any, bitcast: bool) -> Any:
        if bitcast:
            return lambda data: data.view(held(to))
        if source.name == "bf16" and to.name == "fp32":
            return lambda data: (data.astype(np.uint32) << 16).view(np.float32)
        return (lambda data: data.astype(held(to))) if {source.name, to.name} <= _NUMERIC | {"int1"} else None

    def cast(self: Any, dtype: Any, *more: Any, bitcast: Any = False, **named: Any) -> Any:
        if type(dtype) is tl.constexpr:
            dtype = dtype.value
        if more or named or type(bitcast) is not bool:
            return slowly(self, dtype, *more, bitcast=bitcast, **named)
        key = id(self.type), id(dtype), bitcast
        plan = plans.get(key)
        if plan is None:
            right = slowly(self, dtype, bitcast=bitcast)
            if right is self:
                return right
            return plans.learn(key, (self.type, dtype), right, quick(self.dtype, dtype, bitcast), self.handle.data)
        if plan[0] is None:
            return slowly(self, dtype, bitcast=bitcast)
        return plans.made(plan, plan[0](self.handle.data))

    return cast


_ALL = slice(None)


def _indexing(slowly: Any, interpreter: Any) -> Any:
    """``tensor[:, None]``, which adds dimensions of one element."""
    plans = _Plans(interpreter)

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(each is None or each == _ALL for each in slices):
            return slowly(self, slices)
        key = id(self.type), *[each is None for each in slices]
        plan = plans.get(key)
        if plan is None:
            right = slowly(self, slices)
            return plans.learn(key, (self.type,), right, lambda data: data[slices], self.handle.data)
        return plans.made(plan, plan[0](self.handle.data)) if plan[0] is not None else slowly(self, slices)

    return index


def _elementwise(functions: dict[str, Any]) -> Any:
    """A function of as many tensors or numbers as are given: numpy's by the name of the last operand's type."""

    def quickened(slowly: Any, interpreter: Any) -> Any:
        plans = _Plans(interpreter)

        def call(*given: Any, **named: Any) -> Any:
            key: list[Any] = []
            arrays: list[Any] = []
            for each in given:
                kind = type(each)
                if kind is tl.constexpr:
                    each = each.value
                    kind = type(each)
                if kind is tl.tensor:
                    key.append(id(each.type))
                    arrays.append(each.handle.data)
                elif _is_number(each):
                    key.append(kind)
                    arrays.append(each)
                else:
                    return slowly(*given, **named)
            if named:
                return slowly(*given, **named)
            plan = plans.get(tuple(key))
            if plan is None:
                types = tuple([getattr(each, "type", None) for each in given])
                names = {of.scalar.name for of in types if of is not None} - {"int1"}
                function = functions.get(names.pop()) if len(names) == 1 else None
                return plans.learn(tuple(key), types, slowly(*given), function, *arrays)
            if plan[0] is None:
                return slowly(*given)
            found = plan[0](*arrays)
            return plans.made(plan, found) if found.dtype is plan[1] else slowly(*given)

        return call

    return quickened


_HINTS = frozenset(("cache_modifier", "eviction_policy", "volatile"))
"""Arguments that the interpreter ignores, once Triton has checked them."""


def _loading(slowly: Any, interpreter: Any) -> Any:
    """``tl.load`` through pointers, with a number or nothing where a mask leaves elements out."""
    plans, held = _Plans(interpreter), interpreter._get_np_dtype

    def quick(pointer: Any, other: Any) -> Any:
        if not pointer.dtype.is_ptr() or pointer.dtype.element_ty.is_block() or pointer.dtype.element_ty is tl.int1:
            return None
        dtype = held(pointer.dtype.element_ty)
        is_zero = not other
        if not is_zero and pointer.dtype.element_ty.name not in _NUMERIC:
            return None

        def read(at: Any, where: Any) -> Any:
            at, where = _of_one_shape(at, where)
            left_out = np.zeros(at.shape, dtype) if is_zero else np.full(at.shape, other, dtype)
            return interpreter._interpreter.load(at, where, left_out, dtype)

        return read

    def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        is_masked = type(mask) is tl.tensor
        if not (is_masked or mask is None) or not (other is None or _is_number(other)) or not hints.keys() <= _HINTS:
            return slowly(pointer, mask, other, **hints)
        key = id(pointer.type), id(mask.type) if is_masked else None, str(other), *hints.values()
        plan = plans.get(key)
        if plan is not None and plan[0] is None:
            return slowly(pointer, mask, other, **hints)
        given = pointer.handle.data, mask.handle.data if is_masked else np.ones(pointer.handle.data.shape, bool)
        if plan is None:
            types = pointer.type, getattr(mask, "type", None)
            right = slowly(pointer, mask, other, **hints)
            return plans.learn(key, types, right, quick(pointer, other), *given)
        return plans.made(plan, plan[0](*given))

    return load


def _storing(slowly: Any, interpreter: Any) -> Any:
    """``tl.store`` through pointers, of values that have the type of what is there."""
    kept: dict[Any, Any] = {}

    def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> Any:
        is_masked = type(mask) is tl.tensor
        if type(value) is not tl.tensor or not (is_masked or mask is None) or not hints.keys() <= _HINTS:
            return slowly(pointer, value, mask, **hints)
        key = id(pointer.type), id(value.type), id(mask.type) if is_masked else None, *hints.values()
        if key not in kept:
            if len(kept) >= _TYPES:
                kept.clear()
            stored = slowly(pointer, value, mask, **hints)
            is_quick = pointer.dtype.is_ptr() and pointer.dtype.element_ty is value.dtype is not tl.int1
            kept[key] = is_quick, stored, pointer.type, value.type, getattr(mask, "type", None)
            return stored
        is_quick, stored, *_ = kept[key]
        if not is_quick:
            return slowly(pointer, value, mask, **hints)
        at, data = _of_one_shape(pointer.handle.data, value.handle.data)
        where = mask.handle.data if is_masked else np.ones(at.shape, bool)
        interpreter._interpreter.store(at, data, _of_one_shape(at, where)[1])
        return stored

    return store


def _of_one_shape(one: Any, other: Any) -> Any:
    return (one, other) if one.shape == other.shape else np.broadcast_arrays(one, other)


def _constant(slowly: Any, interpreter: Any) -> Any:
    """A tensor that follows from sizes and numbers: its array is kept, as no operation writes to one."""
    kept: dict[Any, Any] = {}

    def call(*given: Any, **named: Any) -> Any:
        plain = [each.value if type(each) is tl.constexpr else each for each in given]
        if plain and isinstance(plain[0], list | tuple):
            plain[0] = tuple([each.value if type(each) is tl.constexpr else each for each in plain[0]])
        if named or not all(isinstance(each, int | float | tuple | tl.dtype) for each in plain):
            return slowly(*given, **named)
        key = str(plain)  # which tells 0.0 from -0.0, 0 and False
        if key not in kept:
            if len(kept) >= _TYPES:
                kept.clear()
            kept[key] = slowly(*given)
        found = kept[key]
        return tl.tensor(interpreter.TensorHandle(found.handle.data, found.handle.dtype), found.type)

    return call


_FUNCTIONS = {
    "load": _loading,
    "store": _storing,
    "where": _elementwise(dict.fromkeys(_NUMERIC, np.where)),
    "maximum": _elementwise({**dict.fromkeys(_WHOLE, np.maximum), "fp32": np.fmax}),
    "minimum": _elementwise({**dict.fromkeys(_WHOLE, np.minimum), "fp32": np.fmin}),
    "div_rn": _elementwise({"fp32": np.divide}),
    "arange": _constant,
    "full": _constant,
}
"""Functions of ``triton.language`` that have a quick form."""


def _finding_them_once(interpreter: Any) -> Any:
    """Look up once, at the first launch, the members of a module or class that are builtins."""

    @functools.cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    return patch_builtin


# Functions


def _rewriting_once(interpreter: Any) -> Any:
    """Rewrite and compile functions of one text once: copies of a kernel's file differ in a line."""

    @functools.lru_cache(maxsize=_TYPES)
    def rewritten(transform: Any, text: str) -> CodeType:
        rewriter = interpreter.FunctionRewriter(None)
        rewriter.def_file_lineno = 1
        return compile(rewriter._transform_ast(text), "<kernel>", "exec")

    def rewrite(self: Any) -> Any:
        function = self.fn
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):  # it has no text, and is interpreted as it is
            return function
        self.def_lineno = self._find_def(lines)
        code = rewritten(self.ast_transformer, self._prepare_source(lines))
        names = function.__globals__
        for name, value in vars(interpreter).items():  # what rewritten code calls
            names.setdefault(name, value)
        made = {**self.kwargs}
        exec(_placed(code, function.__code__.co_filename, first + self.def_lineno - 2), names, made)
        return made[function.__name__]

    return rewrite


def _placed(code: CodeType, file: str, lines: int) -> CodeType:
    """The code as a traceback has it: of a file, so many lines further down."""
    constants = tuple([_placed(each, file, lines) if isinstance(each, CodeType) else each for each in code.co_consts])
    return code.replace(co_filename=file, co_firstlineno=code.co_firstlineno + lines, co_consts=constants)
