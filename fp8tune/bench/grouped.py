"""``fp8tune bench --op``: a grouped GEMM of ours beside bf16 and torchao, and where its time goes.

Every contender's output and gradients are compared with exact ones before its times count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.bench import warming
from fp8tune.bench.cells import Cells, Timing, check_times
from fp8tune.bench.grouped_contenders import (
    PartOfStep,
    Step,
    auto_precision,
    is_padded,
    operation_of,
    parts_of,
    peak_memory,
    timed_parts,
)
from fp8tune.bench.layers import Layer, layers_of
from fp8tune.bench.operation import (
    BF16,
    BF16_OF_OURS,
    BF16_OF_TORCH,
    BOTH,
    FP8_OF_TORCH,
    GEMMS,
    GRAPH,
    MICRO_BATCHES,
    QUANTIZE_WEIGHTS,
    QUANTIZED,
    TORCHAO,
    Operation,
    gemm_of,
    of_ours,
)
from fp8tune.bench.operation_fp8 import AUTO
from fp8tune.bench.operations import OPERATIONS
from fp8tune.bench.options import BenchOptions, OperationName
from fp8tune.bench.warming import Compiled
from fp8tune.measure.engine import Backend
from fp8tune.records import Device
from fp8tune.stats.means import geomean

WARM_UP_WORKERS = 6
"""Six steps of the largest problems of the default set are in 80 GB at once."""


@dataclass(frozen=True)
class Row:
    """One problem, with the time of every step and of every part of ours."""

    problem: Layer
    device: Device
    padded: bool
    """True if our groups had to be padded, inside what is timed."""
    steps: Mapping[tuple[str, str], Timing]
    """(contender, step) -> time; see :meth:`Operation.steps`."""
    parts: Mapping[str, Timing]
    """With the other GEMMs; see :attr:`Operation.all_parts`."""
    peak_bytes: Mapping[str, int | None] = field(default_factory=dict)
    """Contender -> what forward and backward allocate at their peak, beyond operands."""
    auto: str | None = None
    """Precision that ``precision="auto"`` takes; None without that contender or a GPU."""

    @property
    def operation(self) -> Operation:
        """What the problem is of."""
        return operation_of(self.problem)

    @property
    def is_emulated(self) -> bool:
        """See :meth:`Operation.is_emulated`."""
        return self.operation.is_emulated(self.device.arch)

    def time_us(self, contender: str, step: str) -> float | None:
        """None where it was not timed, or the contender is wrong: such a time is in no ratio.

        With weights that were quantized once, forward and backward is what that takes, and its share of quantizing.
        """
        if contender in self.operation.once and step in (BOTH, GRAPH):
            timing = self.steps.get((contender, QUANTIZED if step == BOTH else GRAPH))
            multiplied = timing.valid_us if timing else None
            quantized = self.time_us(self.operation.once[contender], QUANTIZE_WEIGHTS)
            return None if multiplied is None or quantized is None else multiplied + quantized / MICRO_BATCHES
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
    def ours_are_wrong(self) -> bool:
        """Whether any contender of ours is."""
        return any(of_ours(who) for who in self.wrong)

    def part_us(self, part: str, whose: str = "") -> float | None:
        """Of a part, or of another GEMM in its place."""
        timing = self.parts.get(gemm_of(part, whose) if whose else part)
        return timing.time_us if timing else None

    def gemm_speedup(self, gemm: str, over: str = FP8_OF_TORCH) -> float | None:
        """The time of another GEMM over ours: above 1 ours is faster."""
        return _ratio(self.part_us(gemm, over), self.part_us(gemm))

    @property
    def gemms_us(self) -> float | None:
        """The GEMMs of the recipe alone, each on operands quantized before, the faster of ours and torch's."""
        return _sum([_least(self.part_us(gemm), self.part_us(gemm, FP8_OF_TORCH)) for gemm in self.operation.gemms])

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
        parts_us, whole_us = _sum([self.part_us(part) for part in parts_of(self.problem)]), self.ours_us(BOTH)
        return None if whole_us is None or parts_us is None else whole_us - parts_us


@dataclass(frozen=True)
class Mean:
    """Of a ratio over rows."""

    geomean: float
    worst: float
    worst_row: Row
    rows: int
    """Those that have the ratio."""

    @classmethod
    def of(cls, rows: Iterable[Row], ratio: Callable[[Row], float | None]) -> Mean | None:
        """None where no row has it."""
        found = [(value, row) for row in rows if (value := ratio(row)) is not None]
        if not found:
            return None
        worst, worst_row = min(found, key=lambda each: each[0])
        return cls(geomean(value for value, _ in found), worst, worst_row, len(found))


