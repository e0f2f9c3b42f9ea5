"""Where GPUs of one name picked different configs for one problem, each with evidence against the other's. Pure.

A pick is against another where its own finals prove the other to be slower by more than the tie band, or where the
other did not reach them. Once the newest finals have had every pick among their finalists they have decided, and those
rows are the ones that rank (:mod:`fp8tune.choose.ranking`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fp8tune.choose.candidates import Candidates
from fp8tune.choose.decision import pairs_of, plan_of
from fp8tune.choose.incumbents import NO_INCUMBENTS, Incumbents
from fp8tune.choose.ranking import all_candidates, grouped
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Problem, ProcessTimes


@dataclass(frozen=True)
class Disagreement:
    """Two or more picks for one problem on GPUs of one name."""

    problem: Problem
    version: KernelVersion
    picks: tuple[tuple[Device, NamedInts], ...]
    """Each GPU's, that of the newest finals first."""

    @property
    def configs(self) -> tuple[NamedInts, ...]:
        """The picks, each once."""
        return tuple(dict.fromkeys(config for _, config in self.picks))


def disagreements(evidence: Iterable[Evidence], incumbents: Incumbents = NO_INCUMBENTS) -> list[Disagreement]:
    """All of them, in the order of the evidence."""
    timed = [entry for entry in evidence if entry.version is not None and entry.kind is not Kind.PUBLISHED]
    found = []
    for entries in grouped(timed, _question).values():
        by_device = grouped(entries, lambda entry: entry.device)
        if len(by_device) < 2:
            continue
        decided = [one for of in by_device.values() for one in all_candidates(of, incumbents) if one.decision]
        if (disagreement := _disagreement(decided)) is not None:
            found.append(disagreement)
    return found


def _disagreement(decided: list[Candidates]) -> Disagreement | None:
    if len(decided) < 2:
        return None
    newest, *others = sorted(decided, key=lambda one: (-_newest(one), one.device.fingerprint))
    version = newest.entries[0].version
    rivals = [other for other in others if not _has_decided(newest, other)]
    against = [other for other in rivals if _is_against(newest, other) or _is_against(other, newest)]
    if not against or version is None:
        return None
    picks = tuple((one.device, _pick(one)) for one in (newest, *against))
    return Disagreement(newest.problem, version, picks)


def _has_decided(newest: Candidates, other: Candidates) -> bool:
    """Whether the newest finals had the other's pick among their finalists."""
    return _pick(other) in _finals(newest)


def _is_against(one: Candidates, other: Candidates) -> bool:
    """Whether one's evidence speaks against the other's pick."""
    finals, pick = _finals(one), _pick(other)
    if pick not in finals:
        return True
    version = one.entries[0].version
    pairs = pairs_of(finals, default=one.default, axes=version.axes if version else ())
    place = {config: number for number, config in enumerate(pairs.configs)}
    if pick not in place or _pick(one) not in place:
        return False
    return bool(pairs.lower[place[pick], place[_pick(one)]] > math.log1p(plan_of(finals).tie_band))


def _finals(of: Candidates) -> dict[NamedInts, tuple[ProcessTimes, ...]]:
    return {entry.config: entry.finals for entry in of.named if entry.finals and entry.config is not None}


def _pick(of: Candidates) -> NamedInts:
    return of.pick.config or NamedInts()


def _newest(of: Candidates) -> float:
    return max(entry.newest for entry in of.entries)


def _question(entry: Evidence) -> tuple[object, ...]:
    version = entry.version.source_hash if entry.version else ""
    return entry.problem, version, entry.kind, replace(entry.device, uuid_hash="")
