"""From the options of a command to a plan: the back end, the problem sizes and their configs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fp8tune import __version__, alive, registry
from fp8tune.errors import UsageError
from fp8tune.fork_server import start_server
from fp8tune.measure import device, machine, rocm
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.compiling import alike
from fp8tune.measure.engine import Backend
from fp8tune.plan import grids, problems, selection
from fp8tune.plan.selection import Selection
from fp8tune.records import KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Subject
from fp8tune.replay import recording
from fp8tune.replay.loading import check_reference, load_spec, recorded_kernel
from fp8tune.replay.spec import RecordedSpec
from fp8tune.revisions import git, source
from fp8tune.revisions.reference import KernelReference
from fp8tune.stats.study import Today
from fp8tune.studies import NO_CONFIGS
from fp8tune.sweeping import recorded
from fp8tune.sweeping.options import Options
from fp8tune.tables.current import SHIPPED, CurrentTables, completed, find_today, recorded_configs
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec

T = TypeVar("T")

RUNNING = (Kind.MEASURED, Kind.INTERPRETER)
"""Kinds of back ends on which kernels run."""


@dataclass(frozen=True)
class ProblemPlan:
    """A problem size of a kernel with all configs that are tried on it, and facts that every row has."""

    reference: str
    """Text by which workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    version: KernelVersion
    problem: Problem
    lookup_key: NamedInts
    bytes_moved: int
    configs: Mapping[NamedInts, str]
    """Config -> why it is pruned, empty for one that is tried."""
    flops: int | None = None
    """Floating-point operations, if the kernel declares them."""
    reference_hash: str = ""
    """Hash of the reference that outputs are compared with; empty if no kernel runs."""
    current: NamedInts | None = None
    """Config of the shipped table's row for the key: it stays unless another is proven faster."""
    fallback: NamedInts | None = None
    """Config of the shipped table for any other shape: timed in every round, because all problem sizes decide on it."""
    today: Today | None = None
    """Config that a launch uses now, which gains are measured against."""

    @property
    def always(self) -> tuple[NamedInts, ...]:
        """Configs that are finalists whatever the coarse pass says."""
        today = self.today.config if self.today else None
        return tuple(config for config in (self.version.default, self.current, today) if config is not None)

    @property
    def count(self) -> int:
        """Number of configs, without building a grid for it."""
        return self.configs.size if isinstance(self.configs, grids.Grid) else len(self.configs)

    @classmethod
    def of(
        cls,
        reference: str,
        spec: KernelSpec,
        version: KernelVersion,
        problem: Problem,
        configs: Mapping[NamedInts, str],
    ) -> ProblemPlan:
        """Build one with the spec's facts about the problem size."""
        key, bytes_moved = spec.lookup_key(problem), spec.bytes_of(problem)
        flops = spec.flops(problem.shape) if spec.flops else None
        return cls(reference, version, problem, key, bytes_moved, configs, flops)

    def arm(self, config: NamedInts) -> KernelArm:
        """Return a config as it is launched."""
        return KernelArm(self.reference, self.problem, config, self.lookup_key, self.bytes_moved, self.flops)


@dataclass(frozen=True)
class Plan:
    """A sweep as it will run."""

    options: Options
    backend: Backend
    key: str
    """The same for the same options, code, shapes and device, so that a killed sweep continues."""
    notices: tuple[str, ...] = ()
    selections: tuple[Selection, ...] = ()
    problems: tuple[ProblemPlan, ...] = ()
    """Empty until :func:`expanded`."""
    commit: str = ""

    @property
    def rows(self) -> tuple[NamedInts, ...]:
        """Rows of all shape sets."""
        return tuple(row for selected in self.selections for row in selected.rows)

    def subject(self, problem: ProblemPlan) -> Subject:
        """Return what the database knows a problem size of this sweep by."""
        return Subject(problem.version, self.backend.device, self.backend.kind, problem.problem)

    def row(
        self,
        problem: ProblemPlan,
        config: NamedInts,
        outcome: Outcome,
        place: Place,
        process: str,
        stage: str = "screen",
    ) -> Row:
        """Return the row of one block."""
        return Row(
            problem=problem.problem,
            config=config,
            device=self.backend.device,
            kind=self.backend.kind,
            outcome=outcome,
            version=problem.version,
            lookup_key=problem.lookup_key,
            bytes_moved=problem.bytes_moved,
            commit=self.commit,
            stage=stage,
            round=place.round,
            process=process,
            position=place.position,
        )

    def permuted(self, items: Iterable[T], *place: object) -> list[T]:
        """Shuffle: the same for the same seed and place, so that neighbours and drift affect every config alike."""
        shuffled = list(items)
        random.Random(" ".join(map(str, (self.options.seed, *place)))).shuffle(shuffled)
        return shuffled


