"""A recorded kernel as an ordinary KernelSpec: its configs are the grid, its launches are the problems."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fp8tune.autotuned import agreement, configs, problems, sizes
from fp8tune.autotuned.bare import as_autotuned
from fp8tune.autotuned.launching import Launcher
from fp8tune.autotuned.tensors import Case, Storage
from fp8tune.errors import UsageError, one_line
from fp8tune.recording import Argument, Kernel, Launch, Tensor, as_json
from fp8tune.records import RECORDED, NamedInts, Problem, is_recorded
from fp8tune_kernels.spec import Edge, KernelSpec, Tolerance

SMALL = 2**20
"""Elements of a problem that Triton's interpreter runs as it is, and of an edge."""

ADDRESSES = range(2**32, 2**57)
"""Where memory lies. Asked only of launches whose code nobody could read: the default seed of torch is in it too."""

PRUNER_NOTICE = (
    "its early_config_prune makes configs, which are swept instead of the declared ones, and not checked on odd sizes: "
    "they are made for the sizes of a launch"
)

TOLERANCES = {
    "float64": 1e-7,
    "float32": 1e-5,
    "float16": 1e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.125,
    "float8_e4m3fnuz": 0.125,
    "float8_e5m2": 0.25,
    "float8_e5m2fnuz": 0.25,
}
"""Output dtype -> the relative bound where the user names none: two units in the last place, more from float32 on."""


@dataclass(frozen=True)
class RecordedSpec(KernelSpec):
    """The spec of a kernel that has none."""

    kernel: Kernel = field(default_factory=lambda: Kernel(""))
    """As recorded; a bare function with the one config that its launches have."""
    launches: Mapping[Problem, Launch] = field(default_factory=dict)
    module: str = ""
    """Where its function is defined, in this process."""
    agrees: bool = False
    """Whether right is what the config declared first gives: no reference was named."""
    untried_sizes: str = ""
    """Why nothing is checked on other sizes than were recorded; empty where it is."""
    has_odd_sizes: bool = False
    """Whether any launch is checked on other sizes."""
    hook: Callable[[Mapping[str, int], tuple[Any, ...], tuple[Any, ...]], None] | None = None
    """``(config, inputs, outputs)``, called after ``prepare``: the kernel's own ``pre_hook``."""
    unlisted: Callable[[Mapping[str, int], Problem], str | None] = lambda config, problem: None
    """``(config, problem) -> reason``: why a config that the kernel declares is none of this launch's."""
    notices: tuple[str, ...] = ()
    """What the user should know: launches that are left out, what of the kernel a sweep does without."""

    @property
    def check_text(self) -> str:
        """What is right, as rows say it. Without a reference nothing is computed in float64."""
        if not self.agrees:
            return super().check_text
        return f"{super().check_text.removesuffix(' of float64')} to the first config"

    moves: Callable[[Problem], int] = field(default=lambda problem: 0)
    """The bytes of a launch; two launches may have the same shape."""

    def bytes_of(self, problem: Problem) -> int:
        """What its tensors hold: the most that the launch moves."""
        return self.moves(problem)

    def document(self, problem: Problem) -> str:
        """The launch of a problem as JSON, without the values of tensors; empty for one at other sizes."""
        launch = self.launches.get(replace(problem, seed=0))
        if launch is None:
            return ""
        arguments = tuple(replace(a, values=None) if isinstance(a, Tensor) else a for a in launch.arguments)
        own = {
            "kernel": as_json(replace(self.kernel, launches=())),
            "launch": as_json(replace(launch, arguments=arguments, addresses=None)),
        }
        return json.dumps(own)

    def first(self, problem: Problem) -> NamedInts:
        """The config listed first of those that the kernel does not prune."""
        listed = (config for config in self.configs if not self.unlisted(config, problem))
        kept = (c for c in listed if not self.invalid(c, problem.shape, None))  # type: ignore[arg-type]
        return next(kept, self.default)

    def is_small(self, problem: Problem) -> bool:
        """Whether Triton's interpreter can run it, itself or at odd sizes."""
        scaled = self.scaled_down(problem)
        return scaled != problem or _elements(self.launches[replace(problem, seed=0)]) <= SMALL


