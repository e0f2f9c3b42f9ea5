"""Make Triton's interpreter (``TRITON_INTERPRET=1``) quicker, with the same results. For Triton 3.6 to 3.9.

A kernel there is thousands of operations on a few hundred numbers each. Most of the time is not spent in numpy but
around it: types and shapes are built anew for each operation. They are remembered here, which makes checks more than
three times as fast.
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
    _keep_block_types(core.block_type)
    core.tensor.__init__ = _init_by_type(core.tensor.__init__)
    semantic.computation_type_impl = _memo(
        semantic.computation_type_impl, lambda self, a, *rest: (a.name, rest[0], rest[1].name, *rest[2:])
    )
    interpreter._get_np_dtype = _memo(interpreter._get_np_dtype, lambda dtype: dtype.scalar.name)
    interpreter._patch_attr = _calling_once(interpreter)
    interpreter.FunctionRewriter.rewrite_ast = _rewriting_once(interpreter)


def quiet() -> None:
    """Suppress warnings of arithmetic: kernels are checked on infinities and NaN."""
    modules = r"fp8tune\.interpreter\.quick|triton\.runtime\.interpreter"
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=modules)


_TYPES = 4096  # most types that are remembered: each launch makes new ones for its pointers


# Types


def _leaving_plain_values(unwrap: Any) -> Any:
    constexpr, plain = tl.constexpr, frozenset((int, bool, float, str, type(None), tl.tensor))

    @functools.wraps(unwrap)
    def unwrapped(operands: Any) -> Any:
        kind = type(operands)
        if kind in plain:
            return operands
        return operands.value if kind is constexpr else unwrap(operands)

    return unwrapped


def _keep_block_types(block_type: Any) -> None:
    """Make one object for each element type and shape, so that equal types are the same one."""
    cached: dict[Any, Any] = {}
    build = block_type.__init__

    def new(cls: Any, *operands: Any, **named: Any) -> Any:
        if len(operands) != 2:  # of copying, or by keywords
            return object.__new__(cls)
        element, shape = operands
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element.name, getattr(element, "address_space", None), sizes
        if key not in cached:
            made = object.__new__(cls)
            build(made, element, list(sizes))
            cached[key] = made
        return cached[key]

    def init(self: Any, *operands: Any, **named: Any) -> None:
        if "shape" not in self.__dict__:
            build(self, *operands, **named)

    block_type.__new__, block_type.__init__ = new, init


def _init_by_type(build: Any) -> Any:
    """Copy what a tensor says of its type from the first tensor of that type."""

    def init(self: Any, handle: Any, dtype: Any) -> None:
        known = vars(dtype).get("_known")
        if known is None:
            build(self, handle, dtype)
            dtype._known = {name: value for name, value in vars(self).items() if name != "handle"}
            return
        vars(self).update(known)
        self.handle = handle

    return init


# What surrounds an operation


def _memo(function: Any, key: Any) -> Any:
    """Remember the results of a function by a key of its arguments."""
    memo: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        name = key(*arguments)
        if name not in memo:
            memo[name] = function(*arguments)
        return memo[name]

    return call


def _calling_once(interpreter: Any) -> Any:
    """Call what is inside ``tl.core.builtin``, whose one check is whether ``_semantic`` is there. What stands in the
    place of a member is made at the first launch."""
    checks, semantic = tl.core.builtin(lambda: None).__code__, interpreter.interpreter_semantic
    cached: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def calling(owner: Any, name: str, member: Any) -> Any:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*operands: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*operands, **named)

        return _quickened(owner, name, call, interpreter)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        result = cached.get((owner, name))
        if result is None or result[0] is not member:
            result = cached[owner, name] = member, calling(owner, name, member)
        scope.set_attr(owner, name, result[1])

    return patch_attr


# Operations


def _quickened(owner: Any, name: str, slowly: Any, interpreter: Any) -> Any:
    """The quick form of an operation; Triton's own way where there is none."""
    if owner is tl.tensor and name in _OPERATORS:
        return _operator(_OPERATORS[name], slowly, interpreter)
    if owner is tl.tensor and name == "to":
        return _casting(slowly, interpreter)
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
        self._plans: dict[Any, Any] = {}

    def result(self, key: Any, operands: Any, arrays: Any, slowly: Any, choose: Any) -> Any:
        """Return the tensor of an operation.

        ``key``: the types of operands, by their place in memory; ``arrays``: numpy's operands; ``slowly``: Triton's own
        way; ``choose``: a function that returns numpy's, or None where there is none.
        """
        plan = self._plans.get(key)
        if plan is None:
            return self._learned(key, operands, arrays, slowly(), choose())
        function, dtype, scalar, known, _ = plan
        result = None if function is None else function(*arrays)
        if result is None or result.dtype != dtype:
            return slowly()
        handle, made = object.__new__(self._handle), object.__new__(tl.tensor)
        handle.data, handle.dtype, handle.attr = result, scalar, {}
        made.__dict__.update(known)
        made.handle = handle
        return made

    def _learned(self, key: Any, operands: Any, arrays: Any, right: Any, function: Any) -> Any:
        """Keep a plan if the function's array is that of the right tensor; return the tensor of a plan, else that one.

        Both have the same bytes, but maybe not the same memory layout, which decides the order of sums.
        """
        if len(self._plans) >= _TYPES:
            self._plans.clear()
        types = [getattr(operand, "type", operand) for operand in operands]
        self._plans[key] = (*[None] * 4, types)
        if function is not None and type(right) is tl.tensor:
            result, data = function(*arrays), right.handle.data
            if result.dtype == data.dtype and result.tobytes() == data.tobytes():
                known = {name: value for name, value in right.__dict__.items() if name != "handle"}
                self._plans[key] = function, result.dtype, right.handle.dtype, known, types
                return self.result(key, operands, arrays, None, None)
        return right


