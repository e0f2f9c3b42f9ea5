"""Our kernels beside what else there is, in one run on one GPU: the ceiling, ``torch.compile``, torchao."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fp8tune.bench import warming
from fp8tune.bench.cells import Cells, Timing, check_times
from fp8tune.bench.kernel_contenders import (
    COPIED_BYTES,
    OURS,
    TORCH_ADD,
    TORCH_COMPILE,
    TORCHAO,
    Copy,
    Gemm,
    HostCall,
    KernelContender,
    exported_config,
    host_time,
)
from fp8tune.bench.options import AGAINST, BenchOptions
from fp8tune.bench.warming import Compiled
from fp8tune.ceiling import Bound, CeilingShare, ceiling_gb_per_s, ceiling_share, gb_per_s
from fp8tune.errors import unknown
from fp8tune.measure.engine import Backend
from fp8tune.measure.trial import GEMM_SIZE
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import Device, Problem, is_recorded
from fp8tune.replay.loading import check_reference, load_spec
from fp8tune.stats.means import geomean
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.spec import CHECKS

SHAPES = "starting-line"
HOSTS = (OURS, TORCHAO, TORCH_ADD)

WARM_UP_BYTES = 2 << 30
"""Larger problems have the binaries of smaller ones, and would not fit beside each other."""
WARM_UP_WORKERS = 8


@dataclass(frozen=True)
class Row:
    """One problem: what each contender took, and what bounds them all."""

    problem: Problem
    device: Device
    bytes_moved: int
    """The least bytes any implementation moves."""
    copy: Timing
    """Measured once a run."""
    timings: Mapping[str, Timing]
    """Contender -> its time, and how its output compares with the reference."""
    flops: int | None = None
    """Floating-point operations, where the kernel declares them."""
    gemm: Timing | None = None
    """The dense GEMM of its dtype, measured once a run."""

    @property
    def ours(self) -> Timing:
        """Of our kernel."""
        return self.timings[OURS]

    @property
    def gb_per_s(self) -> float | None:
        """Our rate, counting the least bytes; None where our output is wrong."""
        return gb_per_s(self.bytes_moved, self.ours.valid_us) if self.ours.valid_us else None

    @property
    def peak_flop_per_s(self) -> float | None:
        """What the dense GEMM reached."""
        return 2e6 * GEMM_SIZE**3 / self.gemm.valid_us if self.gemm and self.gemm.valid_us else None

    @property
    def is_wrong(self) -> bool:
        """True if our output is not what our reference says."""
        return self.ours.checked is not None and bool(self.ours.checked.wrong)

    def ratio(self, rival: str) -> float | None:
        """A rival's time over ours: above 1 we are faster. None where either is wrong or was not timed."""
        theirs = self.timings[rival].valid_us if rival in self.timings else None
        return theirs / self.ours.valid_us if theirs and self.ours.valid_us else None


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
        rates = [row.gb_per_s for row in rows if row.gb_per_s is not None and not is_recorded(row.problem)]
        return cls(ceiling_gb_per_s(gb_per_s(2 * COPIED_BYTES, copy_us), rates))

    def time_us(self, row: Row) -> float | None:
        """The least that a problem can take: its bytes at the ceiling, or its operations at the peak.

        A recorded launch may move fewer bytes: only its operations count.
        """
        found = [row.bytes_moved / self.gb_per_s / 1e3] if self.gb_per_s and not is_recorded(row.problem) else []
        if row.flops and row.peak_flop_per_s:
            found.append(1e6 * row.flops / row.peak_flop_per_s)
        return max(found, default=None)

    def share(self, row: Row) -> float | None:
        """0.9 where our rate is 90 % of the ceiling."""
        found = self._of(row)
        return found.share if found else None

    def bound(self, row: Row) -> Bound | None:
        """What the share is of."""
        found = self._of(row)
        return found.bound if found else None

    def _of(self, row: Row) -> CeilingShare | None:
        known = (row.bytes_moved, self.gb_per_s, row.flops, row.peak_flop_per_s)
        return ceiling_share(row.ours.valid_us, *known, at_most=is_recorded(row.problem))


@dataclass
class Kernel:
    """All rows of a kernel, and the host time of one call."""

    name: str
    rows: list[Row] = field(default_factory=list)
    hosts: dict[str, Timing] = field(default_factory=dict)
    """Contender -> host time of one operator call on a 64x64 input."""
    check: str = CHECKS[0]
    """What is right: ``KernelSpec.check_text``."""

    def geomean(self, rival: str) -> float | None:
        """The geometric mean of the ratios there are; None where there is none."""
        ratios = [ratio for row in self.rows if (ratio := row.ratio(rival)) is not None]
        return geomean(ratios) if ratios else None


