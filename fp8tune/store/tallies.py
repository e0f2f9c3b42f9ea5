"""What became of the configs of one problem, timed or not: how many are right, and why the others failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.records import Subject as Subject

NO_FAILURES = (Status.OK, Status.PRUNED)


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
