"""The GPU of this machine: configs compile in a pool of all cores and are checked and timed in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from fp8tune import alive
from fp8tune.errors import MachineError
from fp8tune.measure import trial
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.processes import TRIAL_TIMEOUT_S, ProcessBackend
from fp8tune.measure.engine import ComputeCeiling, CopyCeiling, Screened, never
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.records import Device, Kind


class GpuBackend(ProcessBackend):
    """Times with :mod:`fp8tune.measure.timing`. The first screens also measure what a copy and a dense GEMM reach."""

    kind = Kind.MEASURED
    timer = "do_bench"
    times = True

    def __init__(
        self, device: Device, shared_limit: int | None, torch_device: str = "cuda", timeout_s: float = TRIAL_TIMEOUT_S
    ) -> None:
        super().__init__(device, torch_device, shared_limit=shared_limit, trial_timeout_s=timeout_s)
        self._ceiling: Future[float] | None = None
        self._is_warm = torch_device != "cuda"
        self._with_peak: set[str] = set()
        """Input dtypes whose dense GEMM was timed, or cannot be."""

    def compile(self, arms: Sequence[KernelArm], *, with_edges: bool = True) -> None:
        """And start what takes seconds beside the compilers: the GPU context, the copy ceiling, the first inputs."""
        super().compile(arms, with_edges=with_edges)
        if arms and not self._is_warm:
            self._is_warm = True
            self._ceiling = self.runners.submit(TRIAL_TIMEOUT_S, trial.copy_ceiling_gb_per_s)
            self.runners.submit(TRIAL_TIMEOUT_S, trial.prepare, arms[0].reference, arms[0].problem, "cuda")

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = never
    ) -> Iterator[Screened]:
        """Raises MachineError where the GPU cannot even copy: no trial would do better."""
        self.compile(arms)
        if self._ceiling is not None:
            ceiling, self._ceiling = self._ceiling, None
            yield CopyCeiling(copied(ceiling))
        yield from self._compute_ceilings(arms)
        yield from super().screen(arms, places, is_over)

    def copy_gb_per_s(self) -> float:
        """Of a fresh process, which is gone afterwards: its context would disturb the clock."""
        begun, self._ceiling = self._ceiling, None  # where compilers were started, with them
        found = copied(begun or self.runners.submit(TRIAL_TIMEOUT_S, trial.copy_ceiling_gb_per_s))
        self._end_runners()
        return found

    def _compute_ceilings(self, arms: Sequence[KernelArm]) -> Iterator[ComputeCeiling]:
        """Once for each dtype of kernels that declare their operations; none where there is no GEMM of the dtype."""
        dtypes = dict.fromkeys(arm.problem.in_dtype for arm in arms if arm.flops and self._torch_device == "cuda")
        for dtype in dtypes.keys() - self._with_peak:
            self._with_peak.add(dtype)
            with contextlib.suppress(WorkerDied, RemoteError):
                peak = alive.result(self.runners.submit(TRIAL_TIMEOUT_S, trial.gemm_flop_per_s, dtype))
                yield ComputeCeiling(dtype, peak)


def copied(ceiling: Future[float]) -> float:
    """GB/s. Raises MachineError where the worker failed."""
    try:
        return alive.result(ceiling)
    except (WorkerDied, RemoteError) as error:
        reason = str(error).strip().splitlines()[-1][:300]
        raise MachineError(f"the GPU cannot copy 512 MiB ({reason}): see what nvidia-smi says") from None