@dataclass(frozen=True)
class Plan:
    """What ``fp8tune bench`` times."""

    rivals: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    """How workers load a kernel's spec -> its problems."""

    def __len__(self) -> int:
        return sum(map(len, self.problems.values()))

    def contenders(self, reference: str, problem: Problem, device: Device) -> list[KernelContender]:
        """Ours first."""
        spec = load_spec(reference)
        config = exported_config(spec, problem, device)
        bytes_moved = spec.bytes_of(problem)
        return [KernelContender(name, problem, reference, bytes_moved, config) for name in (OURS, *self.rivals)]

    def compiled_first(self, device: Device) -> list[KernelContender]:
        """What is launched once before anything is timed, autotuners first, which take longest."""
        distinct: dict[tuple[object, ...], KernelContender] = {}
        for reference, problems in self.problems.items():
            for contender in (each for problem in problems for each in self.contenders(reference, problem, device)):
                if contender.bytes_moved <= WARM_UP_BYTES:
                    distinct.setdefault(_binaries(contender), contender)
        return sorted(distinct.values(), key=lambda contender: contender.name != TORCHAO)


def planned(options: BenchOptions, backend: Backend) -> Plan:
    """What the options come to (imports torch and the kernels).

    Raises MachineError without a GPU, UsageError for a name nobody knows or shapes that hold no problem of a kernel.
    """
    check_times(backend)
    for rival in options.rivals:
        if rival not in AGAINST:
            raise unknown("contender", rival, AGAINST)
    references = tuple(dict.fromkeys(options.kernels or KERNELS))
    for reference in references:
        check_reference(reference)
    rows = [row for name in options.shapes or (SHAPES,) for row in shapes.load(name).rows]
    arch = backend.device.arch
    fp8_dtype = ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"
    of_each = partial(plan.problems, rows=rows, routing=options.routing, fp8_dtype=fp8_dtype, seed=options.seed)
    return Plan(options.rivals, {reference: tuple(of_each(load_spec(reference))) for reference in references})


def _binaries(contender: KernelContender) -> tuple[object, ...]:
    """The same for problems that a contender surely has the same binaries for.

    Triton compiles anew for sizes of 1 and multiples of 16; ours have configs, ``torch.compile`` code for each size.
    """
    problem, name = contender.problem, contender.name
    sizes = {dim: (n == 1, n % 16 == 0) if name == TORCHAO else n for dim, n in problem.shape.items()}
    return (name, problem.kernel, problem.input_layout, *sizes.items())


def run(
    backend: Backend, wanted: Plan, time_budget_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Row | Kernel | Compiled]:
    """What is compiled, then each kernel before its first row, and its rows as they come. A kernel gets its rows, too,
    and at last its host times.

    Ends early, after a whole row, where a time budget is spent. Closing the generator ends the worker.
    """
    with Cells(backend, time_budget_s, clock) as cells:
        yield from warming.in_parallel(backend, wanted.compiled_first(backend.device), WARM_UP_WORKERS)
        copy: Timing | None = None
        gemms: dict[str, Timing] = {}
        for reference, problems in wanted.problems.items():
            spec = load_spec(reference)
            kernel = Kernel(spec.name, check=spec.check_text)
            refused: dict[str, Timing] = {}
            for problem in problems:
                if cells.is_spent():
                    return
                copy = copy or cells.in_rounds([Copy()])[Copy()]
                if not kernel.rows:
                    yield kernel
                flops, gemm = spec.flops(problem.shape) if spec.flops else None, Gemm(problem.in_dtype)
                if flops and gemm.in_dtype not in gemms:
                    gemms[gemm.in_dtype] = cells.in_rounds([gemm])[gemm]
                row = _row(cells, wanted.contenders(reference, problem, backend.device), refused, copy)
                kernel.rows.append(replace(row, flops=flops, gemm=gemms.get(gemm.in_dtype)))
                yield kernel.rows[-1]
            if not cells.is_spent():
                for name in (name for name in HOSTS if name not in AGAINST or name in wanted.rivals):
                    kernel.hosts[name] = cells.once(HostCall(name, reference, kernel.name), host_time)


def _row(cells: Cells, contenders: Sequence[KernelContender], refused: dict[str, Timing], copy: Timing) -> Row:
    """Every output is checked before the first contender is timed: the reference is built once, and let go.

    ``refused``: contenders that have refused the kernel, which they do whatever its sizes; added to.
    """
    tried = [contender for contender in contenders if contender.name not in refused]
    checks = [cells.check(each) for each in tried]
    timed = cells.in_rounds(tried)
    found = {each.name: timed[each].with_check(check) for each, check in zip(tried, checks, strict=True)}
    theirs = found.get(TORCH_COMPILE)
    if theirs and theirs.time_us is None and "OutOfMemory" not in theirs.reason:
        refused[TORCH_COMPILE] = theirs
    ours = contenders[0]
    found[OURS] = replace(found[OURS], config=ours.config)
    timings = {each.name: found.get(each.name) or refused[each.name] for each in contenders}
    return Row(ours.problem, cells.backend.device, ours.bytes_moved, copy, timings)
