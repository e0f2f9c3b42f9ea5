"""A recorded kernel as an ordinary KernelSpec: its configs are the grid, its launches are the problems."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.records import RECORDED, NamedInts, Problem, is_recorded
from fp8tune.replay import configs, problems, sizes
from fp8tune.replay.case import Case, Storage
from fp8tune.replay.launching import Launcher
from fp8tune.replay.recording import Kernel, Launch, as_json
from fp8tune.replay.values import Unrecordable, config_of
from fp8tune_kernels.spec import Edge, KernelSpec, Tolerance
from fp8tune_kernels.tuners import chain, tuner_of

SMALL = 2**20  # elements of a problem that Triton's interpreter runs as it is, and of an edge case

ADDRESSES = range(2**32, 2**57)
"""Addresses of memory. Asked only of launches whose code nobody could read: the default seed of torch is in it too."""

TOLERANCES = {
    **{"float64": 1e-7, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1.6e-2},
    **{"float8_e4m3fn": 0.125, "float8_e4m3fnuz": 0.125, "float8_e5m2": 0.25, "float8_e5m2fnuz": 0.25},
}
"""Output dtype -> the relative bound where the user names none: two units in the last place, more from float32 on."""

Hook = Callable[[Mapping[str, int], tuple[Any, ...], tuple[Any, ...]], None]


@dataclass(frozen=True)
class RecordedSpec(KernelSpec):
    """Spec of a kernel that declares none."""

    kernel: Kernel = field(default_factory=lambda: Kernel(""))
    """The recorded kernel; a bare function has the configs of its launches."""
    launches: Mapping[Problem, tuple[Launch, ...]] = field(default_factory=dict)
    """Problem -> its launch, or the launches that share a config and are timed one after the other."""
    module: str = ""  # the module that defines its function, in this process
    agrees: bool = False  # True if outputs are compared with the first config, because no reference was named
    untried_sizes: str = ""  # the reason why nothing is checked on other sizes than were recorded, if so
    has_odd_sizes: bool = False  # True if any launch is checked on other sizes
    hook: Hook | None = None  # (config, inputs, outputs), called after `prepare`: the kernel's own `pre_hook`
    unlisted: Callable[[Mapping[str, int], Problem], str | None] = lambda config, problem: None
    """``(config, problem)`` -> the reason why a declared config does not belong to a launch."""
    notices: tuple[str, ...] = ()  # launches that are left out, and what else the user should know

    @property
    def check_text(self) -> str:
        """Return the check as rows name it. Without a reference nothing is computed in float64."""
        text = super().check_text
        return f"{text.removesuffix(' of float64')} to the first config" if self.agrees else text

    def bytes_of(self, problem: Problem) -> int:
        """Return the bytes that the launches of a problem move: two problems may have the same shape."""
        return int(self.inputs(problem, "meta")[-1].bytes_moved())

    def document(self, problem: Problem) -> str:
        """Return the launches of a problem as JSON, without the values of tensors; empty for one at other sizes."""
        launches = self.launches.get(replace(problem, seed=0), ())
        light = [replace(launch.without_values(), addresses=None) for launch in launches]
        if not light:
            return ""
        launch = replace(light[0], shared=tuple(light[1:]))
        return json.dumps({"kernel": as_json(replace(self.kernel, launches=())), "launch": as_json(launch)})

    def first(self, problem: Problem) -> NamedInts:
        """Return the config listed first of those that the kernel does not prune."""
        listed = (config for config in self.configs if not self.unlisted(config, problem))
        runnable = (c for c in listed if not self.invalid(c, problem.shape, None))  # type: ignore[arg-type]
        return next(runnable, self.default)

    def is_small(self, problem: Problem) -> bool:
        """Return True if Triton's interpreter can run it, itself or at odd sizes."""
        return self.scaled_down(problem) != problem or _elements(self.launches[replace(problem, seed=0)]) <= SMALL


