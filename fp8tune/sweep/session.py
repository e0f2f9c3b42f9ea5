"""From what a user asked for to a sweep that can run: which device, which problems, which configs.

Decides the laboratory once: a GPU if there is one, the interpreter if there is none, static compilation for an arch
that is not here, the simulated clock if asked. Everything the user should know about that choice is a notice, never a
silence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune import __version__
from fp8tune.calibrate import record as calibrate
from fp8tune.choose import incumbents, ranking
from fp8tune.choose.ranking import Winner
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import device, machine, rocm
from fp8tune.measure.compiling import alike, distinct
from fp8tune.measure.laboratory import TRIAL_TIMEOUT_S, Batch, Laboratory
from fp8tune.measure.worker import start_server, usable_cores
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Problem, Row
from fp8tune.revisions import git, source
from fp8tune.revisions.loading import check_reference, load_spec
from fp8tune.store import database, names
from fp8tune.store.results import Store
from fp8tune.store.tallies import Subject, Tally
from fp8tune.sweep.loop import Event, Request, TrialDone, recall, sweep
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.spec import DeviceLimits, KernelSpec

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wish:
    """The options of ``fp8tune sweep``."""

    kernels: tuple[str, ...]
    shapes: tuple[str, ...] = ("llama4",)
    routing: str = "jagged"
    grid: tuple[str, ...] = ()
    arch: str | None = None
    static: bool = False
    """Compile only, also for this machine's arch."""
    scale_mode: str | None = None
    seed: int = 0
    timer: str | None = None
    again: bool = False
    retry_failed: bool = False
    quick: bool = False
    """The screen alone: its picks are no more than a first look."""
    time_budget_s: float | None = None
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    command: str = ""


@dataclass(frozen=True)
class Job:
    """A wish on this machine: where it runs and what names it again. Made without torch."""

    wish: Wish
    laboratory: Laboratory
    rows: tuple[NamedInts, ...]
    """The rows of all its shape sets."""
    key: str
    """The same for the same command, code, shapes and device."""
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """A sweep ready to run, and what the user should know first."""

    request: Request
    notices: tuple[str, ...]


def take(wish: Wish) -> Job:
    """Choose the laboratory and read the shapes. Raises UsageError or MachineError for what cannot be done here."""
    laboratory, notices = choose_laboratory(wish.arch, wish.timer, wish.static)
    rows = tuple(row for name in wish.shapes for row in shapes.load(name).rows)
    return Job(wish, laboratory, rows, _key(wish, laboratory, rows), notices)


def _key(wish: Wish, laboratory: Laboratory, rows: Iterable[NamedInts]) -> str:
    """Everything a command can vary but how long it may take; shapes and kernels by content, not by name."""
    work = [
        [[reference, _folder(reference), *_judge(reference)] for reference in wish.kernels],
        [row.canonical for row in rows],
        [wish.routing, wish.grid, wish.scale_mode, wish.seed, laboratory.timer, laboratory.device.fingerprint],
        "screen" if wish.quick else "finals",
        __version__,
    ]
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


def _folder(reference: str) -> str:
    check_reference(reference)
    try:
        return source.folder_hash(reference)
    except source.NoSuchKernel:
        load_spec(reference)  # says more about what is wrong, having imported it
        raise


def _judge(reference: str) -> list[str]:
    """Of a kernel of somebody else, whose reference may lie in another folder."""
    if reference in KERNELS:
        return []
    return [source.reference_hash(reference, source.installed(reference))]


def is_stored(db: str, job: Job) -> bool:
    """Whether a database has all rows of a job, so that nothing needs to be planned. Makes no database."""
    if job.wish.again or job.wish.retry_failed or not database.exists(db):
        return False
    try:
        with Store.open(db, writable=False) as store:
            problems = finished_problems(store, job)
            failures = [outcome for tally in tallies(store, job) for outcome in tally.failures.values()]
            return bool(problems) and not any(machine.is_machines(outcome.reason) for outcome in failures)
    except database.EmptyDatabaseError:
        return False


def finished_problems(store: Store, job: Job) -> list[Problem]:
    """The problems of a job whose rows are all there."""
    return [problem for _, problem in store.finished_sweep(job.key, job.laboratory.device) or []]


