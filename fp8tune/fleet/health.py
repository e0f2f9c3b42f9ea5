"""Whether a GPU can be relied on now: what its driver says of it, and what a copy reaches. No GPU context is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from fp8tune.measure import device, trial
from fp8tune.measure.engine import Backend
from fp8tune.records import Kind

LINGERS_S = 10.0
"""A process that is still there after so long is no worker of ours that is just ending, and clocks that are still held
down are not those of the load before."""

ASKED_EVERY_S = 0.5

XIDS = {
    48: "an uncorrectable memory error",
    64: "a memory row that could not be replaced",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    119: "its firmware did not answer",
    120: "a firmware error",
}
"""NVIDIA's numbers of errors that are the hardware's ("XID Errors", docs.nvidia.com/deploy/xid-errors). The common
13, 31, 43 and 45 are an application's: kernels that are tried may well cause them."""


@dataclass(frozen=True)
class Health:
    """What was read. Empty, or None, where it cannot be read or all is well."""

    slowed: tuple[str, ...] = ()
    """Why the clocks are held down: :func:`fp8tune.measure.device.slowdowns`."""
    other_processes: int | None = None
    """That compute on the device beside ours."""
    errors: tuple[str, ...] = ()
    """Of memory and bus."""
    copy_gb_per_s: float | None = None
    """What a copy reaches now; None where it was not measured."""


class ErrorWatch:
    """Errors that the driver reports or counts from now on, and memory that waits to be mended."""

    def __init__(self, nvml: Any = pynvml) -> None:
        self._nvml, self._events = nvml, None
        self._handle = device.nvidia_handle(nvml=nvml)
        self._counted = self._uncorrected()
        if self._handle is not None:
            try:
                events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._events = events
            except nvml.NVMLError:  # not supported here, or not permitted to this user
                pass

    def errors(self) -> tuple[str, ...]:
        """In words, each once."""
        if self._handle is None:
            return ()
        return tuple(dict.fromkeys((*self._memory(), *self._xids())))

    def _memory(self) -> list[str]:
        nvml, handle, found = self._nvml, self._handle, []
        if count := max(0, self._uncorrected() - self._counted):
            found.append(f"{count} uncorrectable memory error{'s' if count > 1 else ''} since this began")
        _, _, is_pending, has_failed = _readable(lambda: nvml.nvmlDeviceGetRemappedRows(handle), nvml) or (0, 0, 0, 0)
        if has_failed:
            found.append("a memory row that could not be replaced")
        if is_pending:
            found.append("a memory row that waits for a reset to be replaced")
        return found

    def _uncorrected(self) -> int:
        nvml = self._nvml
        if self._handle is None:
            return 0
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(_readable(lambda: nvml.nvmlDeviceGetTotalEccErrors(self._handle, *kinds), nvml) or 0)

    def _xids(self) -> list[str]:
        nvml, found = self._nvml, []
        while self._events is not None:
            try:
                data = nvml.nvmlEventSetWait(self._events, 0)
            except nvml.NVMLError:  # nothing more, mostly
                break
            number = int(data.eventData)
            if number in XIDS:
                found.append(f"Xid {number}, {XIDS[number]}")
        return found


def read(
    backend: Backend,
    watch: ErrorWatch,
    *,
    with_copy: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Health:
    """The health of a back end's device, while nothing of ours runs on it. Raises MachineError where it cannot copy."""
    with contextlib.closing(backend.worker()) as worker:
        copy = worker.run(trial.copy_ceiling_gb_per_s) if with_copy else None
    if backend.kind is not Kind.MEASURED:
        return Health(copy_gb_per_s=copy)
    until = clock() + LINGERS_S
    while True:
        others, slowed = device.other_processes(), device.slowdowns(backend.device.arch, device.telemetry())
        if not (others or slowed) or clock() >= until:
            return Health(slowed, others, watch.errors(), copy)
        sleep(ASKED_EVERY_S)


def _readable(read: Callable[[], Any], nvml: Any) -> Any:
    try:
        return read()
    except nvml.NVMLError:
        return None
