"""From a sweep's plan to units of work, and on another host from a unit back to the plan of its problems.

A unit is some problems of one kernel. Whoever takes it screens them and runs their finals, so that both are of one GPU.
If another GPU takes a unit over, it begins anew: rows of two GPUs are never compared. What the first one measured stays
in the database; of one problem and device name the newest complete rows count (:mod:`fp8tune.stats.rank`), so the
table is the same as if the first had never begun.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fp8tune import __version__
from fp8tune.errors import UsageError, one_line
from fp8tune.fleet.imports import Imports
from fp8tune.fleet.worth import worths
from fp8tune.measure.checking import IN_A_ROW_BYTES
from fp8tune.records import NamedInts
from fp8tune.replay.recording import from_json
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.store.results import Store
from fp8tune.store.units import QueuedSweep, Unit
from fp8tune.sweep import planning
from fp8tune.sweep.estimate import BLOCK_S, NEAR_SHARE
from fp8tune.sweep.loop import FRESH_S, ROUNDS
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan, ProblemPlan

UNIT_S = 60.0
"""Seconds that a unit is meant to take at most. Finals share fresh processes among the problems of a unit, so a short
one costs more in all; a long one leaves other GPUs idle at the end."""

SHORTEST_S = 15.0
"""Of the last units of a kernel, which even out when workers end."""

COMPILE_S = 0.05
"""Of a config that is compiled, checked and timed the first time, with the compilers of 16 cores beside each other."""

CHECKED_B_PER_S = 1e10
"""Bytes of a problem, read plus written, of which one config is checked in a second, most of it in 150 launches in a
row (:mod:`fp8tune.measure.checking`): 16 configs on 738 MB took 1.4 s of an H100. Larger problems have no such row.
"""

BEGUN_S = 1.5
"""Of a unit: its compilers, a process with a GPU, the first tensors."""

_LOCAL = frozenset(
    {
        "db",
        "on",
        "format",
        "time_budget_s",
        "command",
        "timer",
        "arch",
        "shapes",
        "recording",
        "check",
        "reference",
        "op",
    }
)
"""Options that a unit does not keep: those of one process, and those that :func:`fp8tune.sweep.planning.planned` has
put into the kernels' texts. Shapes are kept by their rows: another host need not have their files."""


class OtherCodeError(UsageError):
    """A worker leaves a unit to others: it is of other code than is installed here, or of code that it must not run."""


@dataclass(frozen=True)
class _Document:
    """A queued sweep's document, as far as every version of fp8tune understands it."""

    version: str
    options: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Added:
    """What queueing a sweep did."""

    sweep: QueuedSweep
    new: int
    """Units that were added."""
    there: int
    """Units that were in the queue before, done ones among them."""
    problems: int
    """Of all these units."""
    settled: int = 0
    """Problems that are left out: a device of this name has measured them to the end."""


def add(store: Store, plan: Plan) -> Added:
    """Queue the units of an expanded plan for the device name that it was planned on, in one commit.

    Problems that a device of this name has settled are left out. Adding the same sweep again adds nothing; with
    ``--again`` it adds the units anew once all of them are done. Raises UsageError where nothing is timed.
    """
    if not plan.backend.times:
        raise UsageError("units of work are for GPUs: run this where there is one, or with --timer simulated:SEED")
    sweep = queued(plan)
    if plan.options.again:
        sweep = _anew(store, sweep)
    there = len(store.queue([sweep.key]).units)
    if there:  # what is worth something changes as units are done; the units do not
        return Added(sweep, 0, there, len(plan.problems), 0)
    worth = worths(store, plan)
    wanted = replace(plan, problems=tuple(of for of in plan.problems if worth(of)))
    new = store.add_units(sweep, list(units_of(wanted, sweep.key, worth))) if wanted.problems else 0
    return Added(sweep, new, 0, len(wanted.problems), len(plan.problems) - len(wanted.problems))


