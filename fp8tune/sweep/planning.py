"""From the options of a command to a plan: on which back end, which problems, which configs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fp8tune import __version__, adapter, alive
from fp8tune.errors import UsageError
from fp8tune.fork_server import start_server
from fp8tune.measure import device, machine, rocm
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.compiling import distinct
from fp8tune.measure.engine import Backend, Worker
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Subject
from fp8tune.replay import recording
from fp8tune.replay.loading import check_reference, load_spec, recorded_kernel
from fp8tune.replay.spec import RecordedSpec
from fp8tune.revisions import git, source
from fp8tune.revisions.reference import KernelReference
from fp8tune.stats.study import Today
from fp8tune.sweep import recorded
from fp8tune.sweep.options import Options
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.spec import FLAGS, KernelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class ProblemPlan:
    """One problem of a kernel with all configs that are tried on it, and what every row of it keeps."""

    reference: str
    """How workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    version: KernelVersion
    problem: Problem
    lookup_key: NamedInts
    bytes_moved: int
    configs: Mapping[NamedInts, str]
    """Config -> why it is pruned, empty for one that is tried."""
    flops: int | None = None
    """Floating-point operations, where the kernel declares them."""
    reference_hash: str = ""
    """Of the reference that outputs are compared with; empty where no kernel runs."""
    current: NamedInts | None = None
    """Config of the shipped table's row for the key: it stays unless another is proven faster."""
    fallback: NamedInts | None = None
    """Config of the shipped table for any other shape: timed in every round, for its place hangs on every problem."""
    today: Today | None = None
    """Config that a launch uses now, which gains are measured against."""

    @property
    def always(self) -> tuple[NamedInts, ...]:
        """Configs that are finalists whatever the coarse pass says."""
        today = self.today.config if self.today else None
        return tuple(config for config in (self.version.default, self.current, today) if config is not None)

    @classmethod
    def of(
        cls,
        reference: str,
        spec: KernelSpec,
        version: KernelVersion,
        problem: Problem,
        configs: Mapping[NamedInts, str],
    ) -> ProblemPlan:
        """With what the spec says of the problem."""
        key, bytes_moved = spec.lookup_key(problem), spec.bytes_of(problem)
        flops = spec.flops(problem.shape) if spec.flops else None
        return cls(reference, version, problem, key, bytes_moved, configs, flops)

    def arm(self, config: NamedInts) -> KernelArm:
        """A config as it is launched."""
        return KernelArm(self.reference, self.problem, config, self.lookup_key, self.bytes_moved, self.flops)


@dataclass(frozen=True)
class Plan:
    """A sweep as it will run."""

    options: Options
    backend: Backend
    key: str
    """The same for the same options, code, shapes and device, so that a killed sweep continues."""
    notices: tuple[str, ...] = ()
    """What the user should know first."""
    rows: tuple[NamedInts, ...] = ()
    """Of all shape sets."""
    problems: tuple[ProblemPlan, ...] = ()
    """Empty until :func:`expanded`."""
    commit: str = ""

    def subject(self, of: ProblemPlan) -> Subject:
        """What the database knows a problem of this sweep by."""
        return Subject(of.version, self.backend.device, self.backend.kind, of.problem)

    def row(
        self,
        of: ProblemPlan,
        config: NamedInts,
        outcome: Outcome,
        place: Place,
        process: str,
        stage: str = "screen",
    ) -> Row:
        """One block of a problem with all that is kept of it."""
        return Row(
            problem=of.problem,
            config=config,
            device=self.backend.device,
            kind=self.backend.kind,
            outcome=outcome,
            version=of.version,
            lookup_key=of.lookup_key,
            bytes_moved=of.bytes_moved,
            commit=self.commit,
            stage=stage,
            round=place.round,
            process=process,
            position=place.position,
        )

    def permuted(self, items: Iterable[T], *place: object) -> list[T]:
        """A permutation that is the same for the same seed and place: neighbours and drift hit every config."""
        shuffled = list(items)
        random.Random(" ".join(map(str, (self.options.seed, *place)))).shuffle(shuffled)
        return shuffled


