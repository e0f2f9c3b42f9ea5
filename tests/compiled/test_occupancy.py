"""Occupancy bounds: hand-computed, and what LLVM itself prints for the same kernels ("Occupancy: N" waves a SIMD)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.compiled.facts import resident_warps
from fp8tune_kernels.arches import ARCHES, SIMDS


@pytest.mark.parametrize(
    ("arch", "num_warps", "registers", "shared", "sgprs", "warps"),
    [
        ("sm_90", 8, 32, 0, 0, 64),  # full
        ("sm_90", 4, 255, 0, 0, 8),  # 512 registers of a thread on each of four schedulers: two warps
        ("sm_90", 4, 40, 100 * 1024, 0, 8),  # two blocks of 101 KiB in 228
        ("sm_90", 1, 32, 0, 0, 32),  # at most 32 blocks
        ("sm_120", 4, 32, 0, 0, 48),
        ("gfx942", 4, 67, 8192, 89, 28),  # LLVM: 7
        ("gfx90a", 4, 77, 8192, 0, 24),  # LLVM: 6
        ("gfx942", 4, 32, 0, 102, 28),  # LLVM: 7, for the scalar registers
        ("gfx942", 4, 376, 0, 0, 4),
        ("gfx942", 2, 32, 0, 0, 32),  # 16 work-groups
        ("gfx942", 8, 32, 40 * 1024, 0, 8),  # one in 64 KiB of LDS
        ("gfx950", 8, 32, 40 * 1024, 0, 32),  # four in 160 KiB
        ("gfx942", 4, 32, 65 * 1024, 0, 0),  # does not fit at all
    ],
)
def test_bounds(arch, num_warps, registers, shared, sgprs, warps):
    assert resident_warps(ARCHES[arch], num_warps, registers, shared, sgprs) == warps


@given(
    arch=st.sampled_from(sorted(ARCHES)),
    num_warps=st.sampled_from([1, 2, 4, 8, 16]),
    registers=st.integers(1, 512),
    shared=st.integers(0, 1 << 18),
)
def test_more_resources_never_allow_more_warps(arch, num_warps, registers, shared):
    known = ARCHES[arch]
    warps = resident_warps(known, num_warps, registers, shared)
    assert warps % num_warps == 0
    assert warps <= known.warps_per_simd * SIMDS
    assert resident_warps(known, num_warps, registers + 8, shared) <= warps
    assert resident_warps(known, num_warps, registers, shared + 1024) <= warps