def planned(options: Options) -> Plan:
    """Choose the back end and read the shapes, without torch.

    Raises UsageError or MachineError for what cannot be done here.
    """
    options, left_out = recorded.composed(options)
    backend, notices = backend_for(options.arch, options.timer, options.static)
    selections = tuple(map(selection.parse, options.shapes))
    return Plan(options, backend, _key(options, backend, selections), notices + left_out, selections)


def _key(options: Options, backend: Backend, selections: Iterable[Selection]) -> str:
    """Hash what a command can vary but how long it may take; shapes and kernels by content, not by name."""
    work = [
        [_kernel_key(reference) for reference in options.kernels],
        [row.canonical for selected in selections for row in selected.rows],
        [options.routing, options.grid, options.scale_mode, options.seed, backend.timer, backend.device.fingerprint],
        "screen" if options.quick else "finals",
        __version__,
        *([] if options.in_dtype is None else [options.in_dtype]),
        *([] if options.layout is None else [options.layout]),
        *(selected.size.canonical for selected in selections if selected.size),
    ]
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


def _kernel_key(reference: str) -> list[str]:
    check_reference(reference)
    kernel, installed = KernelReference.parse(reference), source.installed
    text = reference
    if kernel.recording:
        content = json.dumps(recording.as_json(recorded_kernel(kernel)))
        text = str(replace(kernel, recording=hashlib.sha256(content.encode()).hexdigest()[:16]))
    try:
        folder = source.folder_hash(reference)
    except source.NoSuchKernel:
        load_spec(reference)  # its error says more
        raise
    # the reference of a foreign kernel may be in another folder
    return [
        text,
        folder,
        *([] if reference in registry.kernels() else [source.reference_hash(reference, installed(reference))]),
    ]


def expanded(short: Plan, tables: CurrentTables = SHIPPED) -> Plan:
    """Add the problem sizes (imports torch and the kernels). Raises UsageError for a kernel of no use."""
    backend, options, notices = short.backend, short.options, [*short.notices]
    if backend.kind is Kind.INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # before any spec is loaded: Triton reads it when it is imported
    make_ready(backend)
    _check_options(options)
    result: list[ProblemPlan] = []
    with contextlib.closing(backend.worker()) as worker:
        for kernel in options.kernels:
            alive.sign()
            reference, lines = recorded.checkable(kernel, backend.kind, worker)
            found, left_out = _problems(reference, short)
            result += [_with_tables(problem, backend, tables) for problem in found]
            notices += lines + left_out
    if not result:
        raise UsageError(notices[-1] if notices else "these options leave nothing to sweep")
    notices += _notices(result, backend.kind)
    return replace(short, problems=tuple(result), notices=tuple(notices), commit=git.head(Path.cwd()))


def _check_options(options: Options) -> None:
    """Raise UsageError for an option that no kernel of the sweep takes."""
    specs = [load_spec(reference) for reference in options.kernels]
    names = ", ".join(spec.name for spec in specs)
    if options.scale_mode is not None and not any(spec.scale_modes for spec in specs):
        raise UsageError(f"--shapes with scale={options.scale_mode}: {names} has no scale modes; leave it out")
    for spec in specs:
        if options.in_dtype is not None and options.in_dtype not in spec.in_dtypes and not spec.recorded:
            raise UsageError(f"--shapes with dtype={options.in_dtype}: {spec.name} takes {', '.join(spec.in_dtypes)}")
    if options.routing != Options.routing and not any(spec.routed or spec.recorded for spec in specs):
        raise UsageError(f"--shapes with routing={options.routing}: {names} has no groups; leave it out")


def make_ready(backend: Backend) -> None:
    """Check that compilers can write their files, and start the process that imports torch, which takes seconds."""
    if backend.kind in (Kind.MEASURED, Kind.STATIC):
        machine.check_folders()
    if backend.kind is not Kind.SIMULATED:
        start_server()