def tallies(store: Store, job: Job, prepared: Prepared | None = None) -> list[Tally]:
    """What became of the configs of each problem of a job, in this sweep and before."""
    laboratory = job.laboratory
    pairs = (
        [(batch.version, batch.problem) for batch in prepared.request.batches]
        if prepared is not None
        else store.finished_sweep(job.key, laboratory.device) or []
    )
    subjects = [Subject(version, laboratory.device, laboratory.kind, problem) for version, problem in pairs]
    return [tally for subject in subjects if (tally := store.tally(subject)).outcomes]


def prepare(job: Job) -> Prepared:
    """Plan every trial of a job (imports torch and the kernels). Raises UsageError for a kernel that cannot be used."""
    wish, laboratory, notices = job.wish, job.laboratory, job.notices
    if laboratory.kind is Kind.INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # before any spec is loaded: Triton reads it when it is imported
    if laboratory.compiles:
        machine.check_folders()
    start_server()  # it imports torch beside this process, which does so for the specs
    batches: list[Batch] = []
    for reference in wish.kernels:
        batches += _batches(reference, job.rows, wish, laboratory)
    if laboratory.kind is Kind.INTERPRETER:
        notices += (_interpreter_notice(batches),)
    if laboratory.kind in (Kind.MEASURED, Kind.INTERPRETER):
        notices += _edge_notices(batches)
    return Prepared(
        Request(
            batches=tuple(batches),
            laboratory=laboratory,
            key=job.key,
            command=wish.command,
            commit=git.head(Path.cwd()),
            seed=wish.seed,
            again=wish.again,
            retry_failed=wish.retry_failed,
            finals=not wish.quick,
            incumbents=_incumbents(batches, laboratory.device),
            fallbacks=_fallbacks(batches, laboratory.device),
            time_budget_s=wish.time_budget_s,
            trial_timeout_s=wish.trial_timeout_s,
        ),
        notices,
    )


def calibration_batch(laboratory: Laboratory) -> Batch:
    """What ``fp8tune calibrate`` times (imports torch and the kernel)."""
    if laboratory.compiles:
        machine.check_folders()
    start_server()
    spec = load_spec(calibrate.KERNEL)
    problem = Problem(spec.name, calibrate.SHAPE, "balanced")
    trials = plan.trials(spec, problem, spec.axes, limits_of(laboratory.device))
    return make_batch(calibrate.KERNEL, spec, version_of(calibrate.KERNEL, spec), problem, trials)


def run(store: Store, job: Job, prepared: Prepared | None = None) -> Iterator[Event]:
    """The events of a job: from its rows where :func:`is_stored`, otherwise by running it as prepared.

    Where nothing runs, what others published for the arch is compiled too: a table takes no config that does not fit.
    """
    if prepared is None:
        problems = store.finished_sweep(job.key, job.laboratory.device) or []
        yield from recall(store, job.laboratory, problems, finals=not job.wish.quick)
        return
    yield from sweep(store, prepared.request)
    if not job.laboratory.runs:
        yield from compile_published(store, job.laboratory.device.arch, job.wish.kernels, command=job.wish.command)


def row_of(event: Event) -> Row | None:
    """The row an event brings, if it brings one."""
    return event.row if isinstance(event, TrialDone) else None


def winners(store: Store, laboratory: Laboratory, problems: Collection[Problem]) -> list[Winner]:
    """The best config of each of these problems on the laboratory's device."""
    wanted, device = set(problems), laboratory.device
    evidence = store.evidence(keep=ranking.competing, problems=wanted, device=device, finalists_only=True)
    return ranking.winners(evidence, incumbents.COMMITTED)


def _incumbents(batches: Iterable[Batch], target: Device) -> dict[Problem, NamedInts]:
    found = {
        b.problem: ranking.completed(incumbents.COMMITTED.config(b.version.kernel, target, b.lookup_key), b.version)
        for b in batches
    }
    return {problem: config for problem, config in found.items() if config is not None}


def _fallbacks(batches: Iterable[Batch], target: Device) -> dict[str, NamedInts]:
    versions = {batch.version.kernel: batch.version for batch in batches}
    found = {
        kernel: ranking.completed(incumbents.COMMITTED.config(kernel, target, None), version)
        for kernel, version in versions.items()
    }
    return {kernel: config for kernel, config in found.items() if config is not None}


# Where trials run


