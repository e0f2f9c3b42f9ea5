"""The GPU of this machine: configs compile in a pool of all cores and are checked and timed in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from fp8tune import alive
from fp8tune.errors import MachineError
from fp8tune.measure import trial
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.processes import ProcessBackend
from fp8tune.measure.device import clock_limits
from fp8tune.measure.engine import ComputeCeiling, CopyCeiling, Screened
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.records import Device, Kind


class GpuBackend(ProcessBackend):
    """Times with :mod:`fp8tune.measure.timing`. The first coarse passes also time a copy and a dense GEMM."""

    timer = "do_bench"
    times = True

    def __init__(self, device: Device, shared_limit: int | None, torch_device: str = "cuda") -> None:
        super().__init__(device, torch_device, Kind.MEASURED, shared_limit=shared_limit)
        self.limits = clock_limits() if torch_device == "cuda" else self.limits
        self._copy: Future[float] | None = None
        self._is_warm = torch_device != "cuda"
        self._gemm_dtypes: set[str] = set()
        """Input dtypes whose dense GEMM was timed, or cannot be."""

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
            yield CopyCeiling(copied(copy))
        dtypes = dict.fromkeys(arm.problem.in_dtype for arm in arms if arm.flops and self._torch_device == "cuda")
        for dtype in dtypes.keys() - self._gemm_dtypes:
            self._gemm_dtypes.add(dtype)
            with contextlib.suppress(WorkerDied, RemoteError):  # there is no GEMM of the dtype
                peak = alive.result(self.runners.submit(self.trial_timeout_s, trial.gemm_flop_per_s, dtype))
                yield ComputeCeiling(dtype, peak)
        yield from super().screen(arms, places, is_over)


def copied(copy: Future[float]) -> float:
    """Return the GB/s of a copy. Raises MachineError if the worker failed."""
    try:
        return alive.result(copy)
    except (WorkerDied, RemoteError) as error:
        reason = str(error).strip().splitlines()[-1][:300]
        raise MachineError(f"the GPU cannot copy 512 MiB ({reason}): see what nvidia-smi says") from None
