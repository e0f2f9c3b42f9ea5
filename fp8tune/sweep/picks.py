"""The picks of a database as records, decided from its rows, and kept beside them for whoever reads it with SQL."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from fp8tune import adapter
from fp8tune.errors import DatabaseError
from fp8tune.records import Decided, Evidence, Finalist, NamedInts, Pick, Problem
from fp8tune.stats.rank import display_order
from fp8tune.stats.study import Study
from fp8tune.store.layers import Layers, Reader
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.tables import table

REVISION = 3
"""Of how picks are decided. Raise it when the same rows give other picks: kept ones are stale then."""


def decided_by() -> str:
    """What picks are decided by beside rows: this program's rules, and the tables that hold the incumbents."""
    held = repr([(arch, table(arch)) for arch in ARCHES])
    return f"{REVISION} {hashlib.sha256(held.encode()).hexdigest()[:16]}"


def decide(evidence: Iterable[Evidence], recorded: Mapping[Problem, NamedInts] = adapter.NO_CONFIGS) -> Decided:
    """Decide the picks of some rows, in the order of ``fp8tune show``, with their finalists, the fastest first."""
    return of(adapter.studies_of(evidence, adapter.SHIPPED, recorded))


def of(studies: Iterable[Study]) -> Decided:
    """Return the picks and finalists of decided studies."""
    studies = list(studies)
    finalists = (finalist for study in studies for finalist in adapter.finalists_of(study))
    return _sorted(map(adapter.pick_of, studies), finalists)


Names = Collection[str] | None
"""None is all."""


def read(reader: Reader, kernels: Names = None, arches: Names = None) -> Decided:
    """The picks of kernels and arches: the kept ones where they are current, else decided anew."""
    found = None
    with contextlib.suppress(DatabaseError):  # of kept picks that cannot be read: the rows may be
        found = _kept(reader)
    if found is None:
        studies = (adapter.read_studies(reader, *at) for at in places(kernels, arches))
        return of(itertools.chain.from_iterable(studies))

    def is_wanted(one: Pick | Finalist) -> bool:
        return (kernels is None or one.problem.kernel in kernels) and (arches is None or one.device.arch in arches)

    return _sorted(filter(is_wanted, found.picks), filter(is_wanted, found.finalists))


def places(kernels: Names, arches: Names) -> Iterator[tuple[str | None, str | None]]:
    """Each kernel with each arch, None for any: what readers take."""
    return itertools.product([None] if kernels is None else kernels, [None] if arches is None else arches)


def _kept(reader: Reader) -> Decided | None:
    """All picks without reading all rows; None where that cannot be."""
    if isinstance(reader, Store):
        return reader.kept_picks() if are_current(reader) else None
    if not isinstance(reader, Layers) or not are_current(reader.base):
        return None
    kept = reader.base.kept_picks()
    own = [pool.problem for pool in reader.own.pools()]
    named = set(map(_subject, own))

    def is_of_the_base(one: Pick | Finalist) -> bool:
        return _subject(one.problem) not in named

    anew = {*own, *(pick.problem for pick in kept.picks if not is_of_the_base(pick))}
    mine = of(adapter.read_studies(reader, problems=anew) if anew else ())
    return Decided(
        (*filter(is_of_the_base, kept.picks), *mine.picks), (*filter(is_of_the_base, kept.finalists), *mine.finalists)
    )


def _subject(problem: Problem) -> Hashable:
    """Own rows of it may hide the base's, published ones of another routing among them."""
    return problem.kernel, problem.shape, problem.input_layout


def _sorted(picks: Iterable[Pick], finalists: Iterable[Finalist]) -> Decided:
    def by_time(finalist: Finalist) -> tuple[object, ...]:
        place = display_order(finalist.problem, finalist.device)
        return (*place, finalist.time_us, finalist.config.canonical)

    ordered = sorted(picks, key=lambda pick: display_order(pick.problem, pick.device))
    return Decided(tuple(ordered), tuple(sorted(finalists, key=by_time)))


def refresh_picks(store: Store) -> Decided:
    """Decide the picks of all rows anew, and keep them in the database. Raises DatabaseError if it cannot be written.

    Rows that another process adds meanwhile leave them stale, and :func:`are_current` says so.
    """
    rows = store.rows_now()
    decided = of(adapter.read_studies(store))
    store.keep_picks(decided, rows, decided_by())
    return decided


def keep_current(store: Store) -> None:
    """Refresh the picks if rows came or went since they were decided."""
    if not are_current(store):
        refresh_picks(store)


def are_current(store: Store) -> bool:
    """Whether the kept picks are what would be decided now."""
    return store.has_kept_picks(decided_by())
