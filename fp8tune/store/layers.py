"""A user's own results read together with those that come with fp8tune, as two lists of records.

Own results win per kernel, size and device: a problem whose own sweep was completed hides its shipped results.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Published, Row, Subject
from fp8tune.stats.study import Study
from fp8tune.store.location import Databases, to_read
from fp8tune.store.read import Tally, identity
from fp8tune.store.results import Store

if TYPE_CHECKING:
    from pandas import DataFrame


class Layers:
    """Two open databases, read as one."""

    def __init__(self, own: Store, shipped: Store) -> None:
        self.own, self.shipped = own, shipped

    def pools(self, *args: Any, **options: Any) -> list[Study]:
        """Return the studies of both without their results."""
        return list(_merged(*self._visible(*args, **options)).values())

    def studies(self, *args: Any, **options: Any) -> list[Study]:
        """Return the studies of both with their results."""
        own, shipped = ({identity(study) for study in studies} for studies in self._visible(*args, **options))
        own_studies = [study for study in self.own.studies(*args, **options) if identity(study) in own]
        studies = (study for study in self.shipped.studies(*args, **options) if identity(study) in shipped)
        return list(_merged(own_studies, studies).values())

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial, the own ones first."""
        own, shipped = ({identity(study) for study in studies} for studies in self._visible(kernel, arch))
        configs = set()
        for row in self.own.rows(kernel, arch):
            if identity(row) in own:
                configs.add((identity(row), row.config, row.source, row.note))
                yield row
        for row in self.shipped.rows(kernel, arch):
            if identity(row) in shipped and (identity(row), row.config, row.source, row.note) not in configs:
                yield row

    def trials_frame(self, keep: Callable[[Study], bool] = lambda study: True) -> DataFrame:
        """Return the trials of both; those that were imported from the other are there once."""
        import pandas

        own, shipped = ({identity(study) for study in studies} for studies in self._visible())
        frames = [
            self.own.trials_frame(lambda study: keep(study) and identity(study) in own),
            self.shipped.trials_frame(lambda study: keep(study) and identity(study) in shipped),
        ]
        return pandas.concat(frames, ignore_index=True).drop_duplicates(ignore_index=True)

    def tally(self, subject: Subject) -> Tally:
        """Return the outcomes of the configs of a problem."""
        return Tally(subject, self.tried(subject, stage=None))

    def tried(self, subject: Subject, **options: Any) -> dict[NamedInts, Outcome]:
        """Return the last outcome of each config."""
        outcomes: dict[NamedInts, Outcome] = {}
        own, shipped = self._visible(problems=[subject.problem])
        for store, studies in ((self.shipped, shipped), (self.own, own)):
            if identity(subject) in map(identity, studies):
                outcomes |= store.tried(subject, **options)
        return outcomes

    def commit(self, subject: Subject) -> str:
        """Return the git commit that last timed a problem."""
        return self.own.commit(subject) or self.shipped.commit(subject)

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
        own, shipped = ({identity(study) for study in studies} for studies in self._visible())
        counts.update(self.own.counts(lambda study: identity(study) in own))
        counts.update(self.shipped.counts(lambda study: identity(study) in shipped))
        return dict(sorted(counts.items()))

    def close(self) -> None:
        """Close both."""
        self.own.close()
        self.shipped.close()

    def _visible(self, *args: Any, keep: object = None, **options: Any) -> tuple[list[Study], list[Study]]:
        """Return the studies that are read of each: of a problem on a kind of device, those of one database."""
        own, shipped = self.own.pools(*args, **options), self.shipped.pools(*args, **options)
        mine, theirs = ({_place(study) for study in studies if _is_settled(study)} for studies in (own, shipped))
        return (
            [study for study in own if _place(study) in mine or _place(study) not in theirs],
            [study for study in shipped if _place(study) not in mine],
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


def _merged(own: Any, shipped: Any) -> dict[tuple[object, ...], Study]:
    """Return the studies of both by identity; of a study in both, the own results come before the shipped ones."""
    studies = {identity(study): study for study in own}
    for study in shipped:
        first = studies.get(identity(study))
        if first is not None:
            own_configs = {(r.config, r.source, r.note) for r in first.results} | {(c, "", "") for c in first.failures}
            results = [r for r in study.results if (r.config, r.source, r.note) not in own_configs]
            timed = {result.config for result in first.results}
            failures = {c: s for c, s in study.failures.items() if c not in timed} | dict(first.failures)
            study = replace(first, results=(*first.results, *results), failures=failures)
        studies[identity(study)] = study
    return studies


def _is_settled(study: Study) -> bool:
    return study.kind in (Kind.MEASURED, Kind.SIMULATED) and study.complete and study.newest > 0


def _place(study: Study) -> tuple[object, ...]:
    return study.problem, study.device.arch, study.device.name, study.kind
