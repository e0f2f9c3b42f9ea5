"""Our kernels beside what else there is, in one run on one GPU: the ceiling, ``torch.compile``, torchao.

Every cell is checked and timed in one long-lived worker. A cell without a time, or with a wrong output, has a reason,
and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fp8tune.bench import cells as benching
from fp8tune.bench import warming
from fp8tune.bench.cells import OURS, TORCH_ADD, TORCH_COMPILE, TORCHAO, Timing
from fp8tune.bench.rounds import in_rounds
from fp8tune.bench.warming import Compiled
from fp8tune.ceiling import ceiling_gb_per_s, gb_per_s
from fp8tune.errors import MachineError, unknown
from fp8tune.measure.laboratory import Laboratory
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import Device, Kind, Problem
from fp8tune.revisions.loading import check_reference, load_spec
from fp8tune.stats import geomean
from fp8tune_kernels.arches import ARCHES

RIVALS = (TORCH_COMPILE, TORCHAO)
HOSTS = (OURS, TORCHAO, TORCH_ADD)
COPY = "copy"
CELL_TIMEOUT_S = 180.0
"""Long enough for an autotuner of 36 configs with a cold cache."""

WARM_UP_BYTES = 2 << 30
"""Larger problems have the binaries of smaller ones, and would not fit beside each other."""
WARM_UP_WORKERS = 8


@dataclass(frozen=True)
class Wish:
    """The options of ``fp8tune bench``."""

    kernels: tuple[str, ...]
    shapes: tuple[str, ...] = ("starting-line",)
    routing: str = "jagged"
    seed: int = 0
    rivals: tuple[str, ...] = RIVALS
    time_budget_s: float | None = None


@dataclass(frozen=True)
class Request:
    """A wish on this machine."""

    wish: Wish
    laboratory: Laboratory
    problems: tuple[tuple[str, Problem], ...]
    """(how workers load the spec, problem), kernel by kernel."""


@dataclass(frozen=True)
class Row:
    """One problem: what each contender took, and what bounds them all."""

    problem: Problem
    device: Device
    bytes_moved: int
    """The least bytes any implementation moves."""
    copy: Timing
    """The copy behind the ceiling, measured once a run."""
    timings: Mapping[str, Timing]
    """Contender -> its time, and how its output compares with the reference."""

    @property
    def time_us(self) -> float | None:
        """Ours."""
        return self.timings[OURS].time_us

    @property
    def gb_per_s(self) -> float | None:
        """Our rate, counting the least bytes; None where our output is wrong."""
        valid_us = self.timings[OURS].valid_us
        return gb_per_s(self.bytes_moved, valid_us) if valid_us else None

    @property
    def is_wrong(self) -> bool:
        """Whether our output is not what our reference says."""
        checked = self.timings[OURS].checked
        return checked is not None and bool(checked.wrong)

    def ratio(self, rival: str) -> float | None:
        """A rival's time over ours: above 1 we are faster. None where either is wrong or was not timed."""
        theirs = self.timings[rival].valid_us if rival in self.timings else None
        ours = self.timings[OURS].valid_us
        return theirs / ours if theirs and ours else None