def planned(options: Options) -> Plan:
    """Choose the back end and read the shapes, without torch.

    Raises UsageError or MachineError for what cannot be done here.
    """
    options, left_out = recorded.composed(options)
    backend, notices = backend_for(options.arch, options.timer, options.static, options.trial_timeout_s)
    rows = tuple(row for name in options.shapes for row in shapes.load(name).rows)
    return Plan(options, backend, _key(options, backend, rows), notices + left_out, rows)


def _key(options: Options, backend: Backend, rows: Iterable[NamedInts]) -> str:
    """Of everything a command can vary but how long it may take; shapes and kernels by content, not by name."""
    work = [
        [[_named(reference), _folder(reference), *_reference(reference)] for reference in options.kernels],
        [row.canonical for row in rows],
        [options.routing, options.grid, options.scale_mode, options.seed, backend.timer, backend.device.fingerprint],
        "screen" if options.quick else "finals",
        __version__,
    ]
    if options.in_dtype is not None:  # keys of commands without it stay what they were
        work.append(options.in_dtype)
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


def _named(reference: str) -> str:
    """The text of a reference, its recording by content."""
    named = KernelReference.parse(reference)
    if not named.recording:
        return reference
    kernel = recording.as_json(recorded_kernel(named))
    return str(replace(named, recording=hashlib.sha256(json.dumps(kernel).encode()).hexdigest()[:16]))


def _folder(reference: str) -> str:
    check_reference(reference)
    try:
        return source.folder_hash(reference)
    except source.NoSuchKernel:
        load_spec(reference)  # says more about what is wrong, having imported it
        raise


def _reference(reference: str) -> list[str]:
    """Of a kernel of somebody else, whose reference may lie in another folder."""
    if reference in KERNELS:
        return []
    return [source.reference_hash(reference, source.installed(reference))]


def expanded(short: Plan, tables: adapter.CurrentTables = adapter.SHIPPED) -> Plan:
    """With every problem and config (imports torch and the kernels). Raises UsageError for a kernel of no use."""
    backend, notices = short.backend, short.notices
    if backend.kind is Kind.INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # before any spec is loaded: Triton reads it when it is imported
    make_ready(backend)
    references = []
    with (
        ThreadPoolExecutor(1) as beside,
        contextlib.closing(backend.worker()) as worker,  # it starts no process until it is asked
    ):
        runs_kernels = backend.kind in (Kind.MEASURED, Kind.INTERPRETER)
        importing = beside.submit(_import_recorded, worker, short.options.kernels) if runs_kernels else None
        _check_taken(short.options)
        if importing is not None:
            importing.result()
        for given in short.options.kernels:
            reference, said = _settled(given, backend.kind, worker)
            references.append(reference)
            notices += said
    problems, said = [], ()
    for reference in references:
        alive.sign()
        found, said = _problems(reference, short)
        problems += found
        notices += said
    if not problems:
        raise UsageError(notices[-1] if notices else "these options leave nothing to sweep")
    if backend.kind is Kind.INTERPRETER:
        notices += _interpreter_notices(problems)
    if backend.kind in (Kind.MEASURED, Kind.INTERPRETER):
        notices += _edge_notices(problems)
    problems = [_with_tables(found, backend, tables) for found in problems]
    return replace(short, problems=tuple(problems), notices=notices, commit=git.head(Path.cwd()))


def _import_recorded(worker: Worker, references: Sequence[str]) -> None:
    """Import recorded kernels in the worker that will check their edges."""
    with contextlib.suppress(WorkerDied, RemoteError):  # it dies again when it is asked for more, which is said
        for reference in references:
            if KernelReference.parse(reference).recording:
                worker.run(recorded.import_kernel, reference)