def build(
    kernel: Kernel,
    function: Any,
    *,
    check: str = "",
    tolerance: Tolerance | None = None,
    reference: Callable[..., Any] | None = None,
    only_recorded_sizes: bool = False,
) -> RecordedSpec:
    """The spec of a kernel that was recorded and found in its module as ``function``.

    Raises UsageError for one that cannot be swept.
    """
    kernel, left_out = repeatable(kernel)
    kernel = kernel if kernel.is_autotuned and kernel.configs else as_autotuned(kernel)
    launcher = Launcher(kernel, function, check == "exact-inputs")
    kernel = launcher.with_pruner_configs()
    found = problems.problems(kernel)
    grid = tuple(dict.fromkeys(configs.encoded(kernel, config) for config in configs.swept(kernel)))
    if kernel.pruner_configs:
        only_recorded_sizes = True
    odd = {} if only_recorded_sizes else {launch.id: sizes.odd(kernel, launch) for launch in found.values()}
    untried = next((reason for reason in odd.values() if isinstance(reason, str)), "")
    work = _Work(kernel, launcher, found, grid, {id: made for id, made in odd.items() if isinstance(made, Launch)})
    bound = (tolerance or _tolerance(kernel)) if check == "tolerance" else None
    right: Any = functools.partial(_named_reference, reference, bool(bound)) if reference else work.agreed(bound)
    return RecordedSpec(
        name=kernel.name,
        axes=configs.axes(kernel),
        default=grid[0],
        key=problems.key(kernel),
        problems=_none,
        inputs=work.inputs,
        outputs=_outputs,
        launch=launcher.launch,
        reference=right,
        invalid=work.invalid,
        edges=work.edges,
        scale_modes=(),
        scaled_down=work.scaled_down,
        check=check or "exact",
        tolerance=bound,
        prepare=launcher.prepare,
        configs=grid,
        recorded=tuple(found),
        bytes_moved=work.bytes_moved,
        moves=work.bytes_of,
        kernel=kernel,
        launches=found,
        module=_module(function),
        agrees=reference is None,
        untried_sizes="" if only_recorded_sizes else untried,
        has_odd_sizes=bool(work.odd),
        hook=launcher.hook if launcher.has_hook else None,
        unlisted=work.unlisted,
        notices=tuple(filter(None, (*left_out, launcher.unused, PRUNER_NOTICE if kernel.pruner_configs else ""))),
    )


