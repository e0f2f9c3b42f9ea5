"""The GPU architectures kernels are tuned for, with the limits a config can break. Imports neither torch nor triton.

Sources. NVIDIA: CUDA C++ Programming Guide, appendix "Compute Capabilities" (an SM's warps, blocks, registers and
shared memory, of which the system keeps 1 KiB a block); CUDA Occupancy Calculator (registers by 256 a warp).
AMD: instruction set references of MI200, CDNA3 and CDNA4 (four SIMDs a CU, 512 vector registers each; LDS); LLVM's
``AMDGPUBaseInfo.cpp`` (``getMaxWavesPerEU``: 8 waves a SIMD, ``getVGPRAllocGranule``: 8, ``getTotalNumSGPRs`` and
``getSGPRAllocGranule``: 800 by 16, ``getMaxWorkGroupsPerCU``: 16 work-groups of more than one wave).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .spec import DeviceLimits

KIB = 1024
SIMDS = 4
"""Of every SM and CU listed here: each schedules its own warps from its own registers."""
REGISTER_UNIT = 8
"""Registers a thread is given a multiple of."""

DEFAULT_FP8_DTYPE = "float8_e4m3fn"
"""The OCP format: NVIDIA's, gfx950's, and what runs where there is no GPU."""

MXFP8_GEMM_ARCHES = ("sm_100",)
"""Where ``torch._scaled_grouped_mm`` takes E8M0 scales; anywhere else an MXFP8 GEMM is emulated."""


@dataclass(frozen=True, kw_only=True)
class Arch(DeviceLimits):
    """One architecture, with the multiprocessors of the part named beside its entry.

    A block's share of the registers, 32 bits each, can be the whole file of an SM or CU.
    """

    backend: str
    """Triton's name of it: ``cuda`` or ``hip``."""
    warps_per_simd: int
    """Warps (waves) that can be resident on each of the four SIMDs (NVIDIA: sub-partitions) of an SM or CU."""
    blocks_per_multiprocessor: int
    """Blocks of more than one warp that can be resident on an SM or CU."""
    shared_bytes: int
    """Shared memory (LDS) of an SM or CU."""
    reserved_shared_bytes: int = 0
    """Of which the system keeps this much for every block."""
    fp8_dtype: str = DEFAULT_FP8_DTYPE
    """The 4-bit-exponent format the matrix units take; emulated on arches that have none."""

    def limits(self, multiprocessors: int | None = None) -> DeviceLimits:
        """Return the limits for :attr:`KernelSpec.invalid`; ``multiprocessors`` of the running device if known."""
        return self if multiprocessors is None else replace(self, multiprocessors=multiprocessors)


def _nvidia(name: str, shared_kib: int, multiprocessors: int, warps: int, blocks: int) -> Arch:
    """``shared_kib``: of a block; an SM has the 1 KiB more that the system keeps."""
    return Arch(
        arch=name,
        backend="cuda",
        warp_size=32,
        shared_bytes_per_block=shared_kib * KIB,
        registers_per_block=64 * KIB,
        multiprocessors=multiprocessors,
        warps_per_simd=warps // SIMDS,
        blocks_per_multiprocessor=blocks,
        shared_bytes=(shared_kib + 1) * KIB,
        reserved_shared_bytes=KIB,
    )


def _amd(name: str, shared_kib: int, multiprocessors: int, fp8_dtype: str) -> Arch:
    return Arch(
        arch=name,
        backend="hip",
        warp_size=64,
        shared_bytes_per_block=shared_kib * KIB,
        registers_per_block=128 * KIB,
        multiprocessors=multiprocessors,
        warps_per_simd=8,
        blocks_per_multiprocessor=16,
        shared_bytes=shared_kib * KIB,
        fp8_dtype=fp8_dtype,
    )


ARCHES = {
    arch.arch: arch
    for arch in (
        _nvidia("sm_80", 163, 108, 64, 32),  # A100; no FP8 units, casts are emulated
        _nvidia("sm_89", 99, 142, 48, 24),  # L40S
        _nvidia("sm_90", 227, 132, 64, 32),  # H100 SXM, H200
        _nvidia("sm_100", 227, 148, 64, 32),  # B200
        _nvidia("sm_120", 99, 170, 48, 24),  # RTX 5090
        _amd("gfx90a", 64, 104, "float8_e4m3fnuz"),  # MI250 (one die); no FP8 units, casts are emulated
        _amd("gfx942", 64, 304, "float8_e4m3fnuz"),  # MI300X
        _amd("gfx950", 160, 256, DEFAULT_FP8_DTYPE),  # MI355X
    )
}
"""Architecture name -> its record."""


def default_fp8_dtype(arch: str) -> str:
    """The FP8 dtype a wrapper quantizes to unless told otherwise; the OCP format for an arch nobody listed."""
    return ARCHES[arch].fp8_dtype if arch in ARCHES else DEFAULT_FP8_DTYPE
