"""From the options of a command to a plan: the back end, the problem sizes and their configs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from fp8tune import __version__, registry
from fp8tune.errors import UsageError
from fp8tune.fork_server import start_server
from fp8tune.measure import device, machine, timing, trial
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends import backend_for
from fp8tune.measure.compiling import alike
from fp8tune.measure.engine import Backend, Worker
from fp8tune.measure.gpus import Gpu, choose_gpus
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.options import SweepOptions
from fp8tune.plan import grids, problems, shapes
from fp8tune.plan.shapes import Selection, Settings
from fp8tune.records import GRAPH, Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Subject
from fp8tune.replay import recording
from fp8tune.replay.loading import check_reference, load_spec, reach_recorded, recorded_kernel
from fp8tune.replay.spec import RecordedSpec, default_of, repeatable
from fp8tune.revisions import git, source
from fp8tune.revisions.reference import KernelReference
from fp8tune.stats.decide import PLAN
from fp8tune.stats.study import Today
from fp8tune.tables.current import SHIPPED, CurrentTables, Recorded, completed, find_today, recorded_configs
from fp8tune_kernels.spec import KernelSpec

T = TypeVar("T")

# On an H100, to compare sizes with each other: sizes of colwise that move 0.3 and 3 GB took 8 and 17 s in the coarse
# pass, with 129 configs that ran and 591 that were pruned.
CONFIG_S, CONFIG_S_PER_BYTE, BLOCK_S = 0.06, 0.025e-9, 0.02

TORCH_DEVICES = {Kind.MEASURED: "cuda", Kind.INTERPRETER: "cpu"}  # of the kinds of back ends on which kernels run


@dataclass(frozen=True)
class ProblemPlan:
    """A problem size of a kernel with all configs that are tried on it, and facts that every row has."""

    reference: str  # how workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``
    version: KernelVersion
    problem: Problem
    lookup_key: NamedInts
    bytes_moved: int
    configs: Mapping[NamedInts, str]  # config -> why it is pruned, empty for one that is tried
    default: NamedInts  # config that is launched without a table: always a finalist
    flops: int | None = None  # floating-point operations, if the kernel declares them
    reference_hash: str = ""  # of the reference that outputs are compared with; empty if no kernel runs
    current: NamedInts | None = None  # the shipped table's for the key: it stays unless another is proven faster
    fallback: NamedInts | None = None  # the shipped table's for any other shape: timed in every round
    today: Today | None = None  # config that a launch uses now, which gains are measured against
    in_graph: int = 0  # launches in the CUDA graph that is timed; 0 to time single launches
    also: tuple[NamedInts, ...] = ()  # finalists of their own right: the best with the bits of all other sizes
    device: Device | None = None  # GPU that has its results, if a sweep uses several

    @classmethod
    def from_spec(
        cls, reference: str, version: KernelVersion, problem: Problem, configs: Mapping[NamedInts, str]
    ) -> ProblemPlan:
        """Build one with the spec's facts about the problem size."""
        spec = load_spec(reference)
        flops = spec.flops(problem.shape) if spec.flops else None
        facts = spec.lookup_key(problem), spec.bytes_of(problem), configs, default_of(spec, problem), flops
        return cls(reference, version, problem, *facts)

    @property
    def in_use(self) -> list[NamedInts]:
        """Configs of launches of this size: the shipped table's and today's."""
        today = self.today.config if self.today else None
        return [config for config in (self.current, today) if config is not None]

    @property
    def always(self) -> tuple[NamedInts, ...]:
        """Configs that are finalists whatever the coarse pass says."""
        return self.default, *self.in_use, *self.also

    @property
    def count(self) -> int:
        """Number of configs, without building a grid for it."""
        return self.configs.size if isinstance(self.configs, grids.Grid) else len(self.configs)

    @property
    def coarse_s(self) -> float:
        """Seconds that the coarse pass takes on one GPU, compiled."""
        return self.count * (CONFIG_S + self.bytes_moved * CONFIG_S_PER_BYTE)

    def expected_s(self, *, quick: bool) -> float:
        """Return an estimate of the seconds that a sweep of the size takes on one GPU."""
        blocks = 0 if quick else PLAN.processes * PLAN.rounds * (min(PLAN.finalists, self.count) + 1)
        return self.coarse_s + blocks * BLOCK_S

    def arm(self, config: NamedInts) -> KernelArm:
        """Return a config as it is launched."""
        facts = self.lookup_key, self.bytes_moved, self.flops, self.in_graph
        return KernelArm(self.reference, self.problem, config, *facts)