def repeatable(kernel: Kernel) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel with the launches that can be repeated, and why others are left out.

    Raises UsageError if none can.
    """
    if kernel.refusal:
        raise UsageError(f"{kernel.name} cannot be swept: {kernel.refusal}")
    if not kernel.launches:
        raise UsageError(f"{kernel.name} was launched in no process of the recording: record a run that uses it")
    reasons: dict[str, str] = {}
    for describe in (_address_reason, _unread_reason):
        reasons |= {
            launch.id: why for launch in kernel.launches if launch.id not in reasons and (why := describe(launch))
        }
    counts = Counter(reasons.values())
    total = len(kernel.launches)
    left_out = tuple(f"{count} of {total} launches left out: {reason}" for reason, count in counts.items())
    known = tuple(launch for launch in kernel.launches if launch.id not in reasons)
    if not known:
        raise UsageError(f"{kernel.name} cannot be swept: {left_out[0]}")
    return replace(kernel, launches=known), left_out


def _module(function: Any) -> str:
    while hasattr(function, "fn"):
        function = function.fn
    return str(getattr(function, "__module__", ""))


def is_kernel(found: Any) -> bool:
    """Whether an attribute of a module is a kernel: an Autotuner, Heuristics or a ``@triton.jit`` function."""
    return hasattr(found, "run") and hasattr(found, "fn")


@dataclass(frozen=True)
class _Work:
    """The functions of a spec, with what they share."""

    kernel: Kernel
    launcher: Launcher
    found: Mapping[Problem, Launch]
    grid: tuple[NamedInts, ...]
    odd: Mapping[str, Launch]

    def inputs(self, problem: Problem, device: str) -> tuple[Any, ...]:
        """The tensors that the launch reads, then its :class:`Case`."""
        return self.launcher.case(self.launch_of(problem), device).inputs(problem.seed)

    def launch_of(self, problem: Problem) -> Launch:
        """As recorded, or at odd sizes."""
        layout = problem.input_layout
        if layout.startswith(problems.ODD):
            return self.odd[layout.removeprefix(problems.ODD)]
        id = layout.removeprefix(RECORDED)
        found = next((launch for launch in self.kernel.launches if launch.id == id), None)
        if found is None:
            raise UsageError(f"{self.kernel.name} {problem.shape} is not in the recording: name the one that has it")
        return found

    def invalid(self, config: Mapping[str, int], shape: Mapping[str, int], limits: object) -> str | None:
        """What the kernel prunes itself, and configs whose grid is not known."""
        launch = self._of_shape(shape)
        return None if launch is None else self.launcher.pruned(launch, NamedInts(config))

    def unlisted(self, config: Mapping[str, int], problem: Problem) -> str | None:
        """Why a declared config is none of a launch's."""
        return self.launcher.unlisted(self.launch_of(problem), NamedInts(config))

    def bytes_moved(self, shape: Mapping[str, int]) -> int:
        """What is loaded and what is stored; what is both counts twice."""
        launch = self._of_shape(shape)
        return 0 if launch is None else moved(self.launcher.case(launch, "meta"))

    def bytes_of(self, problem: Problem) -> int:
        """The same of one launch."""
        return moved(self.launcher.case(self.launch_of(problem), "meta"))

    def _of_shape(self, shape: Mapping[str, int]) -> Launch | None:
        every = [*self.found.items(), *((self._odd_problem(p), self.odd[p.id]) for p in self._with_odd())]
        return next((launch for problem, launch in every if problem.shape == shape), None)

    def _with_odd(self) -> list[Launch]:
        return [launch for launch in self.found.values() if launch.id in self.odd]

    def _odd_problem(self, launch: Launch, seed: int = 0) -> Problem:
        of = next(problem for problem, found in self.found.items() if found is launch)
        made = problems.problem(self.kernel, self.odd[launch.id], (), problems.ODD)
        shape = NamedInts([(name, made.shape.get(name, value)) for name, value in of.shape.items()])
        return replace(of, shape=shape, input_layout=f"{problems.ODD}{launch.id}", seed=seed)

    def edges(self, problem: Problem) -> Iterable[Edge]:
        """Odd sizes and contents; contents alone where the sizes are recorded and small."""
        if not is_recorded(problem):
            return
        launch = self.launch_of(problem)
        if launch.id in self.odd:
            small = self._odd_problem(launch, problem.seed)
            yield Edge("odd sizes", small)
        elif _elements(launch) <= SMALL:
            small = problem
        else:
            return
        for content in ("zeros", "nan", "infinite"):
            yield Edge("contents", small, content)

    def scaled_down(self, problem: Problem) -> Problem:
        """The problem itself where it is small, else at odd sizes; else as it is, which takes long."""
        launch = self.launch_of(problem)
        is_small = _elements(launch) <= SMALL or launch.id not in self.odd
        return problem if is_small else self._odd_problem(launch, problem.seed)

    def agreed(self, bound: Tolerance | None) -> Callable[..., tuple[Any, ...]]:
        """The reference of a kernel for which none was named."""

        def first_config(*inputs: Any) -> tuple[Any, ...]:
            launch = inputs[-1].launch
            listed = (config for config in self.grid if self.launcher.unlisted(launch, config) is None)
            kept = [config for config in listed if self.launcher.pruned(launch, config) is None]
            return agreement.outputs(self.launcher, kept, inputs, bound)

        return first_config


def _named_reference(function: Callable[..., Any], is_close: bool, *inputs: Any) -> tuple[Any, ...]:
    """What a function of the kernel's arguments says: a tensor, a tuple, or a dict by name.

    Raises UsageError for whatever is wrong with it: that is no fault of any config.
    """
    case: Case = inputs[-1]
    outputs = case.outputs()
    case.prepare(inputs, outputs)
    named = {name: _widened(value) if is_close else value for name, value in case.arguments(inputs, outputs).items()}
    try:
        given = function(**_taken(function, named))
        results = _by_name(given, case)
        pairs = zip(case.written, outputs, strict=True)
        return tuple(_expected(storage, output, results, is_close) for storage, output in pairs)
    except (Exception, SystemExit) as error:
        where = f"{function.__module__}:{getattr(function, '__name__', function)}"
        said = str(error) if isinstance(error, _UnusableError) else f"it raised {one_line(error)}"
        raise UsageError(f"--reference {where} cannot be used: {said}") from error


class _UnusableError(ValueError):
    """What a reference takes or gives; the text says what is wrong with it."""


