"""Which GPUs are relied on, and what is measured of one before its first unit.

A GPU is looked at before its first unit and between units, while nothing of ours runs on it. One that is slowed down,
shared with others, broken, or far slower than it should be takes no units, and the database keeps why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fp8tune.errors import MachineError
from fp8tune.fleet import health
from fp8tune.fleet.health import ErrorWatch, Health
from fp8tune.measure.engine import Backend
from fp8tune.records import Device, Status
from fp8tune.stats.calibration import COPY, are_peers, calibration_of, is_calibrated
from fp8tune.stats.means import median
from fp8tune.store.results import Store
from fp8tune.sweep.calibrate import arms_of, calibrate

COPY_S = 12.0
"""A copy before the first unit: 12 s where torch has not been imported since the machine began (H100), then 2 s."""

CHECK_S = 10.0
"""A config that is compiled with its edges and checked: 45 s for six on an H100, and the copy."""

LOOK_SHARE = 0.1
"""Of the time budget that looking at a GPU may take."""

CALIBRATION_S = 44.0
"""Time that a calibration takes on an H200 that had not run fp8tune before."""

CALIBRATION_SHARE = 0.05
"""Share of the time, with the look at the GPU before it, that a calibration may take under a time budget."""

LEAST_COPY = 0.9
"""Share of the expected copy rate that is far below it. Of 8 H100s and 8 H200s none was 0.7 % below the median."""

REQUEST = "health"


class UntrustedError(MachineError):
    """The GPU is not relied on; ``str()`` says why."""


@dataclass
class Guard:
    """Looks after one worker's GPU."""

    store: Store
    backend: Backend
    worker: str = ""
    """Who it is in ``fp8tune queue``."""
    clock: Callable[[], float] = time.monotonic
    read: Callable[..., Health] = health.read
    watch: ErrorWatch = field(default_factory=ErrorWatch)
    remembered_gb_per_s: float | None = None
    """The copy of this GPU before this worker."""
    waits_for_finals: bool = False
    """Whether :meth:`calibrated` is to be asked again: there was nothing with finals to do."""

    def prepare(self, left_s: float = math.inf, work_s: float = math.inf) -> tuple[str, ...]:
        """Before the first unit: is the GPU well, and what is its noise. Returns what the user should know.

        ``left_s``: seconds that the time budget leaves; ``work_s``: what there is to do with finals. Looking at the GPU
        may take a tenth of ``left_s``. With little of it nothing is compiled or launched: the first unit's sweep
        measures a copy beside its compilers, which :meth:`examine` goes by. Then :meth:`calibrated` calibrates it.
        Raises UntrustedError.
        """
        if not self.backend.times:
            return ()
        allowed_s = LOOK_SHARE * left_s
        begun = self.clock()
        self.remembered_gb_per_s = self.store.calibration(self.backend.device).get(COPY)
        is_checked = allowed_s >= COPY_S + CHECK_S
        if is_checked:
            # beside the copy, for the check and for a calibration
            self.backend.compile(arms_of(self.backend))
        fault = self._fault(with_copy=allowed_s >= COPY_S)
        self.backend.close()
        self._refuse(fault or (self._wrong() if is_checked else ""))
        spent_s = self.clock() - begun
        return self.calibrated(left_s - spent_s, work_s, spent_s)

    def examine(self) -> None:
        """Check between units that the GPU is still well.

        Raises:
            UntrustedError: It is not.
        """
        if self.backend.times:
            self._refuse(self._fault(with_copy=False) or self._slow_copy())

    def _refuse(self, reason: str) -> None:
        if reason:
            raise UntrustedError(reason)

    def _fault(self, *, with_copy: bool) -> str:
        device = self.backend.device
        found = self.read(self.backend, self.watch, with_copy=with_copy)
        if found.errors:
            return f"its driver reports {', '.join(found.errors)}"
        if found.slowed:
            return f"it is being slowed down: {', '.join(found.slowed)}"
        if found.other_processes:
            count = found.other_processes
            return f"{count} other process{'es use' if count > 1 else ' uses'} it"
        if found.copy_gb_per_s is None:
            return ""
        fault = self._copy_fault(found.copy_gb_per_s, self.store.calibrations(device))
        if not fault:
            sweep = self.store.begin_sweep(REQUEST, device, command="", commit="", timer=self.backend.timer, seed=0)
            self.store.record_ceiling(sweep, device, found.copy_gb_per_s)
            self.store.finish_sweep(sweep)
        return fault

    def _slow_copy(self) -> str:
        """Whether the copy that the last sweep measured is far below what it should be."""
        device = self.backend.device
        measured = self.store.calibrations(device)
        newest = measured.get(device, {}).get(COPY)
        before = {} if self.remembered_gb_per_s is None else {COPY: self.remembered_gb_per_s}
        return self._copy_fault(newest, {**measured, device: before})

    def _wrong(self) -> str:
        """Whether a config that is right everywhere is wrong here: one, for each has to be compiled first, and without
        the edges, for it is the GPU that is in question."""
        worker, arm = self.backend.worker(), arms_of(self.backend)[0]
        try:
            outcome = worker.check(arm)
        finally:
            worker.close()
        is_wrong = outcome.status is Status.WRONG
        return f"{arm.problem.kernel} {arm.config} is wrong here: {outcome.reason}" if is_wrong else ""

    def _copy_fault(self, copy_gb_per_s: float | None, measured: Mapping[Device, Mapping[str, float]]) -> str:
        """Explain that a copy is far below what this GPU, or others of its name, had; empty if it is not."""
        if copy_gb_per_s is None:
            return ""
        device = self.backend.device
        own = measured.get(device, {}).get(COPY)
        peers = [values[COPY] for of, values in measured.items() if COPY in values and are_peers(of, device)]
        for expected, whose in ((own, "it had before"), (median(peers) if peers else None, "GPUs of its name have")):
            if expected and copy_gb_per_s < LEAST_COPY * expected:
                share = f"{copy_gb_per_s / expected:.0%} of the {expected:,.0f} that {whose}"
                return f"a copy reaches {copy_gb_per_s:,.0f} GB/s, {share}"
        return ""

    def calibrated(self, left_s: float, work_s: float, spent_s: float = 0.0) -> tuple[str, ...]:
        """Calibrate the GPU if its noise is unknown and the time allows it, and return what the user should know.

        Args:
            left_s: Seconds that the time budget leaves; infinite without one.
            work_s: Seconds of finals that wait. Without any it waits for some, for nothing else uses a calibration.
            spent_s: Seconds that the look at the GPU took.
        """
        self.waits_for_finals = not work_s
        device = self.backend.device
        values, is_own = calibration_of(device, self.store.calibrations(device))
        if self.waits_for_finals or is_own:
            return ()
        if CALIBRATION_S + spent_s <= CALIBRATION_SHARE * min(left_s, work_s) or left_s == math.inf:
            for _ in calibrate(self.store, self.backend, command="fp8tune calibrate"):
                pass
            return ()
        what = "the calibration of GPUs of its name is taken" if is_calibrated(values) else "the defaults are taken"
        return (f"not calibrated, {what}: its own takes longer than it saves",)


def prepare(store: Store, backend: Backend, left_s: float = math.inf, work_s: float = math.inf) -> tuple[str, ...]:
    """Check and calibrate a GPU before its first unit, as :meth:`Guard.prepare` does."""
    return Guard(store, backend).prepare(left_s, work_s)
