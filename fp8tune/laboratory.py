"""Where trials run: a GPU, Triton's interpreter, or only the compiler; and the worker processes while it is open.

On a GPU configs compile in a pool of all cores and are checked and timed in one long-lived worker. The interpreter
checks in as many workers as there are cores. An arch that is not here compiles only. Knows no database.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace

from fp8tune import measure
from fp8tune.compiling import Compiled, compile_config
from fp8tune.plan import Planned
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Status
from fp8tune.worker import Pool, RemoteError, WorkerDied, WorkerHung

COMPILE_TIMEOUT_S = 300.0
TRIAL_TIMEOUT_S = 120.0
"""A trial that takes longer hangs. The first one of a problem also builds inputs and reference: seconds at most."""


@dataclass(frozen=True)
class Batch:
    """All trials of one problem."""

    reference: str
    """How workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    version: KernelVersion
    problem: Problem
    lookup_key: NamedInts
    bytes_moved: int
    trials: tuple[Planned, ...]


@dataclass(frozen=True)
class Laboratory:
    """Where trials run."""

    kind: Kind
    device: Device
    timer: str
    torch_device: str
    """``cuda``, ``cpu`` or, where nothing runs, ``meta``."""
    compiles: bool
    shared_limit: int = 0
    """Bytes of shared memory a block may have."""
    runs: bool = True
    workers: int = 1
    """Checking and timing workers: one on a GPU, so that nothing disturbs the clock."""

    @property
    def times(self) -> bool:
        """False where trials are checked or compiled only, and so once is enough."""
        return self.timer != "none"


@dataclass(frozen=True)
class CompileProgress:
    """Configs compiled of those this problem needs."""

    problem: Problem
    done: int
    total: int


@dataclass
class OpenLaboratory:
    """The worker processes of one sweep, open while it runs."""

    lab: Laboratory
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    _compilers: Pool | None = None
    _runners: Pool | None = None
    _compiling: dict[tuple[Problem, NamedInts], Future[Compiled]] = field(default_factory=dict)
    _ceiling_due: bool = True

    def __enter__(self) -> OpenLaboratory:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._compilers, self._runners):
            if pool is not None:
                pool.close()

    @property
    def runners(self) -> Pool:
        """The checking and timing workers, started when first needed."""
        if self._runners is None:
            self._runners = Pool(self.lab.workers)
        return self._runners

    def needs_ceiling(self) -> bool:
        """True once, on a GPU: the copy ceiling is measured before the first trial."""
        due = self._ceiling_due and self.lab.torch_device == "cuda"
        self._ceiling_due = False
        return due

    def ceiling_gb_per_s(self) -> float:
        """What a copy reaches in the worker that times; GB/s, read plus written."""
        return self.runners.submit(TRIAL_TIMEOUT_S, measure.copy_ceiling_gb_per_s).result()

    def compile(self, batch: Batch, trials: Sequence[Planned]) -> None:
        """Queue every config that was not pruned; the pool takes them in this order."""
        if not self.lab.compiles:
            return
        if self._compilers is None:
            self._compilers = Pool(os.cpu_count() or 1)
        for trial in trials:
            if trial.pruned is None:
                self._compiling[batch.problem, trial.config] = self._compilers.submit(
                    COMPILE_TIMEOUT_S,
                    compile_config,
                    batch.reference,
                    batch.problem,
                    trial.config,
                    self.lab.device.arch,
                    self.lab.shared_limit,
                )

    def compiled(self, problem: Problem, todo: Sequence[Planned]) -> Iterator[CompileProgress]:
        """Wait for this problem's configs: nothing is timed while its own configs still compile."""
        futures = [self._compiling[problem, t.config] for t in todo if (problem, t.config) in self._compiling]
        futures = [future for future in futures if not future.done()]
        for done, _ in enumerate(as_completed(futures), 1):
            yield CompileProgress(problem, done, len(futures))

    def run(self, batch: Batch, todo: Sequence[Planned], number: int) -> Iterator[tuple[Planned, Outcome]]:
        """Outcomes in planned order. All that can run is queued at once: the GPU does not wait for the database."""
        queued = [(trial, self._begin(batch, trial, number)) for trial in todo]
        for trial, begun in queued:
            yield trial, begun if isinstance(begun, Outcome) else self._end(batch, trial, begun)

    def _begin(self, batch: Batch, trial: Planned, number: int) -> Outcome | Future[Outcome]:
        if trial.pruned is not None:
            return Outcome(Status.PRUNED, reason=trial.pruned)
        compiled = self._compiled_outcome(batch.problem, trial.config)
        if compiled.status is not Status.OK or not self.lab.runs:
            return compiled
        return self.runners.submit(
            self.trial_timeout_s,
            measure.run_trial,
            batch.reference,
            batch.problem,
            trial.config,
            self.lab.timer,
            self.lab.torch_device,
            number,
        )

    def _end(self, batch: Batch, trial: Planned, begun: Future[Outcome]) -> Outcome:
        outcome = _answer(begun)
        return replace(outcome, facts=self._compiled_outcome(batch.problem, trial.config).facts)

    def _compiled_outcome(self, problem: Problem, config: NamedInts) -> Outcome:
        future = self._compiling.get((problem, config))
        if future is None:
            return Outcome(Status.OK)
        try:
            compiled = future.result()
        except (WorkerDied, RemoteError):
            return _answer(future)
        return Outcome(compiled.status, reason=compiled.reason, facts=compiled.facts)


def _answer(future: Future[Outcome] | Future[Compiled]) -> Outcome:
    """A worker's outcome, or what its death means."""
    try:
        outcome = future.result()
    except WorkerHung as hung:
        return Outcome(Status.TIMEOUT, reason=str(hung))
    except WorkerDied as died:
        return Outcome(Status.CRASHED, reason=str(died))
    except RemoteError as error:
        return Outcome(Status.CRASHED, reason=str(error).strip().splitlines()[-1][:300])
    assert isinstance(outcome, Outcome)
    return outcome
