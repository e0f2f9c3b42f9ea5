"""Facts of compiled kernels: resources from the compiler's text, what is stored of them, and occupancy bounds."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from database_rows import begin, config, row, stored_results
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.compiled import facts
from fp8tune.records import Code, Device, Facts, Kind
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES, SIMDS

GFX950 = Device("gfx950", triton="3.7.1")
GOOD = Code(resident_warps=32, fp8_conversions=16)


def test_amd_resources_come_from_the_metadata():
    text = """
      - .agpr_count:     12
        .private_segment_fixed_size: 40
        .sgpr_count:     89
        .sgpr_spill_count: 3
        .vgpr_count:     316
        .vgpr_spill_count: 2
    """
    assert facts.amd_resources(text, 8192) == facts.Resources(
        registers=316, spill_bytes=40, shared_bytes=8192, scratch_bytes=40, agprs=12, sgprs=89
    )
    spilled_to_registers = text.replace("fixed_size: 40", "fixed_size: 0")
    assert facts.amd_resources(spilled_to_registers, 0).spill_bytes == 4 * (3 + 2)


@pytest.mark.parametrize(
    ("assembly", "count"),
    [
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;\n\tcvt.rn.bf16x2.f32 %r1, %f1, %f2;", 1),
        ("v_cvt_pk_fp8_f32 v0, v1, v2\n\tv_cvt_scalef32_pk_bf8_f32 v0, v1\n\tv_cvt_sr_fp8_f32 v0, v1", 3),
        ("v_cvt_f32_fp8 v0, v1", 0),
    ],
)
def test_conversions_to_fp8_are_counted(assembly, count):
    assert facts.fp8_conversions(assembly) == count


Sections = dict[str, bytes]


def elf(sections: Sections) -> bytes:
    """An ELF file as compilers write it: header, contents, names, section headers."""
    names, contents, headers = b"\0.shstrtab\0", b"", [(0,) * 6]
    for name, content in sections.items():
        headers.append((len(names), 1, 0, 0, 64 + len(contents), len(content)))
        names, contents = names + name.encode() + b"\0", contents + content
    headers.append((1, 3, 0, 0, 64 + len(contents), len(names)))
    start = 64 + len(contents) + len(names)
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q", start)
    header = header.ljust(58, b"\0") + struct.pack("<3H", 64, len(headers), len(headers) - 1)
    return header + contents + names + b"".join(struct.pack("<2I4Q", *values).ljust(64, b"\0") for values in headers)


def kernel(sections: Sections, **metadata: int) -> Any:
    options = {"num_warps": 4, "num_ctas": 1} | metadata
    return SimpleNamespace(asm={"cubin": elf(sections)}, metadata=SimpleNamespace(**options))


NEED = facts.Resources(registers=40, spill_bytes=0, shared_bytes=4096, scratch_bytes=0)
CONTENTS = st.binary(min_size=1, max_size=40)


@given(CONTENTS, CONTENTS, CONTENTS, st.sampled_from([".debug_line", ".nv.info.a", ".symtab", ".nv.constant0.a"]))
def test_the_hash_is_of_what_the_gpu_executes(code: bytes, constants: bytes, note: bytes, name: str) -> None:
    def code_hash(sections: Sections, need: facts.Resources = NEED, **metadata: int) -> str:
        return facts.code_hash([kernel(sections, **metadata)], [need])

    sections = {".text.a": code, ".nv.constant2.a": constants}
    same = code_hash(sections)
    assert re.fullmatch("[0-9a-f]{16}", same)
    renamed = {name: note, ".nv.constant2.renamed": constants, ".text.renamed": code}
    assert code_hash(renamed) == same  # names, debug information, the order in the file
    assert code_hash(sections, launch_pdl=0, num_stages=7) == same  # what other versions of Triton state besides
    bit = bytes([code[0] ^ 1]) + code[1:]
    different = {
        code_hash(sections | {".text.a": bit}),
        code_hash(sections | {".text.a": code + b"0"}),
        code_hash(sections | {".nv.constant2.a": constants + b"0"}),
        code_hash(sections | {".text.b": code}),
        code_hash(sections, replace(NEED, registers=41)),
        code_hash(sections, replace(NEED, shared_bytes=8192)),
        code_hash(sections, num_warps=8),
        code_hash(sections, num_ctas=2),
        code_hash(sections, launch_pdl=1),
        facts.code_hash([kernel(sections)] * 2, [NEED] * 2),
    }
    assert len(different - {same}) == 10


@given(st.binary(max_size=80), st.integers(0, 240))
def test_what_is_no_elf_file_has_no_hash(content: bytes, end: int) -> None:
    for binary in (content, elf({".text.a": b"code"})[:end], elf({".debug_line": b"code"})):
        unreadable = SimpleNamespace(asm={"cubin": binary}, metadata=SimpleNamespace(num_warps=4, num_ctas=1))
        assert facts.code_hash([unreadable], [NEED]) == ""


def stored(path: Path) -> Store:
    return Store.open(str(path), create=True)


def test_what_the_machine_code_does_is_kept_and_merged(tmp_path):
    compiled_row = row(None, device=GFX950, kind=Kind.STATIC, facts=Facts(64, 0, 4096, 0.5, GOOD))
    with stored(tmp_path / "a.db") as store:
        store.add(begin(store, GFX950), compiled_row)
        store.add(begin(store, GFX950), row(None, config=config(64), device=GFX950, kind=Kind.STATIC))
        codes = {item.config: item.facts.code for item in stored_results(store)}
        assert codes == {config(): GOOD, config(64): None}
        assert [item.outcome.facts.code for item in store.rows()] == [GOOD, None]
        with stored(tmp_path / "b.db") as second:
            second.merge(store)
            assert {item.config: item.facts.code for item in stored_results(second)} == codes


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
def test_bounds_are_computed_by_hand_or_printed_by_llvm(arch, num_warps, registers, shared, sgprs, warps):
    assert facts.resident_warps(ARCHES[arch], num_warps, registers, shared, sgprs) == warps


@given(
    arch=st.sampled_from(sorted(ARCHES)),
    num_warps=st.sampled_from([1, 2, 4, 8, 16]),
    registers=st.integers(1, 512),
    shared=st.integers(0, 1 << 18),
)
def test_more_resources_never_allow_more_warps(arch, num_warps, registers, shared):
    known = ARCHES[arch]
    warps = facts.resident_warps(known, num_warps, registers, shared)
    assert warps % num_warps == 0
    assert warps <= known.warps_per_simd * SIMDS
    assert facts.resident_warps(known, num_warps, registers + 8, shared) <= warps
    assert facts.resident_warps(known, num_warps, registers, shared + 1024) <= warps
