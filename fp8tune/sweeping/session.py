"""A sweep: the coarse pass of each problem size, then the confirmation of all of them.

If the grids do not fit the time budget, a search (:mod:`fp8tune.sweeping.search`) replaces the first round in the
coarse pass (:mod:`fp8tune.sweeping.coarse`). That only chooses the configs that are confirmed
(:mod:`fp8tune.sweeping.confirmation`). The same command continues a sweep that was stopped. Configs that others
published are timed with the grid, or compiled for their arch, and never believed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from fp8tune import registry
from fp8tune.errors import UsageError
from fp8tune.measure import device
from fp8tune.measure.compiling import alike
from fp8tune.plan.grids import Grid
from fp8tune.plan.problems import check_shape
from fp8tune.records import Device, Kind, NamedInts, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.stats.study import Study
from fp8tune.store.results import Store, Tally
from fp8tune.store.texts import UNSTATED
from fp8tune.studies import read_studies
from fp8tune.sweeping import picks, same_bits, search
from fp8tune.sweeping.coarse import CoarsePass
from fp8tune.sweeping.confirmation import Confirmation
from fp8tune.sweeping.events import Event, Finished, SizeDone, Started
from fp8tune.sweeping.planning import Plan, ProblemPlan, version_of

TOGETHER_S = 1.0  # trials that come within this time are stored in one commit: others wait for the database's disk
COMPILE_AHEAD = 1000  # configs of the next problem sizes that are queued, so that compilers do not wait for the clock

_logger = logging.getLogger(__name__)


def run(
    store: Store, plan: Plan, clock: Callable[[], float] = time.monotonic, *, begun: float | None = None
) -> Iterator[Event]:
    """Run a sweep with the configs that others published for its problem sizes, and keep the picks up to date.

    ``begun`` is when the time budget began, if not now.
    """
    yield from sweep(store, with_published(store, plan) if plan.backend.times else plan, clock, begun=begun)
    if plan.backend.kind is Kind.STATIC and (published := published_sizes(store, plan)):
        yield from sweep(store, replace(plan, key="published", problems=tuple(published)), clock, begun=begun)
    picks.keep_current(store)


def sweep(
    store: Store,
    plan: Plan,
    clock: Callable[[], float] = time.monotonic,
    *,
    begun: float | None = None,
    take: Callable[[bool], ProblemPlan | None] | None = None,
    ends: bool = True,
) -> Generator[Event, None, int]:
    """Run a plan alone, and return the id of its sweep. Closing the generator ends the workers; every stored row stays.

    ``take`` returns another problem size to sweep after the plan's, or None. Its argument is False if the size would
    only be compiled beside the current one. Unless ``ends``, the same request continues the sweep once more.
    """
    started, options, backend = clock(), plan.options, plan.backend
    deadline = (started if begun is None else begun) + (math.inf if options.budget_s is None else options.budget_s)
    sweep_id = store.begin_sweep(
        plan.key,
        plan.device,
        command=plan.command,
        commit=plan.commit,
        timer=backend.timer,
        seed=plan.settings.seed,
        again=options.again,
        limits=backend.limits,
    )
    _record_kernels(store, plan.problems, sweep_id)
    yield Started(backend.device, backend.kind, len(plan.problems), sum(size.count for size in plan.problems))
    confirmation = Confirmation(store, plan, sweep_id, clock, deadline)
    share = search.SHARE if plan.is_confirmed else search.QUICK_SHARE
    may_search = backend.times and take is None and not plan.is_partial  # of few configs, all are wanted
    is_search = may_search and search.is_needed(plan, plan.problems, share * (deadline - started))
    upcoming, passes = iter(plan.problems), list[CoarsePass]()

    def compile_ahead(done: int) -> None:
        """Queue the current problem size and the next ones for the compilers."""
        while (ahead := sum(coarse.queued for coarse in passes[done + 1 :])) < COMPILE_AHEAD:
            size = next(upcoming, None)
            if size is None and take is not None and not ahead and (size := take(done == len(passes))):
                _record_kernels(store, [size], sweep_id)
            if size is None:
                return
            kind = search.SearchPass if is_search else CoarsePass
            passes.append(kind(store, plan, sweep_id, size, len(passes)))

    with contextlib.closing(backend), store.adding_together(TOGETHER_S):
        compile_ahead(0)
        if is_search:
            yield from search.visits(passes, started + share * (deadline - started), clock)
        for coarse in passes:  # which grow
            if clock() > deadline:
                break
            yield from coarse.run(lambda: clock() > deadline)
            if coarse.is_done and not plan.is_confirmed:
                confirmation.withdraw(coarse.size)
                yield SizeDone(coarse.size.problem)
            compile_ahead(coarse.index + 1)
        else:
            finalists: list[same_bits.Coarse] = [(coarse.size, coarse.times_us) for coarse in passes]
            if options.same_bits and backend.times:
                finalists = same_bits.with_finalists(store, plan, finalists, options.same_bits)
            if plan.is_confirmed:
                yield from confirmation.run(finalists)
        left_out = confirmation.left_out or sum(coarse.left_out() for coarse in passes if not coarse.is_done)
        left_out += sum(size.count for size in upcoming)
        is_whole = all(coarse.is_done for coarse in passes) and not left_out and not confirmation.is_incomplete
        if is_whole and ends:
            store.finish_sweep(sweep_id)
    searches = [coarse for coarse in passes if isinstance(coarse, search.SearchPass)]
    seen, grid = sum(coarse.seen for coarse in searches), sum(coarse.valid for coarse in searches)
    yield Finished(clock() - started, left_out, is_whole, seen, max(seen, grid))
    return sweep_id


def _record_kernels(store: Store, sizes: Sequence[ProblemPlan], sweep_id: int) -> None:
    """Store by which check and reference each kernel is right, operations, and the launches of recorded problems."""
    for size in {size.reference: size for size in sizes}.values():
        spec = load_spec(size.reference)
        if size.reference_hash:
            store.record_reference(sweep_id, size.version, size.reference_hash)
            store.record_check(sweep_id, size.version, spec.check_text)
        if isinstance(spec, RecordedSpec):
            problems = [alike.problem for alike in sizes if alike.reference == size.reference]
            store.record_launches({problem: text for problem in problems if (text := spec.document(problem))})
    if flops := {size.problem: size.flops for size in sizes if size.flops is not None}:
        store.record_flops(flops)


def with_published(store: Store, plan: Plan) -> Plan:
    """Add the configs that others published for a plan's problem sizes on its arch."""
    published: dict[Problem, list[NamedInts]] = {}
    for study in store.studies(kinds=[Kind.PUBLISHED], problems={size.problem for size in plan.problems}):
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


