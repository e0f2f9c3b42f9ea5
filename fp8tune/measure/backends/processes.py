"""Back ends with worker processes: one that launches arms, and a coarse pass that compiles beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from fp8tune import alive
from fp8tune.errors import MachineError
from fp8tune.measure import trial
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.compiling import compile_config
from fp8tune.measure.engine import CompileProgress, Screened
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied, WorkerHung, WorkerPool, usable_cores
from fp8tune.records import ClockLimits, Device, Kind, Outcome, Status

P = ParamSpec("P")
R = TypeVar("R")

COMPILE_TIMEOUT_S = 300.0
POLL_S = 0.2  # how often a coarse pass that waits checks whether its time is up


class ProcessBackend:
    """Base of the GPU, the interpreter and the compiler."""

    timer = "none"  # the clock's name, as stored with a sweep
    times = False  # if arms are only checked or compiled, and so once is enough
    trial_timeout_s = 120.0
    """A call that takes longer hangs. The first one of a problem also builds inputs and reference: seconds at most."""

    def __init__(
        self,
        device: Device,
        torch_device: str,
        kind: Kind,
        runners: int = 1,  # processes that check and time; none if configs are only compiled
        shared_limit: int | None = None,  # bytes of shared memory a block may have; None if nothing is compiled ahead
    ) -> None:
        self.device, self.kind = device, kind
        self.limits = ClockLimits()  # of all blocks so far
        self._torch_device = torch_device
        self._runner_count, self._shared_limit = runners, shared_limit
        self.runners = WorkerPool(max(1, runners))  # of the coarse pass
        # One core is left to the process that checks and times.
        self._compilers = WorkerPool(max(1, usable_cores() - bool(runners)))
        self._compiling: dict[KernelArm, Future[Outcome]] = {}

    def worker(self, tree: Tree | None = None) -> ProcessWorker:
        """Return a fresh worker with the kernels of a code tree; None: the installed ones."""
        self.runners = (
            self.runners.replaced()
        )  # their context, and the device's memory that they hold, would disturb the clock
        return ProcessWorker(self, self._torch_device, tree)

    def close(self) -> None:
        """End all processes and drop what is queued. The next call starts them again."""
        self.runners, self._compilers = self.runners.replaced(), self._compilers.replaced()
        self._compiling.clear()

    def compile(self, arms: Sequence[KernelArm]) -> None:
        """Queue arms for the compilers, each once, in this order. They compile beside whatever is next."""
        if self._shared_limit is None:
            return
        for arm in arms:
            if arm not in self._compiling:
                code = (arm.reference, arm.problem, arm.config, self.device.arch, self._shared_limit)
                self._compiling[arm] = self._compilers.submit(
                    COMPILE_TIMEOUT_S, compile_config, *code, is_run=bool(self._runner_count)
                )

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Screened]:
        """Check and time each arm of one problem; the number of an arm comes with its outcome, in any order.

        Compiled arms are timed while the rest compiles. Nothing more is yielded once ``is_over`` returns True.
        """
        self.compile(arms)
        pending: dict[Future[Outcome], int] = {}

        def run(number: int) -> None:
            # Everything that is ready is queued at once, so that the GPU waits for neither Python nor the database.
            arguments = (arms[number], self._torch_device, places[number].round)
            future = self.runners.submit(self.trial_timeout_s, trial.checked_block, *arguments, times=self.times)
            pending[future] = number

        for number, arm in enumerate(arms):
            if arm in self._compiling:
                pending[self._compiling[arm]] = number
            else:
                run(number)
        total = uncompiled = sum(arm in self._compiling for arm in arms)
        while pending and not is_over():
            alive.sign()
            done, _ = wait(pending, POLL_S, FIRST_COMPLETED)
            for future in [future for future in pending if future in done]:
                number, outcome = pending.pop(future), answer(future)
                ahead = self._compiling.get(arms[number])
                if future is ahead:
                    uncompiled -= 1
                    if outcome.status is Status.OK and self._runner_count:
                        run(number)
                    else:
                        yield number, outcome
                else:
                    facts = outcome.facts if ahead is None else answer(ahead).facts
                    yield number, replace(self.comparable(outcome), facts=facts)
            if uncompiled and done:
                yield CompileProgress(arms[0].problem, total - uncompiled, total)

    def comparable(self, outcome: Outcome) -> Outcome:
        """Return the outcome. Raises MachineError if it was timed at other clocks or power limits than those before."""
        if difference := self.limits.difference(outcome.limits):
            raise MachineError(
                f"the GPU's {difference} while it was timed: blocks before and after are not comparable; set it back "
                "and run this again"
            )
        self.limits = self.limits.merged(outcome.limits)
        return outcome


class ProcessWorker:
    """A process that launches arms on ``torch_device``, with the kernels of one code tree."""

    def __init__(self, backend: ProcessBackend, torch_device: str, tree: Tree | None) -> None:
        self._backend, self._torch_device, self._tree = backend, torch_device, tree
        self._process = Worker()

    def build(self, arm: Arm) -> Outcome:
        """Build the tensors that the arm's group shares."""
        return self._outcome(trial.build, arm)

    def launch(self, arm: Arm) -> Outcome:
        """Launch the arm once and wait, so that it compiles or breaks now."""
        return self._outcome(trial.launch, arm)

    def check(self, arm: KernelArm) -> Outcome:
        """Compare every byte with the reference, on the problem and on its edges. Times nothing."""
        return self._outcome(trial.checked_block, arm, 0, times=False)

    def block(self, arm: Arm, place: Place) -> Outcome:
        """Time the arm."""
        return self._backend.comparable(self._outcome(trial.block, arm))

    def checked_block(self, arm: KernelArm, place: Place) -> Outcome:
        """Check the arm (once a process), time it, and check its output once more."""
        return self._backend.comparable(self._outcome(trial.checked_block, arm, place.round))

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run any function where kernels run. Raises WorkerDied or RemoteError."""
        return self._process.call(self._backend.trial_timeout_s, within, self._tree, function, *args, **kwargs)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _outcome(self, function: Callable[..., Outcome], arm: Arm, *args: Any, **kwargs: Any) -> Outcome:
        """Call a function of :mod:`fp8tune.measure.trial`. A process that crashed or hung is not used again."""
        try:
            outcome = self.run(function, arm, self._torch_device, *args, **kwargs)
        except (WorkerDied, RemoteError) as error:
            outcome = outcome_of(error)
        if outcome.status in (Status.CRASHED, Status.TIMEOUT):
            self._process.kill()
        return outcome


def answer(future: Future[Outcome]) -> Outcome:
    """Return a worker's outcome, or the one that its death stands for."""
    try:
        return future.result()
    except (WorkerDied, RemoteError) as error:
        return outcome_of(error)


def outcome_of(error: WorkerDied | RemoteError) -> Outcome:
    """Return the outcome of an arm whose worker died, hung or raised."""
    if isinstance(error, WorkerHung):
        return Outcome(Status.TIMEOUT, reason=str(error))
    reason = str(error) if isinstance(error, WorkerDied) else str(error).strip().splitlines()[-1][:300]
    return Outcome(Status.CRASHED, reason=reason)
