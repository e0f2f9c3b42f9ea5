"""Units of work: from a sweep's plan to units, and on another host from a unit back to its plan.

A unit is one problem size of a kernel. One GPU does both passes of a unit, because rows of two GPUs are never
compared. A GPU that takes over a unit begins it anew; rows of the first stay in the database and do not count.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fp8tune import __version__
from fp8tune.errors import UsageError, one_line
from fp8tune.options import SweepOptions
from fp8tune.plan.shapes import Selection, Settings
from fp8tune.records import NamedInts, Pick
from fp8tune.replay.loading import check_reference
from fp8tune.replay.recording import from_json
from fp8tune.revisions.reference import KernelReference
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import QueuedSweep, Unit
from fp8tune.studies import pick_of, read_studies
from fp8tune.sweeping import planning
from fp8tune.sweeping.planning import Plan, ProblemPlan

# Options that a unit keeps, beside its part of the time budget. Shape sets and recordings are kept by content: another
# host need not have the files.
KEPT_OPTIONS = {"kernel", "grid", "again", "quick", "timing"}


class OtherCodeError(UsageError):
    """A worker leaves a unit to others, because the code here is different or may not be imported."""


def add(store: Store, plan: Plan) -> tuple[QueuedSweep, int]:
    """Queue the units of a plan in one commit. Returns the sweep and the number of new units.

    Adding the same sweep again adds nothing; with ``--again`` it adds the units anew once all of them are done.
    Raises UsageError where nothing is timed.
    """
    if not plan.backend.times:
        raise UsageError("units of work are for GPUs: run this where there is one, or with --timer simulated:SEED")
    sweep, first_key = queued(plan), queued(plan).key
    for number in itertools.count(1) if plan.options.again else ():
        sweep = replace(sweep, key=digest([first_key, "again", number]))
        states = {status.state for status in store.queue([sweep.key]).units}
        if not states or states & {UnitState.WAITING, UnitState.RUNNING}:
            break
    return sweep, store.add_units(sweep, list(units_of(plan, sweep.key)))


def queued(plan: Plan) -> QueuedSweep:
    """Return the sweep as the queue keeps it."""
    options = {name: getattr(plan.options, name) for name in KEPT_OPTIONS}
    if plan.options.budget_s is not None:
        options["budget_s"] = plan.options.budget_s / len(plan.problems)
    rows = [dict(row) for selected in plan.selections for row in selected.rows]
    work = {"version": __version__, "options": options, "settings": vars(plan.settings), "rows": rows}
    document = json.dumps(work, sort_keys=True)
    versions = sorted({(size.version.kernel, size.version.source_hash) for size in plan.problems})
    key = digest([document, versions, plan.backend.device.name])
    return QueuedSweep(key, plan.backend.device.name, document, plan.command)


def units_of(plan: Plan, sweep_key: str) -> Iterator[Unit]:
    """Yield a unit for each problem size of a plan, with an estimate of the seconds that it takes on one GPU."""
    most_s = math.inf if plan.options.budget_s is None else plan.options.budget_s / len(plan.problems)
    for position, size in enumerate(plan.problems):
        yield Unit(
            key=digest([sweep_key, problem_key(size)]),
            sweep_key=sweep_key,
            position=position,
            kernel=size.version.kernel,
            source_hash=size.version.source_hash,
            problems=(problem_key(size),),
            shapes=(str(size.problem.shape),),
            expected_s=min(size.expected_s(quick=plan.options.quick), most_s),
        )


def problem_key(size: ProblemPlan | Pick) -> str:
    """Hash a problem size of a kernel version: 16 hex digits, the same on every host with the same code."""
    assert size.version is not None
    problem = {**vars(size.problem), "shape": size.problem.shape.canonical}
    return digest([size.version.kernel, size.version.source_hash, problem])


def speedups(store: Store) -> dict[str, float]:
    """Return the speedup over today's configs of each queued sweep so far: the geometric mean of its decided sizes."""
    units = [status.unit for status in store.queue().units if status.state is UnitState.DONE]
    picks = [pick_of(study) for kernel in {unit.kernel for unit in units} for study in read_studies(store, kernel)]
    ratios = {problem_key(pick): pick.speedup_ratio for pick in picks if pick.version and pick.speedup_ratio}
    sweeps: dict[str, list[float]] = {}
    for unit in units:
        sweeps.setdefault(unit.sweep_key, []).extend(ratios[key] for key in unit.problems if key in ratios)
    return {sweep: geometric_mean(values) for sweep, values in sweeps.items() if values}


