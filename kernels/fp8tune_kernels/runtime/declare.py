"""Declare a kernel once: its specification, its operator and the code of a call follow from the declaration.

A kernel file has its Triton function, ``launch``, ``reference``, edge cases and one :func:`kernel`. What every call
does is generated once per kernel as straight code, because a GPU waits for it: check the arguments, read sizes off
their shapes, look the config up, allocate the outputs, launch.

Names are shared: a Triton function's ``x_ptr`` is the argument or output ``x``, its ``M`` the size ``M``. Functions of
arguments, sizes and ``device`` *by name* are called with what their parameters name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import interpreter
from ..catalog import SPANS
from ..edges import Declaration, declared
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..spec import DTYPE_FLAG, DTYPES, LAYOUT_FLAG, SCALE_MODES, KernelSpec, NamedInts, Problem
from . import checks
from .launching import launch_kernel
from .lookup import config_for
from .ops import Tensors, define, is_traced

Config = Mapping[str, int]
Shape = Mapping[str, int]

_binders: dict[Any, Callable[[Call], tuple[Any, Any, Any]]] = {}


class Call:
    """Arguments, sizes and outputs of one call as attributes; an output that is not requested is None.

    Beside those that the kernel declares: ``device``; ``FP8_MAX`` of ``float8_dtype``; flags and integers a second time
    in capitals, as Triton functions name them. Each kernel has a class with them: its attributes are faster.
    """

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def replace(self, **changes: Any) -> Call:
        """Return a copy with some attributes changed, to use another kernel's launch or reference."""
        return Call(**{**self.__dict__, **changes})

    def run(self, kernel: Any, programs: int, options: Config, **values: Any) -> None:
        """Launch a Triton function with its parameters by name; nothing without programs. ``values`` add attributes."""
        if programs:
            for name, value in values.items():
                setattr(self, name, value)
            bind = _binders.get(kernel.fn) or _binder(kernel.fn, options)
            launch_kernel(kernel, programs, *bind(self), options)


def _binder(function: Any, options: Config) -> Callable[[Call], tuple[Any, Any, Any]]:
    """Generate what reads the tensors, sizes and constants of a Triton function, beside its options, from a call."""
    parameters = inspect.signature(function).parameters.values()
    constants = [item.name for item in parameters if "constexpr" in str(item.annotation)]
    variables = [item.name for item in parameters if item.name not in constants]
    groups = (
        [name.removesuffix("_ptr") for name in variables if name.endswith("_ptr")],
        [name for name in variables if not name.endswith("_ptr")],
        [name for name in constants if name not in options],
    )
    source = ", ".join("(" + "".join(f"call.{name}, " for name in names) + ")" for names in groups)
    _binders[function] = bind = eval(f"lambda call: ({source})")  # attrgetters take 0.3 to 0.9 us more a launch
    return bind  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel and its operator."""

    name: str
    schema: str = "Tensor"
    """Type in the operator's schema."""
    dims: tuple[str, ...] = ()
    """Sizes that the shape has: ``M``, or a multiple such as ``2 * N``. A size that is known already must agree."""
    check: str | Callable[..., Any] = ""
    """A statement, or a function by name, before the sizes are read."""
    random: Callable[[Problem, str], Any] = lambda problem, device: None
    """(problem, device) -> a seeded value; on device ``meta`` shapes and strides alone."""
    default: Any = ...
    """Default in the schema; torch leaves out trailing arguments that have it. None of optional arguments."""


@dataclass(frozen=True)
class Output:
    """An output of a kernel."""

    name: str
    dims: tuple[str, ...] = ()
    """Expressions of sizes."""
    dtype: str = "float8_dtype"
    """An expression: an argument, ``q.dtype``, ``torch.float32``."""
    requested_by: str = ""
    """An argument: if that is None or False, the output has no elements."""
    transposed: bool = False
    """True if the last two dims lie in memory as their ``.mT``."""
    allocate: Callable[..., torch.Tensor] | None = None
    """A function by name, for other layouts."""