def queued(plan: Plan) -> QueuedSweep:
    """The sweep as the queue keeps it."""
    options = {
        field.name: value
        for field in fields(Options)
        if field.name not in _LOCAL and (value := getattr(plan.options, field.name)) != field.default
    }
    rows = [dict(row) for row in plan.rows]
    document = json.dumps({"version": __version__, "options": options, "rows": rows}, sort_keys=True)
    versions = sorted({(of.version.kernel, of.version.source_hash) for of in plan.problems})
    key = _digest([document, versions, plan.backend.device.name])
    return QueuedSweep(key, plan.backend.device.name, document, plan.options.command)


def units_of(plan: Plan, sweep_key: str, worth: Callable[[ProblemPlan], float] = lambda _: 1.0) -> Iterator[Unit]:
    """The units of an expanded plan: each of one kernel, those of a kernel the longer the earlier.

    Half of what is left of a kernel goes into its next unit, at most :data:`UNIT_S` and at least :data:`SHORTEST_S`,
    with what each unit takes besides its problems.
    """
    alone_s = besides_s(quick=plan.options.quick)
    by_kernel: dict[str, list[ProblemPlan]] = {}
    for of in plan.problems:
        by_kernel.setdefault(of.reference, []).append(of)
    position = 0
    for problems in by_kernel.values():
        ordered = sorted(problems, key=lambda of: -worth(of))  # stable: the plan's order within one worth
        expected = [expected_s(of, quick=plan.options.quick) for of in ordered]
        first = 0
        while first < len(ordered):
            limit_s = min(UNIT_S, max(SHORTEST_S, alone_s + sum(expected[first:]) / 2)) - alone_s
            last = first + 1
            while last < len(ordered) and sum(expected[first : last + 1]) <= limit_s:
                last += 1
            mine = ordered[first:last]
            keys = tuple(problem_key(of) for of in mine)
            yield Unit(
                key=_digest([sweep_key, keys]),
                sweep_key=sweep_key,
                position=position,
                kernel=mine[0].version.kernel,
                source_hash=mine[0].version.source_hash,
                problems=keys,
                shapes=tuple(str(of.problem.shape) for of in mine),
                worth=sum(map(worth, mine)) / len(mine),
                expected_s=alone_s + sum(expected[first:last]),
            )
            first, position = last, position + 1


def expected_s(of: ProblemPlan, *, quick: bool = False, numbers: MeasuringPlan = MeasuringPlan()) -> float:
    """About what a problem takes on one GPU, in seconds.

    Ratios are relied on, and the sum only for whether a calibration pays.
    """
    trials = sum(not pruned for pruned in of.configs.values())
    check_s = of.bytes_moved / CHECKED_B_PER_S if of.bytes_moved <= IN_A_ROW_BYTES else 0.0
    screen = trials * (COMPILE_S + check_s + (ROUNDS - 1) * NEAR_SHARE * BLOCK_S)
    arms = min(numbers.finalists, trials) + 1
    return screen if quick else screen + numbers.processes * (arms * numbers.rounds * BLOCK_S + BLOCK_S)


def besides_s(*, quick: bool = False, numbers: MeasuringPlan = MeasuringPlan()) -> float:
    """About what a unit takes besides its problems: each process of its finals is fresh."""
    return BEGUN_S + (0.0 if quick else numbers.processes * FRESH_S)


def has_finals(sweep: QueuedSweep) -> bool:
    """Return True for all sweeps but quick ones."""
    try:
        return not _document(sweep).options.get("quick", False)
    except OtherCodeError:  # a worker refuses its units, and says why
        return True


def problem_key(of: ProblemPlan) -> str:
    """16 hex digits for a problem of a kernel version: the same on every host with the same code."""
    problem = {**vars(of.problem), "shape": of.problem.shape.canonical}
    return _digest([of.version.kernel, of.version.source_hash, problem])


# On the worker's host


