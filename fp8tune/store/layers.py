"""One's own rows read over those that come with fp8tune, as if both were one database.

Rows that may be compared (:class:`fp8tune.records.ComparableRows`: one problem, kernel version, device and kind) are
read from one database alone. So a trial that both hold, after an import, counts once. It is the own one, unless only
the base has them finished. Everything else is read from both. What was not timed here, only compiled, checked or
published, is read config by config: the own row of a config stands for the base's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, Protocol

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    ComparableRows,
    Device,
    Evidence,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Published,
    Row,
    Subject,
)
from fp8tune.store.gathering import Keep
from fp8tune.store.location import Databases, to_read
from fp8tune.store.outcomes import History
from fp8tune.store.results import Store, Tally

_TIMED = (Kind.MEASURED, Kind.SIMULATED)


class Reader(Protocol):
    """What commands read rows through: a :class:`Store`, or :class:`Layers`. Each method is one of the store's."""

    def evidence(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        keep: Keep | None = None,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
    ) -> list[Evidence]:
        """One record a candidate."""

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Every trial."""

    def tally(self, subject: Subject) -> Tally:
        """What became of the configs of a problem."""

    def tried(
        self,
        subject: Subject,
        *,
        sweep: int | None = None,
        round: int | None = None,
        stage: str | None = "screen",
        reference: str = "",
    ) -> dict[NamedInts, Outcome]:
        """Config -> how its trials ended."""

    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[Subject]:
        """Every problem that was tried."""

    def commit(self, subject: Subject) -> str:
        """The commit that last timed a problem."""

    def histories(self, known: Mapping[Subject, Collection[NamedInts]]) -> dict[Subject, History]:
        """Both of many problems, without the configs that are known of each."""

    def calibration(self, device: Device) -> dict[str, float]:
        """What was measured of a device itself."""

    def published(self) -> list[Published]:
        """What others printed of whole operations."""

    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """The recorded launches that problems stand for."""

    def arches(self) -> list[str]:
        """Arches that have rows."""

    def kernels(self) -> list[str]:
        """Kernels that have rows."""

    def counts(self) -> dict[tuple[str, Kind], int]:
        """(arch, kind) -> trials."""

    def timed_sources(self) -> dict[str, set[str]]:
        """Kernel -> the source hashes that were timed."""


class Layers:
    """Two open databases as a :class:`Reader`."""

    def __init__(self, own: Store, base: Store) -> None:
        self.own, self.base = own, base
        self._changes: Hashable = None
        self._decided: tuple[set[_Pool], set[_Pool]] = set(), set()

    def evidence(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        keep: Keep | None = None,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
    ) -> list[Evidence]:
        """One record a candidate; ``keep`` sees the pools of both databases at once."""
        stores = self.own, self.base
        found = [store.pools(kernel, arch, kinds, problems=problems, device=device) for store in stores]
        hidden = _hidden(*found)
        read = [[pool for pool in pools if _pool(pool) not in out] for pools, out in zip(found, hidden, strict=True)]
        if keep is not None:
            chosen = set(keep([pool for pools in read for pool in pools]))
            read = [[pool for pool in pools if pool in chosen] for pools in read]
        given: dict[str, Any] = {"problems": problems, "device": device}
        own, base = (
            store.evidence(kernel, arch, kinds, keep=_these(pools), **given) if pools else []
            for store, pools in zip(stores, read, strict=True)
        )
        held = {_candidate(item) for item in own}
        return own + [item for item in base if item.kind in _TIMED or _candidate(item) not in held]

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Every trial, the own ones first."""
        hidden = self._hidden()
        held = set()
        for row in self.own.rows(kernel, arch):
            if row.kind not in _TIMED:
                held.add(_candidate(row))
            if _pool(row) not in hidden[0]:
                yield row
        for row in self.base.rows(kernel, arch):
            if _pool(row) not in hidden[1] and (row.kind in _TIMED or _candidate(row) not in held):
                yield row

    def tally(self, subject: Subject) -> Tally:
        """What became of the configs of a problem that was tried."""
        return Tally(subject, self.tried(subject, stage=None))

    def tried(self, subject: Subject, **wanted: Any) -> dict[NamedInts, Outcome]:
        """Config -> how its trials ended, of the database that is read for the problem."""
        found: dict[NamedInts, Outcome] = {}
        for store in reversed(self._of(subject)):
            found |= store.tried(subject, **wanted)
        return found

    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[Subject]:
        """Every problem with the kernel version that was tried on it: the own newest one, else the base's."""

        def named(store: Store) -> dict[Hashable, Subject]:
            found = store.tried_subjects(kernel, arch)
            return {(subject.device, subject.kind, subject.problem): subject for subject in found}

        return list((named(self.base) | named(self.own)).values())

    def commit(self, subject: Subject) -> str:
        """The git commit that last timed a problem."""
        return next(filter(None, (store.commit(subject) for store in self._of(subject))), "")

    def histories(self, known: Mapping[Subject, Collection[NamedInts]]) -> dict[Subject, History]:
        """What :meth:`tried` and :meth:`commit` say of many problems, without the configs that are known of each."""
        own, base = (
            store.histories({subject: configs for subject, configs in known.items() if _pool(subject) not in out})
            for store, out in zip((self.own, self.base), self._hidden(), strict=True)
        )
        found = {**base, **own}
        for subject in own.keys() & base.keys():
            outcomes = {**base[subject].outcomes, **own[subject].outcomes}
            found[subject] = History(outcomes, own[subject].commit or base[subject].commit)
        return found

    def calibration(self, device: Device) -> dict[str, float]:
        """The own values of a device over the base's."""
        return self.base.calibration(device) | self.own.calibration(device)

    def published(self) -> list[Published]:
        """What others printed of whole operations, each line once."""
        return list(dict.fromkeys([*self.own.published(), *self.base.published()]))

    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Problem -> its recorded launch; the own recording stands for the base's."""
        own = self.own.recorded_launches(kernel)
        return {**own, **{of: text for of, text in self.base.recorded_launches(kernel).items() if of not in own}}

    def arches(self) -> list[str]:
        """Arches that have rows, sorted."""
        return sorted({*self.own.arches(), *self.base.arches()})

    def kernels(self) -> list[str]:
        """Kernels that have rows, sorted."""
        return sorted({*self.own.kernels(), *self.base.kernels()})

    def counts(self) -> dict[tuple[str, Kind], int]:
        """(arch, kind) -> trials; of what may be compared, those of one database alone."""
        own, base = self.own.pools(), self.base.pools()
        of_own, _ = _hidden(own, base)
        counted = {_pool(pool) for pool in own} - of_own
        total = self.own.counts([pool for pool in own if _pool(pool) in of_own])
        for place, number in self.base.counts([pool for pool in base if _pool(pool) in counted]).items():
            total[place] = total.get(place, 0) + number
        return dict(sorted(total.items()))

    def timed_sources(self) -> dict[str, set[str]]:
        """Kernel -> the source hashes of its code that have rows from a GPU."""
        own, base = self.own.timed_sources(), self.base.timed_sources()
        return {kernel: own.get(kernel, set()) | base.get(kernel, set()) for kernel in {**own, **base}}

    def close(self) -> None:
        """Close both."""
        try:
            self.own.close()
        finally:
            self.base.close()

    def _of(self, subject: Subject) -> list[Store]:
        """The databases to read for a subject, the one that counts first."""
        pool = _pool(subject)
        return [store for store, out in zip((self.own, self.base), self._hidden(), strict=True) if pool not in out]

    def _hidden(self) -> tuple[set[_Pool], set[_Pool]]:
        """What of each database is not read; looked at again where one of them has changed."""
        changes = self.own.changes, self.base.changes
        if changes != self._changes:
            self._decided, self._changes = _hidden(self.own.pools(), self.base.pools()), changes
        return self._decided


