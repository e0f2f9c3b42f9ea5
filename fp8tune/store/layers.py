"""A user's own results read together with those that come with fp8tune, as two lists of records.

Own results win per kernel, size and device: what own rows completed hides the shipped rows of the same problem on the
same kind of device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    ComparableRows,
    Device,
    Evidence,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Published,
    Row,
    Subject,
)
from fp8tune.store.location import Databases, to_read
from fp8tune.store.read import History, Keep, Tally
from fp8tune.store.results import Store

Place = tuple[Problem, str, str, Kind]
"""A problem with the arch and the name of a device, and the kind of rows."""


class Layers:
    """Two open databases, read as one."""

    def __init__(self, own: Store, shipped: Store) -> None:
        self.own, self.shipped = own, shipped

    def evidence(self, *args: Any, keep: Keep | None = None, **options: Any) -> list[Evidence]:
        """Return the evidence of both; ``keep`` sees the pools of both at once."""
        own, shipped = self.own.pools(*args, **options), self.shipped_pools(*args, **options)
        if keep is not None:
            kept = set(keep([*own, *shipped]))
            own, shipped = [pool for pool in own if pool in kept], [pool for pool in shipped if pool in kept]
        read = ((self.own, own), (self.shipped, shipped))
        evidence = (store.evidence(*args, keep=_these(pools), **options) for store, pools in read if pools)
        # A row that was imported into the own database is in both.
        return list({_candidate(item): item for items in reversed(list(evidence)) for item in items}.values())

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial, the own ones first."""
        yield from self.own.rows(kernel, arch)
        visible = {_pool(pool) for pool in self.shipped_pools(kernel, arch)}
        yield from (row for row in self.shipped.rows(kernel, arch) if _pool(row) in visible)

    def tally(self, subject: Subject) -> Tally:
        """Return what became of the configs of a problem."""
        return Tally(subject, self.tried(subject, stage=None))

    def tried(self, subject: Subject, **wanted: Any) -> dict[NamedInts, Outcome]:
        """Return the last outcome of each config."""
        return {**self.shipped.tried(subject, **wanted), **self.own.tried(subject, **wanted)}

    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[Subject]:
        """Return every problem with the newest kernel version that was tried on it, the own one first."""
        stores = (self.shipped, self.own)
        subjects = (subject for store in stores for subject in store.tried_subjects(kernel, arch))
        return list({(subject.device, subject.kind, subject.problem): subject for subject in subjects}.values())

    def commit(self, subject: Subject) -> str:
        """Return the git commit that last timed a problem."""
        return self.own.commit(subject) or self.shipped.commit(subject)

    def histories(self, known: Mapping[Subject, Collection[NamedInts]]) -> dict[Subject, History]:
        """Return the outcomes and the commit of many problems, without the configs that are known of each."""
        own, shipped = self.own.histories(known), self.shipped.histories(known)
        return {
            subject: History({**shipped[subject].outcomes, **own[subject].outcomes}, self.commit(subject))
            for subject in known
        }

    def calibration(self, device: Device) -> dict[str, float]:
        """Return the values measured of a device."""
        return self.shipped.calibration(device) | self.own.calibration(device)

    def published(self) -> list[Published]:
        """Return whole operations as others printed them, each once."""
        return list(dict.fromkeys([*self.own.published(), *self.shipped.published()]))

    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Return the recorded launch of each problem."""
        return {**self.shipped.recorded_launches(kernel), **self.own.recorded_launches(kernel)}

    def arches(self) -> list[str]:
        """Return the arches that have rows, sorted."""
        return sorted({*self.own.arches(), *self.shipped.arches()})

    def kernels(self) -> list[str]:
        """Return the kernels that have rows, sorted."""
        return sorted({*self.own.kernels(), *self.shipped.kernels()})

    def counts(self) -> dict[tuple[str, Kind], int]:
        """Return the number of trials by arch and kind."""
        visible = {_pool(pool) for pool in self.shipped_pools()}
        hidden = [pool for pool in self.shipped.pools() if _pool(pool) not in visible]
        own, shipped = self.own.counts(), self.shipped.counts(hidden)
        return {place: own.get(place, 0) + shipped.get(place, 0) for place in sorted({**own, **shipped})}

    def timed_sources(self) -> dict[str, set[str]]:
        """Return the source hashes of each kernel that have rows from a GPU."""
        own, shipped = self.own.timed_sources(), self.shipped.timed_sources()
        return {kernel: own.get(kernel, set()) | shipped.get(kernel, set()) for kernel in {**own, **shipped}}

    def close(self) -> None:
        """Close both."""
        self.own.close()
        self.shipped.close()

    def shipped_pools(self, *args: Any, **options: Any) -> list[ComparableRows]:
        """Return the shipped pools that no own results stand for."""
        timed = (Kind.MEASURED, Kind.SIMULATED)
        own = {_place(pool) for pool in self.own.pools() if pool.kind in timed and pool.complete and pool.newest}
        return [pool for pool in self.shipped.pools(*args, **options) if _place(pool) not in own]


Reader = Store | Layers
"""An open database, or own and shipped results together."""


@contextlib.contextmanager
def opened(db: str | None, notice: Callable[[str], None] = lambda line: None) -> Iterator[Reader]:
    """Open what a command reads: ``db`` alone, else own and shipped results together.

    Args:
        db: A path or URL.
        notice: Takes one line that says which results are read.

    Raises:
        DatabaseError: A database cannot be used.
    """
    with opened_databases(to_read(db, notice), notice) as reader:
        yield reader


@contextlib.contextmanager
def opened_databases(databases: Databases, notice: Callable[[str], None]) -> Iterator[Reader]:
    """Open databases that were looked up. Shipped results that cannot be used are left out if there are own ones."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(Store.open(databases.own or databases.base or "", writable=False))
        if databases.own is None or databases.base is None:
            yield own
            return
        try:
            shipped = stack.enter_context(Store.open(databases.base, writable=False))
        except DatabaseError as error:
            notice(f"left out the results that come with fp8tune: {error}")
            yield own
        else:
            yield Layers(own, shipped)


def _version(of: ComparableRows | Row | Evidence) -> tuple[str, str] | None:
    return of.version and (of.version.kernel, of.version.source_hash)


def _pool(of: ComparableRows | Row) -> tuple[object, ...]:
    return of.problem, of.device, of.kind, _version(of)


def _place(pool: ComparableRows) -> Place:
    return pool.problem, pool.device.arch, pool.device.name, pool.kind


def _candidate(item: Evidence) -> tuple[object, ...]:
    return item.problem, item.device, item.kind, _version(item), item.config, item.source, item.note


def _these(pools: Collection[ComparableRows]) -> Keep:
    """Return a filter that keeps these pools."""
    wanted = {_pool(pool) for pool in pools}
    return lambda offered: [pool for pool in offered if _pool(pool) in wanted]