def plan_of(sweep: QueuedSweep, *, timer: str | None = None, command: str = "", imports: Imports = Imports()) -> Plan:
    """The expanded plan of a queued sweep on this host's GPU, or on the simulated one of ``timer``.

    ``imports``: foreign code that this process may import. Raises UsageError for a document that this version does not
    understand, that names what is not here, or what must not be imported.
    """
    options, rows = _read(sweep)
    imports.check(options.kernels)
    short = planning.planned(replace(options, timer=timer, command=command, shapes=()))
    if short.backend.device.name != sweep.device:
        raise UsageError(
            f"the units are for {sweep.device}, and this GPU is {short.backend.device.name}: start workers there"
        )
    return planning.expanded(replace(short, rows=rows))


def static_plan_of(sweep: QueuedSweep, arch: str) -> Plan:
    """The expanded plan of a queued sweep for the compiler alone, of problems whose code differs; needs no GPU.

    The document must come from the command that queued the sweep, not from a database: its kernels are imported. Raises
    UsageError as :func:`plan_of` does.
    """
    options, rows = _read(sweep)
    short = planning.planned(replace(options, arch=arch, static=True, shapes=()))
    return planning.expanded(replace(short, rows=rows))


def by_key(plan: Plan) -> dict[str, ProblemPlan]:
    """The problems of a sweep's plan by the keys that units name them by: 25 us each, so once a sweep."""
    return {problem_key(of): of for of in plan.problems}


def of_unit(
    plan: Plan, unit: Unit, time_budget_s: float | None = None, *, known: Mapping[str, ProblemPlan] | None = None
) -> Plan:
    """The plan of one unit, from the plan of its sweep. Raises OtherCodeError.

    Its key is the same whenever this GPU does this unit, so that a unit that was broken off is continued.
    ``known``: :func:`by_key` of the plan.
    """
    known = by_key(plan) if known is None else known
    problems = tuple(known[key] for key in unit.problems if key in known)
    if len(problems) < len(unit.problems):
        here = {of.version.source_hash for of in plan.problems if of.version.kernel == unit.kernel}
        if unit.source_hash not in here:
            have = f"{', '.join(sorted(here))} is" if here else "nothing of it is"
            raise OtherCodeError(
                f"{unit.kernel} of the unit is {unit.source_hash}, and {have} here: install the fp8tune (and the "
                "kernels) that queued it, or queue the sweep anew"
            )
        raise OtherCodeError(f"{unit.kernel} has other problems here than the unit names: install what queued it")
    key = _digest([unit.key, plan.backend.device.fingerprint, plan.backend.timer])
    return replace(plan, key=key, problems=problems, options=replace(plan.options, time_budget_s=time_budget_s))


def _read(sweep: QueuedSweep) -> tuple[Options, tuple[NamedInts, ...]]:
    document = _document(sweep)
    known = {field.name for field in fields(Options) if field.name not in _LOCAL}
    if document.version != __version__ or not document.options.keys() <= known:
        raise OtherCodeError(
            f"the units were queued by fp8tune {document.version}, and this is {__version__}: install the same one"
        )
    with _damaged(sweep):
        options = from_json(json.loads(sweep.document)["options"], Options)
        for name, size in (item for row in document.rows for item in row.items()):
            if type(size) is not int or not 0 <= size < 2**63:
                raise ValueError(f"the size {name}={size!r:.40}")
    return options, tuple(map(NamedInts, document.rows))


def _document(sweep: QueuedSweep) -> _Document:
    with _damaged(sweep):
        return from_json(json.loads(sweep.document), _Document)


@contextlib.contextmanager
def _damaged(sweep: QueuedSweep) -> Iterator[None]:
    """Convert whatever a document of another form raises."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise OtherCodeError(f"queued sweep {sweep.key} is damaged: {one_line(error, 150)}: queue it again") from None


def _anew(store: Store, sweep: QueuedSweep) -> QueuedSweep:
    """The run of an ``--again`` that is not yet done, or a new one."""
    number = 1
    while True:
        numbered = replace(sweep, key=_digest([sweep.key, "again", number]))
        units = store.queue([numbered.key]).units
        if not units or any(of.state in ("waiting", "running") for of in units):
            return numbered
        number += 1


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
