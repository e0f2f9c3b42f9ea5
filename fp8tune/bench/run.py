"""A run of ``bench``: which sizes and contenders it has, and how they are compiled, checked and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune import registry
from fp8tune.bench.contenders import Contender, Result, check, warm_up
from fp8tune.bench.operations import exported_config, load
from fp8tune.errors import MachineError, UsageError, unknown
from fp8tune.measure.backends import outcome_of
from fp8tune.measure.engine import Backend, Group, Schedule, Worker, measure
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores
from fp8tune.options import BenchOptions
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.plan.shapes import LARGEST_DIM, Selection
from fp8tune.records import Device, NamedInts
from fp8tune.stats.means import median
from fp8tune_kernels.operations.operation import Operation, Size

NONE = "none"
ROUNDS = 3  # of a contender's blocks; about one block in a thousand takes several times as long as the others
TIMEOUT_S = 180.0  # of a call: an autotuner with 36 configs and a cold cache fits
WARM_UP_WORKERS = 6
WARM_UP_BYTES = 16 << 30  # larger sizes have the binaries of smaller ones, and would not fit beside each other


@dataclass(frozen=True)
class Subject:
    """A kernel or an operation with the sizes and contenders that are timed."""

    reference: str
    is_kernel: bool
    operation: Operation
    sizes: tuple[Size, ...]
    names: tuple[str, ...]  # of contenders, ours first

    def contenders(self, size: Size) -> list[Contender]:
        """Return the contenders of a size."""
        bytes_moved = self.operation.bytes_of(size)
        return [Contender(self.reference, self.is_kernel, name, size, bytes_moved) for name in self.names]


@dataclass(frozen=True)
class Row:
    """One size with all contenders."""

    subject: Subject
    size: Size
    device: Device
    cells: Mapping[str, Result]
    config: NamedInts | None  # what our kernel was launched with

    @property
    def ours(self) -> Result:
        """The contender that ratios are of."""
        return self.cells[self.subject.names[0]]

    @property
    def tflops(self) -> float | None:
        """Speed of ours in TFLOP/s; None if the operation declares no operations."""
        flops = self.subject.operation.flops(self.size.shape)
        return flops / self.ours.time_us / 1e6 if flops and self.ours.time_us else None

    @property
    def gb_per_s(self) -> float | None:
        """Rate of ours in GB/s, counting the least bytes."""
        return self.subject.operation.bytes_of(self.size) / self.ours.time_us / 1e3 if self.ours.time_us else None

    def speedup(self, name: str) -> float | None:
        """Return a contender's time over ours; None if either is wrong or has no time."""
        theirs = self.cells[name].time_us if name in self.cells else None
        return theirs / self.ours.time_us if theirs and self.ours.time_us else None

    @property
    def is_wrong(self) -> bool:
        """True if an output of this project is wrong."""
        return any(self.cells[name].is_wrong for name in self.subject.operation.ours if name in self.cells)


@dataclass(frozen=True)
class Compiled:
    """Progress of the compiling that comes first."""

    done: int
    total: int


def planned(options: BenchOptions, backend: Backend) -> list[Subject]:
    """Return what the options ask for. Imports torch and the kernels.

    Raises MachineError without a GPU, and UsageError for unknown names, and for shapes without a size of an operation.
    """
    if not backend.times:
        raise MachineError("bench needs a GPU: set FP8TUNE_TIMER=simulated:1 to try it on a simulated one")
    if options.op is not None and options.kernel:
        raise UsageError("--op and --kernel exclude each other: leave out one")
    references = tuple(dict.fromkeys(options.kernel or registry.kernels())) if options.op is None else (options.op,)
    operations = {reference: load(reference, is_kernel=options.op is None) for reference in references}
    known = dict.fromkeys(name for operation in operations.values() for name in operation.rivals)
    for name in options.against:
        if name not in (*known, NONE):
            raise unknown("contender", name, (*known, NONE))
    make = _kernel_sizes if options.op is None else _operation_sizes
    subjects = []
    for reference, operation in operations.items():
        sizes = make(operation, shapes.parse(options.shapes or operation.shapes), backend.device)
        subjects.append(Subject(reference, options.op is None, operation, sizes, _names(operation, options)))
    return subjects


def _names(operation: Operation, options: BenchOptions) -> tuple[str, ...]:
    if NONE in options.against:
        return tuple(operation.ours)
    rivals = [name for name in operation.rivals if name in (options.against or operation.rivals)]
    return (*operation.ours, *operation.baseline, *rivals)


