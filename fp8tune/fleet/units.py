"""Units of work: from a sweep's plan to units, and on another host from a unit back to its plan.

A unit is some problem sizes of one kernel. One GPU does both passes of a unit, because rows of two GPUs are never
compared. A GPU that takes over a unit begins it anew; rows of the first stay in the database and do not count.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from fp8tune import __version__
from fp8tune.errors import UsageError, one_line
from fp8tune.plan.selection import Selection
from fp8tune.records import NamedInts
from fp8tune.replay.loading import check_reference
from fp8tune.replay.recording import from_json
from fp8tune.revisions.reference import KernelReference
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import QueuedSweep, Unit
from fp8tune.sweeping import planning
from fp8tune.sweeping.options import Options
from fp8tune.sweeping.planning import Plan, ProblemPlan

UNIT_S, SHORTEST_S = 90.0, 30.0
"""Limits of a unit. The work of a longer one may be lost with its worker; a shorter one is mostly fresh processes."""
SHARE = 4
"""A unit has at most this fraction of the work that is left: the last units are short, and workers end together."""

# Seconds on an H100, to compare units with each other: one size of colwise, 17 configs with confirmation, took 20 s.
CONFIG_S, BLOCK_S, PROCESS_S, BEGIN_S = 0.06, 0.02, 1.8, 1.5

# Options that a unit keeps. Shape sets and recordings are kept by content: another host need not have the files.
KEPT_OPTIONS = {
    *("kernels", "routing", "grid", "scale_mode", "in_dtype", "layout", "seed"),
    *("again", "retry_failed", "quick", "trial_timeout_s"),
}


class OtherCodeError(UsageError):
    """A worker leaves a unit to others, because the code here is different or may not be imported."""


def add(store: Store, plan: Plan) -> tuple[QueuedSweep, int]:
    """Queue the units of a plan in one commit. Returns the sweep and the number of new units.

    Adding the same sweep again adds nothing; with ``--again`` it adds the units anew once all of them are done.
    Raises UsageError where nothing is timed.
    """
    if not plan.backend.times:
        raise UsageError("units of work are for GPUs: run this where there is one, or with --timer simulated:SEED")
    sweep = queued(plan)
    if plan.options.again:
        keys = (digest([sweep.key, "again", number]) for number in itertools.count(1))
        sweep = next(replace(sweep, key=key) for key in keys if not _is_over(store, key))
    return sweep, store.add_units(sweep, list(units_of(plan, sweep.key)))


def _is_over(store: Store, key: str) -> bool:
    units = store.queue([key]).units
    return bool(units) and not any(status.state in (UnitState.WAITING, UnitState.RUNNING) for status in units)


def queued(plan: Plan) -> QueuedSweep:
    """Return the sweep as the queue keeps it."""
    values = ((option.name, getattr(plan.options, option.name), option.default) for option in fields(Options))
    options = {name: value for name, value, default in values if name in KEPT_OPTIONS and value != default}
    rows = [dict(row) for row in plan.rows]
    document = json.dumps({"version": __version__, "options": options, "rows": rows}, sort_keys=True)
    versions = sorted({(problem.version.kernel, problem.version.source_hash) for problem in plan.problems})
    key = digest([document, versions, plan.backend.device.name])
    return QueuedSweep(key, plan.backend.device.name, document, plan.options.command)


def units_of(plan: Plan, sweep_key: str) -> Iterator[Unit]:
    """Yield the units of a plan, which become shorter towards the end; each has one kernel."""
    expected = [(problem, expected_s(problem, quick=plan.options.quick)) for problem in plan.problems]
    begin_s = BEGIN_S + (0.0 if plan.options.quick else MeasuringPlan().processes * PROCESS_S)
    left_s, position = sum(seconds for _, seconds in expected), 0
    for _, group in itertools.groupby(expected, lambda item: item[0].reference):
        problems = list(group)
        while problems:
            limit_s = min(UNIT_S, max(SHORTEST_S, left_s / SHARE)) - begin_s
            sums_s = list(itertools.accumulate(seconds for _, seconds in problems))
            count = max(1, sum(sum_s <= limit_s for sum_s in sums_s))
            mine, problems = [problem for problem, _ in problems[:count]], problems[count:]
            keys, seconds = tuple(map(problem_key, mine)), begin_s + sums_s[count - 1]
            yield Unit(
                key=digest([sweep_key, keys]),
                sweep_key=sweep_key,
                position=position,
                kernel=mine[0].version.kernel,
                source_hash=mine[0].version.source_hash,
                problems=keys,
                shapes=tuple(str(problem.problem.shape) for problem in mine),
                worth=seconds,  # workers take the longest first
                expected_s=seconds,
            )
            left_s, position = left_s - sums_s[count - 1], position + 1


def expected_s(problem: ProblemPlan, *, quick: bool) -> float:
    """Estimate the seconds that a problem size takes on one GPU."""
    numbers, count = MeasuringPlan(), problem.count
    blocks = 0 if quick else numbers.processes * numbers.rounds * (min(numbers.finalists, count) + 1)
    return count * CONFIG_S + blocks * BLOCK_S


def problem_key(problem: ProblemPlan) -> str:
    """Hash a problem size of a kernel version: 16 hex digits, the same on every host with the same code."""
    values = {**vars(problem.problem), "shape": problem.problem.shape.canonical}
    return digest([problem.version.kernel, problem.version.source_hash, values])


def plan_of(sweep: QueuedSweep, *, timer: str | None = None, command: str = "", kernels: Collection[str] = ()) -> Plan:
    """Return the expanded plan of a queued sweep on this host's GPU, or on the simulated one of ``timer``.

    ``kernels`` are names of foreign kernels that may be imported. Raises UsageError for a document that is damaged, or
    that names what is not here or may not be imported.
    """
    options, rows = _read(sweep)
    if missing := worker_options(options.kernels, kernels):
        raise OtherCodeError(f"only the database names some code: if you trust it, add{missing[:200]}")
    short = planning.planned(replace(options, timer=timer, command=command, shapes=()))
    if short.backend.device.name != sweep.device:
        raise UsageError(
            f"the units are for {sweep.device}, and this GPU is {short.backend.device.name}: start workers there"
        )
    return planning.expanded(replace(short, selections=(Selection(tuple(rows)),)))


def worker_options(kernels: Collection[str], allowed: Collection[str] = ()) -> str:
    """Return the options that allow a worker to import queued kernels, each after a blank, but for those it has.

    Whoever may write to a database must not choose what code runs, so a name in a database is imported only if the
    worker's command line has it. There ``*`` stands for any name: ``my_ops:*``.
    """
    patterns, missing = [_absolute(text) for text in allowed], list[str]()
    for text in kernels:
        check_reference(text)
        kernel = _absolute(text)
        is_named = any(
            fnmatchcase(kernel.kernel, pattern.kernel)
            and kernel.recording in ("", pattern.recording)
            and kernel.reference in ("", pattern.reference)
            and kernel.inputs in ("", pattern.inputs)
            for pattern in patterns
        )
        is_foreign = ":" in kernel.kernel or kernel.recording or kernel.reference or kernel.inputs
        if is_foreign and not is_named:
            missing.append(f" --kernel {shlex.quote(text)}")
    return "".join(dict.fromkeys(missing))


def _absolute(text: str) -> KernelReference:
    def absolute(name: str) -> str:
        path, colon, attribute = name.rpartition(":")
        return f"{Path(path).absolute()}{colon}{attribute}" if path.endswith(".py") else name

    kernel = KernelReference.parse(text).absolute_paths()
    names = absolute(kernel.kernel), absolute(kernel.reference), absolute(kernel.inputs)
    return replace(kernel, kernel=names[0], reference=names[1], inputs=names[2])


def of_unit(plan: Plan, known: Mapping[str, ProblemPlan], unit: Unit, time_budget_s: float | None = None) -> Plan:
    """Return the part of a sweep's plan that a unit names, given its problem sizes by key. Raises OtherCodeError."""
    if not known.keys() >= set(unit.problems):
        raise OtherCodeError(
            f"{unit.kernel} of the unit is {unit.source_hash} and has other code or sizes here: install the fp8tune "
            "and kernels that queued it, or queue the sweep again"
        )
    # The same key whenever this GPU does the unit, so that it continues one that was interrupted.
    key = digest([unit.key, plan.backend.device.fingerprint, plan.backend.timer])
    problems = tuple(known[name] for name in unit.problems)
    return replace(plan, key=key, problems=problems, options=replace(plan.options, time_budget_s=time_budget_s))


def _read(sweep: QueuedSweep) -> tuple[Options, tuple[NamedInts, ...]]:
    try:
        document = json.loads(sweep.document)
        if document["version"] != __version__ or not document["options"].keys() <= KEPT_OPTIONS:
            raise OtherCodeError(
                f"the units were queued by another fp8tune, and this is {__version__}: install the one that queued them"
            )
        options, rows = from_json(document["options"], Options), tuple(map(NamedInts, document["rows"]))
        for name, size in (item for row in rows for item in row.items()):
            if type(size) is not int or not 0 <= size < 2**63:
                raise ValueError(f"the size {name}={size!r:.40}")
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise OtherCodeError(f"queued sweep {sweep.key} is damaged: {one_line(error, 150)}: queue it again") from None
    return options, rows


def digest(value: object) -> str:
    """Hash a JSON document: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
