"""One record a candidate: how a million trials become what is ranked.

Trials are read in one pass over a covering index, without touching a blob. Pools that cannot compete are left out
before a record is made of them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Select,
    Table,
    and_,
    false,
    func,
    or_,
    select,
    type_coerce,
)

from fp8tune.ceiling import FLOP_PER_S, ceiling_gb_per_s
from fp8tune.records import (
    RECORDED,
    Code,
    ComparableRows,
    Device,
    Evidence,
    Facts,
    Kind,
    Problem,
    ProcessTimes,
    Status,
)
from fp8tune.stats.study import CACHED_RATE, process_us
from fp8tune.store import optional, process_times, references
from fp8tune.store.columns import LARGEST_NUMBER
from fp8tune.store.packed import POOL, Ids, Pool, is_empty
from fp8tune.store.reading import Shared, chosen, codes
from fp8tune.store.schema import (
    Calibrations,
    Candidates,
    ChecksUsed,
    Completions,
    PackedTrials,
    ProblemFlops,
    Problems,
    Trials,
)
from fp8tune.store.summaries import Summary, packed_summaries, summaries
from fp8tune.store.unreadable import MissingRowError, of_packed, readable
from fp8tune_kernels.spec import CHECKS, DTYPES

Keep = Callable[[Sequence[ComparableRows]], Collection[ComparableRows]]
"""All pools -> those to read: :func:`fp8tune.stats.rank.competing`."""

_POOL = tuple(Candidates.c[name] for name in POOL)
_COMPLETED = select(Completions.c.version_id, Completions.c.device_id, Completions.c.problem_id).distinct()

_Calibrated = Mapping[tuple[int | None, int], float]
"""(sweep, device) -> the value measured there; (None, device) -> the device's newest."""

_KINDS = {str(kind): kind for kind in Kind}


_FEW = 100
"""Problems that are asked for by their shapes; so many are most of a database, which is read whole."""


def are_there(
    connection: Connection,
    kernel: str | None,
    arch: str | None,
    kinds: Collection[Kind] | None,
    problems: Collection[Problem],
) -> bool:
    """Whether problems may have rows of a kernel, an arch and kinds; None means any.

    A sweep asks for each problem, mostly in vain: 1 ms, where reading what all records refer to takes 10 and more.
    """
    if len(problems) > _FEW:
        return True
    shapes = {problem.shape.canonical for problem in problems}
    same = select(Problems.c.id).where(Problems.c.canonical.in_(shapes))
    tables = [table for table in (Candidates, PackedTrials) if optional.is_there(connection, table)]
    wanted = (chosen(kernel, arch, kinds, of).where(of.c.problem_id.in_(same)) for of in tables)
    return any(connection.execute(query.limit(1)).first() is not None for query in wanted)


@dataclass(frozen=True)
class Wanted:
    """The ids of candidates, and of packed rows of the same problems, versions, devices and kinds."""

    candidates: Select[Any]
    packed: Select[Any] | None
    """None where nothing is packed."""

    def where(self, condition: Callable[[Table], Any]) -> Wanted:
        """Those of which a condition is true, on either table."""
        packed = None if self.packed is None else self.packed.where(condition(PackedTrials))
        return Wanted(self.candidates.where(condition(Candidates)), packed)


@dataclass(frozen=True)
class _Sweeps:
    """What the sweeps that timed a candidate say of it."""

    check: str
    ceiling_gb_per_s: float | None
    copy_gb_per_s: float | None
    peak_flop_per_s: float | None


