"""Facts of compiled kernels: resources from the compiler's text, and the hash of the machine code."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fp8tune.compiled import facts


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
