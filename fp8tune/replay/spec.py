"""A recorded kernel as an ordinary KernelSpec: its configs are the grid, its launches are the problems."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.records import RECORDED, TO_FIRST, NamedInts, Problem, is_recorded
from fp8tune.replay import configs, problems, sizes
from fp8tune.replay.launching import Launcher
from fp8tune.replay.recording import Kernel, Launch, as_json, distinct
from fp8tune.replay.reference import expected_outputs
from fp8tune.replay.values import Unrecordable, config_of
from fp8tune.revisions import source
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
    has_own_inputs: bool = False  # True if inputs are made for each config
    hook: Hook | None = None  # (config, inputs, outputs), called after `prepare`: the kernel's own `pre_hook`
    listed: Callable[[Problem], Sequence[NamedInts]] = lambda problem: ()
    """Problem -> the declared configs; of a bare kernel those that its launches were made with, today's first."""
    pruned: Callable[[Mapping[str, int], Problem], str | None] = lambda config, problem: None
    """``(config, problem)`` -> the reason why the kernel does not run a config, or None."""
    notices: tuple[str, ...] = ()  # launches that are left out, and what else the user should know

    @property
    def check_text(self) -> str:
        """Return the check as rows name it. Without a reference nothing is computed in float64."""
        text = super().check_text
        return f"{text.removesuffix(' of float64')} {TO_FIRST}" if self.agrees else text

    def bytes_of(self, problem: Problem) -> int:
        """Return the bytes that the launches of a problem move: two problems may have the same shape."""
        return int(self.inputs(problem, "meta")[-1].bytes_moved())

    def document(self, problem: Problem) -> str:
        """Return the launches of a problem as JSON, without the values of tensors; empty for one at other sizes."""
        launches = self.launches.get(replace(problem, seed=0), ())
        light = [replace(launch.without_values(), addresses=None) for launch in launches]
        if not light:
            return ""
        launch = replace(light[0], shared=tuple(light[1:]), has_own_inputs=self.has_own_inputs)
        kernel = replace(self.kernel, launches=(), declaration_hash=self._declaration_hash)
        return json.dumps({"kernel": as_json(kernel), "launch": as_json(launch)})

    @cached_property
    def _declaration_hash(self) -> str:
        with contextlib.suppress(UsageError):  # a kernel without source has no configs that a diff could change
            return source.declaration_hash(self.name)
        return ""

    def first(self, problem: Problem) -> NamedInts:
        """Return the config listed first of those that the kernel does not prune."""
        listed = self.listed(problem)
        return next((config for config in listed if not self.pruned(config, problem)), listed[0])

    @property
    def is_bare(self) -> bool:
        """True if the program passes its configs, because the kernel declares none."""
        return self.kernel.launches[0].configs is not None

    def is_small(self, problem: Problem) -> bool:
        """Return True if Triton's interpreter can run it, itself or at odd sizes."""
        return self.scaled_down(problem) != problem or _elements(self.launches[replace(problem, seed=0)]) <= SMALL


def default_of(spec: KernelSpec, problem: Problem) -> NamedInts:
    """Return the config that is always in a problem's sweep: the declared default, or today's of a bare kernel."""
    return spec.listed(problem)[0] if isinstance(spec, RecordedSpec) else spec.default


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
    grid = tuple(dict.fromkeys(configs.encoded(kernel, config) for config in configs.swept(kernel)))
    is_resized = not (only_recorded_sizes or kernel.pruner_configs)
    resized = {launch.id: sizes.odd(launch) for launch in kernel.launches} if is_resized else {}
    work = _Work(launcher, problems.problems(kernel, shared), grid, shared, resized)
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
        reference=partial(expected_outputs, reference, bool(bound)) if reference else partial(work.agreed, bound),
        invalid=lambda config, shape, limits: launcher.pruned(work.at_shape(shape), config),
        edges=work.edges,
        scaled_down=work.scaled_down,
        check=check,
        tolerance=bound,
        prepare=lambda inputs, outputs: inputs[-1].prepare(inputs, outputs),
        configs=grid,
        recorded=tuple(work.recorded),
        bytes_moved=lambda shape: launcher.case(work.at_shape(shape), "meta").bytes_moved(),
        kernel=kernel,
        launches=work.recorded,
        module=str(getattr(list(chain(function))[-1], "__module__", "")),
        agrees=reference is None,
        untried_sizes=next((reason for reason in resized.values() if isinstance(reason, str)), ""),
        has_odd_sizes=bool(work.odd),
        has_own_inputs=make_inputs is not None,
        hook=launcher.hook if launcher.has_hook else None,
        listed=lambda problem: work.listed(work.launches_of(problem)),
        pruned=lambda config, problem: launcher.pruned(work.launches_of(problem), config),
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


def _address_reason(launch: Launch) -> str:
    """Name the arguments with addresses of the recorded process: today they are anything, or memory that is in use."""
    if launch.addresses is not None:
        names = ", ".join(launch.addresses)
        return names and f"{names} holds addresses of the recorded process, which the kernel casts to pointers"
    wide = [item for item in launch.tensors if item.dtype in ("int64", "uint64") and item.is_loaded is not False]
    numbers = {item.name: int(item.most) for item in wide if item.most is not None} | launch.scalars
    names = ", ".join(name for name, value in numbers.items() if type(value) is int and value in ADDRESSES)
    return names and f"{names} may hold addresses of the recorded process: record it again with this fp8tune"