def fp8(name: str, *dims: str, **fields: Any) -> Output:
    """Return an output of FP8 values."""
    return Output(name, dims, **fields)


def float32(name: str, *dims: str, **fields: Any) -> Output:
    """Return an output of float32 values."""
    return Output(name, dims, "torch.float32", **fields)


def matrix(name: str, rows: str, columns: str, seed: int = 0, *, or_transposed: bool = False) -> Argument:
    """Return a row-major matrix of bfloat16, float16 or float32; with ``or_transposed``, or the view of one."""

    def random(problem: Problem, device: str) -> torch.Tensor:
        problem = replace(problem, seed=problem.seed + seed)
        if problem.input_layout == "transposed":
            return random_matrix(problem, problem.shape[columns], problem.shape[rows], device).t()
        return random_matrix(problem, problem.shape[rows], problem.shape[columns], device)

    check = f"check_matrix({name!r}, {name}, or_transposed={or_transposed})"
    return Argument(name, "Tensor", (rows, columns), check, random)


def weights(name: str = "w", *, as_stored: bool = False) -> Argument:
    """Return the weights of all experts: the view ``(E, K, N)`` of what lies as ``(E, N, K)``, or what lies so."""

    def random(problem: Problem, device: str) -> torch.Tensor:
        E, N, K = (problem.shape[size] for size in "ENK")
        stored = random_matrix(problem, E * N, K, device).view(E, N, K)
        return stored if as_stored else stored.transpose(1, 2)

    dims = ("E", "N", "K") if as_stored else ("E", "K", "N")
    return Argument(name, "Tensor", dims, f"check_weights({name!r}, {name}, as_stored={as_stored})", random)


def tensor(name: str, count: str, dtype: str = "float32", *, optional: bool = False, **fields: Any) -> Argument:
    """Return a contiguous tensor with so many values, an expression of sizes, in any shape."""
    condition = f"if {name} is not None: " if optional else ""
    check = f"{condition}check_values({name!r}, {name}, {count}, torch.{dtype}, device)"
    return Argument(name, "Tensor?" if optional else "Tensor", (), check, **fields)


def flag(name: str) -> Argument:
    """Return a bool; a problem's shape may have it as 1."""
    return Argument(name, "bool", random=lambda problem, device: bool(problem.shape.get(name)), default=False)


def choice(name: str, names: Sequence[str]) -> Argument:
    """Return one of some names; a problem's shape may have its position."""
    check = f"check_choice({name!r}, {name}, {tuple(names)!r})"
    return Argument(name, "str", (), check, lambda problem, device: names[problem.shape.get(name, 0)], names[0])


OFFSETS = Argument("offs", "Tensor", ("G",), "check_offsets(offs, device, FIRST)", offsets)
"""End row of each group, int32 ``(G,)``. A kernel with this argument is routed: ``offs`` cuts what ``M`` counts."""

FLOAT8_DTYPE = Argument(
    "float8_dtype",
    "ScalarType?",
    check="float8_dtype = fp8_dtype_for(device, float8_dtype)",
    random=lambda problem, device: dtype_named(problem.fp8_dtype),
)
"""FP8 format of the outputs; None is replaced by that of the arch."""

POWER_OF_TWO = Argument(
    "power_of_two", "bool", random=lambda problem, device: problem.scale_mode == "power-of-two", default=True
)
"""True for scales that are powers of two. A kernel with this argument has both scale modes."""

ALIGNMENT = Argument(
    "alignment",
    "int",
    check="check_alignment(alignment)",
    random=lambda problem, device: problem.shape.get("alignment", 1),
    default=1,
)
"""Alignment of the groups in FP8 values: 1, or a power of two from 16 on."""