@dataclass(frozen=True)
class Gathering:
    """What all records refer to, read once."""

    connection: Connection
    shared: Shared
    codes: Mapping[int, Code]
    completed: Set[tuple[int, int, int]]
    """Version, device and problem of all that was swept to the end."""
    ceilings: _Calibrated
    finals: process_times.Counted
    processes: Mapping[int, str]
    checked: references.References
    flops: Mapping[int, int]
    """The id of a problem -> its floating-point operations."""
    peaks: Mapping[str, _Calibrated]
    """Input dtype -> flop/s of a dense GEMM."""
    checks: Mapping[tuple[int, int], str]
    """The ids of a sweep and a kernel version -> the check used, where it was not ``exact``."""
    fastest: dict[tuple[str, str], float] = field(default_factory=dict)
    """(name of a device, kind) -> the highest rate of a kernel, GB/s; looked up when it is first asked for."""
    known: dict[tuple[Ids, frozenset[int]], _Sweeps] = field(default_factory=dict)
    """(pool, its sweeps) -> what these say, likewise: thousands of candidates share it."""

    @classmethod
    def begin(cls, connection: Connection, ceiling: str) -> Gathering:
        """Read all that is small; ``ceiling`` names the calibration to attach."""
        flops = _flops(connection)
        return cls(
            connection=connection,
            shared=Shared.load(connection),
            codes=codes(connection),
            completed={(row[0], row[1], row[2]) for row in readable(connection, _COMPLETED)},
            ceilings=_ceilings(connection, ceiling),
            finals=process_times.counted_finals(connection),
            processes=process_times.process_names(connection),
            checked=references.references(connection),
            flops=flops,
            peaks={dtype: _ceilings(connection, FLOP_PER_S + dtype) for dtype in DTYPES if flops},
            checks=_checks(connection),
        )

    def wanted(
        self,
        kernel: str | None,
        arch: str | None,
        kinds: Collection[Kind] | None,
        problems: Collection[Problem] | None,
        device: Device | None,
    ) -> Wanted:
        """The candidates of a kernel, an arch, kinds, problems and a device; None means any."""
        packed = None if is_empty(self.connection) else chosen(kernel, arch, kinds, PackedTrials)
        among = Wanted(chosen(kernel, arch, kinds), packed)
        if problems is not None:
            ids = [id for id, one in self.shared.problems.items() if one in problems]
            among = among.where(lambda of: of.c.problem_id.in_(ids))
        if device is not None:
            on = [id for id, one in self.shared.devices.items() if one == device]
            among = among.where(lambda of: of.c.device_id.in_(on))
        return among

    def read_kept(self, wanted: Wanted, keep: Keep, *, few: bool) -> list[Evidence]:
        """The records of the pools that ``keep`` returns. ``few``: these are not most of all candidates."""
        pools = self._pools(wanted, few=few)
        kept = {pool: pools[pool] for pool in keep(list(pools))}
        if len(kept) < len(pools):
            wanted = wanted.where(_in_pools(kept.values()))
        return self.read(wanted)

    def pools(self, wanted: Wanted) -> list[ComparableRows]:
        """Every pool of the wanted candidates, each with the time of its newest row."""
        return list(self._pools(wanted, few=False, dated=True))

    def _pools(self, wanted: Wanted, *, few: bool, dated: bool = False) -> dict[ComparableRows, Ids]:
        """Every pool of the wanted candidates. When it was last timed is looked up only where a problem has two."""
        ids = wanted.candidates.with_only_columns(*_POOL).distinct()
        found: list[Ids] = [(row[0], row[1], row[2], row[3]) for row in readable(self.connection, ids)]
        packed = {}
        if wanted.packed is not None:
            listed = wanted.packed.with_only_columns(*(PackedTrials.c[name] for name in (*POOL, "newest")))
            packed = {(row[0], row[1], row[2], row[3]): row[4] for row in readable(self.connection, listed)}
            found += packed
        rivals = len({problem for problem, *_ in found}) < len(found)
        newest = _last_timed(self.connection, wanted.candidates if few else None) if rivals or dated else {}
        newest |= {ids: moment for ids, moment in packed.items() if moment is not None}
        pools = {}
        for pool in found:
            with contextlib.suppress(MissingRowError):
                pools[self._pool(pool, newest.get(pool, 0.0))] = pool
        return pools

    def _pool(self, ids: Ids, newest: float) -> ComparableRows:
        problem, version, device, kind = ids
        return ComparableRows(
            problem=self.shared.problems[problem],
            device=self.shared.devices[device],
            kind=Kind(kind),
            version=self.shared.versions[version],
            complete=self._is_complete(kind, version, device, problem),
            newest=newest,
            has_finals=(problem, version, device) in self.finals,
        )

    def read(self, wanted: Wanted) -> list[Evidence]:
        """The records of these candidates, by rising id."""
        with _collecting_no_garbage():
            found = [*self._plain(wanted.candidates), *self._packed(wanted.packed)]
            return [evidence for _, evidence in sorted(found, key=itemgetter(0))]

    def _plain(self, wanted: Select[Any]) -> Iterator[tuple[int, Evidence]]:
        rows = {row[0]: row for row in readable(self.connection, wanted.with_only_columns(*Candidates.c))}
        for id, summary in summaries(self.connection, wanted):
            if id in rows:
                with contextlib.suppress(MissingRowError):
                    yield id, self._evidence(rows[id], summary, self.codes.get(id))

    def _packed(self, wanted: Select[Any] | None) -> Iterator[tuple[int, Evidence]]:
        if wanted is None:
            return
        names = [column.name for column in Candidates.c]

        def found(pool: Pool) -> tuple[dict[int, Any], list[tuple[int, Summary]], dict[int, Code]]:
            rows = {row[0]: row for row in pool.rows(Candidates, names)}
            return rows, list(packed_summaries(pool, rows)), pool.codes()

        for rows, mine, known_codes in of_packed(self.connection, wanted, found):
            for id, summary in mine:
                with contextlib.suppress(MissingRowError):
                    yield id, self._evidence(rows[id], summary, known_codes.get(id))

    def _evidence(self, row: Sequence[Any], summary: Summary, code: Code | None) -> Evidence:
        _, problem, config, version, device, kind_name, source, note, lookup_key, bytes_moved = row[:10]
        registers, spill_bytes, shared_bytes, compile_s = row[10:]
        status, kind = self._status(summary, version), _KINDS[kind_name]
        screened_us, by_stage = summary.screened_us(kind), self._finals((problem, version, device), summary)
        timed = by_stage.get("final", ())
        sweeps = self._sweeps((problem, version, device, kind_name), summary.sweeps)
        times_us = tuple(sorted(map(process_us, timed))) or screened_us
        return Evidence(
            problem=self.shared.problems[problem],
            config=self.shared.configs[config],
            device=self.shared.devices[device],
            kind=kind,
            status=status,
            times_us=times_us if status is Status.OK else (),
            version=self.shared.versions[version],
            lookup_key=self.shared.lookup_keys[lookup_key],
            bytes_moved=bytes_moved,
            flops=self.flops.get(problem),
            source=source,
            note=note,
            facts=Facts(registers, spill_bytes, shared_bytes, compile_s, code),
            check=sweeps.check,
            complete=self._is_complete(kind, version, device, problem),
            ceiling_gb_per_s=sweeps.ceiling_gb_per_s,
            copy_gb_per_s=sweeps.copy_gb_per_s,
            peak_flop_per_s=sweeps.peak_flop_per_s,
            stage="final" if timed else "screen",
            screen_us=median(screened_us) if timed and screened_us else None,
            finals=timed,
            duplicate=by_stage.get("duplicate", ()),
            newest=max(summary.newest.values()),
            has_finals=(problem, version, device) in self.finals,
        )

    def _status(self, summary: Summary, version: int) -> Status:
        if not summary.doubted:
            return references.last_but_wrong(summary.newest)
        ended = [replace(one, reference=self.checked.get((one.sweep, version), "")) for one in summary.doubted]
        return references.last_status(ended)

    def _sweeps(self, ids: Ids, sweeps: frozenset[int]) -> _Sweeps:
        """What the sweeps that timed some candidates of a pool say of all of them."""
        if (found := self.known.get((ids, sweeps))) is None:
            problem, version, device, kind = ids
            copy = _of_sweep(self.ceilings, sweeps, device)
            peaks = self.peaks.get(self.shared.problems[problem].in_dtype, {}) if problem in self.flops else {}
            found = self.known[ids, sweeps] = _Sweeps(
                check=self._check(sweeps, version),
                ceiling_gb_per_s=copy and self._ceiling(copy, device, kind),
                copy_gb_per_s=copy,
                peak_flop_per_s=_of_sweep(peaks, sweeps, device),
            )
        return found

    def _check(self, sweeps: frozenset[int], version: int) -> str:
        if not self.checks:
            return CHECKS[0]
        used = {self.checks.get((sweep, version), CHECKS[0]) for sweep in sweeps}
        return max(used, key=lambda check: ([*CHECKS, name := check.partition(" ")[0]].index(name), check))

    def _finals(self, ids: tuple[int, int, int], summary: Summary) -> Mapping[str, tuple[ProcessTimes, ...]]:
        if not summary.finals or ids not in self.finals:
            return {}
        return process_times.of_candidate(summary.finals, *self.finals[ids], self.processes)

    def _is_complete(self, kind: str, version: int, device: int, problem: int) -> bool:
        """A publication is as complete as it will ever be."""
        return kind == Kind.PUBLISHED or (version, device, problem) in self.completed

    def _ceiling(self, copy_gb_per_s: float, device: int, kind: str) -> float:
        """See :mod:`fp8tune.ceiling`; the kernels are all that were timed on a device of the name."""
        subject = self.shared.devices[device].name, kind
        if subject not in self.fastest:
            ids = [id for id, one in self.shared.devices.items() if one.name == subject[0]]
            newest = max(self.ceilings[None, id] for id in ids if (None, id) in self.ceilings)
            self.fastest[subject] = _fastest_gb_per_s(self.connection, ids, kind, CACHED_RATE * newest)
        return ceiling_gb_per_s(copy_gb_per_s, [self.fastest[subject]])


