"""What the trials of a problem come to: how each config ended, and at which commit the problem was last timed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from fp8tune.errors import DatabaseError
from fp8tune.records import Facts, NamedInts, Outcome, Status, Subject
from fp8tune.store import optional, references
from fp8tune.store.packed import POOL, Pool, is_empty
from fp8tune.store.packing import DAMAGED
from fp8tune.store.reading import Shared, candidates_of, items, packed_of
from fp8tune.store.references import Ended, References
from fp8tune.store.schema import FACTS, Candidates, Configs, PackedTrials, Trials, Workers
from fp8tune.store.unreadable import MissingRowError, of_packed, readable

_STATUSES = {str(status): status for status in Status}
_ENDED = ("status", "reason", "time_us", "created_at", "stage", "round", "sweep_id")

_FACTS = 2 + len(_ENDED)
"""Where they begin in a row of what was not packed."""

_Moment = tuple[float, int, int]
"""When a trial was stored, its id, its worker's id."""


@dataclass(frozen=True)
class History:
    """What was tried of one problem."""

    outcomes: Mapping[NamedInts, Outcome]
    """Config -> how its trials ended; without the configs that were known."""
    commit: str
    """The git commit of the working tree that last timed it; empty outside git."""


@dataclass(frozen=True)
class Wanted:
    """Which trials count; None means any."""

    stage: str | None = None
    sweep: int | None = None
    round: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Column -> the value that it has to have."""
        given = {"stage": self.stage, "sweep_id": self.sweep, "round": self.round}
        return {name: value for name, value in given.items() if value is not None}


NO_HISTORY = History({}, "")


class _Trial(NamedTuple):
    status: str
    reason: str
    time_us: float | None
    created_at: float
    stage: str
    round: int
    sweep_id: int
    version_id: int
    facts: Sequence[Any]
    """Of its candidate."""


_ByConfig = dict[NamedInts, list[_Trial]]


def tried(connection: Connection, subject: Subject, wanted: Wanted, reference: str = "") -> dict[NamedInts, Outcome]:
    """Config -> its last status, the median time of its trials, and the reason of the last that failed.

    ``reference``: the hash of today's. What another checked, or an unknown one found wrong, is left out.
    """
    return _outcomes(_trials(connection, subject, wanted), references.references(connection), reference)


def tried_in_rounds(
    connection: Connection, subject: Subject, wanted: Wanted, reference: str = ""
) -> dict[int, dict[NamedInts, Outcome]]:
    """Round -> what :func:`tried` says of it, all rounds in one question: each costs as much as a trial."""
    by_round: dict[int, _ByConfig] = {}
    for config, trials in _trials(connection, subject, wanted).items():
        for trial in trials:
            by_round.setdefault(trial.round, {}).setdefault(config, []).append(trial)
    checked = references.references(connection)
    return {number: _outcomes(of_round, checked, reference) for number, of_round in by_round.items()}


def _trials(connection: Connection, subject: Subject, wanted: Wanted) -> _ByConfig:
    """The trials of each config, oldest first."""
    found: _ByConfig = {}
    for row in _plain(connection, subject, wanted):
        found.setdefault(row[0] or NamedInts(), []).append(_Trial._make((*row[1:_FACTS], row[_FACTS:])))
    if not is_empty(connection):  # else making the query takes a third of the time
        for trials in of_packed(connection, packed_of(subject, subject.kind), lambda pool: _of_pool(pool, wanted)):
            _add(found, trials, items(connection, Configs, trials))
    return found


def _plain(connection: Connection, subject: Subject, wanted: Wanted) -> Sequence[Any]:
    query = (
        select(Configs.c["items"], *(Trials.c[name] for name in _ENDED), Candidates.c.version_id)
        .add_columns(*(Candidates.c[name] for name in FACTS))
        .join(Candidates, Candidates.c.id == Trials.c.candidate_id)
        .join(Configs, Configs.c.id == Candidates.c.config_id)
        .where(Candidates.c.id.in_(candidates_of(subject)), Candidates.c.kind == str(subject.kind))
        .where(*(Trials.c[name] == value for name, value in wanted.values.items()))
        .order_by(Trials.c.created_at, Trials.c.id)
    )
    return readable(connection, query)


def commit(connection: Connection, subject: Subject) -> str:
    """The git commit of the working tree that last timed a problem; empty outside git."""
    query = (
        select(Trials.c.created_at, Trials.c.id, Trials.c.worker_id)
        .where(Trials.c.candidate_id.in_(candidates_of(subject)), Trials.c.time_us.is_not(None))
        .order_by(Trials.c.created_at.desc(), Trials.c.id.desc())
    )
    found = [(row[0], row[1], row[2]) for row in connection.execute(query.limit(1))]
    found += filter(None, of_packed(connection, packed_of(subject), _last))
    if not found:
        return ""
    *_, worker = max(found)
    return str(connection.scalar(select(Workers.c.commit).where(Workers.c.id == worker)) or "")


def histories(
    connection: Connection, known: Mapping[Subject, Collection[NamedInts]], wanted: Wanted
) -> dict[Subject, History]:
    """What :func:`tried` and :func:`commit` say of each of many problems, without the configs that are known of it.

    What is packed is unpacked once: of a thousand problems that takes a second, one by one twenty.
    """
    shared, checked = Shared.load(connection), references.references(connection)
    workers = {row.id: row.commit for row in readable(connection, select(Workers.c.id, Workers.c.commit))}
    of_row = _packed_rows(connection, shared, known)
    found = {}

    def read(pool: Pool) -> tuple[int, dict[int, list[_Trial]], _Moment | None]:
        configs = {id for id in pool.refers_to(Configs) if shared.configs.get(id) not in known[of_row[pool.id]]}
        return pool.id, _of_pool(pool, wanted, configs) if configs else {}, _last(pool)

    for id, trials, last in of_packed(connection, select(PackedTrials.c.id).where(PackedTrials.c.id.in_(of_row)), read):
        by_config: _ByConfig = {}
        _add(by_config, trials, shared.configs)
        found[of_row[id]] = History(_outcomes(by_config, checked), workers.get(last[2], "") if last else "")
    for subject in known.keys() - found.keys():
        ended = tried(connection, subject, wanted)
        others = {config: ended[config] for config in ended if config not in known[subject]}
        found[subject] = History(others, commit(connection, subject))
    return found


def _packed_rows(connection: Connection, shared: Shared, subjects: Iterable[Subject]) -> dict[int, Subject]:
    """The id of a packed row -> which of the problems it is."""
    if not optional.is_there(connection, PackedTrials):
        return {}
    problems = {problem: id for id, problem in shared.problems.items()}
    devices = {device: id for id, device in shared.devices.items()}
    versions = {(v.kernel, v.source_hash): id for id, v in shared.versions.items() if v is not None}
    wanted = {}
    for of in subjects:
        version = versions.get((of.version.kernel, of.version.source_hash))
        wanted[problems.get(of.problem), version, devices.get(of.device), str(of.kind)] = of
    query = select(PackedTrials.c.id, *(PackedTrials.c[name] for name in POOL))
    rows = ((row[0], tuple(row[1:])) for row in readable(connection, query))
    return {id: wanted[pool] for id, pool in rows if pool in wanted}


def _of_pool(pool: Pool, wanted: Wanted, among: Collection[int] | None = None) -> dict[int, list[_Trial]]:
    """The id of a config, of all or of some -> its trials in a packed pool, oldest first.

    Raises DatabaseError for what is damaged.
    """
    configs = {row[0]: (row[1], row[2:]) for row in pool.rows(Candidates, ("id", "config_id", *FACTS))}
    version = pool.ids[POOL.index("version_id")]
    names = ("created_at", "id", "candidate_id", *_ENDED)
    given = [(names.index(name), value) for name, value in wanted.values.items()]
    rows = [row for row in pool.rows(Trials, names) if all(row[place] == value for place, value in given)]
    found: dict[int, list[_Trial]] = {}
    for _, _, candidate, *ended in sorted(rows):
        if candidate not in configs:
            raise DatabaseError(DAMAGED)
        config, facts = configs[candidate]
        if among is None or config in among:
            found.setdefault(config, []).append(_Trial._make((*ended, version, facts)))
    return found


def _last(pool: Pool) -> _Moment | None:
    """The trial of a packed pool that was timed last."""
    rows = pool.rows(Trials, ("created_at", "id", "worker_id", "time_us"))
    return max(((row[0], row[1], row[2]) for row in rows if row[3] is not None), default=None)


def _add(found: _ByConfig, trials: Mapping[int, list[_Trial]], configs: Mapping[int, NamedInts | None]) -> None:
    for id, of_config in trials.items():
        with contextlib.suppress(MissingRowError):
            found.setdefault(configs[id] or NamedInts(), []).extend(of_config)


def _outcomes(found: _ByConfig, checked: References, reference: str = "") -> dict[NamedInts, Outcome]:
    """What becomes of each config; ``reference`` as in :func:`tried`."""
    outcomes = {}
    for config, trials in found.items():
        if reference:
            trials = [trial for trial in trials if not _is_outdated(trial, checked, reference)]
        if trials:
            outcomes[config] = _outcome(trials, checked)
    return outcomes


def _is_outdated(trial: _Trial, checked: References, reference: str) -> bool:
    by = checked.get((trial.sweep_id, trial.version_id), "")
    return references.is_outdated(_STATUSES[trial.status], by, reference)


def _outcome(trials: Sequence[_Trial], checked: References) -> Outcome:
    ended = {trial.status for trial in trials}
    if len(ended) == 1:  # of nearly all configs: which trials count makes no difference then
        status, mine = _STATUSES[ended.pop()], trials
    else:
        status = references.last_status([_ended(trial, checked) for trial in trials])
        mine = [trial for trial in trials if trial.status == status]
    times_us = [trial.time_us for trial in mine if trial.time_us is not None]
    time_us = median(times_us) if times_us and status is Status.OK else None
    return Outcome(status, time_us, mine[-1].reason, facts=Facts(*trials[-1].facts))


def _ended(trial: _Trial, checked: References) -> Ended:
    by = checked.get((trial.sweep_id, trial.version_id), "")
    return Ended(_STATUSES[trial.status], trial.created_at, trial.stage, trial.round, trial.sweep_id, by)
