"""Back ends with worker processes: a GPU, Triton's interpreter and the compiler alone; and the choice of one."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from fp8tune.errors import MachineError, UsageError, unknown
from fp8tune.measure import device, output_bits, trial
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.compiling import compile_config
from fp8tune.measure.engine import Backend, Ceiling, CompileProgress, Screened
from fp8tune.measure.gpus import TIMER, Gpu
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied, WorkerHung, WorkerPool, finished, usable_cores
from fp8tune.records import ClockLimits, Device, Kind, NamedInts, Outcome, Status
from fp8tune_kernels.arches import ARCHES

P = ParamSpec("P")
R = TypeVar("R")
OutputBits = dict[NamedInts, dict[int, str]]

COMPILE_TIMEOUT_S = 300.0


class ProcessBackend:
    """Base of the GPU, the interpreter and the compiler.

    ``runners`` processes check and time, none if configs are only compiled. A block may have ``shared_limit`` bytes of
    shared memory; None if nothing is compiled ahead.
    """

    timer = "none"  # the clock's name, as stored with a sweep
    times = False  # if arms are only checked or compiled, and so once is enough
    trial_timeout_s = 120.0
    """A call that takes longer hangs. The first one of a problem also builds inputs and reference: seconds at most."""

    def __init__(
        self,
        device: Device,
        torch_device: str,
        kind: Kind,
        runners: int = 1,
        shared_limit: int | None = None,
        gpu: str = "",
    ) -> None:
        self.gpu = gpu  # that its workers see; empty for the first visible one
        self.device, self.kind, self.torch_device = device, kind, torch_device
        self.limits = ClockLimits()  # of all blocks so far
        self._is_run, self._shared_limit = runners > 0, shared_limit
        self.runners = WorkerPool(max(1, runners), gpu)  # of the coarse pass
        # One core is left to the process that checks and times.
        self._compilers = WorkerPool(max(1, usable_cores() - bool(runners)), gpu)
        self._compiling: dict[KernelArm, Future[Outcome]] = {}

    def worker(self, tree: Tree | None = None) -> ProcessWorker:
        """Return a fresh worker with the kernels of a code tree; None: the installed ones."""
        # The context of the coarse pass, the memory that it holds, and compilers at work would disturb the clock.
        self.close()
        return ProcessWorker(self, tree)

    def close(self) -> None:
        """End all processes and drop what is queued. The next call starts them again."""
        self.runners, self._compilers = self.runners.replaced(), self._compilers.replaced()
        self._compiling.clear()

    def compile(self, arms: Sequence[KernelArm]) -> None:
        """Queue arms for the compilers, each once, in this order. They compile beside whatever is next."""
        if self._shared_limit is None:
            return
        submit, place = self._compilers.submit, (self.device.arch, self._shared_limit)
        for arm in arms:
            if arm not in self._compiling:
                code = (arm.reference, arm.problem, arm.config, *place)
                self._compiling[arm] = submit(COMPILE_TIMEOUT_S, compile_config, *code, is_run=self._is_run)

    @property
    def compilers(self) -> int:
        """Number of arms that compile at once; 0 if nothing is compiled before it runs."""
        return 0 if self._shared_limit is None else self._compilers.size

    def is_compiled(self, arm: KernelArm) -> bool:
        """Return True unless the arm is queued for the compilers or compiling."""
        return arm not in self._compiling or self._compiling[arm].done()

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
            arguments = (arms[number], self.torch_device, places[number].round)
            future = self.runners.submit(self.trial_timeout_s, trial.checked_block, *arguments, times=self.times)
            pending[future] = number

        for number, arm in enumerate(arms):
            if arm in self._compiling:
                pending[self._compiling[arm]] = number
            else:
                run(number)
        total = uncompiled = sum(arm in self._compiling for arm in arms)
        for number, future in finished(pending, is_over):
            outcome, ahead = _answer(future), self._compiling.get(arms[number])
            if future is not ahead:
                facts = outcome.facts if ahead is None else _answer(ahead).facts
                yield number, replace(self.comparable(outcome), facts=facts)
                continue
            uncompiled -= 1
            if outcome.status is Status.OK and self._is_run:
                run(number)
            else:
                yield number, outcome
            if uncompiled:
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


class GpuBackend(ProcessBackend):
    """The GPU of this machine: configs compile in a pool of all cores and are checked and timed in one process.

    The first coarse passes also time a copy and a dense GEMM.
    """

    timer = "do_bench"
    times = True

    def __init__(
        self, device_here: Device, shared_limit: int | None, torch_device: str = "cuda", gpu: str = ""
    ) -> None:
        super().__init__(device_here, torch_device, Kind.MEASURED, shared_limit=shared_limit, gpu=gpu)
        if torch_device == "cuda":
            self.limits = device.clock_limits_of(device.nvidia_handle(device.seeing(gpu)))
        self._copy: Future[float] | None = None
        self._is_warm = torch_device != "cuda"
        self._gemm_dtypes: set[str] = set()  # input dtypes whose dense GEMM was timed, or cannot be

    def compile(self, arms: Sequence[KernelArm]) -> None:
        """Compile, and start beside it what takes seconds: the GPU context, the copy ceiling, the first inputs."""
        # Workers of one host share a cache: in an order of its own, each finds compiled most of what it comes to.
        super().compile(random.sample(arms, len(arms)))
        if arms and not self._is_warm:
            self._is_warm = True
            self._copy = self.runners.submit(self.trial_timeout_s, trial.copy_ceiling_gb_per_s)
            self.runners.submit(self.trial_timeout_s, trial.prepare, arms[0].reference, arms[0].problem, "cuda")

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Screened]:
        """Measure ceilings before the arms. Raises MachineError if the GPU cannot even copy."""
        self.compile(arms)
        if self._copy is not None:
            copy, self._copy = self._copy, None
            try:
                rate = copy.result()
            except (WorkerDied, RemoteError) as error:
                reason = outcome_of(error).reason
                raise MachineError(f"the GPU cannot copy 512 MiB ({reason}): see what nvidia-smi says") from None
            yield Ceiling("", rate)
        dtypes = {arm.problem.in_dtype for arm in arms if arm.flops and self.torch_device == "cuda"}
        for dtype in sorted(dtypes - self._gemm_dtypes):
            self._gemm_dtypes.add(dtype)
            with contextlib.suppress(WorkerDied, RemoteError):  # there is no GEMM of the dtype
                peak = self.runners.submit(self.trial_timeout_s, trial.gemm_flop_per_s, dtype).result()
                yield Ceiling(dtype, peak)
        yield from super().screen(arms, places, is_over)


class ProcessWorker:
    """A process that launches arms on ``torch_device``, with the kernels of one code tree."""

    def __init__(self, backend: ProcessBackend, tree: Tree | None) -> None:
        self._backend, self._tree, self._process = backend, tree, Worker(backend.gpu)

    def build(self, arm: Arm) -> Outcome:
        """Build the tensors that the arm's group shares."""
        return self.outcome(trial.build, arm)

    def launch(self, arm: Arm) -> Outcome:
        """Launch the arm once and wait, so that it compiles or breaks now."""
        return self.outcome(trial.launch, arm)

    def check(self, arm: KernelArm) -> Outcome:
        """Compare every byte with the reference, on the problem and on its edges. Times nothing."""
        return self.outcome(trial.checked_block, arm, 0, times=False)

    def block(self, arm: Arm, place: Place) -> Outcome:
        """Time the arm."""
        return self._backend.comparable(self.outcome(trial.block, arm))

    def checked_block(self, arm: KernelArm, place: Place) -> Outcome:
        """Check the arm (once a process), time it, and check its output once more."""
        return self._backend.comparable(self.outcome(trial.checked_block, arm, place.round))

    def output_bits(self, *places: Any) -> OutputBits | None:
        """Hash the outputs of configs, see :func:`fp8tune.measure.output_bits.output_bits`; None if that failed."""
        function: Callable[..., OutputBits] = output_bits.output_bits
        try:
            return self.run(function, *places, self._backend.torch_device)
        except (WorkerDied, RemoteError):
            return None

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run any function where kernels run. Raises WorkerDied or RemoteError."""
        return self._process.call(self._backend.trial_timeout_s, within, self._tree, function, *args, **kwargs)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def outcome(self, function: Callable[..., Outcome], arm: Arm, *args: Any, **kwargs: Any) -> Outcome:
        """Call a function of an arm and the torch device that :func:`fp8tune.measure.trial.guarded` wraps.

        A process that crashed or hung is not used again.
        """
        try:
            outcome = self.run(function, arm, self._backend.torch_device, *args, **kwargs)
        except (WorkerDied, RemoteError) as error:
            outcome = outcome_of(error)
        if outcome.status in (Status.CRASHED, Status.TIMEOUT):
            self._process.kill()
        return outcome


def _answer(future: Future[Outcome]) -> Outcome:
    """Return a worker's outcome, or that of its death."""
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