def _of_sweep(values: _Calibrated, sweeps: frozenset[int], device: int) -> float | None:
    """Of the one sweep that rows come from; of several, whose ids say nothing of their age, the newest."""
    newest = values.get((None, device))
    return values.get((min(sweeps), device), newest) if len(sweeps) == 1 else newest


def _fastest_gb_per_s(connection: Connection, devices: Sequence[int], kind: str, most_gb_per_s: float) -> float:
    """The highest rate of a config on these devices that is not above ``most_gb_per_s``, by the mean of its blocks."""
    # not as the type it has, which refuses the 0 it is compared with
    time_us: ColumnElement[float] = type_coerce(Trials.c.time_us, Double())
    blocks = select(Trials.c.candidate_id, func.avg(time_us, type_=Double()).label("mean_us"))
    blocks = blocks.where(Trials.c.status == str(Status.OK), time_us > 0)
    means = blocks.group_by(Trials.c.candidate_id).subquery()
    rate = type_coerce(Candidates.c.bytes_moved, Double()) / means.c.mean_us  # MB/s
    query = select(func.max(rate)).join_from(means, Candidates, Candidates.c.id == means.c.candidate_id)
    recorded = select(Problems.c.id).where(Problems.c.input_layout.startswith(RECORDED))
    wanted = (
        Candidates.c.device_id.in_(devices),
        Candidates.c.kind == kind,
        rate <= 1e3 * most_gb_per_s,
        Candidates.c.problem_id.not_in(recorded),
    )
    fastest = float(connection.scalar(query.where(*wanted)) or 0.0)
    return max(fastest, _fastest_packed(connection, devices, kind, 1e3 * most_gb_per_s)) / 1e3


