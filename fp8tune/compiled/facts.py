"""What the compiler says of a compiled Triton kernel, from its binary (NVIDIA) or its assembly (AMD).

Resources come with every compilation; the assembly is read only where nothing will be timed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8tune.records import Code, Facts
from fp8tune_kernels.arches import REGISTER_UNIT, SIMDS, Arch

_CONVERSION = re.compile(r"\bcvt\.\S*(?:e4m3|e5m2)x2\.f32|\bv_cvt_(?:\w+_)?(?:pk|sr)_(?:fp8|bf8)_f32")

SCALAR_REGISTERS = 800  # of a SIMD of gfx90a, gfx942 and gfx950, given to waves by 16

_SCALAR_UNIT = 16


@dataclass(frozen=True)
class Resources:
    """What one kernel takes. Registers per thread (AMD: vector registers, those of ``agprs`` included)."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    scratch_bytes: int
    agprs: int = 0
    sgprs: int = 0  # per wave


def resources(kernel: Any) -> Resources:
    """Registers, spills, scratch and shared memory of a compiled kernel. Raises RuntimeError where it says nothing."""
    shared = int(kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        return amd_resources(kernel.asm["amdgcn"], shared)
    registers, stack = _cuda_resources(kernel.asm["cubin"])
    return Resources(registers, stack, shared, stack)


def amd_resources(assembly: str, shared_bytes: int) -> Resources:
    """From the metadata at the end of AMDGCN assembly; of the LDS it says nothing, Triton's launch asks for that."""

    def of(field: str) -> int:
        return max(map(int, re.findall(rf"\.{field}:\s*(\d+)", assembly)), default=0)

    scratch = of("private_segment_fixed_size")
    spilled = of("vgpr_spill_count") + of("sgpr_spill_count")  # registers of 4 bytes
    return Resources(
        registers=of("vgpr_count"),
        spill_bytes=max(4 * spilled, scratch),  # scratch is what went to memory
        shared_bytes=shared_bytes,
        scratch_bytes=scratch,
        agprs=of("agpr_count"),
        sgprs=of("sgpr_count"),
    )


def worst(found: Sequence[Resources], compile_s: float) -> Facts:
    """The facts of a launch from those of its kernels."""
    return Facts(
        registers=max((each.registers for each in found), default=None),
        spill_bytes=max((each.spill_bytes for each in found), default=None),
        shared_bytes=max((each.shared_bytes for each in found), default=None),
        compile_s=compile_s,
    )


def code(kernels: Sequence[Any], found: Sequence[Resources], num_warps: int, arch: Arch) -> Code:
    """What else the binaries of a launch say: of several kernels the least favourable. ``found``: their resources."""
    return Code(
        agprs=max(each.agprs for each in found),
        sgprs=max(each.sgprs for each in found),
        scratch_bytes=max(each.scratch_bytes for each in found),
        resident_warps=min(
            resident_warps(arch, num_warps, each.registers, each.shared_bytes, each.sgprs) for each in found
        ),
        fp8_conversions=sum(fp8_conversions(kernel.asm.get("amdgcn") or kernel.asm["ptx"]) for kernel in kernels),
    )


def resident_warps(arch: Arch, num_warps: int, registers: int, shared_bytes: int, scalar_registers: int = 0) -> int:
    """The most warps of blocks of ``num_warps`` on one SM or CU; 0 where not even one block fits.

    A bound from the limits of :mod:`fp8tune_kernels.arches`: a block is resident with all its warps, spread over the
    four SIMDs. Registers, shared memory, warps and blocks each allow so many blocks, and the least decides.
    ``registers`` per thread (AMD: vector registers, accumulation registers included), ``scalar_registers`` per wave,
    ``shared_bytes`` per block.
    """
    of_simd = arch.registers_per_block // SIMDS // arch.warp_size
    taken_by_warp = max(_rounded_up(registers, REGISTER_UNIT), REGISTER_UNIT)
    per_simd = min(arch.warps_per_simd, of_simd // taken_by_warp)
    if arch.backend == "hip" and scalar_registers:
        per_simd = min(per_simd, SCALAR_REGISTERS // _rounded_up(scalar_registers, _SCALAR_UNIT))
    blocks = per_simd * SIMDS // num_warps
    if num_warps > 1 or arch.backend == "cuda":  # a work-group of one wave needs no barrier, which is what limits them
        blocks = min(blocks, arch.blocks_per_multiprocessor)
    if taken := shared_bytes + arch.reserved_shared_bytes:
        blocks = min(blocks, arch.shared_bytes // taken)
    return blocks * num_warps


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def fp8_conversions(assembly: str) -> int:
    """Instructions that convert to FP8. None in a kernel that writes FP8 all the same: it computes the codes."""
    return len(_CONVERSION.findall(assembly))


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes (where spills go) as ``cuobjdump`` of Triton's wheel reads them."""
    from triton import knobs

    with os.fdopen(os.memfd_create("cubin"), "wb") as file:  # no file: a worker may be killed at any time
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", f"/proc/self/fd/{file.fileno()}"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=[file.fileno()])
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    if found is None:
        raise RuntimeError("cuobjdump printed no resource usage")
    return int(found[1]), int(found[2])