def build(
    kernel: Kernel,
    function: Any,
    *,
    check: str = "",
    tolerance: Tolerance | None = None,
    reference: Callable[..., Any] | None = None,
    make_inputs: Callable[..., Mapping[str, Any]] | None = None,
    only_recorded_sizes: bool = False,
    shared: Sequence[str] = (),
) -> RecordedSpec:
    """Return the spec of a kernel that was recorded, and that its module has as ``function``.

    ``make_inputs(config, **arguments)`` returns tensors by name that take the place of inputs for this config, and may
    return ``grid``. ``shared``: arguments of which launches with equal values share a config.
    Raises UsageError for a kernel that cannot be swept.
    """
    kernel, left_out = repeatable(kernel)
    kernel, changed = _as_in_code(kernel, function)
    kernel = kernel if kernel.is_autotuned and kernel.configs else configs.as_autotuned(kernel)
    launcher = Launcher(kernel, function, check == "exact-inputs", make_inputs)
    kernel = launcher.with_pruner_configs()
    launches = problems.problems(kernel, shared)
    grid = tuple(dict.fromkeys(configs.encoded(kernel, config) for config in configs.swept(kernel)))
    is_resized = not (only_recorded_sizes or kernel.pruner_configs)
    resized = {launch.id: sizes.odd(launch) for launch in kernel.launches} if is_resized else {}
    work = _Work(kernel, launcher, launches, grid, shared, resized)
    written = [item for launch in kernel.launches for item in launch.tensors if item.is_stored is not False]
    check = check or ("exact" if all(item.is_integer for item in written) else "tolerance")
    bound = (tolerance or _tolerance(kernel)) if check == "tolerance" else None
    return RecordedSpec(
        name=kernel.name,
        axes=configs.axes(kernel),
        default=grid[0],
        key=problems.key(kernel, shared),
        problems=lambda row: iter(()),
        inputs=lambda problem, device: launcher.case(work.launches_of(problem), device).inputs(problem.seed),
        outputs=lambda *inputs: inputs[-1].outputs(),
        launch=launcher.launch,
        reference=partial(_named_reference, reference, bool(bound)) if reference else partial(work.agreed, bound),
        invalid=lambda config, shape, limits: launcher.pruned(work.at_shape(shape), config),
        edges=work.edges,
        scaled_down=work.scaled_down,
        check=check,
        tolerance=bound,
        prepare=lambda inputs, outputs: inputs[-1].prepare(inputs, outputs),
        configs=grid,
        recorded=tuple(launches),
        bytes_moved=lambda shape: launcher.case(work.at_shape(shape), "meta").bytes_moved(),
        kernel=kernel,
        launches=launches,
        module=str(getattr(list(chain(function))[-1], "__module__", "")),
        agrees=reference is None,
        untried_sizes=next((reason for reason in resized.values() if isinstance(reason, str)), ""),
        has_odd_sizes=bool(work.odd),
        hook=launcher.hook if launcher.has_hook else None,
        unlisted=lambda config, problem: launcher.unlisted(work.launches_of(problem), config),
        notices=(*left_out, *changed, *_notices(kernel, launcher.autotuner)),
    )


def repeatable(kernel: Kernel) -> tuple[Kernel, tuple[str, ...]]:
    """Return the kernel with the launches that can be repeated, and why others are left out.

    Raises UsageError if none can.
    """
    if kernel.refusal:
        raise UsageError(f"{kernel.name} cannot be swept: {kernel.refusal}")
    if not kernel.launches:
        raise UsageError(f"{kernel.name} was launched in no process of the recording: record a run that uses it")
    reasons = {item.id: why for item in kernel.launches if (why := _address_reason(item) or _unread_reason(item))}
    counts, total = Counter(reasons.values()), len(kernel.launches)
    left_out = tuple(f"{count} of {total} launches left out: {why}" for why, count in counts.items())
    known = tuple(launch for launch in kernel.launches if launch.id not in reasons)
    if not known:
        raise UsageError(f"{kernel.name} cannot be swept: {left_out[0]}")
    return replace(kernel, launches=known), left_out


def _as_in_code(kernel: Kernel, function: Any) -> tuple[Kernel, tuple[str, ...]]:
    """Return the kernel with the configs that the code declares now, and a notice if they are not the recorded ones.

    Raises UsageError where a recorded argument is no longer one.
    """
    parameters = next((item.arg_names for item in chain(function) if hasattr(item, "arg_names")), ())
    names = {item.name.partition("[")[0] for launch in kernel.launches for item in launch.arguments}
    if missing := sorted(names - set(parameters)):
        raise UsageError(f"{kernel.name} has changed: it has no argument {missing[0]!r} any more: record it again")
    try:
        declared = tuple(map(config_of, getattr(tuner_of(function), "configs", ())))
    except Unrecordable:
        return kernel, ()
    if not declared or kernel.configs == declared:
        return kernel, ()
    notice = "it changed since it was recorded: its configs are taken from the code, its sizes from the recording"
    return replace(kernel, configs=declared), (notice,)


def _notices(kernel: Kernel, autotuner: Any) -> Iterator[str]:
    if getattr(autotuner, "perf_model", None) is not None:
        yield "its perf_model and top_k are not used: every config is timed"
    if kernel.pruner_configs:
        yield (
            "its early_config_prune makes configs, which are swept instead of the declared ones, and not checked on "
            "odd sizes: they are made for the sizes of a launch"
        )
    if stale := [name for name in kernel.key if name not in kernel.parameters] if kernel.parameters else []:
        yield f"its key names {stale[0]!r}, which is no argument: Triton 3.9 rejects that; remove it from the key"
    if any(launch.is_traced for launch in kernel.launches):
        yield (
            "torch.compile launches copies of it: the kernel itself is swept, with random values; the copies take the "
            "pick once it is in the code"
        )
    if not kernel.is_autotuned and any(not launch.grid.axes for launch in kernel.launches):
        yield "its grid does not follow block sizes, so only num_warps and num_stages can vary: pass a function as grid"