def _check_taken(options: Options) -> None:
    """Raise UsageError for an option that no kernel of the sweep takes."""
    specs = [load_spec(reference) for reference in options.kernels]
    names = ", ".join(spec.name for spec in specs)
    if options.scale_mode is not None and not any(spec.scale_modes for spec in specs):
        raise UsageError(f"--scale-mode {options.scale_mode}: {names} has no scale modes; leave it out")
    for spec in specs:
        if options.in_dtype is not None and options.in_dtype not in spec.in_dtypes and not spec.recorded:
            raise UsageError(f"--in-dtype {options.in_dtype}: {spec.name} takes {', '.join(spec.in_dtypes)}")
    if options.routing != Options.routing and not any(spec.routed or spec.recorded for spec in specs):
        raise UsageError(f"--routing {options.routing}: {names} has no groups; leave it out")


def make_ready(backend: Backend) -> None:
    """Before specs are loaded: check that files can be written where compilers write, and begin what takes seconds."""
    if backend.kind in (Kind.MEASURED, Kind.STATIC):
        machine.check_folders()
    if backend.kind is not Kind.SIMULATED:
        start_server()  # it imports torch beside this process, which does so for the specs


def _with_tables(of: ProblemPlan, backend: Backend, tables: adapter.CurrentTables) -> ProblemPlan:
    version = of.version
    current, fallback = (
        adapter.completed(tables.config(version.kernel, backend.device, key), version) for key in (of.lookup_key, None)
    )
    spec, recorded = load_spec(of.reference), adapter.NO_CONFIGS
    if isinstance(spec, RecordedSpec) and (document := spec.document(of.problem)):
        recorded = adapter.recorded_configs({of.problem: document})
    today = adapter.find_today(version, backend.device, of.lookup_key, recorded.get(of.problem))
    return replace(of, current=current, fallback=fallback, today=today)


def _settled(reference: str, kind: Kind, worker: Worker) -> tuple[str, tuple[str, ...]]:
    """A kernel's text as workers get it, and what the user should know of its recording and its check."""
    spec, named = load_spec(reference), KernelReference.parse(reference)
    if not isinstance(spec, RecordedSpec):
        if not named.overrides:
            return reference, ()
        own = load_spec(named.kernel)
        right = f"{spec.check_text}{f' with {named.reference}' if named.reference else ''}"
        return reference, (f"{spec.name} is checked by {right}, not by its own {own.check_text}",)
    notices = [notice] if (notice := recorded.staleness(reference, spec)) else []
    notices += [f"{spec.name}: {notice}" for notice in spec.notices]
    untried = spec.untried_sizes
    torch_device = {Kind.MEASURED: "cuda", Kind.INTERPRETER: "cpu"}.get(kind)
    if torch_device and spec.has_odd_sizes and (failure := _edge_failure(worker, reference, torch_device)):
        reference, untried = str(replace(named, sizes="recorded")), failure
    if untried:
        notices.append(f"{spec.name} is not checked on odd sizes: {untried}")
    return reference, tuple(notices)


def _edge_failure(worker: Worker, reference: str, torch_device: str) -> str | None:
    try:
        return worker.run(recorded.edge_failure, reference, torch_device)
    except (WorkerDied, RemoteError) as error:
        return str(error).strip().splitlines()[-1][:300]


def _interpreter_notices(problems: Sequence[ProblemPlan]) -> tuple[str, ...]:
    declared = [found for found in problems if not isinstance(load_spec(found.reference), RecordedSpec)]
    notices: tuple[str, ...] = (_interpreter_notice(declared),) if declared else ()
    if len(declared) < len(problems):
        notices += (
            "no GPU here: recorded launches are checked on Triton's interpreter, large ones at smaller sizes, one "
            "config for each set of block sizes; nothing is timed, rows go under arch interpreter",
        )
    return notices