def choose_laboratory(arch: str | None, timer: str | None, static: bool = False) -> tuple[Laboratory, tuple[str, ...]]:
    """The laboratory for an arch and timer as the user gave them (None: this machine's), with notices."""
    if timer is not None and timer.startswith("simulated"):
        if arch not in (None, "simulated"):
            raise UsageError(f"--timer {timer} has an arch of its own: leave out --arch {arch}")
        return _simulated(timer)
    if timer not in (None, "do_bench"):
        raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
    here = None if os.environ.get("TRITON_INTERPRET") == "1" else device.probe()
    if arch is not None:
        names.check_arch(arch)
        if static or here is None or here.arch != arch:
            return static_laboratory(arch), (f"configs are compiled for {arch}; nothing is run or timed",)
    if static:
        raise UsageError("--static compiles for an arch: say which with --arch, such as sm_90 or gfx942")
    if here is None:
        if timer is not None:
            raise MachineError("there is no GPU here to time on: leave out --timer, or use simulated:SEED")
        return _interpreter()
    limits = device.limits(here)
    if limits is None:
        raise MachineError(f"the limits of {here.arch} are not known: add them to fp8tune_kernels/arches.py")
    return Laboratory(Kind.MEASURED, here, "do_bench", "cuda", True, limits.shared_bytes_per_block), ()