@dataclass(frozen=True, eq=False)
class Kernel(KernelSpec):
    """A specification with the functions that were generated of its declaration."""

    schema: str = ""
    """Arguments and results in the operator's schema."""
    functions: Mapping[str, Callable[..., Any]] | None = None
    """``gpu``, ``cpu`` and ``fake``: implementations of the operator. ``run``: ``gpu`` without checks."""
    module: str = ""
    """That of the kernel, whose docstring is the operator's."""

    def __call__(self, *inputs: Any, outputs: Tensors | None = None) -> Tensors:
        """Return the outputs on the current device, on inputs that were checked, without a dispatcher."""
        if is_traced(inputs[0]):
            return self.outputs(*inputs) if outputs is None else outputs
        if inputs[0].is_cpu and not interpreter.INTERPRETED:
            results = self.reference(*inputs)
            return results if outputs is None else tuple(map(torch.Tensor.copy_, outputs, results))
        return self.functions["run"](outputs, *inputs)  # type: ignore[index, no-any-return]

    def define(self, name: str = "", *, replays: bool = False) -> Any:
        """Define the operator, by default ``quantize_NAME``, and return it: the public function of the kernel.

        It takes the arguments of the declaration, by position or by name, and returns the outputs, as the docstring of
        the kernel's module describes them. Raises ValueError, before any launch, for other shapes, dtypes, strides or
        devices. ``replays``: see :func:`.ops.define`.
        """
        functions = [self.functions[device] for device in ("gpu", "cpu", "fake")]  # type: ignore[index]
        name = name or f"quantize_{self.name.replace('-', '_')}"
        operator = define(name + self.schema, *functions, makes_codes=True, replays=replays)
        operator.__doc__ = f"{name}{self.schema}\n\n{sys.modules[self.module].__doc__}"
        return operator


def kernel(
    *,
    name: str,
    arguments: Sequence[Argument],
    outputs: Sequence[Output],
    launch: Callable[[Config, Call], Any],
    reference: Callable[[Call], None],
    problems: Sequence[Mapping[str, str]] | Callable[[Shape], Iterator[NamedInts]],
    edges: Sequence[Declaration],
    inputs: Callable[[Problem, str], Mapping[str, Any]] = lambda problem, device: {},
    check: Callable[..., None] | None = None,
    rule: str = "exact",
    sizes: Mapping[str, Callable[..., int]] | None = None,
    unwritten: Callable[[Call], None] | None = None,
    constrain: Callable[[Call], None] | None = None,
    defaults: Mapping[str, Any] = NamedInts(),
    **fields: Any,
) -> Kernel:
    """Return the specification of a kernel.

    ``launch`` launches exactly one config and writes every output; ``reference`` writes them in plain torch.
    ``problems``: a mapping of the kernel's sizes to dims of a layer's row per problem, or a function of the row.
    ``inputs``: random arguments that depend on each other, by name. ``check``: a function by name that raises
    ValueError. ``rule``: the ``check`` of :class:`.spec.KernelSpec`. ``sizes``: functions by name of further sizes.
    ``unwritten``, ``constrain``: as there, of a call. ``defaults``: of arguments that declare none. ``fields``: its
    other fields.
    """
    names = [argument.name for argument in arguments]
    signature = {item.name: defaults.get(item.name, _default(item)) for item in arguments}
    scope = _compiled(arguments, outputs, signature, fields["key"], check, sizes or {}, launch)
    call_of, empty = scope["call_of"], scope["outputs"]

    def reference_outputs(*values: Any) -> Tensors:
        results: Tensors = empty(*values)
        reference(call_of(results, *values))
        return results

    def on_cpu(*values: Any) -> Any:
        call = scope["checked"](*values)
        if OFFSETS in arguments:
            checks.check_ends(call.offs, call.M)
        with torch.no_grad():  # autograd would follow the reference, and fail at its views
            if interpreter.INTERPRETED:
                return scope["gpu"](*values)
            results = reference_outputs(*[call.__dict__[name] for name in names])
            return results if len(results) > 1 else results[0]

    def random_inputs(problem: Problem, device: str) -> tuple[Any, ...]:
        made = inputs(problem, device)
        return tuple(made[item.name] if item.name in made else item.random(problem, device) for item in arguments)

    def problems_of(row: Shape) -> Iterator[NamedInts]:
        for mapping in problems if isinstance(problems, Sequence) else ():
            yield NamedInts({size: row[dim] for size, dim in mapping.items()})

    literals = [f'="{value}"' if isinstance(value, str) else f"={value}" for value in signature.values()]
    schema = ", ".join(
        f"{item.schema} {item.name}{literal.replace('=Ellipsis', '')}"
        for item, literal in zip(arguments, literals, strict=True)
    )
    derived = {
        "span": SPANS.get(name),
        "check": rule,
        "routed": OFFSETS in arguments,
        "uses_fp8": FLOAT8_DTYPE in arguments,
        "scale_modes": SCALE_MODES if POWER_OF_TWO in arguments else (),
    }
    spec = scope["spec"] = Kernel(
        name=name,
        problems=problems_of if isinstance(problems, Sequence) else problems,
        inputs=random_inputs,
        outputs=empty,
        launch=lambda config, values, results: launch(config, call_of(results, *values)),
        reference=reference_outputs,
        edges=declared(*edges),
        unwritten=unwritten and (lambda values, results: unwritten(call_of(results, *values))),
        constrain=constrain and (lambda values: constrain(call_of(None, *values))),
        schema=f"({schema}) -> " + ("Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"),
        functions={**scope, "cpu": on_cpu},
        module=launch.__module__,
        **{**derived, **fields, "default": NamedInts(fields["default"])},
    )
    return spec


