"""Which GPUs are relied on, and what is measured of one before its first unit.

A GPU is looked at before its first unit and between units, while nothing of ours runs on it. One that is slowed down,
shared with others, broken, or far slower than it should be takes no units, and the database keeps why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from fp8tune.calibrate import record
from fp8tune.calibrate.record import arms_of, calibrate
from fp8tune.choose import calibration, reliance
from fp8tune.choose.calibration import Allowance, Known, Origin
from fp8tune.choose.levels import COPY, Level, levels
from fp8tune.choose.ranking import grouped
from fp8tune.errors import MachineError
from fp8tune.measure import health
from fp8tune.measure.engine import Backend
from fp8tune.measure.health import ErrorWatch, Health
from fp8tune.records import ComparableRows, Device, Kind, Problem, Status
from fp8tune.store.results import Store

COPY_S = 12.0
"""A copy before the first unit: 12 s where torch has not been imported since the machine began (H100), then 2 s."""

CHECK_S = 10.0
"""A config that is compiled with its edges and checked: 45 s for six on an H100, and the copy."""

LOOK_SHARE = 0.1
"""Of the time budget that looking at a GPU may take."""

AT_WORK_S = 120.0
"""A GPU that began its calibration so long ago may still be at it: that takes 44 s, and clocks of hosts may differ. One
that was killed keeps the others from theirs no longer."""

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
        Raises UntrustedError, with the reason in the database.
        """
        if not self.backend.times:
            return ()
        allowed_s = LOOK_SHARE * left_s
        begun = self.clock()
        self.remembered_gb_per_s = self.store.calibration(self.backend.device).get(COPY)
        is_checked = allowed_s >= COPY_S + CHECK_S
        if is_checked:
            # beside the copy, for the check and for a calibration
            self.backend.compile(arms_of(self.backend), with_edges=False)
        fault = self._fault(with_copy=allowed_s >= COPY_S)
        self.backend.finish_compiling()
        self._refuse(fault or (self._wrong() if is_checked else ""))
        self.store.readmit(self.backend.device)
        spent_s = self.clock() - begun
        return self.calibrated(left_s - spent_s, work_s, spent_s)

    def examine(self, problems: Collection[Problem] = ()) -> None:
        """Between units: is the GPU still well. ``problems``: of the unit that was done, those with wrong bytes, which
        others may have done too. Raises UntrustedError."""
        if self.backend.times:
            self._refuse(self._fault(with_copy=False) or self._slow_copy() or self._contradicted(problems))

    def _refuse(self, reason: str) -> None:
        if reason:
            self.store.exclude(self.backend.device, self.worker, reason)
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
        fault = reliance.copy_fault(device, found.copy_gb_per_s, self.store.calibrations(device))
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
        return reliance.copy_fault(device, newest, {**measured, device: before})

    def _wrong(self) -> str:
        """Whether a config that is right everywhere is wrong here: one, for each has to be compiled first, and without
        the edges, for it is the GPU that is in question."""
        worker, arm = self.backend.worker(), arms_of(self.backend)[0]
        try:
            outcome = worker.check(arm, with_edges=False)
        finally:
            worker.close()
        is_wrong = outcome.status is Status.WRONG
        return f"{arm.problem.kernel} {arm.config} is wrong here: {outcome.reason}" if is_wrong else ""

    def _contradicted(self, problems: Collection[Problem]) -> str:
        if not problems:
            return ""
        return reliance.check_fault(self.backend.device, self.store.evidence(problems=set(problems)))

    def calibrated(self, left_s: float, work_s: float, spent_s: float = 0.0) -> tuple[str, ...]:
        """Calibrate the GPU where the database does not know its noise, as far as that is worth its time.

        The arguments are those of :func:`fp8tune.choose.calibration.allowance`. Without finals to do it waits for some,
        for nothing else goes by it. Returns what the user should know.
        """
        self.waits_for_finals = not work_s
        if self.waits_for_finals:
            return ()
        known = self._known()
        is_coming = known.origin is Origin.NONE and self._is_mate_at_work()
        is_known = is_coming or known.origin is not Origin.NONE
        allowed = calibration.allowance(left_s, work_s, spent_s=spent_s, is_known=is_known)
        if not known.is_whole and allowed.processes > _processes(known):
            self._calibrate(allowed)
            known = self._known()
        return _notice(known, is_coming)

    def _calibrate(self, allowed: Allowance) -> None:
        until = self.clock() + allowed.seconds
        for _ in calibrate(
            self.store,
            self.backend,
            command="fp8tune calibrate",
            processes=allowed.processes,
            is_over=lambda: self.clock() > until,
        ):
            pass

    def _is_mate_at_work(self) -> bool:
        """Whether a GPU is being calibrated now that lends this one its calibration."""
        at_work = self.store.at_work(record.REQUEST, since=time.time() - AT_WORK_S)
        return any(calibration.are_mates(device, self.backend.device) for device in at_work)

    def _known(self) -> Known:
        device = self.backend.device
        return calibration.known_of(device, self.store.calibrations(device))


