"""The cells of ``fp8tune bench``: every contender on a problem is checked, then all of them are timed in turns.

A cell without a time, or with a wrong output, has a reason, and the run goes on.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from fp8tune.bench.checking import Checked
from fp8tune.bench.warming import tune_in_short_blocks
from fp8tune.errors import Fp8tuneError, MachineError
from fp8tune.measure.arms import Arm, Place
from fp8tune.measure.backends.processes import outcome_of
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.measure.worker import Poisoned, RemoteError, WorkerDied
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.stats.means import median

R = TypeVar("R")
Asked = ParamSpec("Asked")

ROUNDS = 3
"""A cell is the median of so many blocks. On an H100 about one block in a thousand takes several times as long as the
others, which made 25 % of the ceiling of what is 98 %; why is not known."""
CELL_TIMEOUT_S = 180.0
"""Long enough for an autotuner of 36 configs with a cold cache."""
LONGEST_REASON = 160


@dataclass(frozen=True)
class Timing:
    """Microseconds, or why there are none, or why they do not count."""

    time_us: float | None = None
    reason: str = ""
    """Beside a time: the output was wrong, or could not be checked."""
    config: NamedInts | None = None
    """What ours was launched with."""
    checked: Checked | None = None
    """How the output compares with the reference; None where it was not compared."""
    sqnr_db: Mapping[str, float] | None = None
    """Of a grouped GEMM's results, instead: the worst group of each."""

    def with_check(self, check: Timing) -> Timing:
        """This time with what a check found. If the check could not be made, the time does not count either."""
        if self.time_us is None:
            return self
        failed = check.reason and check.checked is None and check.sqnr_db is None
        reason = f"not checked: {check.reason}" if failed else check.reason
        return replace(self, reason=reason, checked=check.checked, sqnr_db=check.sqnr_db)

    @property
    def valid_us(self) -> float | None:
        """The time of work that was done right: what ratios, rates and means are made of."""
        return None if self.reason else self.time_us


@dataclass(frozen=True)
class Contender(Arm):
    """One contender on a problem."""

    name: str
    problem: Problem

    @abstractmethod
    def check(self) -> Timing:
        """Run it once and compare what it gives: a Timing without a time. Called in the worker, after ``build``."""


Timed = TypeVar("Timed", bound=Arm)


def check_times(backend: Backend) -> None:
    """Raises MachineError for a back end that times nothing."""
    if not backend.times:
        raise MachineError("bench times kernels and needs a GPU; --timer simulated:1 runs it on a fake one")


class Cells:
    """The one worker that has the tensors, and how long it may be asked."""

    def __init__(
        self, backend: Backend, time_budget_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.backend = backend
        self._worker = backend.worker()
        self._clock, self._deadline = clock, math.inf if time_budget_s is None else clock() + time_budget_s

    def __enter__(self) -> Cells:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def is_spent(self) -> bool:
        """True if the time budget is."""
        return self._clock() > self._deadline

    def check(self, contender: Contender) -> Timing:
        """What a check of a contender's outputs finds; where no kernels run, nothing."""
        built = self._worker.build(contender)
        return self.run(checked, contender) or Timing() if built.status is Status.OK else timing_of(built)

    def in_rounds(self, arms: Sequence[Timed]) -> dict[Timed, Timing]:
        """Time each arm once a round, another one first in each. An arm that fails is out, and has its reason."""
        group = Group(None, list(arms))
        found: dict[Timed, Timing] = {}
        for turn in measure(self.backend, [group], Schedule(range(1), ROUNDS, _rotated), self._worker):
            found |= {block.arm: timing_of(block.outcome) for block in turn.failed}
            for arm in dict.fromkeys(block.arm for block in turn.blocks):
                found[arm] = Timing(median(block.outcome.time_us or 0.0 for block in turn.blocks if block.arm == arm))
        ended = Timing(reason=_said(group.failure))
        return {arm: found.get(arm, ended) for arm in arms}

    def once(self, arm: Arm, time_it: Callable[[Arm], Timing]) -> Timing:
        """What ``time_it`` says of an arm; where no kernels run, one block of it."""
        return self.run(time_it, arm) or timing_of(self._worker.block(arm, Place()))

    def run(self, function: Callable[[R], Timing], arm: R) -> Timing | None:
        """What a function gives in the worker; None where no kernels run. A worker that dies is a reason."""
        try:
            return self._worker.run(function, arm)
        except (WorkerDied, RemoteError) as error:  # also one that hung; the next call starts another
            return Timing(reason=_said(outcome_of(error).reason))

    def ask(self, function: Callable[Asked, R], *args: Asked.args, **kwargs: Asked.kwargs) -> R | None:
        """What a function says in the worker of what has a cell of its own; None where it fails or no kernels run."""
        try:
            return self._worker.run(function, *args, **kwargs)
        except (WorkerDied, RemoteError, Fp8tuneError):  # the cell has the reason
            return None


def _rotated(group: Group[Timed, None], process: int, round: int) -> Sequence[Timed]:
    first = round % len(group.arms)
    return group.arms[first:] + group.arms[:first]


def timing_of(outcome: Outcome) -> Timing:
    """An outcome as a cell."""
    is_ok = outcome.status is Status.OK
    return Timing(outcome.time_us) if is_ok else Timing(reason=_said(outcome.reason or str(outcome.status)))


def _said(reason: str) -> str:
    """Our own refusals say all themselves; compilers go on with listings and advice."""
    return reason.removeprefix("MachineError: ").removeprefix("UsageError: ")[:LONGEST_REASON]


# In the worker


def checked(contender: Contender) -> Timing:
    """See :meth:`Contender.check`. Raises Poisoned with a Timing where the process must not be used again."""
    tune_in_short_blocks()
    return guarded(contender.check)


def guarded(run: Callable[[], Timing]) -> Timing:
    """A Timing, or the reason why there is none; the border where foreign failures become cells."""
    from fp8tune.measure.trial import failure

    try:
        return run()
    except Exception as error:
        outcome = failure(error)
        if outcome.status is Status.CRASHED:
            raise Poisoned(timing_of(outcome)) from error
        return timing_of(outcome)