@dataclass(frozen=True)
class _Work:
    """Functions of a spec, with the data that they share."""

    kernel: Kernel
    launcher: Launcher
    launches: dict[Problem, tuple[Launch, ...]]
    grid: tuple[NamedInts, ...]
    shared: Sequence[str]
    resized: Mapping[str, Launch | str]  # id of a launch -> the same at odd sizes, or the reason why there is none

    @cached_property
    def odd(self) -> dict[Problem, tuple[Problem, tuple[Launch, ...]]]:
        """Recorded problem -> the one at odd sizes with its launches, where all of them have some."""
        result = {}
        for recorded, launches in self.launches.items():
            resized = [odd for launch in launches if isinstance(odd := self.resized.get(launch.id), Launch)]
            if len(resized) == len(launches):
                odd_shape = problems.problem(self.kernel, resized, problems.ODD, self.shared).shape
                shape = NamedInts([(name, odd_shape.get(name, value)) for name, value in recorded.shape.items()])
                layout = problems.ODD + recorded.input_layout.removeprefix(RECORDED)
                result[recorded] = replace(recorded, shape=shape, input_layout=layout), tuple(resized)
        return result

    @cached_property
    def _every(self) -> dict[Problem, tuple[Launch, ...]]:
        return self.launches | dict(self.odd.values())

    def launches_of(self, problem: Problem) -> tuple[Launch, ...]:
        """Return the launches of a problem, as recorded or at odd sizes."""
        for item, launches in self._every.items():
            if item.input_layout == problem.input_layout:
                return launches
        raise UsageError(f"{self.kernel.name} {problem.shape} is not in the recording: name the one that has it")

    @cached_property
    def _by_shape(self) -> dict[Mapping[str, int], tuple[Launch, ...]]:
        return {problem.shape: launches for problem, launches in reversed(self._every.items())}

    def at_shape(self, shape: Mapping[str, int]) -> tuple[Launch, ...]:
        """Return the launches at recorded or odd sizes; of two problems with one shape the first."""
        return self._by_shape.get(NamedInts(shape), ())

    def edges(self, problem: Problem) -> Iterable[Edge]:
        """Yield odd sizes and contents; contents alone where the sizes are recorded and small."""
        if not is_recorded(problem):
            return
        small = self.scaled_down(problem)
        if odd := self.odd.get(replace(problem, seed=0)):
            small = replace(odd[0], seed=problem.seed)
            yield Edge("odd sizes", small)
        elif _elements(self.launches_of(problem)) > SMALL:
            return
        for content in ("zeros", "nan", "infinite"):
            yield Edge("contents", small, content)

    def scaled_down(self, problem: Problem) -> Problem:
        """Return the problem itself where it is small, else at odd sizes; else as it is, which takes long."""
        odd = self.odd.get(replace(problem, seed=0))
        is_small = odd is None or _elements(self.launches_of(problem)) <= SMALL
        return problem if is_small or odd is None else replace(odd[0], seed=problem.seed)

    def agreed(self, bound: Tolerance | None, *inputs: Any) -> tuple[Any, ...]:
        """Return the outputs of the first config that the kernel runs: what is right where no reference was named."""
        launches = inputs[-1].launches
        listed = [config for config in self.grid if self.launcher.unlisted(launches, config) is None]
        runnable = [config for config in listed if self.launcher.pruned(launches, config) is None]
        return self.launcher.agreed(runnable, inputs, bound)


class _UnusableError(ValueError):
    """A fault of what a reference returns; the text names it."""


def _named_reference(function: Callable[..., Any], is_close: bool, *inputs: Any) -> tuple[Any, ...]:
    """Return what a function of the kernel's arguments returns: a tensor, a tuple, or a dict by name.

    Raises UsageError for whatever is wrong with it: that is no fault of any config.
    """
    case: Case = inputs[-1]
    outputs = case.outputs()
    case.prepare(inputs, outputs)
    results: dict[str, Mapping[str, Any]] = {}
    try:
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters)
        names = {item.name for item in parameters}
        for launch, arguments in zip(case.launches, case.arguments(inputs, outputs), strict=True):
            taken = {name: value for name, value in arguments.items() if takes_all or name in names}
            written = [item.name for storage in case.written if storage.launch is launch for item in storage.arguments]
            written = [item.name for item in launch.tensors if item.name in written and item.is_stored is not False]
            result = function(**{name: _widened(value) if is_close else value for name, value in taken.items()})
            results[launch.id] = _by_name(result, written)
        pairs = zip(case.written, outputs, strict=True)
        return tuple(_expected(storage, output, results[storage.launch.id], is_close) for storage, output in pairs)
    except (Exception, SystemExit) as error:
        where = f"{function.__module__}:{getattr(function, '__name__', function)}"
        reason = str(error) if isinstance(error, _UnusableError) else f"it raised {one_line(error)}"
        raise UsageError(f"--reference {where} cannot be used: {reason}") from error