def _default(argument: Argument) -> Any:
    return None if argument.default is ... and argument.schema.endswith("?") else argument.default


def _compiled(
    arguments: Sequence[Argument],
    outputs: Sequence[Output],
    defaults: Mapping[str, Any],
    key: Sequence[str],
    check: Callable[..., None] | None,
    sizes: Mapping[str, Callable[..., int]],
    launch: Callable[[Config, Call], Any],
) -> dict[str, Any]:
    """Generate and compile the functions of a call, and return the namespace that they run in."""
    scope: dict[str, Any] = {
        **vars(checks),
        **{"Call": Call, "launch": launch, "config_for": config_for, "padded_rows": padded_rows, "torch": torch},
        **{"FIRST": arguments[0].name, "empty": torch.empty, "empty_strided": torch.empty_strided},
        "IN_DTYPE": {getattr(torch, name): place for place, name in enumerate(DTYPES)},
        "LARGEST": {None: None, **{dtype: torch.finfo(dtype).max for dtype in checks.FP8_DTYPES}},
    }

    def applied(function: Callable[..., Any], name: str) -> str:
        scope[name] = function
        return f"{name}({', '.join(inspect.signature(function).parameters)})"

    first, known = arguments[0].name, list[str]()
    lines = [(f"device = {first}.device", True)]  # a statement, and False if it is a check alone
    for item in arguments:
        if item.check:
            lines.append((applied(item.check, f"check_{item.name}") if callable(item.check) else item.check, False))
        shape, new = f"{item.name}.shape", [dim for dim in item.dims if dim not in known]
        for place, dim in enumerate(item.dims):
            factor, _, size = dim.rpartition(" * ")
            length = f"{shape}[{place}]" + (f" // {factor}" if factor else "")
            if size in known:
                lines.append((f"check_size({item.name!r}, {size!r}, {length}, {size}, FIRST)", False))
            elif len(new) < len(item.dims) or " * " in "".join(item.dims):
                lines.append((f"{size} = {length}", True))
        if item.dims and len(new) == len(item.dims) and " * " not in "".join(item.dims):  # all at once is faster
            lines.append((f"{', '.join(item.dims)}, = {shape}", True))
        known += [size for dim in new if (size := dim.rpartition(" * ")[2]) not in known]
    for size, function in sizes.items():
        lines.append((f"{size} = {applied(function, f'size_{size}')}", True))
        known.append(size)
    if check is not None:
        lines.append((applied(check, "check_call"), False))

    read = [line for line, is_needed in lines if is_needed]
    checked = [line for line, _ in lines]
    allocate = [f"{item.name} = {_allocation(item, arguments, applied)}" for item in outputs]
    values = {name: name for name in (*[item.name for item in arguments], *known, "device")}
    values |= {item.name.upper(): item.name for item in arguments if item.schema in ("bool", "int")}
    if FLOAT8_DTYPE in arguments:
        values["FP8_MAX"] = "LARGEST[float8_dtype]"
    before = f"Call({', '.join(f'{name}={value}' for name, value in values.items())})"
    values |= {item.name: _if_requested(item, arguments, item.name, "None") for item in outputs}
    call = f"Complete({', '.join(values.values())})"
    results = ", ".join(item.name for item in outputs)
    signature = ", ".join(name if value is ... else f"{name}={value!r}" for name, value in defaults.items())
    keys = ", ".join(_key(name, first) for name in key)
    run = [f"config = config_for(spec, ({keys},), device)", f"call = {call}", "launch(config, call)"]
    functions = {
        f"checked({signature})": [*checked, f"return {before}"],
        f"call_of(made, {signature})": [
            *read,
            f"if made is None: return {before}",
            f"{results}, = made",
            f"return {call}",
        ],
        f"outputs({signature})": [*read, *allocate, f"return ({results},)"],
        f"fake({signature})": [*checked, *allocate, f"return {results}"],
        f"gpu({signature})": [*checked, *allocate, *run, f"return {results}"],
        f"run(made, {signature})": [
            *read,
            "if made is None:",
            *[f" {line}" for line in allocate],
            f"else: {results}, = made",
            *run,
            f"return ({results},)",
        ],
    }
    source = f"class Complete(Call):\n def __init__(self, {', '.join(values)}):\n"
    source += "\n".join(f"  self.{name} = {name}" for name in values) + "\n"
    source += "\n".join(f"def {head}:\n " + "\n ".join(body) for head, body in functions.items())
    exec(compile(source, f"<calls of {launch.__module__}>", "exec"), scope)
    return scope


