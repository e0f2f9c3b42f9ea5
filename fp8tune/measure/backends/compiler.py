"""The compiler alone, for an arch that need not be here: nothing runs."""

from __future__ import annotations

import os

from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import device
from fp8tune.measure.backends.processes import ProcessBackend
from fp8tune.records import Device, Kind
from fp8tune_kernels.arches import ARCHES


class CompilerBackend(ProcessBackend):
    """Compiles for ``arch`` and reads the machine code.

    Raises UsageError for an arch that Triton cannot compile for, MachineError if it cannot compile at all.
    """

    kind = Kind.STATIC

    def __init__(self, arch: str) -> None:
        if arch not in ARCHES:
            raise UsageError(f"cannot compile for {arch}: known are {', '.join(ARCHES)}")
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise MachineError("TRITON_INTERPRET=1 is set, and Triton then cannot compile: unset it")
        compiler = Device(arch=arch, triton=device.software().triton)
        super().__init__(compiler, "meta", runners=0, shared_limit=ARCHES[arch].shared_bytes_per_block)
