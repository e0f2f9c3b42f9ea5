"""What a device and its host are like with nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8tune.measure import trial
from fp8tune.measure.arms import Arm, KernelArm, Work
from fp8tune.measure.host import host_us
from fp8tune.stats import block_value


@dataclass(frozen=True)
class EmptyKernel(Arm):
    """A kernel that does nothing."""

    @property
    def work(self) -> Work:
        """None, in so many bytes."""
        return Work("empty kernel", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """One program."""
        import torch
        import triton

        @triton.jit
        def empty(pointer):  # type: ignore[no-untyped-def]  # (1,)
            pass

        pointer = torch.zeros(1, device=torch_device)
        return lambda: empty[(1,)](pointer)


def idle_values(arm: KernelArm) -> dict[str, float]:
    """Name -> value, the unit in the name: of the host (launching ``arm``), the cache's flush and the copy. Needs the
    GPU."""
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    return {
        "host_enqueue_us": host_us(arm.launcher("cuda")),
        "cache_flush_us": block_value(trial.timed(lambda: driver.active.clear_cache(cache)).samples_us),
        "copy_ceiling_gb_per_s": trial.copy_ceiling_gb_per_s(),
    }
