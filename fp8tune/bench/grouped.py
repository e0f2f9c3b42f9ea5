"""``fp8tune bench --op``: a grouped GEMM of ours beside bf16 and torchao, and where its time goes.

Every contender's output and gradients are compared with exact ones before its times count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.bench import warming
from fp8tune.bench.cells import Cells, Timing, check_times
from fp8tune.bench.grouped_contenders import PartOfStep, Step, needs_padding, operation_of, parts_of, peak_memory
from fp8tune.bench.operation import BF16, BOTH, GEMMS, OPERATIONS, SHAPES, TORCHAO, Operation
from fp8tune.bench.options import BenchOptions
from fp8tune.bench.warming import Compiled
from fp8tune.errors import UsageError
from fp8tune.measure.engine import Backend
from fp8tune.options import OperationName
from fp8tune.plan import shapes
from fp8tune.records import Device, NamedInts, Problem
from fp8tune_kernels.spec import ROUTINGS

WARM_UP_WORKERS = 6
"""Six steps of the largest problems of the default set are in 80 GB at once."""


@dataclass(frozen=True)
class Row:
    """One problem, with the time of every step and of every part of ours."""

    problem: Problem
    device: Device
    padded: bool
    """True if our groups had to be padded, inside what is timed."""
    steps: Mapping[tuple[str, str], Timing]
    """(contender, step) -> time; see :meth:`Operation.steps`."""
    parts: Mapping[str, Timing]
    peak_bytes: Mapping[str, int | None] = field(default_factory=dict)
    """Contender -> what forward and backward allocate at their peak, beyond operands."""

    @property
    def operation(self) -> Operation:
        """What the problem is of."""
        return operation_of(self.problem)

    @property
    def is_emulated(self) -> bool:
        """See :meth:`Operation.is_emulated`."""
        return self.operation.is_emulated(self.device.arch)

    def time_us(self, contender: str, step: str) -> float | None:
        """None where it was not timed, or the contender is wrong: such a time is in no ratio."""
        timing = self.steps.get((contender, step))
        return timing.valid_us if timing else None

    def ours_us(self, step: str) -> float | None:
        """:meth:`time_us` of ours."""
        return self.time_us(self.operation.ours, step)

    def speedup(self, step: str, contender: str | None = None) -> float | None:
        """The time of bf16 over the contender's, ours unless given: above 1 bf16 is slower."""
        return _ratio(self.time_us(BF16, step), self.time_us(contender or self.operation.ours, step))

    @property
    def wrong(self) -> Mapping[str, str]:
        """Contender -> how it is wrong."""
        return {who: timing.reason for (who, _), timing in self.steps.items() if timing.time_us and timing.reason}

    @property
    def gemms_us(self) -> float | None:
        """The three GEMMs of the recipe alone, each on operands quantized before."""
        return _sum([self.parts[gemm] for gemm in GEMMS])

    @property
    def bound(self) -> float | None:
        """The speedup of forward and backward if quantizing took no time."""
        return _ratio(self.time_us(BF16, BOTH), self.gemms_us)

    @property
    def bound_share(self) -> float | None:
        """0.84 where the speedup is 84 % of the bound."""
        return self.bound_share_of(self.operation.ours)

    def bound_share_of(self, contender: str) -> float | None:
        """:attr:`bound_share` of another contender of the same recipe."""
        return _ratio(self.gemms_us, self.time_us(contender, BOTH))

    @property
    def rest_us(self) -> float | None:
        """Of our step, what no part explains: launches, reciprocals of scales, and the host where it is slower."""
        parts_us, whole_us = _sum(self.parts.values()), self.ours_us(BOTH)
        return None if whole_us is None or parts_us is None else whole_us - parts_us


def _sum(timings: Iterable[Timing]) -> float | None:
    """Microseconds; None where one was not timed."""
    times = [timing.time_us for timing in timings]
    return None if None in times else sum(time_us for time_us in times if time_us)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def problems_of(options: BenchOptions, backend: Backend) -> tuple[Problem, ...]:
    """Raises MachineError without a GPU, UsageError for options that name nothing to time."""
    check_times(backend)
    if options.routing not in ROUTINGS:
        raise UsageError(f"unknown routing {options.routing!r}: use one of {', '.join(ROUTINGS)}")
    sets, operation = options.shapes or (SHAPES,), OPERATIONS[options.op or OperationName.GROUPED_MM]
    rows = [row for name in sets for row in shapes.load(name).rows if "N" in row]
    if not rows:
        raise UsageError(f"no row of {', '.join(sets)} has all of M, K, N and E: a grouped GEMM needs them")
    layers = dict.fromkeys(NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"]) for row in rows)
    name, multiple = operation.name, operation.multiple
    if odd := [layer for layer in layers if layer["N"] % multiple or layer["K"] % multiple]:
        raise UsageError(f"{odd[0]}: {name} wants K and N to be multiples of {multiple}")
    return tuple(Problem(name, layer, options.routing, seed=options.seed) for layer in layers)


def run(
    backend: Backend, problems: Sequence[Problem], time_budget_s: float | None = None, *, with_torchao: bool = True
) -> Iterator[Row | Compiled]:
    """What is compiled, then rows as they come. Ends early, after a whole row, where a time budget is spent.

    Closing the generator ends the worker.
    """
    with Cells(backend, time_budget_s) as cells:
        yield from warming.in_parallel(backend, compiled_first(problems, with_torchao), WARM_UP_WORKERS)
        for problem in problems:
            if cells.is_spent():
                return
            yield _row(cells, problem, with_torchao)


def compiled_first(problems: Sequence[Problem], with_torchao: bool) -> list[Step]:
    """What is launched once before anything is timed, torchao's first, which take longest. bf16 compiles nothing."""
    steps = ((who, problem) for problem in problems for who, _ in operation_of(problem).steps(with_torchao))
    every = [Step(who, problem, BOTH) for who, problem in dict.fromkeys(steps) if who != BF16]
    return sorted(every, key=lambda step: step.name != TORCHAO)


def _row(cells: Cells, problem: Problem, with_torchao: bool) -> Row:
    steps = [Step(who, problem, step) for who, step in operation_of(problem).steps(with_torchao)]
    contenders = {step.name: step for step in steps}
    checks = {name: cells.check(step) for name, step in contenders.items()}
    timed = cells.in_rounds(steps)
    parts = cells.in_rounds([PartOfStep(part, problem) for part in parts_of(problem)])
    return Row(
        problem=problem,
        device=cells.backend.device,
        padded=needs_padding(problem),
        steps={(step.name, step.step): timing.with_check(checks[step.name]) for step, timing in timed.items()},
        parts={part.part: timing for part, timing in parts.items()},
        peak_bytes={name: cells.peak_bytes(peak_memory, name, problem) for name in contenders},
    )
