"""``fp8tune bench --op``: a grouped GEMM of ours beside bf16 and torchao, and where its time goes.

Every contender's output and gradients are compared with exact ones, and every cell is timed, in one worker, problem
after problem. A cell without a time, or of a contender that is wrong, has a reason, and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fp8tune.bench import grouped_cells as grouped_steps
from fp8tune.bench import warming
from fp8tune.bench.cells import LONGEST_REASON, Timing
from fp8tune.bench.grouped_cells import OPERATIONS
from fp8tune.bench.operation import BF16, BOTH, GEMMS, SHAPES, TORCHAO, Operation
from fp8tune.bench.rounds import in_rounds
from fp8tune.bench.warming import Compiled
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure.laboratory import Laboratory
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied
from fp8tune.plan import shapes
from fp8tune.records import Device, Kind, NamedInts, Problem
from fp8tune_kernels.spec import ROUTINGS

CELL_TIMEOUT_S = 180.0
"""Long enough for torchao's autotuners with a cold cache."""
WARM_UP_WORKERS = 6
"""Six steps of the largest problems of the default set are in 80 GB at once."""


@dataclass(frozen=True)
class Wish:
    """The options of ``fp8tune bench --op``."""

    operation: Operation = OPERATIONS["grouped-mm"]
    shapes: tuple[str, ...] = (SHAPES,)
    routing: str = "jagged"
    seed: int = 0
    with_torchao: bool = True
    time_budget_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One problem, with the time of every step and of every part of ours."""

    problem: Problem
    device: Device
    padded: bool
    """Whether our groups had to be padded, inside what is timed."""
    steps: Mapping[tuple[str, str], Timing]
    """(contender, step) -> time; see :meth:`fp8tune.bench.operation.Operation.steps`."""
    parts: Mapping[str, Timing]
    peak_bytes: Mapping[str, int | None] = field(default_factory=dict)
    """Contender -> what forward and backward allocate at their peak, beyond operands."""

    @property
    def operation(self) -> Operation:
        """What the problem is of."""
        return grouped_steps.operation_of(self.problem)

    @property
    def is_emulated(self) -> bool:
        """Whether the times of ours say nothing of the recipe's speed on this device."""
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
        times = [self.parts[gemm].time_us for gemm in GEMMS]
        return None if None in times else sum(time_us for time_us in times if time_us)

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
        times, whole = [timing.time_us for timing in self.parts.values()], self.ours_us(BOTH)
        if whole is None or None in times:
            return None
        return whole - sum(time_us for time_us in times if time_us)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def prepare(wish: Wish, laboratory: Laboratory) -> tuple[Problem, ...]:
    """Every problem to time. Raises MachineError without a GPU, UsageError for options that name nothing to time."""
    if laboratory.kind not in (Kind.MEASURED, Kind.SIMULATED):
        raise MachineError("bench times kernels and needs a GPU; --timer simulated:1 runs it on a fake one")
    if wish.routing not in ROUTINGS:
        raise UsageError(f"unknown routing {wish.routing!r}: use one of {', '.join(ROUTINGS)}")
    rows = [row for name in wish.shapes for row in shapes.load(name).rows if "N" in row]
    if not rows:
        raise UsageError(f"no row of {', '.join(wish.shapes)} has all of M, K, N and E: a grouped GEMM needs them")
    layers = dict.fromkeys(NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"]) for row in rows)
    name, multiple = wish.operation.name, wish.operation.multiple
    if odd := [layer for layer in layers if layer["N"] % multiple or layer["K"] % multiple]:
        raise UsageError(f"{odd[0]}: {name} wants K and N to be multiples of {multiple}")
    return tuple(Problem(name, layer, wish.routing, seed=wish.seed) for layer in layers)


def run(wish: Wish, laboratory: Laboratory, problems: tuple[Problem, ...]) -> Iterator[Row | Compiled]:
    """Rows as they come, on a GPU after what is compiled for them; ends early, after a whole row, where a time budget
    is spent. Closing it ends the worker."""
    begun = time.monotonic()
    cells = _Cells(Worker(), laboratory)
    try:
        if laboratory.torch_device == "cuda":
            yield from _warm_up(wish, problems)
        for problem in problems:
            if wish.time_budget_s is not None and time.monotonic() - begun > wish.time_budget_s:
                return
            yield cells.row(problem, wish.with_torchao)
    finally:
        cells.worker.close()


def _warm_up(wish: Wish, problems: Sequence[Problem]) -> Iterator[Compiled]:
    """Compile what the worker will need, torchao's first, which takes longest. bf16 has nothing to compile."""
    contenders = dict.fromkeys(who for who, _ in wish.operation.steps(wish.with_torchao) if who != BF16)
    names = sorted(contenders, key=TORCHAO.__ne__)
    cells: list[warming.Cell] = [(grouped_steps.warm_up, (name, problem)) for name in names for problem in problems]
    return warming.in_parallel(cells, WARM_UP_WORKERS, CELL_TIMEOUT_S)


@dataclass
class _Cells:
    """The worker that times, asked for one cell after the other."""

    worker: Worker
    laboratory: Laboratory

    def row(self, problem: Problem, with_torchao: bool) -> Row:
        timer = self.laboratory.timer
        steps = grouped_steps.operation_of(problem).steps(with_torchao)
        contenders = dict.fromkeys(who for who, _ in steps)
        parts = grouped_steps.parts_of(problem)
        step_cell = partial(self._timing, grouped_steps.time_step)
        part_cell = partial(self._timing, grouped_steps.time_part)
        checks = {name: self._timing(grouped_steps.check_step, name, problem, timer) for name in contenders}
        steps_timed = in_rounds({step: partial(step_cell, *step, problem, timer) for step in steps})
        parts_timed = in_rounds({part: partial(part_cell, part, problem, timer) for part in parts})
        return Row(
            problem=problem,
            device=self.laboratory.device,
            padded=grouped_steps.needs_padding(problem),
            steps={step: timing.judged(checks[step[0]]) for step, timing in steps_timed.items()},
            parts=parts_timed,
            peak_bytes={name: self._peak(name, problem) for name in contenders},
        )

    def _peak(self, contender: str, problem: Problem) -> int | None:
        try:
            return self.worker.call(
                CELL_TIMEOUT_S, grouped_steps.peak_memory, contender, problem, self.laboratory.timer
            )
        except (WorkerDied, RemoteError):  # as the step's own cell says
            return None

    def _timing(self, function: Callable[..., Timing], *arguments: object) -> Timing:
        try:
            return self.worker.call(CELL_TIMEOUT_S, function, *arguments)
        except WorkerDied as died:  # also one that hung; the next call forks another
            return Timing(reason=str(died))
        except RemoteError as error:
            return Timing(reason=str(error).strip().splitlines()[-1][:LONGEST_REASON])
