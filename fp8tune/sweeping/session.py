"""A sweep beside its database: run it, with configs that others published, then read outcomes and picks.

Published configs are timed with the grid, or compiled for their arch, and never believed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from fp8tune import registry
from fp8tune.errors import UsageError
from fp8tune.measure import device, machine
from fp8tune.measure.backends import compiler
from fp8tune.measure.compiling import alike
from fp8tune.options import SweepOptions
from fp8tune.plan.grids import Grid
from fp8tune.plan.problems import check_shape
from fp8tune.records import Device, Kind, NamedInts, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.study import Study
from fp8tune.store.results import Store, Tally
from fp8tune.store.texts import UNSTATED
from fp8tune.studies import read_studies
from fp8tune.sweeping import picks
from fp8tune.sweeping.events import Event
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.planning import Plan, ProblemPlan, version_of
from fp8tune_kernels.arches import ARCHES

_logger = logging.getLogger(__name__)


def run(
    store: Store, plan: Plan, clock: Callable[[], float] = time.monotonic, *, begun: float | None = None
) -> Iterator[Event]:
    """Run a sweep with the configs that others published for its problem sizes, and keep the picks up to date.

    ``begun`` is when the time budget began, if not now.
    """
    yield from sweep(store, with_published(store, plan) if plan.backend.times else plan, clock, begun=begun)
    if plan.backend.kind is Kind.STATIC:
        yield from compile_published(store, plan.backend.device.arch, plan.options.kernel, command=plan.command)
    picks.keep_current(store)


def tallies(store: Store, plan: Plan) -> list[Tally]:
    """Return the outcomes of each problem size of a plan, in this sweep and before."""
    all_tallies = [(problem, store.tally(plan.subject(problem))) for problem in plan.problems]
    # Pruned rows come first: if a time budget left no room for others, nothing is known of the problem size.
    return [
        tally
        for problem, tally in all_tallies
        if tally.outcomes and (set(tally.counts) != {Status.PRUNED} or all(problem.configs.values()))
    ]


def studies(store: Store, plan: Plan) -> list[Study]:
    """Return the decided problem sizes of a plan on its device."""
    sizes: dict[Device, set[Problem]] = {}
    for size in plan.problems:
        sizes.setdefault(plan.device_of(size), set()).add(size.problem)
    return [study for device in sizes for study in read_studies(store, problems=sizes[device], device=device)]


def lookup_key(problem: Problem) -> NamedInts | None:
    """Return the table key of an imported problem size; None for a kernel that is not declared here.

    Raises UsageError for a shape that the kernel cannot have.
    """
    if problem.kernel not in registry.kernels():
        return None
    spec = load_spec(problem.kernel)
    check_shape(spec, problem)
    return spec.lookup_key(problem)


def with_published(store: Store, plan: Plan) -> Plan:
    """Add the configs that others published for a plan's problem sizes on its arch."""
    published: dict[Problem, list[NamedInts]] = {}
    for study in store.studies(kinds=[Kind.PUBLISHED], problems={problem.problem for problem in plan.problems}):
        if study.device.arch in (plan.backend.device.arch, UNSTATED):
            published.setdefault(study.problem, []).extend(study.configs)

    def added(size: ProblemPlan) -> ProblemPlan:
        configs = published.get(size.problem, [])

        def build() -> dict[NamedInts, str]:
            grid, limits = dict(size.configs), device.limits(plan.backend.device)
            axes = {name for config in grid for name in config}
            for config in map(size.version.complete, configs):
                if set(config) != axes:
                    _logger.warning(f"left out: the published config {config} of {size.version.kernel} has other axes")
                elif config not in grid:
                    invalid = load_spec(size.reference).invalid
                    grid[config] = (limits and invalid(config, size.problem.shape, limits)) or ""
            return grid

        return replace(size, configs=Grid(size.count + len(configs), build)) if configs else size

    return replace(plan, problems=tuple(map(added, plan.problems)))


def compile_published(store: Store, arch: str, kernels: Collection[str], *, command: str) -> Iterator[Event]:
    """Compile every published config of some kernels for an arch, once for all sizes that give the same code."""
    sizes: dict[str, dict[Problem, dict[NamedInts, str]]] = {}
    for study in store.studies(arch=arch, kinds=[Kind.PUBLISHED]):
        kernel = study.problem.kernel
        if not study.configs or kernel not in kernels or kernel not in registry.kernels():
            continue
        spec = load_spec(kernel)
        try:
            check_shape(spec, study.problem)
        except UsageError as error:
            _logger.warning(f"left out: {error}")
            continue
        # sources state no routing; the binary is the same for all
        routing, mode = "jagged" if spec.routed else "none", spec.scale_modes[0] if spec.scale_modes else ""
        problem = replace(study.problem, routing=routing, scale_mode=mode)
        configs = dict.fromkeys(map(version_of(kernel).complete, study.configs), "")
        sizes.setdefault(kernel, {}).setdefault(problem, {}).update(configs)
    problems = [
        ProblemPlan.from_spec(
            kernel, version_of(kernel), same[0], {config: "" for problem in same for config in by_problem[problem]}
        )
        for kernel, by_problem in sizes.items()
        for same in alike(kernel, list(by_problem), arch)
    ]
    if problems and arch in ARCHES:
        machine.check_folders()
        options = SweepOptions(quick=True)
        yield from sweep(store, Plan(options, compiler(arch), "published", problems=tuple(problems), command=command))
