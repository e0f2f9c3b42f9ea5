"""The picks of a database as records, decided from its rows, and kept beside them for whoever reads it with SQL."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator

from fp8tune.choose import incumbents, ranking
from fp8tune.choose.candidates import Candidates
from fp8tune.errors import DatabaseError
from fp8tune.records import Decided, Evidence, Finalist, Pick, Problem
from fp8tune.stats.study import process_us
from fp8tune.store.layers import Layers, Reader
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.tables import table

REVISION = 2
"""Of how picks are decided. Raise it when the same rows give other picks: kept ones are stale then."""


def decided_by() -> str:
    """What picks are decided by beside rows: this program's rules, and the tables that hold the incumbents."""
    held = repr([(arch, table(arch)) for arch in ARCHES])
    return f"{REVISION} {hashlib.sha256(held.encode()).hexdigest()[:16]}"


def decide(evidence: Iterable[Evidence]) -> Decided:
    """The picks of these rows in the order of ``fp8tune show``, with their finalists, the fastest first."""
    return of(ranking.all_candidates(evidence, incumbents.COMMITTED))


def of(found: Iterable[Candidates]) -> Decided:
    """The same of what competes for problems."""
    found = list(found)
    return _sorted(map(_pick, found), (one for each in found for one in _finalists(each)))


Names = Collection[str] | None
"""None is all."""


def read(reader: Reader, kernels: Names = None, arches: Names = None) -> Decided:
    """The picks of kernels and arches: the kept ones where they are current, else decided anew."""
    found = None
    with contextlib.suppress(DatabaseError):  # of kept picks that cannot be read: the rows may be
        found = _kept(reader)
    if found is None:
        evidence = (reader.evidence(*at, keep=ranking.competing, finalists_only=True) for at in places(kernels, arches))
        return decide(itertools.chain.from_iterable(evidence))

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
    mine = decide(reader.evidence(keep=ranking.competing, problems=anew, finalists_only=True) if anew else ())
    return Decided(
        (*filter(is_of_the_base, kept.picks), *mine.picks), (*filter(is_of_the_base, kept.finalists), *mine.finalists)
    )


def _subject(problem: Problem) -> Hashable:
    """Own rows of it may hide the base's, published ones of another routing among them."""
    return problem.kernel, problem.shape, problem.input_layout


def _sorted(picks: Iterable[Pick], finalists: Iterable[Finalist]) -> Decided:
    def by_time(one: Finalist) -> tuple[object, ...]:
        return (*ranking.order(one), one.time_us, one.config.canonical)

    return Decided(tuple(sorted(picks, key=ranking.order)), tuple(sorted(finalists, key=by_time)))


def refresh_picks(store: Store) -> Decided:
    """Decide the picks of all rows anew, and keep them in the database. Raises DatabaseError if it cannot be written.

    Rows that another process adds meanwhile leave them stale, and :func:`are_current` says so.
    """
    rows = store.rows_now()
    decided = decide(store.evidence(keep=ranking.competing, finalists_only=True))
    store.keep_picks(decided, rows, decided_by())
    return decided


def keep_current(store: Store) -> None:
    """Refresh the picks if rows came or went since they were decided."""
    if not are_current(store):
        refresh_picks(store)


def are_current(store: Store) -> bool:
    """Whether the kept picks are what would be decided now."""
    return store.has_kept_picks(decided_by())


def _pick(of: Candidates) -> Pick:
    winner, decision = of.winner, of.winner.decision
    stored = winner.evidence
    return Pick(
        problem=stored.problem,
        config=stored.config,
        device=stored.device,
        kind=stored.kind,
        version=stored.version,
        lookup_key=stored.lookup_key,
        bytes_moved=stored.bytes_moved,
        source=stored.source,
        note=stored.note,
        runner_up=winner.runner_up,
        stage=stored.stage,
        verdict=None if winner.verdict is None else str(winner.verdict),
        time_us=winner.time_us,
        processes=winner.n,
        ceiling_share=winner.ceiling_share,
        bound=None if winner.bound is None else str(winner.bound),
        runner_up_us=winner.runner_up_us,
        runner_up_ratio=decision.ratio,
        slowdown_lower_share=_bound(decision.lower),
        slowdown_upper_share=_bound(decision.upper),
        noise_floor_share=winner.noise_floor,
        is_default=stored.config is not None and stored.config == of.default,
        is_incumbent=stored.config is not None and stored.config == of.incumbent,
        is_complete=stored.complete,
        checked_by=stored.check,
        newest=stored.newest,
    )


def _finalists(of: Candidates) -> Iterable[Finalist]:
    for entry in of.named:
        if entry.finals and entry.config is not None:
            times_us = list(map(process_us, entry.finals))
            yield Finalist(
                problem=entry.problem,
                config=entry.config,
                device=entry.device,
                kind=entry.kind,
                version=entry.version,
                source=entry.source,
                note=entry.note,
                time_us=of.times_us[entry.config],
                slowdown_ratio=of.slowdowns[entry.config],
                processes=len(times_us),
                blocks=sum(len(times.blocks) for times in entry.finals),
                fastest_process_us=min(times_us),
                slowest_process_us=max(times_us),
                screen_us=entry.screen_us,
                is_pick=entry.config == of.pick.config,
                is_default=entry.config == of.default,
                is_incumbent=entry.config == of.incumbent,
                newest=entry.newest,
            )


def _bound(value: float) -> float | None:
    return value if math.isfinite(value) else None