@dataclass(frozen=True)
class Plan:
    """A sweep as it will run."""

    options: SweepOptions  # its kernels are complete: the recording and the check are in their texts
    backend: Backend
    key: str  # the same for the same options, code, shapes and device, so that a killed sweep continues
    notices: tuple[str, ...] = ()
    selections: tuple[Selection, ...] = ()
    problems: tuple[ProblemPlan, ...] = ()  # empty until :func:`expanded`
    commit: str = ""
    command: str = ""  # command line that is stored with the results
    processes: tuple[int, ...] = (PLAN.processes, *PLAN.more_processes)  # after which a size is decided
    coarse_rounds: int = PLAN.screen_rounds
    # Within which of the best the later rounds repeat configs: the others cannot be the pick.
    contender_ratio: float = 1.3
    rounds: int = PLAN.rounds  # in each process of the confirmation
    # Few configs of each size: it is complete only once they are confirmed. Races are looked for on each size in the
    # config in use and in finalists, in others on one size of the kernel.
    is_partial: bool = False
    gpus: tuple[Gpu, ...] = ()  # that the sweep uses; the back end is the first one's

    @property
    def settings(self) -> Settings:
        """Settings that all selections share."""
        return shapes.common_settings(self.selections)

    @property
    def is_confirmed(self) -> bool:
        """True if a confirmation follows the coarse pass."""
        return self.backend.times and not self.options.quick

    @property
    def device(self) -> Device:
        """The device as it times unless a kernel cannot be captured in a graph."""
        is_graph = self.options.timing == "graph" and self.backend.times
        return replace(self.backend.device, timing=GRAPH) if is_graph else self.backend.device

    def device_of(self, size: ProblemPlan) -> Device:
        """Return the device of a problem size's rows, with the way it is timed."""
        device = size.device or self.backend.device
        return replace(device, timing=GRAPH) if size.in_graph else device

    def device_on(self, gpu: Gpu, size: ProblemPlan) -> Device:
        """Return the device of a problem size's rows on a GPU."""
        return self.device_of(replace(size, device=gpu.device))

    def subject(self, size: ProblemPlan) -> Subject:
        """Return the key of a problem size in the database."""
        return Subject(size.version, self.device_of(size), self.backend.kind, size.problem)

    def row(
        self, size: ProblemPlan, config: NamedInts, outcome: Outcome, place: Place, process: str, stage: str = "screen"
    ) -> Row:
        """Return the row of one block."""
        return Row(
            problem=size.problem,
            config=config,
            device=self.device_of(size),
            kind=self.backend.kind,
            outcome=outcome,
            version=size.version,
            lookup_key=size.lookup_key,
            bytes_moved=size.bytes_moved,
            commit=self.commit,
            stage=stage,
            round=place.round,
            process=process,
            position=place.position,
        )

    def permuted(self, items: Iterable[T], *place: object) -> list[T]:
        """Shuffle: the same for the same seed and place, so that neighbours and drift affect every config alike."""
        shuffled = list(items)
        random.Random(" ".join(map(str, (self.settings.seed, *place)))).shuffle(shuffled)
        return shuffled


