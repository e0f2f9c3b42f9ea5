from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.compiled.instructions import Mix, fp8_conversions, hot_loops

PTX = """
.version 8.7
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
{
	.reg .pred 	%p<9>;
	@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ]; // before the loops
$L__BB0_1: // the maxima
	@!%p2 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 0 ];
	ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 16 ];
	st.shared.v2.b32 [ %r9 + 0 ], { %r2, %r3 };
	@%p3 bra 	$L__BB0_1;
$L__BB0_2:
	cp.async.cg.shared.global [ %r10 + 0 ], [ %rd3 + 0 ], 0x10, %r11;
	ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
	ld.shared.b16 %rs1, [%r5];
	cvt.rn.satfinite.e4m3x2.f32 	%rs2, %f1, %f2;
	st.global.v4.b32 [ %rd4 + 0 ], { %r6, %r6, %r6, %r6 };
	@%p4 bra 	$L__BB0_2;
$L__BB0_3: // edges, a byte at a time
	ld.global.b8 %rs3, [%rd5];
	st.global.b8 [%rd6], %rs3;
	@%p5 bra 	$L__BB0_3;
	ret;
}
"""

AMDGCN = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	buffer_load_dword v9, v9, s[4:7], 0 offen
.LBB0_6:                                ; =>This Loop Header: Depth=1
	s_mov_b32 s0, 0
.LBB0_7:                                ;   Parent Loop BB0_6 Depth=1
	buffer_load_dwordx4 v[2:5], v44, s[52:55], 0 offen
	global_load_ushort v6, v7, s[2:3]
	buffer_load_dword v8, off, s[0:3], 0 offset:4 ; 4-byte Folded Reload
	ds_write_b128 v1, v[2:5]
	v_cvt_pk_fp8_f32 v1, v2, v3
	global_store_byte v1, v2, s[2:3]
	s_cbranch_scc1 .LBB0_7
	s_cbranch_execnz .LBB0_6
	s_endpgm
"""


def test_the_hot_loops_of_ptx_are_the_wide_ones():
    assert hot_loops(PTX) == [
        Mix(instructions=4, loads=2, load_bytes=32, shared=1),
        Mix(instructions=6, loads=1, load_bytes=16, stores=1, store_bytes=16, shared=2),
    ]


PANELS = """
$L__BB0_1: // a turn: the tile of a ticket
	ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 0 ];
	@%p1 bra 	$L__BB0_5;
$L__BB0_2: // until its panel is complete
	atom.global.acquire.gpu.add.u32 %r1, [ %rd1 ], 0;
	@%p2 bra 	$L__BB0_2;
	st.global.v4.b32 [ %rd4 + 0 ], { %r6, %r6, %r6, %r6 };
$L__BB0_3: // edges, a byte at a time
	ld.global.b8 %rs3, [%rd5];
	st.global.b8 [%rd6], %rs3;
	@%p3 bra 	$L__BB0_3;
	@%p4 bra 	$L__BB0_1; // the next ticket, from the cast
$L__BB0_5:
	red.global.max.s32 [ %rd7 ], %r2;
	@%p5 bra 	$L__BB0_1; // and from the maxima
	ret;
"""


def test_a_loop_counts_what_it_does_itself_and_not_the_loops_inside_it():
    """The loop at the edges was once taken for the hot one of a kernel that works on panels."""
    (turn,) = hot_loops(PANELS)
    assert turn == Mix(instructions=6, loads=1, load_bytes=16, stores=1, store_bytes=16)


def test_amd_assembly_counts_its_innermost_loop_without_spills():
    assert hot_loops(AMDGCN) == [Mix(6, loads=2, load_bytes=18, stores=1, store_bytes=1, shared=1)]


def test_a_kernel_without_loops_is_hot_as_a_whole():
    assert hot_loops("\tld.global.v2.b64 {%rd1, %rd2}, [%rd3];\n\tst.global.b16 [%rd4], %rs1;\n\tret;") == [
        Mix(instructions=3, loads=1, load_bytes=16, stores=1, store_bytes=2)
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;", 1),
        ("cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2;", 1),
        ("\tv_cvt_pk_fp8_f32 v1, v2, v3\n\tv_cvt_pk_bf8_f32 v1, v2, v3", 2),
        ("\tv_cvt_scalef32_pk_fp8_f32 v1, v2, v3, v4", 1),
        ("cvt.rn.f16x2.e4m3x2 %r1, %rs1;\n\tv_cvt_f32_fp8 v1, v2", 0),
        ("cvt.f32.bf16 %f1, %rs1;", 0),
    ],
)
def test_only_conversions_to_fp8_count(text, found):
    assert fp8_conversions(text) == found


@given(st.lists(st.sampled_from([*PTX.splitlines(), *AMDGCN.splitlines(), "}", ":", "bra", "@%p1", "; x"])))
def test_any_text_gives_counts(lines):
    for loop in hot_loops("\n".join(lines)):
        assert loop.loads + loop.stores <= loop.instructions
        assert loop.load_bytes <= 16 * loop.loads
