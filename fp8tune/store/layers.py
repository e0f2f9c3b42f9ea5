"""A user's own results read together with those that come with fp8tune, as two lists of records.

Own results win per problem size, device name and kind: a size whose own sweep was completed hides its shipped results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fp8tune.errors import DatabaseError
from fp8tune.records import Compiler, Device, Kind, NamedInts, Outcome, Problem, Program, Row, Subject
from fp8tune.stats.study import Study
from fp8tune.store.location import Databases
from fp8tune.store.read import Tally
from fp8tune.store.results import Store

if TYPE_CHECKING:
    from pandas import DataFrame

IsOwn = Callable[[Study | Row | Subject], bool]


class Layers:
    """Two open databases, read as one. Its methods are those of :class:`Store`."""

    def __init__(self, own: Store, shipped: Store) -> None:
        self.own, self.shipped = own, shipped
        self._places: tuple[object, dict[tuple[object, ...], bool]] | None = None
        """State of the own database, and the places of both with True for those that are read from it."""

    def pools(self, *places: Any, **conditions: Any) -> list[Study]:
        """Return the studies of both without their results."""
        return self._joined(lambda store: store.pools(*places, **conditions))

    def studies(self, *places: Any, **conditions: Any) -> list[Study]:
        """Return the studies of both with their results."""
        return self._joined(lambda store: store.studies(*places, **conditions))

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial, the own ones first."""
        is_own = self._is_own()  # no list is made: there may be millions
        yield from (row for row in self.own.rows(kernel, arch) if is_own(row))
        yield from (row for row in self.shipped.rows(kernel, arch) if not is_own(row))

    def trials_frame(self, keep: Callable[[Study], bool] = lambda study: True) -> DataFrame:
        """Return the trials of both."""
        import pandas

        is_own = self._is_own()
        own = self.own.trials_frame(lambda study: is_own(study) and keep(study))
        shipped = self.shipped.trials_frame(lambda study: not is_own(study) and keep(study))
        return pandas.concat([own, shipped], ignore_index=True)

    def tally(self, subject: Subject) -> Tally:
        """Return the outcomes of a problem's configs."""
        return self._store(subject).tally(subject)

    def tried(self, subject: Subject, **options: Any) -> dict[NamedInts, Outcome]:
        """Return the last outcome of each config."""
        return self._store(subject).tried(subject, **options)

    def output_bits(self, subject: Subject, axis: str) -> dict[NamedInts, dict[int, str]]:
        """Return the hashes of outputs on a problem by config and size."""
        return self._store(subject).output_bits(subject, axis)

    def commit(self, subject: Subject) -> str:
        """Return the git commit that last timed a problem."""
        return self._store(subject).commit(subject)

    def calibration(self, device: Device) -> dict[str, float]:
        """Return the values measured of a device."""
        return self.shipped.calibration(device) | self.own.calibration(device)

    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Return the recorded launch of each problem."""
        return {**self.shipped.recorded_launches(kernel), **self.own.recorded_launches(kernel)}

    def programs(self, kernel: str | None = None, arch: str | None = None) -> dict[Program, dict[Compiler, str]]:
        """Return the machine code of both: what was compiled here holds for shipped results, too."""
        programs = self.shipped.programs(kernel, arch)
        for program, hashes in self.own.programs(kernel, arch).items():
            programs[program] = programs.get(program, {}) | hashes
        return programs

    def arches(self) -> list[str]:
        """Return the arches that have rows, sorted."""
        return sorted({*self.own.arches(), *self.shipped.arches()})

    def kernels(self) -> list[str]:
        """Return the kernels that have rows, sorted."""
        return sorted({*self.own.kernels(), *self.shipped.kernels()})

    def _joined(self, read: Callable[[Store], Any]) -> list[Any]:
        is_own = self._is_own()
        own = [record for record in read(self.own) if is_own(record)]
        return own + [record for record in read(self.shipped) if not is_own(record)]

    def _is_own(self) -> IsOwn:
        """Return a function that tells which records are read from the own database; all others are shipped."""
        if self._places is None or self._places[0] != self.own.changes:
            state, timed = self.own.changes, (Kind.MEASURED, Kind.SIMULATED)
            places = dict.fromkeys(map(place, self.shipped.pools()), False)
            places |= {place(study): True for study in self.own.pools() if study.complete or study.kind not in timed}
            self._places = state, places
        known = self._places[1]
        return lambda record: known.get(place(record), True)

    def _store(self, subject: Subject) -> Store:
        return self.own if self._is_own()(subject) else self.shipped


Reader = Store | Layers
"""An open database, or own and shipped results together."""


@contextlib.contextmanager
def opened_databases(databases: Databases, notice: Callable[[str], None]) -> Iterator[Reader]:
    """Open databases that were looked up. Shipped results that cannot be used are left out if there are own ones.

    Raises:
        DatabaseError: A database cannot be used.
    """
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(Store.open(databases.own or databases.base or "", writable=False))
        reader: Reader = own
        if databases.own is not None and databases.base is not None:
            try:
                reader = Layers(own, stack.enter_context(Store.open(databases.base, writable=False)))
            except DatabaseError as error:
                notice(f"left out the results that come with fp8tune: {error}")
        yield reader


def place(record: Study | Row | Subject) -> tuple[object, ...]:
    """Return what an own result must share with a shipped one to win over it."""
    return record.problem, record.device.arch, record.device.name, record.kind