def _truncated(x: Any, y: Any) -> Any:
    """Integer division as Triton has it, rounded towards zero."""
    return (x - np.fmod(x, y)) // y


_NUMERIC = frozenset(("int32", "int64", "fp32"))
_WHOLE = frozenset(("int32", "int64"))
_BITS = frozenset(("int1", "int32", "int64"))
_BOTH_WAYS: dict[str, tuple[Any, frozenset[str]]] = {
    "add": (np.add, _NUMERIC),
    "sub": (np.subtract, _NUMERIC),
    "mul": (np.multiply, _NUMERIC),
    "truediv": (np.divide, frozenset(("fp32",))),
    "floordiv": (_truncated, _WHOLE),
    "mod": (np.fmod, _WHOLE),
}
_ONE_WAY: dict[str, tuple[Any, frozenset[str]]] = {
    "lshift": (np.left_shift, _WHOLE),
    "rshift": (np.right_shift, _WHOLE),
    "lt": (np.less, _NUMERIC),
    "le": (np.less_equal, _NUMERIC),
    "gt": (np.greater, _NUMERIC),
    "ge": (np.greater_equal, _NUMERIC),
    "eq": (np.equal, _NUMERIC),
    "ne": (np.not_equal, _NUMERIC),
    "and": (np.bitwise_and, _BITS),
    "or": (np.bitwise_or, _BITS),
}
# Operators -> the function of arrays and the types it is quick for: those that numpy holds as they are.
_OPERATORS = {
    **{f"__{name}__": entry for name, entry in (_BOTH_WAYS | _ONE_WAY).items()},
    **{f"__r{name}__": (lambda x, y, f=f: f(y, x), types) for name, (f, types) in _BOTH_WAYS.items()},
}

_INTEGERS = range(-(2**31), 2**31)  # Python integers that Triton takes for int32


def _is_number(operands: Any) -> bool:
    """A number that numpy takes as Triton does, which before 3.9 makes a negative zero a positive one."""
    kind = type(operands)
    if kind is float:
        return operands != 0 or math.copysign(1, operands) > 0
    # A loop counts in a subclass of int, which a range would look for one by one.
    return issubclass(kind, int) and kind is not bool and int(operands) in _INTEGERS


def _planned(slowly: Any, interpreter: Any, choose: Any) -> Any:
    """Return the quick form of a function that takes tensors, numbers or types; ``choose`` returns numpy's."""
    plans, builder = _Plans(interpreter), interpreter.interpreter_builder

    def call(*operands: Any, **named: Any) -> Any:
        key: list[Any] = []
        arrays: list[Any] = []
        for operand in operands:
            kind = type(operand)
            if kind is tl.constexpr:
                operand = operand.value
                kind = type(operand)
            if kind is tl.tensor:
                key.append(id(operand.type))
                arrays.append(operand.handle.data)
            elif kind is tl.dtype:
                key.append(id(operand))
            elif _is_number(operand):
                key.append(kind)
                arrays.append(operand if kind is float else int(operand))
            else:
                return slowly(*operands, **named)
        if builder.options.debug or (named and [*named] != ["bitcast"]):  # debugging looks for overflows
            return slowly(*operands, **named)
        key += named.values()

        def slow() -> Any:
            return slowly(*operands, **named)

        return plans.result(tuple(key), operands, arrays, slow, lambda: choose(*operands, **named))

    return call