def planned(options: SweepOptions, command: str = "") -> Plan:
    """Choose the back end and read the shapes, without torch.

    Raises UsageError or MachineError for what cannot be done here.
    """
    selections = tuple(map(shapes.parse, options.shapes))
    settings = shapes.common_settings(selections)
    if options.same_bits and (options.on or (options.gpus or 1) > 1):
        raise UsageError("--same-bits compares all sizes on one GPU: leave out --on and --gpus")
    options, left_out = _with_recording(options)
    if options.arch is not None and options.gpus is not None:
        raise UsageError(f"--arch {options.arch} only compiles: leave out --gpus")
    count = 1 if options.same_bits or options.on else options.gpus
    gpus, lines = choose_gpus(count, options.timer) if options.arch is None else ((), ())
    backend, notices = backend_for(options.arch, options.timer, gpus[0].name if gpus else "")
    plan = Plan(options, backend, "", notices + left_out + lines, selections, command=command, gpus=gpus)
    # What a command can vary but how long it may take; shapes and kernels by content, not by name.
    work = [
        [_kernel_key(reference) for reference in options.kernel],
        [(selected.size.canonical, *(row.canonical for row in selected.rows)) for selected in selections],
        [vars(settings), options.grid, options.quick, backend.timer, replace(plan.device, uuid_hash="").fingerprint],
        [__version__],
        *([options.same_bits] if options.same_bits else []),  # it has more finalists
    ]
    return replace(plan, key=_digest(json.dumps(work)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_recording(options: SweepOptions) -> tuple[SweepOptions, tuple[str, ...]]:
    """Put ``--recording``, ``--tolerance`` and ``--reference`` into the text of each kernel. Returns notices too.

    A recording alone stands for every kernel in it that can be swept. Raises UsageError if there is none.
    """
    refused, names = list[str](), list(options.kernel)
    if options.recording is not None and not names:
        for recorded in recording.read(Path(options.recording)).kernels:
            try:
                names.append(repeatable(recorded)[0].name)
            except UsageError as error:
                refused.append(str(error))
        if not names:
            reason = refused[0] if refused else "it holds no kernel"
            raise UsageError(f"nothing of {options.recording} can be swept: {reason}")
    rule, complete = _rule_of(options.tolerance), []
    for kernel in map(KernelReference.parse, names or registry.kernels()):  # what a kernel's own text says stays
        if options.recording is not None and not kernel.recording and ":" in kernel.kernel:
            kernel = replace(kernel, recording=options.recording)
        if rule.check and not kernel.check:
            kernel = replace(kernel, check=rule.check, relative=rule.relative, absolute=rule.absolute)
        kernel = replace(kernel, reference=kernel.reference or options.reference or "").absolute_paths()
        reach_recorded(kernel)
        complete.append(str(kernel))
    return replace(options, kernel=tuple(complete)), tuple(refused)


def _rule_of(tolerance: str) -> KernelReference:
    """Return the check of a ``--tolerance`` as kernels' texts have it; none for the kernel's own."""
    rules = {"auto": "", "exact": "?check=exact", "exact-sums": "?check=exact-inputs"}
    if match := re.fullmatch(r"([0-9.eE+-]{1,30}),([0-9.eE+-]{1,30})", tolerance):
        rules[tolerance] = f"?check=tolerance&relative={match[1]}&absolute={match[2]}"
    if tolerance not in rules:
        raise UsageError(f"--tolerance {tolerance!r:.80} is unknown: use exact, exact-sums, auto or RTOL,ATOL")
    return KernelReference.parse(f"any{rules[tolerance]}")


def _kernel_key(reference: str) -> list[str]:
    check_reference(reference)
    kernel, text = KernelReference.parse(reference), reference
    if kernel.recording:
        text = str(replace(kernel, recording=_digest(json.dumps(recording.as_json(recorded_kernel(kernel))))))
    try:
        # the reference of a foreign kernel may be in another folder
        return [text, source.declaration_hash(reference), source.reference_hash(reference)]
    except source.NoSuchKernel:
        load_spec(reference)  # its error says more
        raise


def expanded(
    short: Plan, tables: CurrentTables = SHIPPED, stored: Mapping[str, Sequence[Problem]] = MappingProxyType({})
) -> Plan:
    """Add the problem sizes (imports torch and the kernels). Raises UsageError for a kernel of no use.

    ``stored`` holds sizes by kernel that take the place of those in the shapes.
    """
    if short.backend.kind is Kind.INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # before any spec is loaded: Triton reads it when it is imported
    make_ready(short.backend)
    _check_settings(short)
    sizes = list[ProblemPlan]()
    with contextlib.closing(short.backend.worker()) as worker:
        expansion = _Expansion(short, worker, tables, [*short.notices])
        for reference in short.options.kernel:
            sizes += expansion.sizes(reference, stored.get(load_spec(reference).name))
    notices = expansion.notices
    if not sizes:
        raise UsageError(notices[-1] if notices else "these options leave nothing to sweep")
    if (axis := short.options.same_bits) and not any(axis in size.problem.shape for size in sizes):
        raise UsageError(f"--same-bits {axis}: no size has that name; these have {', '.join(sizes[0].problem.shape)}")
    if short.backend.kind is Kind.INTERPRETER:
        notices.append(
            "No GPU found: checking outputs on small sizes with Triton's interpreter, one config for each set of block "
            "sizes; nothing is timed"
        )
    return replace(short, problems=tuple(sizes), notices=tuple(notices), commit=git.head(Path.cwd()))


def make_ready(backend: Backend) -> None:
    """Check that compilers can write their files, and start the process that imports torch, which takes seconds."""
    if backend.kind in (Kind.MEASURED, Kind.STATIC):
        machine.check_folders()
    if backend.kind is not Kind.SIMULATED:
        start_server()


def _check_settings(short: Plan) -> None:
    """Raise UsageError for a setting that no kernel of the sweep takes."""
    specs, settings = [load_spec(reference) for reference in short.options.kernel], short.settings
    names = ", ".join(spec.name for spec in specs)
    if settings.scale and not any(spec.scale_modes for spec in specs):
        raise UsageError(f"--shapes with scale={settings.scale}: {names} has no scale modes; leave it out")
    for spec in specs:
        if settings.dtype not in ("", *spec.in_dtypes) and not spec.recorded:
            raise UsageError(f"--shapes with dtype={settings.dtype}: {spec.name} takes {', '.join(spec.in_dtypes)}")
    if settings.routing not in ("", "jagged") and not any(spec.routed or spec.recorded for spec in specs):
        raise UsageError(f"--shapes with routing={settings.routing}: {names} has no groups; leave it out")


def version_of(reference: str) -> KernelVersion:
    """Return the kernel as it is in the files that are installed here."""
    spec = load_spec(reference)
    return KernelVersion(
        kernel=spec.name,
        source_hash=source.source_hash(reference),
        default=spec.default,
        axes=tuple((name, tuple(values)) for name, values in spec.axes.items()),
        key=spec.key,
    )


@dataclass
class _Expansion:
    """Builds the problem sizes of a plan's kernels."""

    plan: Plan
    worker: Worker
    tables: CurrentTables
    notices: list[str] = field(default_factory=list)

    def sizes(self, reference: str, stored: Sequence[Problem] | None) -> list[ProblemPlan]:
        """Return the problem sizes of a kernel: its ``stored`` ones, or those of the shapes."""
        reference, backend, texts = self._checkable(reference), self.plan.backend, self.plan.options.grid
        spec, version, here = load_spec(reference), version_of(reference), backend.device
        axes = grids.parse_grid(texts, spec.axes, device.AMD_LAUNCH_OPTIONS if here.arch.startswith("gfx") else ())
        conditions, named, judge = grids.parse_conditions(texts, axes), grids.named_axes(texts), ""
        if backend.kind in TORCH_DEVICES:
            # another reference, check or bound judges the same configs anew
            judge = source.reference_hash(reference)
            judge = judge if spec.check == "exact" else _digest(f"{judge}\n{spec.check_text}")

        def grid(problem: Problem) -> grids.Grid:
            if backend.kind is Kind.INTERPRETER:
                return grids.interpreter_configs(spec, problem, axes, named)
            configs = grids.of_kernel(reference, problem, axes, device.limits(here), conditions, named)
            if isinstance(configs, grids.Product) and (self.plan.options.budget_s is None or not backend.times):
                fix = "add --budget 10m to search it, or" if backend.times else "name"
                count = f"{configs.size:,} configs"
                raise UsageError(f"the grid of {spec.name} has {count}: {fix} fewer values with --grid")
            if backend.kind is not Kind.STATIC:
                return configs
            # what is not compiled needs no row
            return grids.Grid(configs.size, lambda: {config: "" for config, pruned in configs.items() if not pruned})

        def size(problem: Problem) -> ProblemPlan:
            plan = ProblemPlan.from_spec(reference, version, problem, grid(problem))
            document = spec.document(problem) if isinstance(spec, RecordedSpec) else ""
            recorded = recorded_configs({problem: document}).get(problem, Recorded(Today(plan.default)))
            current, fallback = (self.tables.config(version.kernel, here, key) for key in (plan.lookup_key, None))
            return replace(
                plan,
                reference_hash=judge,
                current=completed(current, version),
                fallback=completed(fallback, version),
                today=find_today(version, here, plan.lookup_key, recorded.today),
            )

        return self._in_graphs([size(problem) for problem in self._problems(reference, spec, stored)])

    def _checkable(self, reference: str) -> str:
        """Return a kernel's text as workers get it, with notices about its recording and its check."""
        spec, kernel = load_spec(reference), KernelReference.parse(reference)
        if not isinstance(spec, RecordedSpec):
            if kernel.overrides:
                rule = f"{spec.check_text}{f' with {kernel.reference}' if kernel.reference else ''}"
                own = load_spec(kernel.kernel).check_text
                self.notices.append(f"{spec.name} is checked by {rule}, not by its own {own}")
            return reference
        recorded_hash = spec.kernel.source_hash
        if recorded_hash and recorded_hash != source.source_hash(reference):
            changed = "has changed since it was recorded: its grids and arguments may be others, record it again"
            self.notices.append(f"{spec.name} {changed}")
        self.notices += [f"{spec.name}: {notice}" for notice in spec.notices]
        untried, torch_device = spec.untried_sizes, TORCH_DEVICES.get(self.plan.backend.kind)
        is_tried = torch_device is not None and spec.has_odd_sizes
        if is_tried and (failure := self._failure(trial.edge_failure, reference, torch_device)):
            reference, untried = str(replace(kernel, sizes="recorded")), failure
        if untried:
            self.notices.append(f"{spec.name} is not checked on odd sizes: {untried}")
        return reference

    def _failure(self, function: Callable[..., str | None], *arguments: object) -> str | None:
        """Call a function that returns the reason of a failure; the death of its process is one, too."""
        try:
            return self.worker.run(function, *arguments)
        except (WorkerDied, RemoteError) as error:
            return str(error).strip().splitlines()[-1][:200]

    def _problems(self, reference: str, spec: KernelSpec, stored: Sequence[Problem] | None) -> list[Problem]:
        kind, arch = self.plan.backend.kind, self.plan.backend.device.arch
        selections = self.plan.selections[:1] if spec.recorded else self.plan.selections
        of_shapes = (
            problems.problems(spec, chosen.rows, chosen.settings, size=chosen.size, arch=arch) for chosen in selections
        )
        sizes = list(dict.fromkeys(itertools.chain.from_iterable(of_shapes) if stored is None else stored))
        if kind is Kind.STATIC and stored is None:  # shapes with the same machine code need one row
            return [first for first, *_ in alike(reference, sizes, arch)]
        if kind is not Kind.INTERPRETER:
            return sizes
        small = [problem for problem in sizes if not isinstance(spec, RecordedSpec) or spec.is_small(problem)]
        if len(small) < len(sizes):
            count = len(sizes) - len(small)
            self.notices.append(f"{spec.name}: {count} launches are too large for Triton's interpreter")
        return problems.scaled_down(spec, small)

    def _in_graphs(self, sizes: list[ProblemPlan]) -> list[ProblemPlan]:
        """Return the sizes of a kernel as ``--timing`` asks, with a notice if they cannot be captured in a graph."""
        if self.plan.options.timing == "events" or not self.plan.backend.times or not sizes:
            return sizes
        in_graphs = [replace(size, in_graph=timing.graph_launches(size.bytes_moved)) for size in sizes]
        smallest = min(in_graphs, key=lambda size: size.bytes_moved)
        reason: str | None = "inputs are made for each config"
        if not KernelReference.parse(smallest.reference).inputs:
            reason = self._failure(trial.capture_failure, smallest.arm(smallest.default), "cuda")
        if not reason:
            return in_graphs
        name = smallest.problem.kernel
        self.notices.append(f"{name} cannot be captured in a CUDA graph, and is timed by events: {reason}")
        return sizes