def means(rows: Sequence[Row]) -> dict[str, Mean]:
    """Of each contender's step over bf16, and of our GEMMs over others; what no row has is not there."""
    if not rows:
        return {}
    operation = rows[0].operation
    ratios: dict[str, Callable[[Row], float | None]] = {
        f"{who} over {BF16}": lambda row, who=who: row.speedup(BOTH, who)  # type: ignore[misc]
        for who in operation.compared
    }
    for gemm in operation.other_gemms:
        for over in (FP8_OF_TORCH, BF16_OF_TORCH):
            ratios[f"{gemm} over {over}"] = lambda row, gemm=gemm, over=over: row.gemm_speedup(gemm, over)  # type: ignore[misc]
    found = {name: Mean.of(rows, ratio) for name, ratio in ratios.items()}
    return {name: mean for name, mean in found.items() if mean}


def _sum(times: Iterable[float | None]) -> float | None:
    """Microseconds; None where one was not timed."""
    known = list(times)
    return None if None in known else sum(time_us for time_us in known if time_us)


def _least(first: float | None, second: float | None) -> float | None:
    """Of those that were timed."""
    return min((time_us for time_us in (first, second) if time_us is not None), default=None)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def problems_of(options: BenchOptions, backend: Backend) -> tuple[Layer, ...]:
    """Raises MachineError without a GPU, UsageError for options that name nothing to time."""
    check_times(backend)
    return layers_of(options, OPERATIONS[options.op or OperationName.GROUPED_MM])


@dataclass(frozen=True)
class Extent:
    """What is timed of an operation."""

    with_torchao: bool = True
    with_variants: bool = False

    def steps(self, layer: Layer) -> list[Step]:
        """The arms of a layer."""
        steps = operation_of(layer).steps(self.with_torchao, self.with_variants)
        return [Step(who, layer, step) for who, step in steps]


def run(
    backend: Backend, problems: Sequence[Layer], time_budget_s: float | None = None, extent: Extent | None = None
) -> Iterator[Row | Compiled]:
    """What is compiled, then rows as they come. Ends early, after a whole row, where a time budget is spent.

    Closing the generator ends the worker.
    """
    extent = extent or Extent()
    with Cells(backend, time_budget_s) as cells:
        yield from warming.in_parallel(backend, compiled_first(problems, extent), WARM_UP_WORKERS)
        for problem in problems:
            if cells.is_spent():
                return
            yield _row(cells, problem, extent)


def compiled_first(problems: Sequence[Layer], extent: Extent) -> list[Step | PartOfStep]:
    """What is launched once before anything is timed, torchao's first, which take longest.

    torch's GEMMs compile nothing, and quantized weights are multiplied by the kernels of ours or ``auto``.
    """
    spared = {BF16, *(name for operation in OPERATIONS.values() for name in operation.once)}
    steps = (step for problem in problems for step in extent.steps(problem) if step.name not in spared)
    every = list(dict.fromkeys(Step(step.name, step.problem, BOTH) for step in steps))
    ours = [gemm_of(gemm, BF16_OF_OURS) for gemm in GEMMS]
    parts = [PartOfStep(part, problem) for problem in problems for part in timed_parts(problem) if part in ours]
    return [*sorted(every, key=lambda step: step.name != TORCHAO), *parts]


def _row(cells: Cells, problem: Layer, extent: Extent) -> Row:
    steps = extent.steps(problem)
    contenders = {step.name: step for step in steps}
    checks = {name: cells.check(step) for name, step in contenders.items()}
    refused = {name for name, check in checks.items() if name == TORCHAO and check.reason and check.sqnr_db is None}
    timed = cells.in_rounds([step for step in steps if step.name not in refused])  # it may end the process each time
    timed |= {step: checks[step.name] for step in steps if step.name in refused}
    parts = cells.in_rounds([PartOfStep(part, problem) for part in timed_parts(problem)])
    return Row(
        problem=problem,
        device=cells.backend.device,
        padded=is_padded(problem),
        steps={(step.name, step.step): timed[step].with_check(checks[step.name]) for step in steps},
        parts={part.part: timing for part, timing in parts.items()},
        peak_bytes={name: cells.ask(peak_memory, name, problem) for name in contenders if name not in refused},
        auto=cells.ask(auto_precision, problem) if AUTO in contenders else None,
    )
