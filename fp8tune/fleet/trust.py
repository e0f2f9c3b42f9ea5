"""Which GPUs are relied on, and what is measured of one before its first unit."""

from __future__ import annotations

from fp8tune.calibrate.record import calibrate
from fp8tune.choose.calibration import is_calibrated
from fp8tune.measure.engine import Backend
from fp8tune.store.results import Store

CALIBRATION_S = 45.0
"""What a calibration takes: 20 fresh processes; 44 s on an H200 that had not run fp8tune before."""

MOST_OF_BUDGET = 0.1
"""A calibration that would take a larger share of the time that is left is skipped."""


def prepare(store: Store, backend: Backend, left_s: float) -> None:
    """Calibrate this GPU where the database has no calibration of it, unless the time is better spent on units.

    ``left_s``: seconds that the time budget leaves, infinite without one.
    """
    if is_calibrated(store.calibration(backend.device)) or left_s * MOST_OF_BUDGET < CALIBRATION_S:
        return
    for _ in calibrate(store, backend):
        pass
