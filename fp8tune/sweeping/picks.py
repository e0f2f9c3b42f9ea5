"""The picks of a database, decided from its rows, and kept beside them so that reading them is fast."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from fp8tune.errors import DatabaseError
from fp8tune.lookups import Declared, look_up
from fp8tune.records import Finalist, Pick, Subject, is_recorded
from fp8tune.stats.rank import TIMED_KINDS, display_order, joined
from fp8tune.stats.study import Origin, Study
from fp8tune.store.layers import Layers, Reader
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store
from fp8tune.studies import finalists_of, pick_of, read_studies, with_words, without_rival
from fp8tune.studies import is_stale as is_stale
from fp8tune.studies import known_programs as known_programs
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.runtime import user_tables
from fp8tune_kernels.tables import table, versions

REVISION = 5  # of how picks are decided. Raise it when the same rows give other picks: kept ones are stale then.

Names = Collection[str] | None  # none is all


def decided_by() -> str:
    """Name what picks are decided by beside rows: this program's rules, and the tables that hold today's configs."""
    tables = repr([(arch, table(arch, triton)) for arch in ARCHES for triton in ("", *versions(arch))])
    return f"{REVISION} {hashlib.sha256(tables.encode()).hexdigest()[:16]}"


def decided(studies: Iterable[Study]) -> list[Pick]:
    """Return the picks of decided studies in the order of ``fp8tune show``."""
    return _sorted(map(pick_of, studies))


def read(reader: Reader, kernels: Names = None, arches: Names = None) -> list[Pick]:
    """Return the picks of kernels and arches: the kept ones if they are current, else decided anew."""
    if isinstance(reader, Layers):
        return _sorted(joined(read(reader.own, kernels, arches), read(reader.shipped, kernels, arches)))
    picks = [
        pick
        for pick in _kept(reader)
        if (kernels is None or pick.problem.kernel in kernels) and (arches is None or pick.device.arch in arches)
    ]
    picks = _with_own_tables(reader, picks) if picks else list(map(pick_of, _studies(reader, kernels, arches)))
    return _sorted(_with_words(reader, picks))


def finalists(reader: Reader, kernels: Names = None, arches: Names = None) -> list[Finalist]:
    """Return the configs that reached the finals, the fastest of each problem first."""

    def order(finalist: Finalist) -> tuple[object, ...]:
        return (*display_order(finalist.problem, finalist.device), finalist.time_us, finalist.config.canonical)

    return sorted(itertools.chain(*map(finalists_of, _studies(reader, kernels, arches))), key=order)


def keep_current(store: Store) -> None:
    """Decide the picks of a database anew if rows came or went since they were decided."""
    if not store.has_kept_picks(decided_by()):
        store.keep_picks(map(pick_of, read_studies(store)), decided_by())


def wrong(reader: Reader, kernels: Names = None, arches: Names = None) -> list[Subject]:
    """Return the problem sizes that have neither a pick nor a right config, though configs were tried."""
    pools = [pool for place in _places(kernels, arches) for pool in reader.pools(*place)]

    def size_of(pool: Study) -> tuple[object, ...]:
        return pool.problem, pool.device.arch, pool.device.name

    timed = {size_of(pool) for pool in pools if pool.newest}
    tried = [pool for pool in pools if pool.complete and pool.kind in TIMED_KINDS and size_of(pool) not in timed]
    return [subject for subject in subjects_of(tried) if not reader.tally(subject).has_right]


def _kept(store: Store) -> list[Pick]:
    """Return all picks without reading all rows; none if they are not current."""
    with contextlib.suppress(DatabaseError):  # of kept picks that are damaged: the rows may not be
        if store.has_kept_picks(decided_by()):
            return list(map(without_rival, store.kept_picks()))  # which may be older than the verdict
    return []


def _places(kernels: Names, arches: Names) -> Iterator[tuple[str | None, str | None]]:
    return itertools.product([None] if kernels is None else kernels, [None] if arches is None else arches)


def _studies(reader: Reader, kernels: Names, arches: Names) -> Iterator[Study]:
    return itertools.chain.from_iterable(read_studies(reader, *place) for place in _places(kernels, arches))


def _with_own_tables(store: Store, picks: list[Pick]) -> list[Pick]:
    """Decide picks again for which the user's own table holds another config than when they were kept."""
    outdated = [pick for pick in picks if _is_outdated(pick)]
    places = {(pick.problem.kernel, pick.device.arch) for pick in outdated}
    problems = {pick.problem for pick in outdated}
    studies = (study for place in places for study in read_studies(store, *place, problems=problems))
    again = {(pick.problem, pick.device): pick for pick in map(pick_of, studies)}
    return [again.get((pick.problem, pick.device), pick) for pick in picks]


def _is_outdated(pick: Pick) -> bool:
    device, is_own = pick.device, pick.today_origin == Origin.OWN_TABLE
    if pick.version is None or pick.lookup_key is None or not (is_own or user_tables.user_table(device.arch).rows):
        return False
    result = look_up(Declared.from_version(pick.version), device, pick.lookup_key)
    return (result.is_own or is_own) and (result.config, result.is_own) != (pick.today, is_own)


def _with_words(store: Store, picks: list[Pick]) -> list[Pick]:
    """Return picks whose recorded arguments print as in the program: ``MODE=silu``."""
    kernels = {pick.problem.kernel for pick in picks if is_recorded(pick.problem)}
    documents = {problem: text for kernel in kernels for problem, text in store.recorded_launches(kernel).items()}
    return [
        replace(pick, problem=with_words(pick.problem, documents[pick.problem])) if pick.problem in documents else pick
        for pick in picks
    ]


def _sorted(picks: Iterable[Pick]) -> list[Pick]:
    return sorted(picks, key=lambda pick: display_order(pick.problem, pick.device))