def _interpreter_notice(problems: Sequence[ProblemPlan]) -> str:
    shapes = [found.problem.shape for found in problems]
    named = dict.fromkeys(("M", "K", "N", "E", "G", *(dim for shape in shapes for dim in shape if dim not in FLAGS)))
    largest = {dim: max(found) for dim in named if (found := [shape[dim] for shape in shapes if dim in shape])}
    sizes = ", ".join(f"{dim} <= {size}" for dim, size in largest.items())
    return (
        f"no GPU here: Triton's interpreter checks every byte on shapes scaled down to {sizes}, one config for each "
        "set of block sizes (it knows no warps or stages); nothing is timed, rows go under arch interpreter"
    )


def _edge_notices(problems: Sequence[ProblemPlan]) -> tuple[str, ...]:
    by_kernel = {found.version.kernel: (load_spec(found.reference), found.problem) for found in problems}
    own = {kernel: each for kernel, each in by_kernel.items() if not isinstance(each[0], RecordedSpec)}
    without = [kernel for kernel, (spec, problem) in own.items() if not any(spec.edges(problem))]
    if not without:
        return ()
    declare = "declares no edges and is" if len(without) == 1 else "declare no edges and are"
    return (f"{', '.join(without)} {declare} checked on the swept sizes alone: give the spec edges",)


def _problems(reference: str, short: Plan) -> tuple[list[ProblemPlan], tuple[str, ...]]:
    """The problems of a kernel, and notices of those that are left out."""
    notices = tuple[str, ...]()
    spec, options, kind, arch = load_spec(reference), short.options, short.backend.kind, short.backend.device.arch
    axes = plan.parse_grid(options.grid, spec.axes, rocm.LAUNCH_OPTIONS if arch.startswith("gfx") else ())
    found = plan.problems(
        spec,
        short.rows,
        routing=options.routing,
        in_dtype=options.in_dtype,
        fp8_dtype=fp8_dtype_of(arch),
        scale_mode=options.scale_mode,
        seed=options.seed,
    )
    version = version_of(reference, spec)
    if kind is Kind.STATIC:  # a row for each shape would say the same again and again
        found = distinct(reference, found, arch)
    if kind is Kind.INTERPRETER and isinstance(spec, RecordedSpec):
        small = [problem for problem in found if spec.is_small(problem)]
        if len(small) < len(found):
            notices = (f"{spec.name}: {len(found) - len(small)} launches are too large for Triton's interpreter",)
        found = small
    if kind is Kind.INTERPRETER:
        configs = plan.interpreter_configs(spec, found, axes)
    else:
        limits = device.limits(short.backend.device)
        configs = {problem: plan.configs(spec, problem, axes, limits) for problem in found}
    if kind is Kind.STATIC:  # a row for what is not even compiled would say nothing
        configs = {problem: {c: "" for c, pruned in of.items() if not pruned} for problem, of in configs.items()}
    runs_kernels = kind in (Kind.MEASURED, Kind.INTERPRETER)
    reference_hash = _right(reference, spec) if runs_kernels else ""
    plans = [ProblemPlan.of(reference, spec, version, problem, of) for problem, of in configs.items()]
    return [replace(of, reference_hash=reference_hash) for of in plans], notices


def _right(reference: str, spec: KernelSpec) -> str:
    """16 hex digits for what is right: another reference, check or bound judges the same configs anew."""
    code = source.reference_hash(reference, source.installed(reference))
    if spec.check == "exact":
        return code
    return hashlib.sha256(f"{code}\n{spec.check_text}".encode()).hexdigest()[:16]


def fp8_dtype_of(arch: str) -> str:
    """The FP8 type that an arch computes with."""
    return ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"


def version_of(reference: str, spec: KernelSpec) -> KernelVersion:
    """The kernel as it stands in the files that are installed here."""
    return KernelVersion(
        kernel=spec.name,
        source_hash=source.source_hash(reference, source.installed(reference)),
        default=spec.default,
        axes=tuple((name, tuple(values)) for name, values in spec.axes.items()),
        key=spec.key,
    )
