"""The GPU of this machine: configs compile in a pool of all cores and are checked and timed in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from fp8tune.errors import MachineError
from fp8tune.measure import trial
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.processes import TRIAL_TIMEOUT_S, ProcessBackend
from fp8tune.measure.engine import CompileProgress, CopyCeiling
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.records import Device, Kind, Outcome


class GpuBackend(ProcessBackend):
    """Times with :mod:`fp8tune.measure.timing`. The first screen also measures what a copy reaches."""

    kind = Kind.MEASURED
    timer = "do_bench"
    times = True

    def __init__(
        self, device: Device, shared_limit: int | None, torch_device: str = "cuda", timeout_s: float = TRIAL_TIMEOUT_S
    ) -> None:
        super().__init__(device, torch_device, shared_limit=shared_limit, trial_timeout_s=timeout_s)
        self._ceiling: Future[float] | None = None
        self._is_warm = torch_device != "cuda"

    def compile(self, arms: Sequence[KernelArm]) -> None:
        """And start what takes seconds beside the compilers: the GPU context, the copy ceiling, the first inputs."""
        super().compile(arms)
        if arms and not self._is_warm:
            self._is_warm = True
            self._ceiling = self.runners.submit(TRIAL_TIMEOUT_S, trial.copy_ceiling_gb_per_s)
            self.runners.submit(TRIAL_TIMEOUT_S, trial.prepare, arms[0].reference, arms[0].problem, "cuda")

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place]
    ) -> Iterator[CopyCeiling | CompileProgress | tuple[int, Outcome]]:
        """Raises MachineError where the GPU cannot even copy: no trial would do better."""
        self.compile(arms)
        if self._ceiling is not None:
            ceiling, self._ceiling = self._ceiling, None
            yield CopyCeiling(copied(ceiling))
        yield from super().screen(arms, places)


def copied(ceiling: Future[float]) -> float:
    """GB/s. Raises MachineError where the worker failed."""
    try:
        return ceiling.result()
    except (WorkerDied, RemoteError) as error:
        reason = str(error).strip().splitlines()[-1][:300]
        raise MachineError(f"the GPU cannot copy 512 MiB ({reason}): see what nvidia-smi says") from None