def _unread_reason(launch: Launch) -> str:
    """Name the integer tensors that are read and whose values nobody knows: zeros would be other indices or sizes."""
    read = [item for item in launch.tensors if item.is_integer and 0 not in item.shape and item.is_loaded is not False]
    names = ", ".join(item.name for item in read if item.integers is None and item.least is None)
    cause, fix = "the capture of a CUDA graph", "without graphs"
    if launch.is_traced:
        cause, fix = "torch.compile", "with TORCH_COMPILE_DISABLE=1"
    return names and f"integers in {names} were never read, as in {cause}: record a run {fix}"


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
    if stale := [name for name in kernel.key if kernel.parameters and name not in kernel.parameters]:
        yield f"its key names {stale[0]!r}, which is no argument: Triton 3.9 rejects that; remove it from the key"
    if any(launch.is_traced for launch in kernel.launches):
        yield (
            "torch.compile launches copies of it: the kernel itself is swept, with random values; the copies take the "
            "pick once it is in the code"
        )
    total, fixed = len(kernel.launches), sum(not launch.grid.axes for launch in kernel.launches)
    if fixed and not kernel.is_autotuned:
        grid = "its grid" if fixed == total else f"the grid of {fixed} of {total} launches"
        yield f"{grid} does not follow block sizes, so only num_warps and num_stages can vary: pass a function as grid"
    if several := sum(len(launch.configs or ()) > 1 for launch in kernel.launches):
        yield f"the program passes several configs in {several} of {total} launches: today's is the most frequent"


@dataclass(frozen=True)
class _Work:
    """Problems of a recorded kernel with their launches, as recorded and at odd sizes."""

    launcher: Launcher
    recorded: Mapping[Problem, tuple[Launch, ...]]
    grid: tuple[NamedInts, ...]
    shared: Sequence[str]
    resized: Mapping[str, Launch | str]  # id of a launch -> the same at odd sizes, or the reason why there is none

    @cached_property
    def odd(self) -> dict[str, tuple[Problem, tuple[Launch, ...]]]:
        """Layout of a recorded problem -> the one at odd sizes with its launches, where all of them have some."""
        result = {}
        for problem, launches in self.recorded.items():
            resized = [odd for launch in launches if isinstance(odd := self.resized.get(launch.id), Launch)]
            if len(resized) == len(launches):
                odd_shape = problems.problem(self.launcher.kernel, resized, problems.ODD, self.shared).shape
                shape = NamedInts([(name, odd_shape.get(name, value)) for name, value in problem.shape.items()])
                layout = problems.ODD + problem.input_layout.removeprefix(RECORDED)
                result[problem.input_layout] = replace(problem, shape=shape, input_layout=layout), tuple(resized)
        return result

    @cached_property
    def _by_layout(self) -> dict[str, tuple[Launch, ...]]:
        every = [*self.recorded.items(), *self.odd.values()]
        return {problem.input_layout: launches for problem, launches in every}

    @cached_property
    def _by_shape(self) -> dict[Mapping[str, int], tuple[Launch, ...]]:
        every = [*self.recorded.items(), *self.odd.values()]
        return {problem.shape: launches for problem, launches in reversed(every)}

    def launches_of(self, problem: Problem) -> tuple[Launch, ...]:
        """Return the launches of a problem, as recorded or at odd sizes."""
        if problem.input_layout not in self._by_layout:
            name = self.launcher.kernel.name
            raise UsageError(f"{name} {problem.shape} is not in the recording: name the one that has it")
        return self._by_layout[problem.input_layout]

    def at_shape(self, shape: Mapping[str, int]) -> tuple[Launch, ...]:
        """Return the launches at recorded or odd sizes; of two problems with one shape the first."""
        return self._by_shape.get(NamedInts(shape), ())

    def listed(self, launches: Sequence[Launch]) -> Sequence[NamedInts]:
        """Return the declared configs; for a bare kernel those of its launches."""
        own = distinct(config for launch in launches for config in launch.configs or ())
        return [configs.encoded(self.launcher.kernel, config) for config in own] or self.grid

    def edges(self, problem: Problem) -> Iterator[Edge]:
        """Yield odd sizes and contents; contents alone where the sizes are recorded and small."""
        if not is_recorded(problem):
            return
        small = problem
        if problem.input_layout in self.odd:
            small = replace(self.odd[problem.input_layout][0], seed=problem.seed)
            yield Edge("odd sizes", small)
        elif _elements(self.launches_of(problem)) > SMALL:
            return
        for content in ("zeros", "nan", "infinite"):
            yield Edge("contents", small, content)

    def scaled_down(self, problem: Problem) -> Problem:
        """Return the problem itself where it is small, else at odd sizes; else as it is, which takes long."""
        if problem.input_layout not in self.odd or _elements(self.launches_of(problem)) <= SMALL:
            return problem
        return replace(self.odd[problem.input_layout][0], seed=problem.seed)

    def agreed(self, bound: Tolerance | None, *inputs: Any) -> tuple[Any, ...]:
        """Return the outputs of the first config that the kernel runs: what is right where no reference was named."""
        launches, launcher = inputs[-1].launches, self.launcher
        runnable = [config for config in self.listed(launches) if launcher.pruned(launches, config) is None]
        return launcher.agreed(runnable, inputs, bound)


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


def _elements(launches: Iterable[Launch]) -> int:
    return sum(math.prod(argument.shape) for launch in launches for argument in launch.tensors)
