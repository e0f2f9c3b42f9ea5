"""Declare a kernel once: its specification, its operator and the code of a call follow from the declaration.

A kernel file has its Triton function, ``launch``, ``reference``, edge cases and one :func:`kernel`. What every call
does is generated once per kernel as straight code, because a GPU waits for it: check the arguments, read sizes off
their shapes, look the config up, allocate the outputs, launch.

Names are shared: a Triton function's ``x_ptr`` is the argument or output ``x``, its ``M`` the size ``M``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from .. import interpreter
from ..catalog import SPANS
from ..edges import Declaration, declared
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..spec import DTYPE_FLAG, DTYPES, LAYOUT_FLAG, SCALE_MODES, KernelSpec, NamedInts, Problem, bucket
from . import checks
from .launching import launch_kernel
from .lookup import config_for
from .ops import Tensors, define, is_traced

Config = Mapping[str, int]
Shape = Mapping[str, int]
Rows = Callable[[Shape], Iterator[NamedInts]]

FP8_MAX: Mapping[torch.dtype, float] = {dtype: torch.finfo(dtype).max for dtype in checks.FP8_DTYPES}

_binders: dict[Any, Callable[[Call], tuple[Any, Any, Any]]] = {}


class Call(SimpleNamespace):
    """Arguments, sizes and outputs of one call as attributes; an output that is not requested is None.

    Beside those that the kernel declares: ``device``; ``FP8_MAX`` of ``float8_dtype``; flags and integers a second time
    in capitals, as Triton functions name them.
    """

    def replace(self, **changes: Any) -> Call:
        """Return a copy with some attributes changed, to use another kernel's launch or reference."""
        return Call(**{**self.__dict__, **changes})

    def run(self, kernel: Any, programs: int, options: Config, **values: Any) -> None:
        """Launch a Triton function with its parameters by name; nothing without programs. ``values`` add attributes."""
        if programs:
            self.__dict__.update(values)
            bind = _binders.get(kernel.fn) or _binder(kernel.fn, options)
            launch_kernel(kernel, programs, *bind(self), options)


def _binder(function: Any, options: Config) -> Callable[[Call], tuple[Any, Any, Any]]:
    """Generate what reads the tensors, sizes and constants of a Triton function, beside its options, from a call."""
    parameters = inspect.signature(function).parameters.values()
    constants = [each.name for each in parameters if "constexpr" in str(each.annotation)]
    variables = [each.name for each in parameters if each.name not in constants]
    groups = (
        [name.removesuffix("_ptr") for name in variables if name.endswith("_ptr")],
        [name for name in variables if not name.endswith("_ptr")],
        [name for name in constants if name not in options],
    )
    source = ", ".join("(" + "".join(f"call.{name}, " for name in names) + ")" for names in groups)
    _binders[function] = bind = eval(f"lambda call: ({source})")
    return bind  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel and of its operator."""

    name: str
    schema: str = "Tensor"
    """Type in the operator's schema."""
    dims: tuple[str, ...] = ()
    """Sizes that the shape has: ``M``, or a multiple such as ``2 * N``. One that is known already must agree."""
    check: str | Callable[..., Any] = ""
    """A statement, or a function of arguments, sizes and ``device`` by name, before the sizes are read."""
    random: Callable[[Problem, str], Any] = lambda problem, device: None
    """(problem, device) -> a seeded value; on device ``meta`` shapes and strides alone."""
    default: int | None = None
    """Default in the schema; torch leaves out trailing arguments that have it."""


@dataclass(frozen=True)
class Output:
    """One output of a kernel."""

    name: str
    dims: tuple[str, ...] = ()
    """Expressions of sizes."""
    dtype: str = "float8_dtype"
    """An argument, an argument's dtype such as ``q.dtype``, or a name such as ``torch.float32``."""
    requested_by: str = ""
    """An argument: without it, if that is None or False, the output has no elements."""
    transposed: bool = False
    """True if the last two dims lie in memory as their ``.mT``."""
    allocate: Callable[..., torch.Tensor] | None = None
    """A function of arguments, sizes and ``device`` by name, for other layouts."""


# Arguments


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


def tensor(name: str, count: str, dtype: str = "float32", *, optional: bool = False, random: Any = None) -> Argument:
    """Return a contiguous tensor with so many values, an expression of sizes, in any shape."""
    check = f"check_values({name!r}, {name}, {count}, torch.{dtype}, device)"
    if optional:
        check = f"if {name} is not None: {check}"
    fields = {"random": random} if random else {}
    return Argument(name, "Tensor?" if optional else "Tensor", (), check, **fields)


def flag(name: str) -> Argument:
    """Return a bool; a problem's shape may have it as 1."""
    return Argument(name, "bool", random=lambda problem, device: bool(problem.shape.get(name)))


