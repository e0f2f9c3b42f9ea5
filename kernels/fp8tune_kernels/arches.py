"""The GPU architectures kernels are tuned for, with the limits a config can break. Imports neither torch nor triton.

Sources. NVIDIA: CUDA C++ Programming Guide, appendix "Compute Capabilities", table "Technical Specifications per
Compute Capability" (warps, blocks, registers and shared memory of an SM), whose text adds that the system keeps 1 KiB
of shared memory of every block; registers are given to warps in units of 256 (CUDA Occupancy Calculator).
AMD: instruction set references of MI200 (gfx90a), CDNA3 (gfx942) and CDNA4 (gfx950), chapters on the vector registers
and the local data share; a CU has four SIMDs of 512 vector registers (128 KiB) each. What a wave is given of them:
LLVM's ``AMDGPUBaseInfo.cpp`` (``getMaxWavesPerEU``: 8 waves a SIMD since gfx90a, ``getVGPRAllocGranule``: 8 vector
registers, ``getTotalNumSGPRs`` and ``getSGPRAllocGranule``: 800 scalar registers by 16, ``getMaxWorkGroupsPerCU``: 16
work-groups of more than one wave).
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8tune_kernels.spec import DeviceLimits

__all__ = ["ARCHES", "DEFAULT_FP8_DTYPE", "MXFP8_GEMM_ARCHES", "SIMDS", "Arch", "default_fp8_dtype"]

KIB = 1024
SIMDS = 4
"""Of every SM and CU listed here: each schedules its own warps from its own registers."""

DEFAULT_FP8_DTYPE = "float8_e4m3fn"
"""The OCP format: NVIDIA's, gfx950's, and what runs where there is no GPU."""

MXFP8_GEMM_ARCHES = ("sm_100",)
"""Where ``torch._scaled_grouped_mm`` takes E8M0 scales; anywhere else an MXFP8 GEMM is emulated."""


@dataclass(frozen=True)
class Arch:
    """One architecture. Sizes in bytes; registers are 32 bits wide."""

    name: str
    backend: str
    """Triton's name of it: ``cuda`` or ``hip``."""
    warp_size: int
    shared_bytes_per_block: int
    """The most shared memory (LDS) one block can have, opt-in included."""
    registers_per_block: int
    """A block's share of the register file is at most this; it is also the whole file of an SM or CU."""
    multiprocessors: int
    """SMs or CUs of the part named beside the entry; the running device knows its own."""
    warps_per_simd: int
    """Warps (waves) that can be resident on each of the four SIMDs (NVIDIA: sub-partitions) of an SM or CU."""
    blocks_per_multiprocessor: int
    """Blocks of more than one warp that can be resident on an SM or CU."""
    register_unit: int
    """Registers a thread is given a multiple of."""
    shared_bytes: int
    """Shared memory (LDS) of an SM or CU."""
    reserved_shared_bytes: int = 0
    """Of which the system keeps this much for every block."""
    fp8_dtype: str = DEFAULT_FP8_DTYPE
    """The 4-bit-exponent format the matrix units take; emulated on arches that have none."""

    def limits(self, multiprocessors: int | None = None) -> DeviceLimits:
        """What :attr:`KernelSpec.invalid` asks for; ``multiprocessors`` of the running device where it is known."""
        return DeviceLimits(
            arch=self.name,
            warp_size=self.warp_size,
            shared_bytes_per_block=self.shared_bytes_per_block,
            registers_per_block=self.registers_per_block,
            multiprocessors=self.multiprocessors if multiprocessors is None else multiprocessors,
        )


def _nvidia(name: str, shared_kib: int, multiprocessors: int, warps: int, blocks: int) -> Arch:
    """``shared_kib``: of a block; an SM has the 1 KiB more that the system keeps."""
    return Arch(
        name=name,
        backend="cuda",
        warp_size=32,
        shared_bytes_per_block=shared_kib * KIB,
        registers_per_block=64 * KIB,
        multiprocessors=multiprocessors,
        warps_per_simd=warps // SIMDS,
        blocks_per_multiprocessor=blocks,
        register_unit=8,  # 256 a warp
        shared_bytes=(shared_kib + 1) * KIB,
        reserved_shared_bytes=KIB,
    )


def _amd(name: str, shared_kib: int, multiprocessors: int, fp8_dtype: str) -> Arch:
    return Arch(
        name=name,
        backend="hip",
        warp_size=64,
        shared_bytes_per_block=shared_kib * KIB,
        registers_per_block=128 * KIB,
        multiprocessors=multiprocessors,
        warps_per_simd=8,
        blocks_per_multiprocessor=16,
        register_unit=8,
        shared_bytes=shared_kib * KIB,
        fp8_dtype=fp8_dtype,
    )


ARCHES = {
    arch.name: arch
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