def _taken(function: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a reference asks for."""
    taken = inspect.signature(function).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken):
        return dict(named)
    needed = [one.name for one in taken if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
    if strange := [name for name in needed if name not in named]:
        raise _UnusableError(f"it asks for {strange[0]}, the kernel takes {', '.join(named)}")
    return {one.name: named[one.name] for one in taken if one.name in named}


def _by_name(given: Any, case: Case) -> dict[str, Any]:
    """What a reference gives, by the argument that it is right for."""
    arguments = (argument for storage in case.written for argument in storage.arguments)
    written = [argument.name for argument in arguments if argument.is_stored is not False]
    names = ", ".join(written)
    if isinstance(given, Mapping):
        results = dict(given)
    else:
        several = given if isinstance(given, tuple | list) else (given,)
        if len(several) != len(written):
            raise _UnusableError(f"it gives {len(several)} tensors, the kernel writes {names}: give a dict")
        results = dict(zip(written, several, strict=True))
    for name, result in results.items():
        if name not in written:
            raise _UnusableError(f"it gives {name!r}, the kernel writes {names}")
        if not hasattr(result, "untyped_storage"):
            raise _UnusableError(f"it gives {type(result).__name__} for {name}: return a tensor")
    return results


def _expected(storage: Storage, output: Any, results: Mapping[str, Any], is_close: bool) -> Any:
    """An output as the reference has it; what it does not name is what the launch found there."""
    expected = output.double() if is_close and output.dtype.is_floating_point else output
    for argument in storage.arguments:
        if argument.name in results:
            result = results[argument.name]
            if tuple(result.shape) != argument.shape:
                shapes = f"{tuple(result.shape)}, the kernel's {argument.shape}"
                raise _UnusableError(f"its {argument.name} has the shape {shapes}")
            if not storage.is_flat:
                if not is_close and result.dtype != output.dtype:
                    dtypes = f"{result.dtype}, the kernel's {output.dtype}"
                    raise _UnusableError(f"its {argument.name} is {dtypes}: return that, or ask for --check tolerance")
                return result.double() if is_close and expected.is_floating_point() else result
            target = expected.as_strided(argument.shape, argument.strides, expected.storage_offset() + argument.offset)
            target.copy_(result)
    return expected


def _widened(value: Any) -> Any:
    import torch

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _unread_reason(launch: Launch) -> str:
    """Name the integer tensors that are read and whose values nobody knows: zeros would be other indices or sizes."""
    unknown = (
        tensor.name
        for tensor in problems.tensors_of(launch)
        if not tensor.dtype.startswith(("float", "bfloat", "complex"))
        and 0 not in tensor.shape
        and (tensor.values, tensor.least) == (None, None)
        and tensor.is_loaded is not False
    )
    names = ", ".join(unknown)
    return names and (
        f"integers in {names} were never read, as in the capture of a CUDA graph: record a run without graphs"
    )


def _address_reason(launch: Launch) -> str:
    """Name the arguments with addresses of the recorded process: today they are anything, or memory that is in use."""
    if launch.addresses is not None:
        names = ", ".join(launch.addresses)
        return names and f"{names} holds addresses of the recorded process, which the kernel casts to pointers"
    names = ", ".join(one.name for one in launch.arguments if _may_be_address(one))
    return names and f"{names} may hold addresses of the recorded process: record it again with this fp8tune"


def _may_be_address(argument: Argument) -> bool:
    if isinstance(argument, Tensor):
        is_wide = argument.dtype in ("int64", "uint64") and argument.is_loaded is not False
        return is_wide and argument.most is not None and int(argument.most) in ADDRESSES
    return type(argument.value) is int and argument.value in ADDRESSES


def _tolerance(kernel: Kernel) -> Tolerance:
    dtypes = [
        argument.dtype
        for launch in kernel.launches
        for argument in problems.tensors_of(launch)
        if argument.is_stored is not False
    ]
    relative = max((TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES), default=1e-5)
    return Tolerance(relative, relative * 1e-3)


def moved(case: Case) -> int:
    """Bytes of a launch that are loaded and stored, each element once."""
    total = 0
    for storage in case.storages:
        for argument in storage.arguments:
            own = [size for size, stride in zip(argument.shape, argument.strides, strict=True) if stride]
            times = (argument.is_loaded is not False) + (argument.is_stored is True)
            total += math.prod(own) * storage.itemsize(argument) * times
    return total


def _elements(launch: Launch) -> int:
    return sum(math.prod(argument.shape) for argument in problems.tensors_of(launch))


def _outputs(*inputs: Any) -> tuple[Any, ...]:
    case: Case = inputs[-1]
    return case.outputs()


def _none(row: Mapping[str, int]) -> Iterator[NamedInts]:
    return iter(())
