"""How many warps of a config can be resident on one SM or CU: a bound from the arch's published limits.

A block is resident with all its warps, spread over the four SIMDs. Registers, shared memory, warps and blocks each
allow so many blocks, and the least decides. The limits and their sources are in :mod:`fp8tune_kernels.arches`.
"""

from __future__ import annotations

from fp8tune_kernels.arches import SIMDS, Arch

SCALAR_REGISTERS = 800
"""Of a SIMD of gfx90a, gfx942 and gfx950, given to waves by 16."""

_SCALAR_UNIT = 16


def resident_warps(arch: Arch, num_warps: int, registers: int, shared_bytes: int, scalar_registers: int = 0) -> int:
    """The most warps of blocks of ``num_warps`` on one SM or CU; 0 where not even one block fits.

    ``registers`` per thread (AMD: vector registers, accumulation registers included), ``scalar_registers`` per wave,
    ``shared_bytes`` per block.
    """
    of_simd = arch.registers_per_block // SIMDS // arch.warp_size
    taken_by_warp = max(_rounded_up(registers, arch.register_unit), arch.register_unit)
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