def _by_name(result: Any, written: Sequence[str]) -> Mapping[str, Any]:
    """Return the tensors of a reference by the argument that each is right for."""
    names = ", ".join(written)
    if not isinstance(result, Mapping):
        tensors = result if isinstance(result, tuple | list) else (result,)
        if len(tensors) != len(written):
            raise _UnusableError(f"it gives {len(tensors)} tensors, the kernel writes {names}: give a dict")
        result = dict(zip(written, tensors, strict=True))
    for name, tensor in result.items():
        if name not in written:
            raise _UnusableError(f"it gives {name!r}, the kernel writes {names}")
        if not hasattr(tensor, "untyped_storage"):
            raise _UnusableError(f"it gives {type(tensor).__name__} for {name}: return a tensor")
    return dict(result)


def _expected(storage: Storage, output: Any, results: Mapping[str, Any], is_close: bool) -> Any:
    """Return an output as the reference has it; what it does not name is what the launch finds there."""
    expected = output.double() if is_close and output.dtype.is_floating_point else output
    for argument in (argument for argument in storage.arguments if argument.name in results):
        result, name = results[argument.name], argument.name
        if tuple(result.shape) != argument.shape:
            raise _UnusableError(f"its {name} has the shape {tuple(result.shape)}, the kernel's {argument.shape}")
        if storage.is_flat:
            start = expected.storage_offset() + argument.offset
            expected.as_strided(argument.shape, argument.strides, start).copy_(result)
        elif is_close or result.dtype == output.dtype:
            return result.double() if is_close and expected.is_floating_point() else result
        else:
            dtypes = f"{result.dtype}, the kernel's {output.dtype}"
            raise _UnusableError(f"its {name} is {dtypes}: return that, or add --tolerance RTOL,ATOL")
    return expected


def _widened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return value.double() if getattr(getattr(value, "dtype", None), "is_floating_point", False) else value


def _unread_reason(launch: Launch) -> str:
    """Name the integer tensors that are read and whose values nobody knows: zeros would be other indices or sizes."""
    read = [item for item in launch.tensors if item.is_integer and 0 not in item.shape and item.is_loaded is not False]
    names = ", ".join(item.name for item in read if item.integers is None and item.least is None)
    cause, fix = "the capture of a CUDA graph", "without graphs"
    if launch.is_traced:
        cause, fix = "torch.compile", "with TORCH_COMPILE_DISABLE=1"
    return names and f"integers in {names} were never read, as in {cause}: record a run {fix}"


def _address_reason(launch: Launch) -> str:
    """Name the arguments with addresses of the recorded process: today they are anything, or memory that is in use."""
    if launch.addresses is not None:
        names = ", ".join(launch.addresses)
        return names and f"{names} holds addresses of the recorded process, which the kernel casts to pointers"
    wide = [item for item in launch.tensors if item.dtype in ("int64", "uint64") and item.is_loaded is not False]
    numbers = {item.name: int(item.most) for item in wide if item.most is not None} | launch.scalars
    names = ", ".join(name for name, value in numbers.items() if type(value) is int and value in ADDRESSES)
    return names and f"{names} may hold addresses of the recorded process: record it again with this fp8tune"


def _tolerance(kernel: Kernel) -> Tolerance:
    """Return the bound where the user names none, from the outputs' dtypes and the longest sum that a launch can have.

    An element is a sum whose terms may cancel, so that its error goes by the size of all outputs, not by its own.
    """
    tensors = [item for launch in kernel.launches for item in launch.tensors]
    outputs = [item for item in tensors if item.is_stored is not False]
    inputs = [item for item in tensors if item.is_loaded is not False and item.shape]
    relative = max((TOLERANCES[item.dtype] for item in outputs if item.dtype in TOLERANCES), default=1e-5)
    smallest = min((max(1, math.prod(item.shape)) for item in outputs), default=1)
    longest = max((max(*item.shape, math.prod(item.shape) // smallest) for item in inputs), default=1)
    # float32 sums in two orders differ by about 2**-24 of their size for each square root of a term
    return Tolerance(relative, rms=max(relative, 4 * 2.0**-24 * math.sqrt(longest)))


def _elements(launches: Sequence[Launch]) -> int:
    return sum(math.prod(argument.shape) for launch in launches for argument in launch.tensors)
