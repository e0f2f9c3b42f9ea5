"""Triton's interpreter: bytes are checked in as many processes as there are cores, and nothing is timed."""

from __future__ import annotations

from fp8tune.measure import device
from fp8tune.measure.backends.processes import TRIAL_TIMEOUT_S, ProcessBackend
from fp8tune.measure.worker import usable_cores
from fp8tune.records import Kind


class InterpreterBackend(ProcessBackend):
    """Checks outputs; its times would say nothing about a GPU."""

    kind = Kind.INTERPRETER

    def __init__(self, trial_timeout_s: float = TRIAL_TIMEOUT_S) -> None:
        super().__init__(device.interpreter_device(), "cpu", runners=usable_cores(), trial_timeout_s=trial_timeout_s)