def _problems(reference: str, short: Plan) -> tuple[list[ProblemPlan], list[str]]:
    """Return the problem sizes of a kernel, and notices of those that are left out."""
    spec, options, kind, arch = load_spec(reference), short.options, short.backend.kind, short.backend.device.arch
    notices: list[str] = []
    axes = grids.parse_grid(options.grid, spec.axes, rocm.LAUNCH_OPTIONS if arch.startswith("gfx") else ())
    of_rows = partial(
        problems.problems,
        spec,
        routing=options.routing,
        in_dtype=options.in_dtype,
        layout=options.layout,
        fp8_dtype=fp8_dtype_of(arch),
        scale_mode=options.scale_mode,
        seed=options.seed,
    )
    selections = (Selection(()),) if spec.recorded else short.selections
    found = list(dict.fromkeys(p for selected in selections for p in of_rows(selected.rows, size=selected.size)))
    if kind is Kind.STATIC:
        found = [first for first, *_ in alike(reference, found, arch)]  # shapes with the same machine code need one row
    if kind is Kind.INTERPRETER:
        if isinstance(spec, RecordedSpec):
            small = [problem for problem in found if spec.is_small(problem)]
            if len(small) < len(found):
                notices = [f"{spec.name}: {len(found) - len(small)} launches are too large for Triton's interpreter"]
            found = small
        found = problems.scaled_down(spec, found)
    version, limits = version_of(reference, spec), device.limits(short.backend.device)

    def grid(problem: Problem) -> grids.Grid:
        if kind is Kind.INTERPRETER:
            return grids.interpreter_configs(spec, problem, axes)
        configs = grids.configs(spec, problem, axes, limits)
        if kind is not Kind.STATIC:
            return configs
        # what is not compiled needs no row
        return grids.Grid(configs.size, lambda: {config: "" for config, pruned in configs.items() if not pruned})

    plans = [ProblemPlan.of(reference, spec, version, problem, grid(problem)) for problem in found]
    judge = _reference_hash(reference, spec) if kind in RUNNING else ""
    return [replace(problem, reference_hash=judge) for problem in plans], notices


def _reference_hash(reference: str, spec: KernelSpec) -> str:
    """Hash what outputs are compared with: another reference, check or bound judges the same configs anew."""
    code = source.reference_hash(reference, source.installed(reference))
    if spec.check == "exact":
        return code
    return hashlib.sha256(f"{code}\n{spec.check_text}".encode()).hexdigest()[:16]


def _with_tables(problem: ProblemPlan, backend: Backend, tables: CurrentTables) -> ProblemPlan:
    version, key = problem.version, problem.lookup_key
    current, fallback = (completed(tables.config(version.kernel, backend.device, row), version) for row in (key, None))
    spec, launched = load_spec(problem.reference), NO_CONFIGS
    if isinstance(spec, RecordedSpec) and (document := spec.document(problem.problem)):
        launched = recorded_configs({problem.problem: document})
    today = find_today(version, backend.device, key, launched.get(problem.problem))
    return replace(problem, current=current, fallback=fallback, today=today)


def _notices(plans: Sequence[ProblemPlan], kind: Kind) -> list[str]:
    """Say what is not checked, or on smaller sizes only."""
    if kind not in RUNNING:
        return []
    notices, specs = [], {problem.version.kernel: (load_spec(problem.reference), problem.problem) for problem in plans}
    if kind is Kind.INTERPRETER:
        largest: dict[str, int] = {}
        for name, size in (item for problem in plans for item in problem.problem.shape.items()):
            largest[name] = max(size, largest.get(name, 0))
        sizes = ", ".join(f"{name} <= {size}" for name, size in largest.items())
        notices.append(
            f"no GPU here: Triton's interpreter checks every byte on small shapes ({sizes}), one config for each set "
            "of block sizes; nothing is timed, rows go under arch interpreter"
        )
    own = {kernel: spec for kernel, (spec, _) in specs.items() if not isinstance(spec, RecordedSpec)}
    if without := [kernel for kernel, spec in own.items() if not any(spec.edges(specs[kernel][1]))]:
        notices.append(f"{', '.join(without)}: no edge cases are declared, only the swept sizes are checked")
    return notices


def fp8_dtype_of(arch: str) -> str:
    """Return the FP8 type that an arch computes with."""
    return ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"


def version_of(reference: str, spec: KernelSpec) -> KernelVersion:
    """Return the kernel as it is in the files that are installed here."""
    return KernelVersion(
        kernel=spec.name,
        source_hash=source.source_hash(reference, source.installed(reference)),
        default=spec.default,
        axes=tuple((name, tuple(values)) for name, values in spec.axes.items()),
        key=spec.key,
    )
