"""Facts that the compiler states of a Triton kernel, from its binary (NVIDIA) or its assembly (AMD).

Every compilation gives its resources and the hash of its machine code.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from fp8tune.records import Facts
from fp8tune.replay.lazy import triton

# Sections of a binary that a GPU executes or reads. Constant bank 0 is filled by the launch; symbols, debug information
# and notes name paths and versions.
_EXECUTED = re.compile(r"(\.text|\.rodata|\.nv\.constant[1-9]\d*|\.nv\.global\.init)(?:\..*)?")

# Options of a launch that are not in these sections -> their value in versions of Triton without them.
_LAUNCH: Mapping[str, int] = {"num_warps": 0, "num_ctas": 1, "launch_cooperative_grid": 0, "launch_pdl": 0}


@dataclass(frozen=True)
class Resources:
    """Needs of one kernel, which the hash of its code covers. Registers are per thread, on AMD vector registers."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    scratch_bytes: int
    agprs: int = 0  # accumulation registers of AMD, which ``registers`` includes
    sgprs: int = 0  # scalar registers of AMD, per wave


def resources(kernel: Any) -> Resources:
    """Read what a compiled kernel needs. Raises RuntimeError where it says nothing."""
    shared = int(kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        return amd_resources(kernel.asm["amdgcn"], shared)
    with os.fdopen(os.memfd_create("cubin"), "wb") as file:  # no file: a worker may be killed at any time
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", f"/proc/self/fd/{file.fileno()}"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=[file.fileno()])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)  # spills go to the stack
    if usage is None:
        raise RuntimeError("cuobjdump printed no resource usage")
    return Resources(int(usage[1]), int(usage[2]), shared, int(usage[2]))


def amd_resources(assembly: str, shared_bytes: int) -> Resources:
    """Read the metadata at the end of AMDGCN assembly; it lacks the LDS that Triton's launch requests."""

    def value(field: str) -> int:
        return max(map(int, re.findall(rf"\.{field}:\s*(\d+)", assembly)), default=0)

    scratch = value("private_segment_fixed_size")
    spilled = value("vgpr_spill_count") + value("sgpr_spill_count")  # registers of 4 bytes
    spill_bytes = max(4 * spilled, scratch)  # scratch is what went to memory
    return Resources(value("vgpr_count"), spill_bytes, shared_bytes, scratch, value("agpr_count"), value("sgpr_count"))


def worst(kernels: Sequence[Resources], compile_s: float) -> Facts:
    """Return the facts of a launch from those of its kernels."""
    return Facts(
        registers=max((kernel.registers for kernel in kernels), default=None),
        spill_bytes=max((kernel.spill_bytes for kernel in kernels), default=None),
        shared_bytes=max((kernel.shared_bytes for kernel in kernels), default=None),
        compile_s=compile_s,
    )


def code_hash(kernels: Sequence[Any], needs: Sequence[Resources]) -> str:
    """Return 16 hex digits for the machine code of a launch: the same digits run the same code in the same way.

    It covers what the GPU executes, registers, shared and scratch memory, and the launch options of each kernel in
    order. Names, paths, debug information and versions change none of it. Empty for a binary of unknown format.
    """
    digest = hashlib.sha256()
    for kernel, need in zip(kernels, needs, strict=True):
        options = [int(getattr(kernel.metadata, name, default)) for name, default in _LAUNCH.items()]
        sections = executed(next(kernel.asm[name] for name in ("cubin", "hsaco") if name in kernel.asm))
        if not sections:
            return ""
        digest.update(repr((astuple(need), options, sections)).encode())
    return digest.hexdigest()[:16]


def executed(elf: bytes) -> list[tuple[str, bytes]]:
    """Return kind and content of what a GPU executes or reads as constants in an ELF file, sorted, without names."""
    try:
        (start,) = struct.unpack_from("<Q", elf, 40)
        size, count, names_index = struct.unpack_from("<3H", elf, 58)
        headers = [struct.unpack_from("<2I4Q", elf, start + size * index) for index in range(count)]
        names_offset = headers[names_index][4]
        sections = []
        for name, _, _, _, offset, length in headers:
            text = elf[names_offset + name : elf.index(0, names_offset + name)].decode()
            if kind := _EXECUTED.fullmatch(text):
                sections.append((kind[1], elf[offset : offset + length]))
    except (struct.error, IndexError, ValueError):  # no ELF file, or one that was cut off
        return []
    return sorted(sections)


@functools.cache
def ptxas_version(arch: str) -> str:
    """Return the version of NVIDIA's assembler for an arch, such as ``12.8.93``; empty for AMD."""
    if not arch.startswith("sm_"):
        return ""
    text = triton.backends.nvidia.compiler.get_ptxas_version(int(arch[3:]))
    version = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return version[1] if version else ""
