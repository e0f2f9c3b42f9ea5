"""A user's own results read together with those that come with fp8tune, as two lists of records.

Own results win per kernel, size and device: what own rows completed hides the shipped rows of the same problem on the
same kind of device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
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
        own, shipped = self._visible(*args, **options)
        if keep is not None:
            kept = set(keep([*own, *shipped]))
            own, shipped = [pool for pool in own if pool in kept], [pool for pool in shipped if pool in kept]
        read = ((self.own, own), (self.shipped, shipped))
        found = [store.evidence(*args, keep=_these(pools), **options) if pools else [] for store, pools in read]
        there = {_candidate(item) for item in found[0]}
        return found[0] + [item for item in found[1] if _candidate(item) not in there]

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial, the own ones first."""
        own, shipped = ({_pool(pool) for pool in pools} for pools in self._visible(kernel, arch))
        there = set()
        for row in self.own.rows(kernel, arch):
            if _pool(row) in own:
                there.add(_candidate(row))
                yield row
        for row in self.shipped.rows(kernel, arch):
            if _pool(row) in shipped and _candidate(row) not in there:
                yield row

    def tally(self, subject: Subject) -> Tally:
        """Return what became of the configs of a problem."""
        return Tally(subject, self.tried(subject, stage=None))

    def tried(self, subject: Subject, **wanted: Any) -> dict[NamedInts, Outcome]:
        """Return the last outcome of each config."""
        visible = self._visible(problems=[subject.problem])
        outcomes: dict[NamedInts, Outcome] = {}
        for store, pools in ((self.shipped, visible[1]), (self.own, visible[0])):
            if _pool(subject) in map(_pool, pools):
                outcomes |= store.tried(subject, **wanted)
        return outcomes

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
        return {
            subject: History({c: o for c, o in self.tried(subject).items() if c not in configs}, self.commit(subject))
            for subject, configs in known.items()
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
        counts = Counter[tuple[str, Kind]]()
        for store, pools in zip((self.own, self.shipped), self._visible(), strict=True):
            visible = {_pool(pool) for pool in pools}
            counts.update(store.counts([pool for pool in store.pools() if _pool(pool) not in visible]))
        return dict(sorted(counts.items()))

    def timed_sources(self) -> dict[str, set[str]]:
        """Return the source hashes of each kernel that have rows from a GPU."""
        own, shipped = self.own.timed_sources(), self.shipped.timed_sources()
        return {kernel: own.get(kernel, set()) | shipped.get(kernel, set()) for kernel in {**own, **shipped}}

    def close(self) -> None:
        """Close both."""
        self.own.close()
        self.shipped.close()

    def _visible(self, *args: Any, **options: Any) -> tuple[list[ComparableRows], list[ComparableRows]]:
        """Return the pools of both that are read: of a problem on a kind of device, those of one database."""
        own, shipped = self.own.pools(*args, **options), self.shipped.pools(*args, **options)
        mine, theirs = ({_place(pool) for pool in pools if _is_settled(pool)} for pools in (own, shipped))
        return (
            [pool for pool in own if _place(pool) in mine or _place(pool) not in theirs],
            [pool for pool in shipped if _place(pool) not in mine],
        )


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


def _is_settled(pool: ComparableRows) -> bool:
    return pool.kind in (Kind.MEASURED, Kind.SIMULATED) and pool.complete and pool.newest > 0


def _version(of: ComparableRows | Row | Evidence | Subject) -> tuple[str, str] | None:
    return None if of.version is None else (of.version.kernel, of.version.source_hash)


def _pool(of: ComparableRows | Row | Subject) -> tuple[object, ...]:
    return of.problem, of.device, of.kind, _version(of)


def _place(pool: ComparableRows) -> Place:
    return pool.problem, pool.device.arch, pool.device.name, pool.kind


def _candidate(item: Evidence | Row) -> tuple[object, ...]:
    return item.problem, item.device, item.kind, _version(item), item.config, item.source, item.note


def _these(pools: Collection[ComparableRows]) -> Keep:
    """Return a filter that keeps these pools."""
    wanted = {_pool(pool) for pool in pools}
    return lambda offered: [pool for pool in offered if _pool(pool) in wanted]