def _operator(operator: tuple[Any, frozenset[str]], slowly: Any, interpreter: Any) -> Any:
    """Return the quick form of an operator on tensors, or a tensor and a number. Numpy broadcasts as Triton does."""
    function, names = operator

    def choose(x: Any, y: Any) -> Any:
        y = y.value if type(y) is tl.constexpr else y
        if x.dtype.is_ptr() and function in (np.add, np.subtract):
            size = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
            offsets = type(y) is not tl.tensor or y.dtype.name in _WHOLE
            return (lambda at, by: function(at, size * np.asarray(by).astype(np.uint64))) if offsets else None
        known = x.dtype.name in names and (type(y) is not tl.tensor or y.dtype.name in names)
        return function if known else None

    return _planned(slowly, interpreter, choose)


def _casting(slowly: Any, interpreter: Any) -> Any:
    """``tensor.to`` between integers and float32, from bfloat16, and of bits."""

    def choose(x: Any, dtype: Any, bitcast: bool = False) -> Any:
        dtype = dtype.value if type(dtype) is tl.constexpr else dtype
        held = interpreter._get_np_dtype(dtype)
        if bitcast:
            return lambda data: data.view(held)
        if (x.dtype.name, dtype.name) == ("bf16", "fp32"):
            return lambda data: (data.astype(np.uint32) << 16).view(np.float32)
        return (lambda data: data.astype(held)) if {x.dtype.name, dtype.name} <= _NUMERIC | {"int1"} else None

    return _planned(slowly, interpreter, choose)


def _elementwise(functions: dict[str, Any]) -> Any:
    """Return the quick form of a function by the type of the tensors or numbers, as many as come."""

    def choose(*operands: Any) -> Any:
        names = {operand.type.scalar.name for operand in operands if type(operand) is tl.tensor} - {"int1"}
        return functions.get(names.pop()) if len(names) == 1 else None

    return lambda slowly, interpreter: _planned(slowly, interpreter, choose)


_HINTS = frozenset(("cache_modifier", "eviction_policy", "volatile"))
"""Arguments that the interpreter ignores, once Triton has checked them."""


def _loading(slowly: Any, interpreter: Any) -> Any:
    """``tl.load`` through pointers, with a number or nothing where a mask leaves elements out."""
    plans, held = _Plans(interpreter), interpreter._get_np_dtype

    def quick(pointer: Any, filler: Any) -> Any:
        if not pointer.dtype.is_ptr() or pointer.dtype.element_ty.is_block() or pointer.dtype.element_ty is tl.int1:
            return None
        dtype = held(pointer.dtype.element_ty)
        is_zero = not filler
        if not is_zero and pointer.dtype.element_ty.name not in _NUMERIC:
            return None

        def read(at: Any, where: Any) -> Any:
            at, where = _of_one_shape(at, where)
            left_out = np.zeros(at.shape, dtype) if is_zero else np.full(at.shape, filler, dtype)
            return interpreter._interpreter.load(at, where, left_out, dtype)

        return read

    def load(pointer: Any, mask: Any = None, *fillers: Any, **hints: Any) -> Any:
        if len(fillers) > 1:
            return slowly(pointer, mask, *fillers, **hints)
        filler = fillers[0] if fillers else hints.pop("other", None)
        if type(filler) is tl.constexpr:
            filler = filler.value
        is_masked = type(mask) is tl.tensor
        if not (is_masked or mask is None) or not (filler is None or _is_number(filler)) or not hints.keys() <= _HINTS:
            return slowly(pointer, mask, filler, **hints)
        key = id(pointer.type), id(mask.type) if is_masked else None, str(filler), *hints.values()
        arrays = pointer.handle.data, mask.handle.data if is_masked else np.ones(pointer.handle.data.shape, bool)

        def slow() -> Any:
            return slowly(pointer, mask, filler, **hints)

        return plans.result(key, (pointer, mask), arrays, slow, lambda: quick(pointer, filler))

    return load


def _of_one_shape(first: Any, second: Any) -> Any:
    return (first, second) if first.shape == second.shape else np.broadcast_arrays(first, second)


def _chosen_codes(where: Any, x: Any, y: Any) -> Any:
    """``np.where`` of uint8; None for numbers that Triton refuses and numpy wraps."""
    return np.where(where, x, y) if all(type(item) is not int or 0 <= item < 256 for item in (x, y)) else None


_FUNCTIONS = {
    "load": _loading,
    "where": _elementwise({**dict.fromkeys(_NUMERIC, np.where), "uint8": _chosen_codes}),
    "maximum": _elementwise({**dict.fromkeys(_WHOLE, np.maximum), "fp32": np.fmax}),
    "minimum": _elementwise({**dict.fromkeys(_WHOLE, np.minimum), "fp32": np.fmin}),
}
"""Functions of ``triton.language`` that have a quick form."""


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
    constants = tuple([_placed(item, file, lines) if isinstance(item, CodeType) else item for item in code.co_consts])
    return code.replace(co_filename=file, co_firstlineno=code.co_firstlineno + lines, co_consts=constants)
