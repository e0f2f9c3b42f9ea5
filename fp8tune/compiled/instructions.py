"""What the text of a compiled kernel (PTX, or AMDGCN assembly) does in its hot loops.

Most of the time goes to loops that load a tile each time round. Of each counts what it does itself, without the loops
inside it: those of a loop of panels wait, or handle edges. A loop that loads far less in one iteration than the widest
one is left out; a kernel without loops is hot as a whole. Counts are per thread, or per lane.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

EDGE_SHARE = 0.25
"""A loop that loads less than this share of what the widest loads in an iteration is not hot."""


@dataclass(frozen=True)
class Mix:
    """One iteration of one hot loop."""

    instructions: int = 0
    loads: int = 0
    load_bytes: int = 0
    """Loaded from global memory, to registers or straight to shared memory."""
    stores: int = 0
    store_bytes: int = 0
    shared: int = 0
    """Instructions that read or write shared memory (LDS), or pass values through its crossbar."""


@dataclass(frozen=True)
class _Instruction:
    opcode: str
    operands: str


_PTX_TYPE = re.compile(r"[busf](8|16|32|64|128)$")
_PTX_PREDICATE = re.compile(r"^@!?%\w+\s+")
_AMD_ACCESS = re.compile(
    r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(?:[us])?(byte|short|dword|b)(?:x([234])|(\d+))?"
)
_SHARED = re.compile(r"(?:ld|st)\.shared|ldmatrix|stmatrix|ds_")
_AMD_BYTES = {"byte": 1, "short": 2, "dword": 4}
_CONVERSION = re.compile(r"\bcvt\.\S*(?:e4m3|e5m2)x2\.f32|\bv_cvt_(?:\w+_)?(?:pk|sr)_(?:fp8|bf8)_f32")


def hot_loops(text: str) -> list[Mix]:
    """The hot loops of one kernel, in the order of the text."""
    lines = list(_lines(text))
    loops = [_mix(own) for own in _own_lines(lines)] or [_mix(lines)]
    widest = max(loop.load_bytes for loop in loops)
    return [loop for loop in loops if loop.load_bytes >= EDGE_SHARE * widest]


def fp8_conversions(text: str) -> int:
    """Instructions that convert to FP8. None in a kernel that writes FP8 all the same: it computes the codes."""
    return len(_CONVERSION.findall(text))


def _lines(text: str) -> Iterator[str | _Instruction]:
    """Labels (as text) and instructions; no directives, no comments, no spills (they are counted elsewhere)."""
    comment = ";" if ".amdgcn_target" in text else "//"
    for line in text.splitlines():
        code = line.partition(comment)[0].strip()
        if code.endswith(":"):
            yield code[:-1]
        elif code and code[0] not in ".{}()" and "Folded" not in line:
            opcode, _, operands = _PTX_PREDICATE.sub("", code).rstrip(";").partition(" ")
            opcode, tab, rest = opcode.partition("\t")
            yield _Instruction(opcode, rest if tab else operands)


def _loops(lines: list[str | _Instruction]) -> list[tuple[int, int]]:
    """First and last line of every loop: a branch back to a label closes one."""
    labels: dict[str, int] = {}
    loops = []
    for number, line in enumerate(lines):
        if isinstance(line, str):
            labels[line] = number
        elif "bra" in line.opcode and (target := line.operands.split()[-1:]) and target[0] in labels:
            loops.append((labels[target[0]], number))
    return loops


def _own_lines(lines: list[str | _Instruction]) -> Iterator[list[str | _Instruction]]:
    """The lines of each loop that are in no loop inside it."""
    loops: dict[int, int] = {}
    for start, end in _loops(lines):  # one that goes on from several places has a branch back from each
        loops[start] = max(end, loops.get(start, end))
    for start, end in loops.items():
        inside = [(first, last) for first, last in loops.items() if start < first and last <= end]
        own = (n for n in range(start, end + 1) if not any(first <= n <= last for first, last in inside))
        yield [lines[number] for number in own]


def _mix(lines: list[str | _Instruction]) -> Mix:
    instructions = [line for line in lines if isinstance(line, _Instruction)]
    accesses = [access for access in map(_access, instructions) if access is not None]
    loads = [size for is_load, size in accesses if is_load]
    stores = [size for is_load, size in accesses if not is_load]
    shared = sum(_SHARED.match(line.opcode) is not None for line in instructions)
    return Mix(len(instructions), len(loads), sum(loads), len(stores), sum(stores), shared)


def _access(instruction: _Instruction) -> tuple[bool, int] | None:
    """(is a load, bytes) of an access to global memory."""
    opcode = instruction.opcode
    if found := _AMD_ACCESS.match(opcode):
        direction, unit, words, bits = found.groups()
        return direction == "load", int(bits) // 8 if bits else _AMD_BYTES[unit] * int(words or 1)
    if opcode.startswith("cp.async") and ".shared" in opcode and ".global" in opcode:
        return True, int(instruction.operands.split(",")[2].strip(), 0)
    if opcode.startswith(("ld.global", "st.global")):
        *modifiers, kind = opcode.split(".")
        vector = next((int(name[1:]) for name in modifiers if re.fullmatch(r"v\d", name)), 1)
        bits = _PTX_TYPE.fullmatch(kind)
        return opcode.startswith("ld"), vector * int(bits[1]) // 8 if bits else 0
    return None