def prepare(store: Store, backend: Backend, left_s: float = math.inf, work_s: float = math.inf) -> tuple[str, ...]:
    """See :meth:`Guard.prepare`."""
    return Guard(store, backend).prepare(left_s, work_s)


def differing(store: Store) -> list[Level]:
    """Devices of one name that are not alike, of all that a database has: :func:`fp8tune.choose.levels.levels`."""
    problems = shared_problems(store)
    kinds = (Kind.MEASURED, Kind.SIMULATED)
    return levels(store.evidence(kinds=kinds, problems=problems) if problems else [], store.calibrations())


def level_line(level: Level, where: str = "") -> str:
    """``GPU 3fa2... on host a is 3.1 % (2.9 to 3.3 %) slower than the 7 others of its name (copy ceiling)``."""
    slower = level.slower.mean > 0
    ratios = [level.slower.ratio, *level.slower.interval]
    off, *ends = (abs(ratio - 1) if slower else abs(1 - ratio) for ratio in ratios)
    low, high = sorted(ends)
    others = f"the {level.mates} others" if level.mates > 1 else "the other"
    name = f"GPU {level.device.uuid_hash[:4]}... ({level.device.name}){f' on {where}' if where else ''}"
    than = f"{'slower' if slower else 'faster'} than {others} of its name"
    return f"{name} is {100 * off:.1f} % ({100 * low:.1f} to {100 * high:.1f} %) {than} ({level.sources})"


def shared_problems(store: Store) -> set[Problem]:
    """Problems that several devices of one name timed."""

    def question(pool: ComparableRows) -> tuple[Problem, str, Kind, str]:
        version = pool.version.source_hash if pool.version else ""
        return pool.problem, version, pool.kind, pool.device.name

    timed = [pool for pool in store.pools(kinds=(Kind.MEASURED, Kind.SIMULATED)) if pool.newest]
    together = [group for group in grouped(timed, question).values() if _are_several(pool.device for pool in group)]
    return {pool.problem for group in together for pool in group}


def _are_several(devices: Iterator[Device]) -> bool:
    return len({device.uuid_hash for device in devices if device.uuid_hash}) > 1


def _processes(known: Known) -> float:
    """How many processes a device's own calibration has; 0 without one."""
    whole = float(calibration.FULL)
    return known.values.get(calibration.COUNTED, whole) if known.origin is Origin.OWN else 0.0


def _notice(known: Known, is_coming: bool) -> tuple[str, ...]:
    if known.is_whole:
        return ()
    if known.origin is Origin.OWN:
        return (f"calibrated with {_processes(known):.0f} processes instead of {calibration.FULL}: more take too long",)
    if known.origin is Origin.MATES:
        what = "the calibration of GPUs of its name is taken"
    elif is_coming:
        what = "that of a GPU of its name is taken once it is measured"
    else:
        what = "the defaults are taken"
    return (f"not calibrated, {what}: its own takes longer than it saves",)
