"""What became of the configs of each problem, timed or not: how many are right, and why the others failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Status
from fp8tune.store.reading import Shared, chosen
from fp8tune.store.schema import Candidates

NO_FAILURES = (Status.OK, Status.PRUNED)


@dataclass(frozen=True)
class Subject:
    """One problem as one kernel version was tried on it, on one device."""

    version: KernelVersion
    device: Device
    kind: Kind
    problem: Problem


@dataclass(frozen=True)
class Tally:
    """The configs that were tried on a subject."""

    subject: Subject
    outcomes: Mapping[NamedInts, Outcome]

    @property
    def counts(self) -> Counter[Status]:
        """How many configs ended how."""
        return Counter(outcome.status for outcome in self.outcomes.values())

    @property
    def failures(self) -> dict[NamedInts, Outcome]:
        """What failed; wrong bytes first."""
        failed = {c: outcome for c, outcome in self.outcomes.items() if outcome.status not in NO_FAILURES}
        return dict(sorted(failed.items(), key=lambda item: item[1].status is not Status.WRONG))

    @property
    def has_right(self) -> bool:
        """Whether at least one config is right, or none was tried."""
        return not self.failures or Status.OK in self.counts


def subjects(connection: Connection, kernel: str | None, arch: str | None) -> list[Subject]:
    """Whatever was tried here, each with the newest version of its kernel only."""
    shared = Shared.load(connection)
    ids = (Candidates.c.problem_id, Candidates.c.version_id, Candidates.c.device_id, Candidates.c.kind)
    query = select(*ids).where(Candidates.c.id.in_(chosen(kernel, arch, [k for k in Kind if k is not Kind.PUBLISHED])))
    newest: dict[object, Subject] = {}
    for row in connection.execute(query.group_by(*ids).order_by(func.max(Candidates.c.id))):
        if (version := shared.versions[row.version_id]) is not None:
            subject = Subject(version, shared.devices[row.device_id], Kind(row.kind), shared.problems[row.problem_id])
            newest[subject.device, subject.kind, subject.problem] = subject
    return list(newest.values())