@dataclass(frozen=True)
class Ceiling:
    """What "of ceiling" is a share of in one run: see :mod:`fp8tune.ceiling`."""

    gb_per_s: float | None = None
    """None where the copy could not be measured."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Ceiling:
        """Of all rows of a run, or of those there are so far."""
        copy_us = next((row.copy.valid_us for row in rows), None)
        if copy_us is None:
            return cls()
        rates = [row.gb_per_s for row in rows if row.gb_per_s is not None]
        return cls(ceiling_gb_per_s(gb_per_s(benching.COPY_BYTES, copy_us), rates))

    def time_us(self, row: Row) -> float | None:
        """What the least bytes of a problem take at the ceiling."""
        return row.bytes_moved / self.gb_per_s / 1e3 if self.gb_per_s else None

    def share(self, row: Row) -> float | None:
        """0.9 where our rate is 90 % of the ceiling."""
        return row.gb_per_s / self.gb_per_s if row.gb_per_s and self.gb_per_s else None


@dataclass
class Kernel:
    """All rows of a kernel, and the host time of one call."""

    name: str
    rows: list[Row] = field(default_factory=list)
    hosts: dict[str, Timing] = field(default_factory=dict)
    """Contender -> host time of one operator call on a 64x64 input."""

    def geomean(self, rival: str) -> float | None:
        """The geometric mean of the ratios there are; None where there is none."""
        ratios = [ratio for row in self.rows if (ratio := row.ratio(rival)) is not None]
        return geomean(ratios) if ratios else None


def prepare(wish: Wish, laboratory: Laboratory) -> Request:
    """Every problem to time (imports torch and the kernels).

    Raises MachineError without a GPU, UsageError for a name nobody knows or shapes that hold no problem of a kernel.
    """
    if laboratory.kind not in (Kind.MEASURED, Kind.SIMULATED):
        raise MachineError("bench times kernels and needs a GPU; --timer simulated:1 runs it on a fake one")
    for rival in wish.rivals:
        if rival not in RIVALS:
            raise unknown("contender", rival, RIVALS)
    for reference in wish.kernels:
        check_reference(reference)
    rows = [row for name in wish.shapes for row in shapes.load(name).rows]
    arch = laboratory.device.arch
    fp8_dtype = ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"
    return Request(
        wish,
        laboratory,
        tuple(
            (reference, problem)
            for reference in wish.kernels
            for problem in plan.problems(
                load_spec(reference), rows, routing=wish.routing, fp8_dtype=fp8_dtype, seed=wish.seed
            )
        ),
    )


def run(request: Request) -> Iterator[Row | Kernel | Compiled]:
    """A kernel before its first row, then its rows as they come: it has them, and at last its host times, too.

    On a GPU, what is compiled comes before all that.
    Ends early, after a whole row, where a time budget is spent; host times are not taken then. Closing the generator
    ends the worker.
    """
    begun, budget_s = time.monotonic(), request.wish.time_budget_s

    def is_spent() -> bool:
        return budget_s is not None and time.monotonic() - begun > budget_s

    worker = _Cells(Worker(), request.laboratory)
    try:
        if request.laboratory.torch_device == "cuda":
            yield from _warm_up(request)
        copy: Timing | None = None
        for reference in request.wish.kernels:
            kernel = Kernel(load_spec(reference).name)
            for problem in [problem for owner, problem in request.problems if owner == reference]:
                if is_spent():
                    return
                copy = copy or worker.copy()
                if not kernel.rows:
                    yield kernel
                kernel.rows.append(worker.row(reference, problem, request.wish.rivals, copy))
                yield kernel.rows[-1]
            if not is_spent():
                kernel.hosts.update(worker.hosts(reference, request.wish.rivals))
    finally:
        worker.worker.close()


@dataclass
class _Cells:
    """The worker that times, asked for one cell after the other."""

    worker: Worker
    laboratory: Laboratory
    _refused: dict[str, Timing] = field(default_factory=dict)
    """Kernels whose reference ``torch.compile`` refuses: it does so whatever their sizes."""

    def copy(self) -> Timing:
        """The copy behind the ceiling."""
        return in_rounds({COPY: lambda _: self._timing(benching.time_copy, self.laboratory.timer)})[COPY]

    def row(self, reference: str, problem: Problem, rivals: Sequence[str], copy: Timing) -> Row:
        """Every contender's output is checked before the first is timed: the reference is built once, and let go."""
        names = (OURS, *rivals)
        checks = {name: self._check(name, reference, problem) for name in names}
        timings = in_rounds({name: partial(self._contender, name, reference, problem) for name in names})
        return Row(
            problem=problem,
            device=self.laboratory.device,
            bytes_moved=load_spec(reference).bytes_moved(problem.shape),
            copy=copy,
            timings={name: timings[name].judged(checks[name]) for name in names},
        )

    def _check(self, name: str, reference: str, problem: Problem) -> Timing:
        if name == TORCH_COMPILE and reference in self._refused:
            return self._refused[reference]
        return self._timing(benching.check_contender, name, reference, problem, self.laboratory.timer)

    def hosts(self, reference: str, rivals: Sequence[str]) -> dict[str, Timing]:
        """Host times of one call, without a rival that was not asked for."""
        names = [name for name in HOSTS if name not in RIVALS or name in rivals]
        return {name: self._timing(benching.time_host, name, reference, self.laboratory.timer) for name in names}

    def _contender(self, name: str, reference: str, problem: Problem, round: int) -> Timing:
        if name == TORCH_COMPILE and reference in self._refused:
            return self._refused[reference]
        timing = self._timing(benching.time_contender, name, reference, problem, self.laboratory.timer, round)
        if name == TORCH_COMPILE and timing.time_us is None and "OutOfMemory" not in timing.reason:
            self._refused[reference] = timing
        return timing

    def _timing(self, function: Callable[..., Timing], *arguments: object) -> Timing:
        try:
            return self.worker.call(CELL_TIMEOUT_S, function, *arguments)
        except WorkerDied as died:  # also one that hung; the next call forks another
            return Timing(reason=str(died))
        except RemoteError as error:
            return Timing(reason=str(error).strip().splitlines()[-1][: benching.LONGEST_REASON])


def _warm_up(request: Request) -> Iterator[Compiled]:
    """Compile what the worker will need; autotuners first, which take longest."""
    cells: dict[tuple[object, ...], warming.Cell] = {}
    for name in sorted((OURS, *request.wish.rivals), key=TORCHAO.__ne__):
        for reference, problem in request.problems:
            if load_spec(reference).bytes_moved(problem.shape) <= WARM_UP_BYTES:
                cells.setdefault(_binaries(name, problem), (benching.warm_up, (name, reference, problem)))
    return warming.in_parallel(cells.values(), WARM_UP_WORKERS, CELL_TIMEOUT_S)


def _binaries(name: str, problem: Problem) -> tuple[object, ...]:
    """The same for problems that a contender surely has the same binaries for.

    Triton compiles anew for sizes of 1 and multiples of 16; ours have configs, ``torch.compile`` code for each size.
    """
    sizes = problem.shape if name != TORCHAO else {dim: (n == 1, n % 16 == 0) for dim, n in problem.shape.items()}
    return (name, problem.kernel, problem.input_layout, *sizes.items())