def static_laboratory(arch: str) -> Laboratory:
    """Compiles for an arch, runs nothing."""
    if arch not in ARCHES:
        raise UsageError(f"cannot compile for {arch}: known are {', '.join(ARCHES)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise MachineError("TRITON_INTERPRET=1 is set, and Triton then cannot compile: unset it")
    compiler = Device(arch=arch, triton=device.software().triton)
    return Laboratory(Kind.STATIC, compiler, "none", "meta", True, ARCHES[arch].shared_bytes_per_block, runs=False)


def _interpreter() -> tuple[Laboratory, tuple[str, ...]]:
    here = device.interpreter_device()
    return Laboratory(Kind.INTERPRETER, here, "none", "cpu", False, workers=usable_cores()), ()


def _simulated(timer: str) -> tuple[Laboratory, tuple[str, ...]]:
    from fp8tune.measure.timing import make_timer

    make_timer(timer)
    gpu = replace(device.simulated_device(), name=timer.partition(".")[0])  # the noise is no part of it
    laboratory = Laboratory(Kind.SIMULATED, gpu, timer, "cpu", False)
    return laboratory, ("simulated clock: no kernel runs, times are drawn from a seeded model",)


def _interpreter_notice(batches: Sequence[Batch]) -> str:
    largest = {
        dim: max(batch.problem.shape.get(dim, 0) for batch in batches)
        for dim in ("M", "K", "N", "E", "G")
        if any(dim in batch.problem.shape for batch in batches)
    }
    sizes = ", ".join(f"{dim} <= {size}" for dim, size in largest.items())
    return (
        f"no GPU here: Triton's interpreter checks every byte on shapes scaled down to {sizes}, one config for each "
        "set of block sizes (it knows no warps or stages); nothing is timed, rows go under arch interpreter"
    )


def _edge_notices(batches: Sequence[Batch]) -> tuple[str, ...]:
    by_kernel = {batch.version.kernel: batch for batch in batches}
    without = [
        kernel for kernel, batch in by_kernel.items() if not any(load_spec(batch.reference).edges(batch.problem))
    ]
    if not without:
        return ()
    declare = "declares no edges and is" if len(without) == 1 else "declare no edges and are"
    return (f"{', '.join(without)} {declare} checked on the swept sizes alone: give the spec edges",)


# What is tried


def _batches(reference: str, rows: Iterable[NamedInts], wish: Wish, laboratory: Laboratory) -> list[Batch]:
    spec = load_spec(reference)
    arch = laboratory.device.arch
    axes = plan.parse_grid(wish.grid, spec.axes, rocm.LAUNCH_OPTIONS if arch.startswith("gfx") else ())
    problems = plan.problems(
        spec,
        rows,
        routing=wish.routing,
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn",
        scale_mode=wish.scale_mode,
        seed=wish.seed,
    )
    version = version_of(reference, spec)
    if laboratory.kind is Kind.STATIC:  # a row for each shape would say the same again and again
        problems = distinct(reference, problems, arch)
    if laboratory.kind is Kind.INTERPRETER:
        planned = plan.interpreter_plan(spec, problems, axes)
    else:
        limits = limits_of(laboratory.device)
        planned = [trial for problem in problems for trial in plan.trials(spec, problem, axes, limits)]
        if not laboratory.runs:  # a row for what is not even compiled would say nothing
            planned = [trial for trial in planned if trial.pruned is None]
    by_problem: dict[Problem, list[plan.Planned]] = {}
    for trial in planned:
        by_problem.setdefault(trial.problem, []).append(trial)
    runs_kernels = laboratory.kind in (Kind.MEASURED, Kind.INTERPRETER)
    judge = source.reference_hash(reference, source.installed(reference)) if runs_kernels else ""
    batches = [make_batch(reference, spec, version, problem, trials) for problem, trials in by_problem.items()]
    return [replace(batch, judge=judge) for batch in batches]


def make_batch(
    reference: str, spec: KernelSpec, version: KernelVersion, problem: Problem, trials: Sequence[plan.Planned]
) -> Batch:
    """The trials of one problem with what every row of it keeps."""
    return Batch(
        reference=reference,
        version=version,
        problem=problem,
        lookup_key=spec.lookup_key(problem),
        bytes_moved=spec.bytes_moved(problem.shape),
        trials=tuple(trials),
    )


def limits_of(target: Device) -> DeviceLimits | None:
    """What prunes configs on a device; the simulated one has no limits."""
    return device.limits(target)


def version_of(reference: str, spec: KernelSpec) -> KernelVersion:
    """The kernel as it stands in the files that are installed here."""
    return KernelVersion(
        kernel=spec.name,
        source_hash=source.source_hash(reference, source.installed(reference)),
        default=spec.default,
        axes=tuple((name, tuple(values)) for name, values in spec.axes.items()),
        key=spec.key,
    )


# Published rows


def lookup_key(problem: Problem) -> NamedInts | None:
    """The table key of an imported problem; None for a kernel that is not declared here.

    Raises UsageError for a shape that the kernel cannot have.
    """
    if problem.kernel not in KERNELS:
        return None
    spec = load_spec(problem.kernel)
    plan.check_shape(spec, problem.shape)
    return spec.lookup_key(problem)


def compile_published(
    store: Store, only: str | None = None, kernels: Collection[str] = KERNELS, *, command: str = "fp8tune import"
) -> Iterator[Event]:
    """Compile every published config of our kernels for its arch, or ``only`` for one: others tuned their own code."""
    published = [item for item in store.evidence(arch=only, kinds=[Kind.PUBLISHED]) if _compilable(item)]
    for arch in dict.fromkeys(item.device.arch for item in published):
        laboratory = static_laboratory(arch)
        batches = [
            batch
            for kernel in KERNELS
            if kernel in kernels
            for batch in _published_batches(kernel, [e for e in published if e.device.arch == arch], arch)
        ]
        if batches:
            machine.check_folders()
            yield from sweep(store, Request(tuple(batches), laboratory, "published", command=command))


def _compilable(item: Evidence) -> bool:
    return item.problem.kernel in KERNELS and item.config is not None and item.device.arch in ARCHES


def _can_be_made(spec: KernelSpec, problem: Problem) -> bool:
    """Whether the kernel has such a problem; where it has not, says so and why."""
    try:
        plan.check_shape(spec, problem.shape)
    except UsageError as error:
        _logger.warning(f"left out: {error}")
        return False
    return True


def _published_batches(kernel: str, published: Sequence[Evidence], arch: str) -> list[Batch]:
    """Each config once for all problems that give the same machine code with it."""
    if all(item.problem.kernel != kernel for item in published):
        return []
    spec = load_spec(kernel)
    version = version_of(kernel, spec)
    by_problem: dict[Problem, dict[NamedInts, None]] = {}
    mine = [item for item in published if item.problem.kernel == kernel]
    possible = {problem for problem in dict.fromkeys(item.problem for item in mine) if _can_be_made(spec, problem)}
    for item in mine:
        if item.problem in possible:
            # the sources state no routing; which one compiles makes no difference to the binary
            problem = replace(item.problem, routing="jagged" if spec.routed else "none", scale_mode=spec.scale_modes[0])
            config = NamedInts({**spec.default, **(item.config or {})})
            by_problem.setdefault(problem, {})[config] = None
    return [
        make_batch(kernel, spec, version, same[0], [plan.Planned(same[0], config) for config in configs])
        for same in alike(kernel, list(by_problem), arch)
        for configs in [dict.fromkeys(config for problem in same for config in by_problem[problem])]
    ]
