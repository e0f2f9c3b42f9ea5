"""Does a kernel's lookup key hold all that moves its winner? Vary what it leaves out, and see what its pick loses.

Each problem and its variations are screened. Where the pick seems to lose too much on a variation, fresh processes time
it against that variation's best alone: the screen chose that rival, so its own times would flatter it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from fp8tune import scratch
from fp8tune.choose.decision import Block, process_values
from fp8tune.choose.ranking import TIE_BAND, Candidates, all_candidates, usable
from fp8tune.errors import MachineError
from fp8tune.measure import machine
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Batch, Laboratory, OpenLaboratory
from fp8tune.measure.worker import start_server
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.plan.variations import Variation, key_faults, variations
from fp8tune.records import Device, Evidence, Kind, NamedInts, Problem
from fp8tune.revisions import git
from fp8tune.revisions.loading import check_reference, load_spec
from fp8tune.store import tallies as tried
from fp8tune.store.results import Store
from fp8tune.store.tallies import Tally
from fp8tune.sweep import session
from fp8tune.sweep.loop import Event, Request, sweep
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec

PROCESSES = 6
ROUNDS = 3
"""How often a suspect and its rival are timed: so many rounds in each of so many fresh processes."""

ALPHA = 0.025
"""Chance of a false alarm in a whole lint, shared by its suspects."""


@dataclass(frozen=True)
class Wish:
    """The options of ``fp8tune lint``."""

    kernel: str
    shapes: tuple[str, ...]
    routing: str = "jagged"
    grid: tuple[str, ...] = ()
    seed: int = 0
    timer: str | None = None
    time_budget_s: float | None = None


@dataclass(frozen=True)
class Subject:
    """A problem as a sweep would have it, and what else its lookup key stands for."""

    problem: Problem
    key: NamedInts
    variations: tuple[Variation, ...]


@dataclass(frozen=True)
class Job:
    """A wish on this machine; ``faults`` of the key itself leave nothing to measure."""

    kernel: str
    device: Device
    faults: tuple[str, ...]
    subjects: tuple[Subject, ...]
    request: Request
    notices: tuple[str, ...]


class Verdict(StrEnum):
    """What a variation does to a winner."""

    HOLDS = "holds"
    UNCLEAR = "unclear"
    """The pick seems to lose too much there, and fresh processes do not prove it."""
    MOVES = "moves"


@dataclass(frozen=True)
class Judgement:
    """What the pick of a problem is worth on one variation of it."""

    subject: Subject
    variation: Variation
    pick: NamedInts
    best: NamedInts
    """The variation's own."""
    slowdown: float | None
    """The pick's time over the best's, on the variation; None where it does not run."""
    allowed: float
    """The pick's slowdown on the problem it was picked on, which the tie rule grants, and one tie band more."""
    processes: int = 0
    """Fresh ones that ``slowdown`` comes from; 0: the screen's was small enough."""
    is_proven: bool = False
    """Whether they prove that it is more than what is allowed."""

    @property
    def verdict(self) -> Verdict:
        """Whether the variation leaves the winner where it is."""
        if self.slowdown is None or self.is_proven:
            return Verdict.MOVES
        return Verdict.HOLDS if self.slowdown <= self.allowed else Verdict.UNCLEAR


@dataclass(frozen=True)
class Report:
    """Last event of a lint."""

    judgements: tuple[Judgement, ...]
    left_out: int
    """Variations that a time budget left out."""

    @property
    def exit_code(self) -> int:
        """1 where a winner moves, 3 where that stays unclear or nothing was judged."""
        verdicts = {judgement.verdict for judgement in self.judgements}
        if Verdict.MOVES in verdicts:
            return 1
        return 0 if verdicts == {Verdict.HOLDS} else 3


def prepare(wish: Wish) -> Job:
    """Everything to measure (imports torch and the kernel).

    Raises MachineError without a GPU or simulated clock, UsageError for a kernel, grid, routing or shapes nobody knows.
    """
    check_reference(wish.kernel)
    rows = [row for name in wish.shapes for row in shapes.load(name).rows]
    laboratory, notices = session.choose_laboratory(None, wish.timer)
    if laboratory.kind not in (Kind.MEASURED, Kind.SIMULATED):
        raise MachineError("lint times kernels and needs a GPU; --timer simulated:1 runs it on a fake one")
    spec, arch = load_spec(wish.kernel), laboratory.device.arch
    fp8_dtype = ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"
    problems = plan.problems(spec, rows, routing=wish.routing, fp8_dtype=fp8_dtype, seed=wish.seed)
    faults = dict.fromkeys(fault for problem in problems for fault in key_faults(spec, problem))
    if laboratory.compiles:
        machine.check_folders()
    subjects = () if faults else tuple(_subject(spec, problem) for problem in problems)
    start_server()
    request = Request(
        batches=_batches(wish, spec, laboratory, subjects),
        laboratory=laboratory,
        key=f"lint {wish.kernel}",
        command=f"fp8tune lint {wish.kernel}",
        commit=git.head(Path.cwd()),
        seed=wish.seed,
        time_budget_s=wish.time_budget_s,
    )
    return Job(spec.name, laboratory.device, tuple(faults), subjects, request, notices)


