"""Published rows: their lookup keys, their configs timed with the grid, or compiled for their arch.

A table takes no config that does not fit, and others tuned their own code.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fp8tune.errors import UsageError
from fp8tune.measure import device, machine
from fp8tune.measure.backends.compiler import CompilerBackend
from fp8tune.measure.compiling import alike
from fp8tune.plan import problems as plan
from fp8tune.records import Evidence, KernelVersion, Kind, NamedInts, Problem, Subject
from fp8tune.replay.loading import load_spec
from fp8tune.store.columns import UNSTATED
from fp8tune.store.results import Store
from fp8tune.sweep.events import Event
from fp8tune.sweep.loop import sweep
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan, ProblemPlan, version_of
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.spec import KernelSpec

_logger = logging.getLogger(__name__)


def lookup_key(problem: Problem) -> NamedInts | None:
    """The table key of an imported problem; None for a kernel that is not declared here.

    Raises UsageError for a shape that the kernel cannot have.
    """
    if problem.kernel not in KERNELS:
        return None
    spec = load_spec(problem.kernel)
    plan.check_shape(spec, problem)
    return spec.lookup_key(problem)


def with_published(store: Store, plan: Plan) -> Plan:
    """The plan with what others published for its problems on its arch: timed beside the grid, not believed.

    A config that names other axes than the kernel has is left out.
    """
    found = _published(store, [of.problem for of in plan.problems], plan.backend.device.arch)
    return replace(plan, problems=tuple(_with(of, found.get(of.problem, ()), plan) for of in plan.problems))


def is_any_untimed(store: Store, subjects: Collection[Subject]) -> bool:
    """Whether something was published for problems since they were swept."""
    for arch in {subject.device.arch for subject in subjects}:
        found = _published(store, [subject.problem for subject in subjects], arch)
        for subject in subjects:
            if subject.problem in found and subject.device.arch == arch:
                tried = store.tried(subject)
                added, _ = _fitting(subject.version, found[subject.problem], tried)
                if any(config not in tried for config in added):
                    return True
    return False


def _published(store: Store, problems: Collection[Problem], arch: str) -> dict[Problem, list[NamedInts]]:
    found: dict[Problem, list[NamedInts]] = {}
    for row in store.evidence(kinds=[Kind.PUBLISHED], problems=set(problems)):
        if row.config is not None and row.device.arch in (arch, UNSTATED):
            found.setdefault(row.problem, []).append(row.config)
    return found


def _fitting(
    version: KernelVersion, published: Sequence[NamedInts], configs: Collection[NamedInts]
) -> tuple[list[NamedInts], list[NamedInts]]:
    """The published configs that name the axes of ``configs``, and the others."""
    names = {name for config in configs for name in config}
    complete = [version.complete(config) for config in published]
    return [each for each in complete if set(each) == names], [each for each in complete if set(each) != names]


def _with(of: ProblemPlan, published: Sequence[NamedInts], plan: Plan) -> ProblemPlan:
    fitting, others = _fitting(of.version, published, of.configs)
    for config in others:
        _logger.warning(f"left out: the published config {config} of {of.version.kernel} names other axes")
    added = {config: "" for config in fitting if config not in of.configs}
    if added and (limits := device.limits(plan.backend.device)) is not None:
        invalid = load_spec(of.reference).invalid
        added = {config: invalid(config, of.problem.shape, limits) or "" for config in added}
    return replace(of, configs={**of.configs, **added})


def compile_published(
    store: Store, only: str | None = None, kernels: Collection[str] = KERNELS, *, command: str = "fp8tune import"
) -> Iterator[Event]:
    """Compile every published config of our kernels for its arch, or ``only`` for one."""
    published = [item for item in store.evidence(arch=only, kinds=[Kind.PUBLISHED]) if _compilable(item)]
    for arch in dict.fromkeys(item.device.arch for item in published):
        backend = CompilerBackend(arch)
        problems = [
            found
            for kernel in KERNELS
            if kernel in kernels
            for found in _problems(kernel, [item for item in published if item.device.arch == arch], arch)
        ]
        if problems:
            machine.check_folders()
            options = Options(tuple(kernels), quick=True, command=command)
            yield from sweep(store, Plan(options, backend, "published", problems=tuple(problems)))


def _compilable(item: Evidence) -> bool:
    return item.problem.kernel in KERNELS and item.config is not None and item.device.arch in ARCHES


def _can_be_made(spec: KernelSpec, problem: Problem) -> bool:
    """Whether the kernel has such a problem; where it has not, says so and why."""
    try:
        plan.check_shape(spec, problem)
    except UsageError as error:
        _logger.warning(f"left out: {error}")
        return False
    return True


def _problems(kernel: str, published: Sequence[Evidence], arch: str) -> list[ProblemPlan]:
    """Each config once for all problems that give the same machine code with it."""
    mine = [item for item in published if item.problem.kernel == kernel]
    if not mine:
        return []
    spec = load_spec(kernel)
    version = version_of(kernel, spec)
    by_problem: dict[Problem, dict[NamedInts, str]] = {}
    possible = {problem for problem in dict.fromkeys(item.problem for item in mine) if _can_be_made(spec, problem)}
    for item in mine:
        if item.problem in possible:
            # the sources state no routing; which one compiles makes no difference to the binary
            problem = replace(item.problem, routing="jagged" if spec.routed else "none", scale_mode=spec.scale_modes[0])
            config = version.complete(item.config or NamedInts())  # as export looks it up
            by_problem.setdefault(problem, {})[config] = ""
    return [
        ProblemPlan.of(
            kernel, spec, version, same[0], {config: "" for problem in same for config in by_problem[problem]}
        )
        for same in alike(kernel, list(by_problem), arch)
    ]