def plan_of(sweep: QueuedSweep, *, timer: str | None = None, command: str = "", kernels: Collection[str] = ()) -> Plan:
    """Return the expanded plan of a queued sweep on this host's GPU, or on the simulated one of ``timer``.

    ``kernels`` are names of foreign kernels that may be imported. Raises UsageError for a document that is damaged, or
    that names what is not here or may not be imported.
    """
    options, selected = _read(sweep)
    if missing := worker_options(options.kernel, kernels):
        raise OtherCodeError(f"only the database names some code: if you trust it, add{missing[:200]}")
    short = planning.planned(replace(options, timer=timer, shapes=()), command)
    if short.backend.device.name != sweep.device:
        raise UsageError(
            f"the units are for {sweep.device}, and this GPU is {short.backend.device.name}: start workers there"
        )
    plan = planning.expanded(replace(short, selections=(selected,)))
    return replace(plan, size_budget_s=options.budget_s)


def _read(sweep: QueuedSweep) -> tuple[SweepOptions, Selection]:
    try:
        document = json.loads(sweep.document)
        if document["version"] != __version__ or not document["options"].keys() <= KEPT_OPTIONS | {"budget_s"}:
            raise OtherCodeError(
                f"the units were queued by another fp8tune, and this is {__version__}: install the one that queued them"
            )
        options, rows = from_json(document["options"], SweepOptions), tuple(map(NamedInts, document["rows"]))
        settings = Settings.parse(document["settings"], "a queued sweep")
        for name, size in (item for row in rows for item in row.items()):
            if type(size) is not int or not 0 <= size < 2**63:
                raise ValueError(f"the size {name}={size!r:.40}")
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise OtherCodeError(f"queued sweep {sweep.key} is damaged: {one_line(error, 150)}: queue it again") from None
    return options, Selection(rows, settings=settings)


def worker_options(kernels: Collection[str], allowed: Collection[str] = ()) -> str:
    """Return the options that allow a worker to import queued kernels, each after a blank, but for those it has.

    Whoever may write to a database must not choose what code runs, so a name in a database is imported only if the
    worker's command line has it. There ``*`` stands for any name: ``my_ops:*``.
    """
    patterns, missing = [_absolute(text) for text in allowed], list[str]()
    for text in kernels:
        check_reference(text)
        kernel = _absolute(text)
        code = [name for name in ("recording", "reference", "inputs") if getattr(kernel, name)]
        is_named = any(
            fnmatchcase(kernel.kernel, pattern.kernel)
            and all(getattr(kernel, name) == getattr(pattern, name) for name in code)
            for pattern in patterns
        )
        if (":" in kernel.kernel or code) and not is_named:
            missing.append(f" --kernel {shlex.quote(text)}")
    return "".join(dict.fromkeys(missing))


def _absolute(text: str) -> KernelReference:
    kernel, names = KernelReference.parse(text).absolute_paths(), dict[str, Any]()
    for field in ("kernel", "reference", "inputs"):
        path, _, attribute = getattr(kernel, field).rpartition(":")
        if path.endswith(".py"):
            names[field] = f"{Path(path).absolute()}:{attribute}"
    return replace(kernel, **names)


def digest(value: object) -> str:
    """Hash a JSON document: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