def _subject(spec: KernelSpec, problem: Problem) -> Subject:
    return Subject(problem, spec.lookup_key(problem), tuple(variations(spec, problem)))


def _batches(wish: Wish, spec: KernelSpec, laboratory: Laboratory, subjects: Sequence[Subject]) -> tuple[Batch, ...]:
    """Each problem and then its variations, so that a time budget leaves out whole problems, nearly."""
    axes, version = plan.parse_grid(wish.grid, spec.axes), session.version_of(wish.kernel, spec)
    limits = session.limits_of(laboratory.device)
    problems = dict.fromkeys(
        problem
        for subject in subjects
        for problem in (subject.problem, *(variation.problem for variation in subject.variations))
    )
    return tuple(
        session.make_batch(wish.kernel, spec, version, problem, plan.trials(spec, problem, axes, limits))
        for problem in problems
    )


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[Store]:
    """The database to keep rows in, or one that is gone afterwards: rows of odd variations belong in no table."""
    if db is not None:
        with Store.open(db, create=True) as store:
            yield store
        return
    with (
        scratch.folder("lint") as folder,
        Store.open(f"{folder}/lint.db", create=True) as store,
    ):
        yield store


def run(store: Store, job: Job) -> Iterator[Event | Report]:
    """Screen, time the suspects again, and end with a Report. Closing the generator keeps every stored row."""
    yield from sweep(store, job.request)
    screened = judge(job.subjects, _evidence(store, job))
    suspects = [judgement for judgement in screened if judgement.verdict is Verdict.UNCLEAR]
    settled = dict(zip(suspects, _settled(job, suspects), strict=True))
    judged = tuple(settled.get(judgement, judgement) for judgement in screened)
    yield Report(judged, sum(len(subject.variations) for subject in job.subjects) - len(judged))


def tallies(store: Store, job: Job) -> list[Tally]:
    """What became of the configs of each problem and variation."""
    request = job.request
    subjects = [
        tried.Subject(batch.version, job.device, request.laboratory.kind, batch.problem) for batch in request.batches
    ]
    return [store.tally(subject) for subject in subjects]


def judge(subjects: Sequence[Subject], evidence: Sequence[Evidence]) -> list[Judgement]:
    """Each pick on each variation, from evidence of one device; a problem not swept to its end is left out."""
    found = {candidates.problem: candidates for candidates in usable(all_candidates(evidence))}
    return [
        _judgement(subject, variation, found[subject.problem], found[variation.problem])
        for subject in subjects
        for variation in subject.variations
        if subject.problem in found and variation.problem in found
    ]


def _judgement(subject: Subject, variation: Variation, picked: Candidates, other: Candidates) -> Judgement:
    pick = picked.pick.config or NamedInts()
    return Judgement(
        subject=subject,
        variation=variation,
        pick=pick,
        best=other.named[0].config or NamedInts(),
        slowdown=other.slowdown(pick) if pick in other.times_us else None,
        allowed=picked.slowdown(pick) * (1 + TIE_BAND),
    )


def _evidence(store: Store, job: Job) -> list[Evidence]:
    return [item for item in store.evidence(job.kernel, job.device.arch) if item.device == job.device]


def _settled(job: Job, suspects: Sequence[Judgement]) -> list[Judgement]:
    """The suspects as fresh processes see them."""
    batches = {batch.problem: batch for batch in job.request.batches}
    blocks: list[list[Block]] = [[] for _ in suspects]
    with OpenLaboratory(job.request.laboratory, job.request.trial_timeout_s) as lab:
        for process in range(1, PROCESSES + 1 if suspects else 1):
            lab.fresh_runner()
            for suspect, found in zip(suspects, blocks, strict=True):
                found += _visit(lab, batches[suspect.variation.problem], suspect, process)
    return [settle(suspect, found, ALPHA / len(suspects)) for suspect, found in zip(suspects, blocks, strict=True)]


def _visit(lab: OpenLaboratory, batch: Batch, suspect: Judgement, process: int) -> Iterator[Block]:
    """Pick and rival in turns, forth and back, in the process that runs."""
    if lab.prepare_final(batch) is not None:
        return
    for number in range(ROUNDS):
        pair = (suspect.pick, suspect.best) if number % 2 else (suspect.best, suspect.pick)
        for position, config in enumerate(pair):
            outcome = lab.run_final(batch, config, Slot(process, number, position))
            if outcome.time_us is not None:
                yield Block(str(process), number, config, outcome.time_us)


def settle(suspect: Judgement, blocks: Sequence[Block], alpha: float) -> Judgement:
    """The judgement with what fresh processes timed; as it was where none timed both configs.

    One log ratio a process, and a one-sided t-test at level ``alpha`` of their mean against what is allowed.
    """
    from scipy.stats import ttest_1samp

    values = process_values(blocks)
    pick, best = values.get(suspect.pick, {}), values.get(suspect.best, {})
    ratios = [pick[process] - best[process] for process in pick if process in best]
    if not ratios:
        return suspect
    is_proven = len(ratios) > 1 and bool(
        ttest_1samp(ratios, math.log(suspect.allowed), alternative="greater").pvalue < alpha
    )
    slowdown = max(1.0, math.exp(fmean(ratios)))
    return replace(suspect, slowdown=slowdown, processes=len(ratios), is_proven=is_proven)