def choice(name: str, names: Sequence[str]) -> Argument:
    """Return one of some names; a problem's shape may have its position."""
    check = f"if {name} not in {tuple(names)!r}: refuse_choice({name!r}, {name}, {tuple(names)!r})"
    return Argument(name, "str", (), check, lambda problem, device: names[problem.shape.get(name, 0)])


OFFSETS = Argument("offs", "Tensor", ("G",), "check_offsets(offs, device, FIRST)", offsets)
"""End row of each group, int32 ``(G,)``. A kernel with this argument is routed: ``offs`` cuts what ``M`` counts."""

FLOAT8_DTYPE = Argument(
    "float8_dtype",
    "ScalarType?",
    (),
    "float8_dtype = fp8_dtype_for(device, float8_dtype)",
    lambda problem, device: dtype_named(problem.fp8_dtype),
)
"""FP8 format of the outputs; None is replaced by that of the arch."""

POWER_OF_TWO = Argument("power_of_two", "bool", random=lambda problem, device: problem.scale_mode == "power-of-two")
"""True for scales that are powers of two. A kernel with this argument has both scale modes."""

ALIGNMENT = Argument(
    "alignment",
    "int",
    (),
    "if alignment != 1: check_alignment(alignment)",
    lambda problem, device: problem.shape.get("alignment", 1),
    1,
)
"""Alignment of the groups in FP8 values: 1, or a power of two from 16 on."""


