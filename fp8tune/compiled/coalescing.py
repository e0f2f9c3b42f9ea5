"""How many neighbouring bytes a warp asks for at once, from the layouts in Triton's GPU IR (TTGIR).

A layout says how many elements along each dim a thread holds and how the threads of a warp lie; along its first dim in
``order``, memory is contiguous. Memory moves in sectors of 32 bytes (NVIDIA) or lines of 64 and more (AMD): a shorter
run wastes the rest of one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

EDGE_SHARE = 0.25
"""A tile with less than this share of the elements of the largest is an edge, or scales: not what takes the time."""

_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], threadsPerWarp = \[([\d, ]+)\],.*?order = \[([\d, ]+)\]",
    re.MULTILINE,
)
_TILE = re.compile(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?([a-z]+)(\d+)\w*>?, (#\w+)>")
_LOAD = re.compile(r"= (?:tt\.load|ttg\.async_copy_global_to_local|\w+\.buffer_load(?:_to_local)?) ")
_STORE = re.compile(r"(?:tt\.store|\w+\.buffer_store) ")


@dataclass(frozen=True)
class Runs:
    """The shortest runs of one kernel's large tiles, in bytes; 0 where it has none."""

    load_bytes: int
    store_bytes: int


def runs(ttgir: str) -> Runs:
    """The contiguous bytes of one access of a warp, of what the kernel loads and of what it stores."""
    layouts = {name: [_ints(text) for text in texts] for name, *texts in _LAYOUT.findall(ttgir)}
    lines = ttgir.splitlines()
    loads = [tile for line in lines if _LOAD.search(line) for tile in _tiles(line, layouts)]
    stores = [tile for line in lines if _STORE.search(line) for tile in _tiles(line, layouts)]
    return Runs(_shortest(loads), _shortest(stores))


def _tiles(line: str, layouts: dict[str, list[list[int]]]) -> list[tuple[int, int]]:
    """(elements, bytes in a run) of the tile that a line moves; of several on it (pointers, then masks) the first."""
    for dims, _, bits, layout in _TILE.findall(line):
        if layout in layouts:
            shape = _ints(dims.rstrip("x"))
            per_thread, threads, order = layouts[layout]
            run = min(per_thread[order[0]] * threads[order[0]], shape[order[0]])
            return [(math.prod(shape), run * int(bits) // 8)]
    return []


def _shortest(tiles: list[tuple[int, int]]) -> int:
    largest = max((elements for elements, _ in tiles), default=0)
    return min((run for elements, run in tiles if elements >= EDGE_SHARE * largest), default=0)


def _ints(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