def compiler(arch: str) -> ProcessBackend:
    """Return the compiler alone, for an arch that need not be here. Raises MachineError if it cannot compile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise MachineError("TRITON_INTERPRET=1 is set, and Triton then cannot compile: unset it")
    here = Device(arch=arch, triton=device.software().triton)
    return ProcessBackend(here, "meta", Kind.STATIC, runners=0, shared_limit=ARCHES[arch].shared_bytes_per_block)


def interpreter() -> ProcessBackend:
    """Return Triton's interpreter, which checks outputs in as many processes as there are cores and times nothing."""
    installed = device.software()
    here = Device("interpreter", "Triton interpreter", torch=installed.torch, triton=installed.triton)
    return ProcessBackend(here, "cpu", Kind.INTERPRETER, runners=usable_cores())


def backend_on(gpu: Gpu) -> Backend:
    """Return the back end of a GPU."""
    is_simulated = gpu.device.arch == "simulated"
    return backend_for(None, gpu.name if is_simulated else "do_bench", "" if is_simulated else gpu.name)[0]


def backend_for(arch: str | None, timer: str | None, gpu: str = "") -> tuple[Backend, tuple[str, ...]]:
    """Return the back end of a timer (None: this machine's) or the compiler for an arch, with notices about it.

    ``gpu`` is the name of a GPU in ``CUDA_VISIBLE_DEVICES``; empty for the first visible one.

    Raises UsageError for an unknown name, MachineError for what this machine cannot do.
    """
    timer = timer or os.environ.get(TIMER)
    if timer is not None and timer.startswith("simulated"):
        if arch not in (None, "simulated"):
            raise UsageError(f"--timer {timer} has an arch of its own: leave out --arch {arch}")
        return SimulatedBackend(timer), ("simulated clock: no output is checked, times are drawn from a seeded model",)
    if timer not in (None, "do_bench"):
        raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
    if arch is not None:
        if arch not in ARCHES:
            raise unknown("arch", arch, ARCHES)
        return compiler(arch), (f"configs are compiled for {arch}; nothing is run, checked or timed",)
    here = None if os.environ.get("TRITON_INTERPRET") == "1" else device.probe(device.seeing(gpu))
    if here is None:
        if timer is not None:
            raise MachineError("there is no GPU here to time on: leave out --timer, or use simulated:SEED")
        return interpreter(), ()
    limits = device.limits(here)
    if limits is None:
        raise MachineError(f"the limits of {here.arch} are not known: add them to fp8tune_kernels/arches.py")
    return GpuBackend(here, limits.shared_bytes_per_block, gpu=gpu), ()