def _key(name: str, first: str) -> str:
    """Return the expression for one value in the lookup key."""
    if name == DTYPE_FLAG:
        return f"IN_DTYPE[{first}.dtype]"
    if name == LAYOUT_FLAG:  # by the stride alone: one token must not change it
        return f"int({first}.stride(1) != 1)"
    if name.endswith("_bucket"):  # :func:`.spec.bucket`
        size = name.removesuffix("_bucket")
        return f"(1 << {size}.bit_length() - 1 if {size} else 0)"
    return name if name.isupper() else f"int({name})"


def _if_requested(output: Output, arguments: Sequence[Argument], value: str, otherwise: str) -> str:
    """Return the expression of a value that depends on the argument that requests the output."""
    if not output.requested_by:
        return value
    is_tensor = any(item.name == output.requested_by and item.schema == "Tensor?" for item in arguments)
    return f"{value} if {output.requested_by}{' is not None' * is_tensor} else {otherwise}"


def _allocation(output: Output, arguments: Sequence[Argument], applied: Callable[..., str]) -> str:
    """Return the expression of an uninitialized output."""
    if output.allocate is not None:
        return applied(output.allocate, f"allocate_{output.name}")
    options, shape = f"dtype={output.dtype}, device=device", ", ".join(output.dims)
    if output.transposed:
        *outer, rows, columns = (f"({dim})" if re.search(r"\W", dim) else dim for dim in output.dims)
        strides = ", ".join([*[f"{rows} * {columns}" for _ in outer], "1", rows])
        return f"empty_strided(({shape}), ({strides}), {options})"
    return _if_requested(output, arguments, f"empty({shape}, {options})", f"empty(0, {options})")