def _kernel_sizes(operation: Operation, chosen: Selection, device: Device) -> tuple[Size, ...]:
    spec = operation.spec  # type: ignore[attr-defined]  # of a KernelOperation
    problems = plan.problems(spec, chosen.rows, chosen.settings, size=chosen.size, arch=device.arch)
    return tuple(Size(**vars(problem)) for problem in problems)


def _operation_sizes(operation: Operation, chosen: Selection, device: Device) -> tuple[Size, ...]:
    settings = chosen.settings
    groups = group_sizes(Path(settings.groups)) if settings.groups and operation.routed else ()
    routing = ("listed" if groups else settings.routing or "jagged") if operation.routed else "none"
    sizes: dict[NamedInts, Size] = {}
    lacking = ""
    for row in chosen.rows:
        listed = {**row, "M": sum(groups)} if groups else row
        try:
            for shape, name in operation.sizes(listed, chosen.names.get(row, "")):
                if groups and shape["G"] != len(groups):
                    continue
                if all(shape.get(dim, row.get(dim)) == value for dim, value in chosen.size.items()):
                    size = Size(operation.name, shape, routing, seed=settings.seed, label=name, groups=groups)
                    sizes.setdefault(shape, size)
        except KeyError as error:
            lacking = str(error.args[0])
    if not sizes:
        reason = f"its rows lack {lacking}" if lacking else "no row fits"
        raise UsageError(f"--shapes has no size of {operation.name}: {reason}; name another set")
    return tuple(sizes.values())


def group_sizes(path: Path) -> tuple[int, ...]:
    """Read the rows of each group from a file, one number per line. Raises UsageError."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"groups={path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10)]:
        raise UsageError(f"groups={path}: {wrong[0]!r:.40} is not a number of rows: write one per line")
    sizes = tuple(map(int, words))
    if not 1 <= sum(sizes) <= LARGEST_DIM:
        raise UsageError(f"groups={path} has {sum(sizes)} rows: use 1 to {LARGEST_DIM}")
    return sizes


def run(backend: Backend, subjects: Sequence[Subject]) -> Iterator[Compiled | Row]:
    """Compile all contenders in parallel, then check and time each size. Closing the generator ends the workers."""
    yield from _warm_up(backend, subjects)
    worker = backend.worker()
    try:
        for subject in subjects:
            for size in subject.sizes:
                yield _row(backend, worker, subject, size)
    finally:
        worker.close()


def _row(backend: Backend, worker: Worker, subject: Subject, size: Size) -> Row:
    contenders = subject.contenders(size)
    results: dict[str, Result] = {}
    for contender in contenders:
        try:
            result = worker.run(check, contender, is_profiled=contender.name == subject.names[0])
        except (WorkerDied, RemoteError) as error:
            result = Result(outcome_of(error).reason)
        results[contender.name] = result or Result()  # a simulated GPU runs nothing
    group = Group(None, [contender for contender in contenders if not results[contender.name].reason])
    blocks: dict[str, list[float]] = {}
    for turn in measure(backend, [group], Schedule(range(1), ROUNDS, _rotated), worker):
        for block in turn.failed:
            results[block.arm.name] = Result(block.outcome.reason or str(block.outcome.status))
        for block in turn.blocks:
            blocks.setdefault(block.arm.name, []).append(block.outcome.time_us or 0.0)
    if group.failure:
        results = {name: result if result.reason else Result(group.failure) for name, result in results.items()}
    for name, times_us in blocks.items():
        results[name] = replace(results[name], time_us=median(times_us))
    return Row(subject, size, backend.device, results, exported_config(subject.operation, size, backend.device))


def _rotated(group: Group[Contender, None], process: int, round: int) -> Sequence[Contender]:
    first = round % len(group.arms)
    return group.arms[first:] + group.arms[:first]


def _warm_up(backend: Backend, subjects: Sequence[Subject]) -> Iterator[Compiled]:
    """Run each contender once, in processes that are thrown away: one by one, compiling would take minutes."""
    if isinstance(backend, SimulatedBackend):
        return
    backend.trial_timeout_s = TIMEOUT_S
    every = [contender for subject in subjects for size in subject.sizes for contender in subject.contenders(size)]
    contenders = [contender for contender in every if contender.bytes_moved <= WARM_UP_BYTES]
    pool = WorkerPool(min(WARM_UP_WORKERS, usable_cores()))
    try:
        running = [pool.submit(TIMEOUT_S, warm_up, contender) for contender in contenders]
        for done, _ in enumerate(as_completed(running), start=1):  # what fails, fails again where it is timed
            yield Compiled(done, len(running))
    finally:
        pool.close()
