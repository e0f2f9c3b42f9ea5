"""What became of the configs of a unit, from the events of its sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8tune.records import Problem, Status, shortfall
from fp8tune.sweep.events import TrialDone


@dataclass
class Outcomes:
    """Takes the trials of one unit."""

    trials: int = 0
    """That were run, not found in the database."""
    right: set[Problem] = field(default_factory=set)
    """With a config that is right."""
    failed: dict[Problem, Status] = field(default_factory=dict)
    """How the first config of a problem failed, of those that did; pruned where none was tried."""

    def take(self, trial: TrialDone) -> None:
        """Count one."""
        problem, status = trial.row.problem, trial.row.outcome.status
        self.trials += not trial.from_database
        if status is Status.OK:
            self.right.add(problem)
        elif self.failed.get(problem, Status.PRUNED) is Status.PRUNED:
            self.failed[problem] = status

    @property
    def without_right(self) -> Mapping[Problem, Status]:
        """Problems that no config is right on, and how the first one failed."""
        return {problem: status for problem, status in self.failed.items() if problem not in self.right}

    def finding(self, problems: int) -> str:
        """What is to be said of a unit of so many problems that is done; empty where each has a right config."""
        if not (without := self.without_right):
            return ""
        problem, status = next(iter(without.items()))
        where = f"{len(without)} of {problems} problems, first {problem.shape}" if problems > 1 else str(problem.shape)
        return f"{shortfall(status)} on {where}: {status}"