def published_sizes(store: Store, plan: Plan) -> list[ProblemPlan]:
    """Return the sizes of a plan's kernels that have published configs for its arch, one for all with the same code."""
    arch, sizes = plan.backend.device.arch, list[ProblemPlan]()
    for kernel in sorted({*plan.options.kernel} & registry.kernels().keys()):
        spec, version = load_spec(kernel), version_of(kernel)
        # sources state no routing; the binary is the same for all
        facts = {"routing": "jagged" if spec.routed else "none", "scale_mode": next(iter(spec.scale_modes), "")}
        configs: dict[Problem, list[NamedInts]] = {}
        for study in store.studies(kernel, arch, kinds=[Kind.PUBLISHED]):
            try:
                check_shape(spec, study.problem)
            except UsageError as error:
                _logger.warning(f"left out: {error}")
            else:
                complete = map(version.complete, study.configs)
                configs.setdefault(replace(study.problem, **facts), []).extend(complete)  # type: ignore[arg-type]
        for same in alike(kernel, [problem for problem in configs if configs[problem]], arch):
            grid = {config: "" for problem in same for config in configs[problem]}
            sizes.append(ProblemPlan.from_spec(kernel, version, same[0], grid))
    return sizes


def best_pools(store: Store, plan: Plan) -> dict[Problem, Study]:
    """Return the study of each problem size, without its results, on that GPU of a plan that has done most of it."""

    def place(device: Device) -> Device:  # of a cluster, any GPU of the model counts
        return replace(device, uuid_hash="") if plan.options.on else device

    places = {
        (size.problem, size.version.source_hash, place(plan.device_on(gpu, size)))
        for size in plan.problems
        for gpu in plan.gpus
    }
    pools = store.pools(kinds=[plan.backend.kind], problems={size.problem for size in plan.problems})
    begun = [pool for pool in pools if (pool.problem, pool.source_hash, place(pool.device)) in places]
    return {
        pool.problem: pool for pool in sorted(begun, key=lambda pool: (pool.complete, pool.has_finals, pool.newest))
    }


def decided(store: Store, plan: Plan) -> set[Problem]:
    """Return the problem sizes of which a plan leaves nothing to do, unless a grid or a reference has changed."""
    pools = best_pools(store, plan).items()
    return {problem for problem, pool in pools if pool.complete and (pool.has_finals or not plan.is_confirmed)}


def placed(store: Store, plan: Plan) -> Plan:
    """Return the plan with the GPU of each problem size that has been begun on one of several."""
    if len(plan.gpus) < 2 and not plan.options.on:
        return plan
    pools = best_pools(store, plan)
    sizes = (
        replace(size, device=pools[size.problem].device if size.problem in pools else None) for size in plan.problems
    )
    return replace(plan, problems=tuple(sizes))


def tallies(store: Store, plan: Plan) -> list[Tally]:
    """Return the outcomes of a plan's problem sizes, in this sweep and before."""
    plan = placed(store, plan)
    all_tallies = [(size, store.tally(plan.subject(size))) for size in plan.problems]
    # Pruned rows come first: if a time budget left no room for others, nothing is known of the problem size.
    return [
        tally
        for size, tally in all_tallies
        if tally.outcomes and (set(tally.counts) != {Status.PRUNED} or all(size.configs.values()))
    ]


def studies(store: Store, plan: Plan) -> list[Study]:
    """Return the decided problem sizes of a plan on its GPUs."""
    plan = placed(store, plan)
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