def check_values(name: str, values: torch.Tensor, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a tensor has so many contiguous values of a dtype on a device."""
    if values.dtype != dtype or values.numel() != count or not values.is_contiguous():
        layout = f"{values.dtype} of shape {tuple(values.shape)} and strides {values.stride()}"
        raise ValueError(f"{name} is {layout}, wanted {count} contiguous values of {dtype}")
    if values.device != device:
        raise ValueError(f"{name} is on {values.device}, wanted {device}")


def refuse_choice(name: str, value: str, names: Sequence[str]) -> None:
    """Raise ValueError for a name that is none of some."""
    raise ValueError(f"{name} is {value!r}, wanted {' or '.join(map(repr, names))}")


def refuse_size(name: str, size: str, found: int, known: int, first: str) -> None:
    """Raise ValueError for a shape that disagrees with an earlier one."""
    raise ValueError(f"{name} has {size}={found}, wanted {size}={known} as {first}")


# Outputs


def fp8(name: str, *dims: str, **fields: Any) -> Output:
    """Return an output of FP8 values."""
    return Output(name, dims, **fields)


def float32(name: str, *dims: str, **fields: Any) -> Output:
    """Return an output of float32 values: scales or sums."""
    return Output(name, dims, "torch.float32", **fields)


# Kernels


@dataclass(frozen=True, eq=False)
class Kernel(KernelSpec):
    """A specification with the functions that were generated of its declaration."""

    schema: str = ""
    """Arguments and results in the operator's schema."""
    checked: Mapping[str, Callable[..., Any]] = None  # type: ignore[assignment]
    """By name: ``gpu``, ``cpu`` and ``fake``, the implementations of the operator; ``run``, without checks."""

    def __call__(self, *inputs: Any, outputs: Tensors | None = None) -> Tensors:
        """Return the outputs on the current device, on inputs that were checked, without a dispatcher."""
        if is_traced(inputs[0]):
            return self.outputs(*inputs) if outputs is None else outputs
        if inputs[0].is_cpu and not interpreter.INTERPRETED:
            right = self.reference(*inputs)
            return right if outputs is None else tuple(map(torch.Tensor.copy_, outputs, right))
        return self.checked["run"](outputs, *inputs)  # type: ignore[no-any-return]

    def define(self, name: str = "", *, replays: bool = False) -> Any:
        """Define the operator, by default ``quantize_NAME``, and return it; ``replays``: see :func:`.ops.define`."""
        name = name or f"quantize_{self.name.replace('-', '_')}"
        functions = [self.checked[device] for device in ("gpu", "cpu", "fake")]
        return define(name + self.schema, *functions, makes_codes=True, replays=replays)


def kernel(
    *,
    name: str,
    arguments: Sequence[Argument],
    outputs: Sequence[Output],
    launch: Callable[[Config, Call], Any],
    reference: Callable[[Call], None],
    problems: Sequence[Mapping[str, str]] | Rows,
    edges: Sequence[Declaration],
    inputs: Callable[[Problem, str], Mapping[str, Any]] = lambda problem, device: {},
    check: Callable[..., None] | None = None,
    rule: str = "exact",
    sizes: Mapping[str, Callable[..., int]] | None = None,
    unwritten: Callable[[Call], None] | None = None,
    constrain: Callable[[Call], None] | None = None,
    **fields: Any,
) -> Kernel:
    """Return the specification of a kernel.

    ``launch`` launches exactly one config and writes every output; ``reference`` writes them in plain torch.
    ``problems``: maps the kernel's sizes to the dims of a layer's row; a mapping per problem, or a function.
    ``inputs``: random arguments by name that depend on each other. ``check``: a function of arguments, sizes and
    ``device`` by name that raises ValueError. ``rule``: the ``check`` of :class:`KernelSpec`. ``sizes``: further sizes,
    likewise. ``unwritten`` and ``constrain``: as in :class:`KernelSpec`, of a call. ``fields``: the other fields of
    :class:`KernelSpec`.
    """
    names = [argument.name for argument in arguments]
    namespace = _compiled(arguments, outputs, fields["key"], check, sizes or {}, launch)
    call_of, empty = namespace["call_of"], namespace["outputs"]

    def reference_outputs(*values: Any) -> Tensors:
        results: Tensors = empty(*values)
        reference(call_of(results, *values))
        return results

    def on_cpu(*values: Any) -> Any:
        namespace["fake"](*values)  # checks
        call = call_of(None, *values)
        if OFFSETS in arguments:
            checks.check_ends(call.offs, call.M)
        with torch.no_grad():  # autograd would follow the reference, and fail at its views
            if interpreter.INTERPRETED:
                return namespace["gpu"](*values)
            if "float8_dtype" in names:
                call.float8_dtype = checks.fp8_dtype_for(call.device, call.float8_dtype)
            results = reference_outputs(*[call.__dict__[name] for name in names])
            return results if len(results) > 1 else results[0]

    def random_inputs(problem: Problem, device: str) -> tuple[Any, ...]:
        made = inputs(problem, device)
        return tuple(made[each.name] if each.name in made else each.random(problem, device) for each in arguments)

    def problems_of(row: Mapping[str, int]) -> Iterator[NamedInts]:
        for mapping in problems if isinstance(problems, Sequence) else ():
            yield NamedInts({size: row[dim] for size, dim in mapping.items()})

    schema = ", ".join(
        f"{each.schema} {each.name}" + ("" if each.default is None else f"={each.default}") for each in arguments
    )
    results = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    derived = {
        "span": SPANS.get(name),
        "check": rule,
        "routed": OFFSETS in arguments,
        "uses_fp8": "float8_dtype" in names,
        "scale_modes": SCALE_MODES if POWER_OF_TWO in arguments else (),
    }
    fields["default"] = NamedInts(fields["default"])
    spec = Kernel(
        name=name,
        problems=problems_of if isinstance(problems, Sequence) else problems,
        inputs=random_inputs,
        outputs=empty,
        launch=lambda config, values, results: launch(config, call_of(results, *values)),
        reference=reference_outputs,
        edges=declared(*edges),
        unwritten=unwritten and (lambda values, results: unwritten(call_of(results, *values))),
        constrain=constrain and (lambda values: constrain(call_of(None, *values))),
        schema=f"({schema}) -> {results}",
        checked={**{function: namespace[function] for function in ("gpu", "fake", "run")}, "cpu": on_cpu},
        **{**derived, **fields},
    )
    namespace["spec"] = spec
    return spec


def _compiled(
    arguments: Sequence[Argument],
    outputs: Sequence[Output],
    key: Sequence[str],
    check: Callable[..., None] | None,
    sizes: Mapping[str, Callable[..., int]],
    launch: Callable[[Config, Call], Any],
) -> dict[str, Any]:
    """Generate and compile the functions of a call; see :func:`kernel` for the names that its code may use."""
    scope: dict[str, Any] = {
        **vars(checks),
        **{"check_values": check_values, "refuse_choice": refuse_choice, "refuse_size": refuse_size, "torch": torch},
        **{"Call": Call, "bucket": bucket, "config_for": config_for, "launch": launch, "LARGEST": FP8_MAX},
        **{"padded_rows": padded_rows, "empty": torch.empty, "empty_strided": torch.empty_strided},
        **{"IN_DTYPE": {getattr(torch, name): place for place, name in enumerate(DTYPES)}},
        "FIRST": arguments[0].name,
    }

    def applied(function: Callable[..., Any], name: str) -> str:
        scope[name] = function
        return f"{name}({', '.join(inspect.signature(function).parameters)})"

    read, read_checked = ([f"device = {arguments[0].name}.device"] for _ in range(2))
    known: set[str] = set()
    for argument in arguments:
        statement = argument.check
        if callable(statement):
            statement = applied(statement, f"check_{argument.name}")
        read_checked += filter(None, [statement])
        if argument.dims:
            targets = []
            for place, (factor, size) in enumerate(map(_parsed, argument.dims)):
                found = f"{argument.name}.shape[{place}]" + (f" // {factor}" if factor > 1 else "")
                if size in known:
                    refusal = f"refuse_size({argument.name!r}, {size!r}, {found}, {size}, FIRST)"
                    read_checked.append(f"if {found} != {size}: {refusal}")
                else:
                    targets.append((size, found, factor))
                    known.add(size)
            if len(targets) == len(argument.dims) and all(factor == 1 for *_, factor in targets):
                lines = [f"{', '.join(argument.dims)}, = {argument.name}.shape"]
            else:
                lines = [f"{size} = {found}" for size, found, _ in targets]
            read += lines
            read_checked += lines
    for size, function in sizes.items():
        line = f"{size} = {applied(function, f'size_{size}')}"
        known.add(size)
        read.append(line)
        read_checked.append(line)
    if check is not None:
        read_checked.append(applied(check, "check_call"))

    allocations = [f"{output.name} = {_allocation(output, arguments, applied)}" for output in outputs]
    names = [*[argument.name for argument in arguments], *sorted(known), "device"]
    values = {name: name for name in names}
    values |= {each.name.upper(): each.name for each in arguments if each.schema in ("bool", "int")}
    if "float8_dtype" in names:
        values["FP8_MAX"] = "LARGEST[float8_dtype]"
    made = {output.name: _if_requested(output, arguments, output.name, "None") for output in outputs}
    call = f"Call({', '.join(f'{name}={value}' for name, value in {**values, **made}.items())})"
    unchecked = {**values, **({"FP8_MAX": "LARGEST.get(float8_dtype)"} if "FP8_MAX" in values else {})}
    results = ", ".join(output.name for output in outputs)
    config = f"config = config_for(spec, ({', '.join(_key_of(name, arguments[0].name) for name in key)},), device)"
    signature = ", ".join(each.name + (f"={each.default}" if each.default is not None else "") for each in arguments)
    returned = f"return {results}" if len(outputs) > 1 else f"return ({results},)"
    run = [config, f"call = {call}", "launch(config, call)"]
    functions = {
        f"call_of(made, {signature})": [
            *read,
            f"if made is None: return Call({', '.join(f'{name}={value}' for name, value in unchecked.items())})",
            f"{results}, = made",
            f"return {call}",
        ],
        f"outputs({signature})": [*read, *allocations, returned],
        f"fake({signature})": [*read_checked, *allocations, f"return {results}"],
        f"run(made, {signature})": [
            *read,
            "if made is None:",
            *[f" {line}" for line in allocations],
            f"else: {results}, = made",
            *run,
            returned,
        ],
        f"gpu({signature})": [*read_checked, *allocations, *run, f"return {results}"],
    }
    source = "\n".join(f"def {head}:\n " + "\n ".join(lines) for head, lines in functions.items())
    exec(compile(source, f"<call of {arguments[0].name}>", "exec"), scope)
    return scope


@functools.cache
def _parsed(dim: str) -> tuple[int, str]:
    """Return the factor and the size of an argument's dim: ``2 * N`` is (2, "N")."""
    factor, _, size = dim.rpartition("*")
    return int(factor or 1), size.strip()


def _key_of(name: str, first: str) -> str:
    """Return the expression of a value of the lookup key."""
    if name == DTYPE_FLAG:
        return f"IN_DTYPE[{first}.dtype]"
    if name == LAYOUT_FLAG:  # by the stride alone: one token must not change it
        return f"int({first}.stride(1) != 1)"
    if name.endswith("_bucket"):
        return f"bucket({name.removesuffix('_bucket')})"
    return name if name.isupper() else f"int({name})"


def _if_requested(output: Output, arguments: Sequence[Argument], value: str, otherwise: str) -> str:
    """Return the expression of a value that depends on the argument that requests the output."""
    if not output.requested_by:
        return value
    is_tensor = any(each.name == output.requested_by and each.schema.startswith("Tensor") for each in arguments)
    return f"{value} if {output.requested_by}{' is not None' * is_tensor} else {otherwise}"


def _allocation(output: Output, arguments: Sequence[Argument], applied: Callable[..., str]) -> str:
    """Return the expression of an uninitialized output."""
    if output.allocate is not None:
        return applied(output.allocate, f"allocate_{output.name}")
    options = f"dtype={output.dtype}, device=device"
    shape = ", ".join(output.dims)
    if output.transposed:
        *outer, rows, columns = (f"({dim})" if re.search(r"\W", dim) else dim for dim in output.dims)
        strides = [*[f"{rows} * {columns}" for _ in outer], "1", rows]
        return f"empty_strided(({shape}), ({', '.join(strides)}), {options})"
    return _if_requested(output, arguments, f"empty({shape}, {options})", f"empty(0, {options})")