def _fastest_packed(connection: Connection, devices: Sequence[int], kind: str, most_mb_per_s: float) -> float:
    """The same of packed rows, in MB/s."""
    if is_empty(connection):
        return 0.0
    of = PackedTrials.c
    recorded = select(Problems.c.id).where(Problems.c.input_layout.startswith(RECORDED))
    wanted = (of.device_id.in_(devices), of.kind == kind, of.problem_id.not_in(recorded))
    stated = select(of.id, of.fastest_mb_per_s).where(*wanted, of.fastest_mb_per_s.is_not(None))
    rates: dict[int, float] = {row.id: row.fastest_mb_per_s for row in readable(connection, stated)}
    too_fast = select(of.id).where(of.id.in_([id for id, rate in rates.items() if rate > most_mb_per_s]))
    others = of_packed(connection, too_fast, lambda pool: pool.fastest_mb_per_s(most_mb_per_s) or 0.0)
    return max([0.0, *(rate for rate in rates.values() if rate <= most_mb_per_s), *others])


def _ceilings(connection: Connection, name: str) -> dict[tuple[int | None, int], float]:
    query = select(*Calibrations.c).where(Calibrations.c.name == name)
    found: dict[tuple[int | None, int], float] = {}
    for row in readable(connection, query.order_by(Calibrations.c.created_at, Calibrations.c.value)):
        found[row.sweep_id, row.device_id] = found[None, row.device_id] = row.value
    return found


def _flops(connection: Connection) -> dict[int, int]:
    if not optional.is_there(connection, ProblemFlops):
        return {}
    query = select(ProblemFlops.c.problem_id, ProblemFlops.c.flops)
    return {row.problem_id: row.flops for row in readable(connection, query)}


def _checks(connection: Connection) -> dict[tuple[int, int], str]:
    if not optional.is_there(connection, ChecksUsed):
        return {}
    query = select(ChecksUsed.c.sweep_id, ChecksUsed.c.version_id, ChecksUsed.c.check)
    return {(row.sweep_id, row.version_id): row.check for row in readable(connection, query)}


def _last_timed(connection: Connection, few: Select[Any] | None) -> dict[Ids, float]:
    """Of some candidates, or of all that there are: many are read faster than looked up."""
    times = select(Trials.c.candidate_id, func.max(Trials.c.created_at).label("newest"))
    if few is not None:
        times = times.where(Trials.c.candidate_id.in_(few))
    is_timed = (Trials.c.time_us.is_not(None), Trials.c.created_at <= LARGEST_NUMBER)  # SQLite: no text is
    timed = times.where(*is_timed).group_by(Trials.c.candidate_id).subquery()
    query = select(*_POOL, func.max(timed.c.newest)).join(timed, timed.c.candidate_id == Candidates.c.id)
    query = query.where(Candidates.c.kind.in_(_KINDS))
    return {(row[0], row[1], row[2], row[3]): row[4] for row in connection.execute(query.group_by(*_POOL))}


def _in_pools(pools: Iterable[Ids]) -> Callable[[Table], Any]:
    """The condition that a candidate, or a packed row, belongs to one of these pools."""
    problems: dict[tuple[int, int, str], list[int]] = {}
    for problem, version, device, kind in pools:
        problems.setdefault((version, device, kind), []).append(problem)

    def among_them(of: Table) -> Any:
        same = [
            and_(of.c.version_id == version, of.c.device_id == device, of.c.kind == kind, of.c.problem_id.in_(ids))
            for (version, device, kind), ids in problems.items()
        ]
        return or_(false(), *same)

    return among_them


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Records hold no reference cycles: walking them again and again doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