@contextlib.contextmanager
def opened(db: str | None, notice: Callable[[str], None] = lambda line: None) -> Iterator[Reader]:
    """The rows that a command reads: of ``db`` alone, else the own ones over the base's.

    ``notice`` takes a line on which they are. Raises DatabaseError for what cannot be opened.
    """
    with opened_databases(to_read(db, notice), notice) as reader:
        yield reader


@contextlib.contextmanager
def opened_databases(found: Databases, notice: Callable[[str], None]) -> Iterator[Reader]:
    """The same of databases that were looked up. A base that cannot be used is left out where there are own rows."""
    with contextlib.ExitStack() as stack:
        if found.own is None or found.base is None:
            yield stack.enter_context(Store.open(found.own or found.base or "", writable=False))
            return
        own = stack.enter_context(Store.open(found.own, writable=False))
        try:
            base = stack.enter_context(Store.open(found.base, writable=False))
        except DatabaseError as error:
            notice(f"left out the rows that come with fp8tune: {error}")
            yield own
            return
        yield Layers(own, base)


_Pool = tuple[Problem, Device, Kind, Hashable]


def _pool(rows: ComparableRows | Row | Subject) -> _Pool:
    return rows.problem, rows.device, rows.kind, _version(rows.version)


def _version(version: KernelVersion | None) -> Hashable:
    return version and (version.kernel, version.source_hash)


def _candidate(item: Evidence | Row) -> Hashable:
    return (item.problem, item.device, item.kind, _version(item.version), item.config, item.source, item.note)


def _hidden(own: Collection[ComparableRows], base: Collection[ComparableRows]) -> tuple[set[_Pool], set[_Pool]]:
    """Of pools that were timed and that both have, which is not read of the own and which not of the base."""
    theirs = {_pool(pool): pool for pool in base if pool.kind in _TIMED}
    hidden: tuple[set[_Pool], set[_Pool]] = set(), set()
    for pool in own:
        if (other := theirs.get(_pool(pool))) is not None:
            is_further = (other.complete, other.has_finals) > (pool.complete, pool.has_finals)
            hidden[0 if is_further else 1].add(_pool(pool))
    return hidden


def _these(pools: Collection[ComparableRows]) -> Keep:
    """What keeps these pools and no other."""
    wanted = {_pool(pool) for pool in pools}
    return lambda found: [pool for pool in found if _pool(pool) in wanted]
