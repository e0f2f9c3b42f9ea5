"""Where trials run: a GPU, Triton's interpreter, or only the compiler; and the worker processes while it is open.

On a GPU configs compile in a pool of all cores and are checked and timed in one long-lived worker. The interpreter
checks in as many workers as there are cores. An arch that is not here compiles only. Knows no database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from fp8tune.errors import MachineError
from fp8tune.measure import trial as measure
from fp8tune.measure.clock import Slot
from fp8tune.measure.compiling import Compiled, compile_config, compile_edges
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerHung, WorkerPool, usable_cores
from fp8tune.plan.problems import Planned
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Status

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
    judge: str = ""
    """The hash of the reference that outputs are held to; empty where no kernel runs."""


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
    _compilers: WorkerPool | None = None
    _runners: WorkerPool | None = None
    _compiling: dict[tuple[Problem, NamedInts], Future[Compiled]] = field(default_factory=dict)
    _compiling_edges: dict[tuple[Problem, NamedInts], Future[None]] = field(default_factory=dict)
    """What the check of a config launches beside the binary that is timed."""
    _ceiling: Future[float] | None = None

    def __enter__(self) -> OpenLaboratory:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._compilers, self._runners):
            if pool is not None:
                pool.close()

    @property
    def runners(self) -> WorkerPool:
        """The checking and timing workers, started when first needed."""
        if self._runners is None:
            self._runners = WorkerPool(self.lab.workers)
        return self._runners

    def warm_up(self, batch: Batch) -> None:
        """Start what takes seconds beside the compilers: the GPU context, the copy ceiling, the first inputs."""
        if self.lab.torch_device == "cuda" and self.lab.runs and self._ceiling is None:
            self._ceiling = self.runners.submit(TRIAL_TIMEOUT_S, measure.copy_ceiling_gb_per_s)
            self.runners.submit(TRIAL_TIMEOUT_S, measure.prepare, batch.reference, batch.problem, "cuda")

    def take_ceiling_gb_per_s(self) -> float | None:
        """What a copy reaches in the worker that times, in GB/s, read plus written: once, then None.

        Raises MachineError where the GPU cannot even copy: no trial would do better.
        """
        ceiling, self._ceiling = self._ceiling, None
        try:
            return None if ceiling is None else ceiling.result()
        except (WorkerDied, RemoteError) as error:
            reason = str(error).strip().splitlines()[-1][:300]
            raise MachineError(f"the GPU cannot copy 512 MiB ({reason}): see what nvidia-smi says") from None

    def compile(self, batch: Batch, trials: Sequence[Planned]) -> None:
        """Queue every config that was not pruned, once; the pool takes them in this order."""
        if not self.lab.compiles:
            return
        if self._compilers is None:
            self._compilers = WorkerPool(usable_cores())
        for trial in trials:
            if trial.pruned is None and (batch.problem, trial.config) not in self._compiling:
                self._compiling[batch.problem, trial.config] = self._compilers.submit(
                    COMPILE_TIMEOUT_S,
                    compile_config,
                    batch.reference,
                    batch.problem,
                    trial.config,
                    self.lab.device.arch,
                    self.lab.shared_limit,
                    read_code=not self.lab.runs,
                )
                if self.lab.runs:
                    self._compiling_edges[batch.problem, trial.config] = self._compilers.submit(
                        COMPILE_TIMEOUT_S,
                        compile_edges,
                        batch.reference,
                        batch.problem,
                        trial.config,
                        self.lab.device.arch,
                    )

    def run(
        self, batch: Batch, todo: Mapping[Planned, int], number: int
    ) -> Iterator[CompileProgress | tuple[Planned, Outcome]]:
        """Outcomes as they come: what is compiled is timed while the rest still compiles.

        ``todo``: trials with their places in round ``number``. All that is ready is queued at once, so that the GPU
        waits for neither Python nor the database.
        """
        compiling: dict[Future[Compiled], Planned] = {}
        compiling_edges: dict[Future[None], Planned] = {}
        running: dict[Future[Outcome], Planned] = {}
        for trial in todo:
            future = self._compiling.get((batch.problem, trial.config))
            if trial.pruned is not None:
                yield trial, Outcome(Status.PRUNED, reason=trial.pruned)
            elif future is not None:
                compiling[future] = trial
            else:
                running[self._submit(batch, trial, number, todo[trial])] = trial
        total = len(compiling)
        while compiling or compiling_edges or running:
            pending: list[Future[Any]] = [*compiling, *compiling_edges, *running]
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in [future for future in compiling if future in done]:
                trial = compiling.pop(future)
                compiled = self.compiled_outcome(batch.problem, trial.config)
                if compiled.status is not Status.OK or not self.lab.runs:
                    yield trial, compiled
                else:
                    compiling_edges[self._compiling_edges[batch.problem, trial.config]] = trial
            for prepared in [prepared for prepared in compiling_edges if prepared.done()]:
                trial = compiling_edges.pop(prepared)
                running[self._submit(batch, trial, number, todo[trial])] = trial
            for begun in [begun for begun in running if begun in done]:
                trial = running.pop(begun)
                facts = self.compiled_outcome(batch.problem, trial.config).facts
                yield trial, replace(_answer(begun), facts=facts)
            if compiling:
                yield CompileProgress(batch.problem, total - len(compiling), total)

    def _submit(self, batch: Batch, trial: Planned, number: int, position: int) -> Future[Outcome]:
        return self.runners.submit(
            self.trial_timeout_s,
            measure.run_trial,
            batch.reference,
            batch.problem,
            trial.config,
            self.lab.timer,
            self.lab.torch_device,
            number,
            position,
        )

    def fresh_runner(self) -> None:
        """End the worker that timed until now: the next trial runs in a new process."""
        if self._runners is not None:
            self._runners.close()
        self._runners = WorkerPool(1)

    def prepare_final(self, batch: Batch) -> str | None:
        """Build a problem's tensors in the worker; the reason in one line where that fails."""
        arguments = (batch.reference, batch.problem, self.lab.timer, self.lab.torch_device)
        outcome = _answer(self.runners.submit(self.trial_timeout_s, measure.prepare_final, *arguments))
        return None if outcome.status is Status.OK else outcome.reason

    def run_final(self, batch: Batch, config: NamedInts, slot: Slot) -> Outcome:
        """Time one config in a slot of the finals. Whatever goes wrong is the outcome."""
        return _answer(
            self.runners.submit(
                self.trial_timeout_s,
                measure.run_final,
                batch.reference,
                batch.problem,
                config,
                self.lab.timer,
                self.lab.torch_device,
                slot,
            )
        )

    def compiled_outcome(self, problem: Problem, config: NamedInts) -> Outcome:
        """What became of a config that :meth:`compile` queued, once it is known; ok where it was never queued."""
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
    except (WorkerDied, RemoteError) as error:
        return answer_to(error)
    assert isinstance(outcome, Outcome)
    return outcome


def answer_to(error: WorkerDied | RemoteError) -> Outcome:
    """What it means for a trial that its worker died, hung or raised."""
    if isinstance(error, WorkerHung):
        return Outcome(Status.TIMEOUT, reason=str(error))
    if isinstance(error, WorkerDied):
        return Outcome(Status.CRASHED, reason=str(error))
    return Outcome(Status.CRASHED, reason=str(error).strip().splitlines()[-1][:300])
