"""What the back ends with worker processes share: one that launches arms, and a screen that compiles beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from fp8tune import alive
from fp8tune.measure import trial
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.compiling import compile_config, compile_edges
from fp8tune.measure.engine import CompileProgress, Screened, never
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied, WorkerHung, WorkerPool, usable_cores
from fp8tune.records import Device, Kind, Outcome, Status

P = ParamSpec("P")
R = TypeVar("R")

COMPILE_TIMEOUT_S = 300.0
ASKED_EVERY_S = 0.2
"""How often a screen that waits asks whether its time is up."""
TRIAL_TIMEOUT_S = 120.0
"""A call that takes longer hangs. The first one of a problem also builds inputs and reference: seconds at most."""


class ProcessWorker:
    """A process that launches arms on ``torch_device``, with the kernels of one code tree."""

    def __init__(self, torch_device: str, tree: Tree | None = None, timeout_s: float = TRIAL_TIMEOUT_S) -> None:
        self._torch_device, self._tree, self._timeout_s = torch_device, tree, timeout_s
        self._process = Worker()

    def build(self, arm: Arm) -> Outcome:
        """See :class:`fp8tune.measure.engine.Worker`, as of all that follows."""
        return self._outcome(trial.build, arm, self._torch_device)

    def launch(self, arm: Arm) -> Outcome:  # noqa: D102
        return self._outcome(trial.launch, arm, self._torch_device)

    def check(self, arm: KernelArm, *, with_edges: bool = True) -> Outcome:  # noqa: D102
        return self._outcome(trial.checked_block, arm, self._torch_device, 0, times=False, with_edges=with_edges)

    def block(self, arm: Arm, place: Place) -> Outcome:  # noqa: D102
        return self._outcome(trial.block, arm, self._torch_device)

    def checked_block(self, arm: KernelArm, place: Place) -> Outcome:  # noqa: D102
        return self._outcome(trial.checked_block, arm, self._torch_device, place.round)

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: D102
        return self._process.call(self._timeout_s, within, self._tree, function, *args, **kwargs)

    def close(self) -> None:  # noqa: D102
        self._process.end()

    def _outcome(self, function: Callable[P, Outcome], /, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """The answer. A process that crashed or hung is not used again: the next call begins a fresh one."""
        try:
            outcome = self.run(function, *args, **kwargs)
        except (WorkerDied, RemoteError) as error:
            outcome = outcome_of(error)
        if outcome.status in (Status.CRASHED, Status.TIMEOUT):
            self._process.kill()
        return outcome


def outcome_of(error: WorkerDied | RemoteError) -> Outcome:
    """What it means for an arm that its worker died, hung or raised."""
    if isinstance(error, WorkerHung):
        return Outcome(Status.TIMEOUT, reason=str(error))
    if isinstance(error, WorkerDied):
        return Outcome(Status.CRASHED, reason=str(error))
    return Outcome(Status.CRASHED, reason=str(error).strip().splitlines()[-1][:300])


class ProcessBackend:
    """What GPU, interpreter and compiler have in common."""

    kind: Kind
    timer = "none"
    times = False

    def __init__(
        self,
        device: Device,
        torch_device: str,
        *,
        runners: int = 1,
        shared_limit: int | None = None,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
    ) -> None:
        """``runners``: processes that screen, none where configs are compiled only. ``shared_limit``: bytes of shared
        memory a block may have; None where nothing is compiled ahead."""
        self.device = device
        self.trial_timeout_s = trial_timeout_s
        self._torch_device = torch_device
        self._runner_count, self._shared_limit = runners, shared_limit
        self._compilers: WorkerPool | None = None
        self._runners: WorkerPool | None = None
        self._compiling: dict[KernelArm, Future[Outcome]] = {}
        self._compiling_edges: dict[KernelArm, Future[None]] = {}
        """What the check of an arm launches beside the binary that is timed."""

    def worker(self, tree: Tree | None = None) -> ProcessWorker:
        """See :class:`fp8tune.measure.engine.Backend`, as of all that follows."""
        self._end_runners()  # what they hold of the device's memory, and their context, would disturb the clock
        return ProcessWorker(self._torch_device, tree, self.trial_timeout_s)

    def copy_gb_per_s(self) -> float | None:  # noqa: D102
        return None

    def close(self) -> None:  # noqa: D102
        self._end_runners()
        self._end_compilers()

    def compiling(self, within_s: float) -> int:
        """How many of the compilers' calls are left when all have ended, or so many seconds have passed."""
        return len(wait(self._queued, within_s).not_done)

    def finish_compiling(self) -> None:  # noqa: D102
        for queued in self._queued:
            with contextlib.suppress(WorkerDied, RemoteError):  # it fails again where it is launched
                alive.result(queued)
        self._end_compilers()

    @property
    def _queued(self) -> list[Future[Any]]:
        return [*self._compiling.values(), *self._compiling_edges.values()]

    def _end_compilers(self) -> None:
        if self._compilers is not None:
            self._compilers.close()
        self._compilers = None
        self._compiling.clear()
        self._compiling_edges.clear()

    def compile(self, arms: Sequence[KernelArm], *, with_edges: bool = True) -> None:  # noqa: D102
        if self._shared_limit is None:
            return
        if self._compilers is None:
            # one core is left to the process that checks and times
            self._compilers = WorkerPool(max(1, usable_cores() - bool(self._runner_count)))
        for arm in arms:
            if arm not in self._compiling:
                spec = (arm.reference, arm.problem, arm.config, self.device.arch)
                self._compiling[arm] = self._compilers.submit(
                    COMPILE_TIMEOUT_S, compile_config, *spec, self._shared_limit, read_code=not self._runner_count
                )
                if self._runner_count and with_edges:
                    self._compiling_edges[arm] = self._compilers.submit(COMPILE_TIMEOUT_S, compile_edges, *spec)

    def _compiled(self, arm: KernelArm) -> Outcome:
        """What became of an arm that was queued; ok where none was."""
        return _answer(self._compiling[arm]) if arm in self._compiling else Outcome(Status.OK)

    def screen(  # noqa: D102
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = never
    ) -> Iterator[Screened]:
        self.compile(arms)
        compiling: dict[Future[Outcome], int] = {}
        compiling_edges: dict[Future[None], int] = {}
        running: dict[Future[Outcome], int] = {}
        for number, arm in enumerate(arms):
            if (future := self._compiling.get(arm)) is not None:
                compiling[future] = number
            else:
                running[self._submit(arm, places[number])] = number
        total, stirred = len(compiling), time.monotonic()
        while (compiling or compiling_edges or running) and not is_over():
            pending: list[Future[Any]] = [*compiling, *compiling_edges, *running]
            if time.monotonic() - stirred <= self._longest_s:
                alive.sign()
            done, _ = wait(pending, alive.EVERY_S if is_over is never else ASKED_EVERY_S, FIRST_COMPLETED)
            stirred = time.monotonic() if done else stirred
            for future in [future for future in compiling if future in done]:
                number = compiling.pop(future)
                compiled = self._compiled(arms[number])
                if compiled.status is not Status.OK or not self._runner_count:
                    yield number, compiled
                else:
                    compiling_edges[self._compiling_edges[arms[number]]] = number
            for ready in [ready for ready in compiling_edges if ready.done()]:
                number = compiling_edges.pop(ready)
                running[self._submit(arms[number], places[number])] = number
            for ran in [ran for ran in running if ran in done]:
                number = running.pop(ran)
                yield number, replace(_answer(ran), facts=self._compiled(arms[number]).facts)
            if compiling and done:
                yield CompileProgress(arms[0].problem, total - len(compiling), total)

    @property
    def _longest_s(self) -> float:
        """Seconds after which something that was asked for has been answered, if only by its time limit."""
        return 1.1 * max(COMPILE_TIMEOUT_S, self.trial_timeout_s)

    def _submit(self, arm: KernelArm, place: Place) -> Future[Outcome]:
        """All that is ready is queued at once, so that the GPU waits for neither Python nor the database."""
        ask, device, round = trial.checked_block, self._torch_device, place.round
        return self.runners.submit(self.trial_timeout_s, ask, arm, device, round, times=self.times)

    def _end_runners(self) -> None:
        if self._runners is not None:
            self._runners.close()
        self._runners = None

    @property
    def runners(self) -> WorkerPool:
        """The processes that screen, started when first needed."""
        if self._runners is None:
            self._runners = WorkerPool(self._runner_count)
        return self._runners


def _answer(future: Future[Outcome]) -> Outcome:
    """A worker's outcome, or what its death means."""
    try:
        return future.result()
    except (WorkerDied, RemoteError) as error:
        return outcome_of(error)
