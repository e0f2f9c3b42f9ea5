"""Faults to plant in copies of the grouped GEMMs: where they are, which configs and dtypes they are in."""

from __future__ import annotations

from dataclasses import dataclass

FP8 = "float8_e4m3fn"
BF16 = "bfloat16"
POINTERS, LOADS, STORES = 0, 1, 2  # of DESCRIPTORS


@dataclass(frozen=True)
class GemmFault:
    """Pairs of a text of the last module and what stands there instead, as ``planting.plant`` takes them."""

    changes: tuple[str, ...]
    descriptors: tuple[int, ...] = (POINTERS, LOADS, STORES)
    """Values of DESCRIPTORS whose code has the fault."""
    dtypes: tuple[str, ...] = (FP8, BF16)
    hides: bool = False
    """Whether a round problem is right all the same: only an edge finds it."""


def fault(*changes: str, **where: object) -> GemmFault:
    return GemmFault(changes, **where)  # type: ignore[arg-type]


BY_POINTERS = {"descriptors": (POINTERS,)}
BY_DESCRIPTORS = {"descriptors": (LOADS, STORES)}
STORED_BY_POINTERS = {"descriptors": (POINTERS, LOADS)}
STORED_BY_DESCRIPTORS = {"descriptors": (STORES,)}
SCALED = {"dtypes": (FP8,)}
ZEROS = "total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)\n"
SUM_OF_ROWS = "total = tl.dot(a_piece, b_piece.T, total)"
SUM_OF_CONTRACTION = "total = tl.dot(a_piece, b_piece, total)"

OF_BOTH: dict[str, GemmFault] = {
    "sums that are cut off and not rounded": fault(
        "result = total.to(",
        "result = (total.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True).to(",
        hides=True,
    ),
}
OF_TILES: dict[str, GemmFault] = {
    "a reciprocal left out, of a": fault("* _reciprocal(scale_a)[:, None]", "* scale_a[:, None]", **SCALED),
    "a reciprocal left out, of b": fault("* _reciprocal(scale_b)[None, :]", "* scale_b[None, :]", **SCALED),
    "a scale left out, of a": fault("* _reciprocal(scale_a)[:, None]", "", **SCALED),
    "a scale left out, of b": fault("* _reciprocal(scale_b)[None, :]", "", **SCALED),
    "a band that is taken for full": fault("tl.minimum(down - band * BAND, BAND)", "BAND"),
    "row tiles of the first band alone": fault("return band * BAND + inside % height", "return inside % height"),
    "a reciprocal left out": fault("tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)", "scale", **SCALED),
    "the second group from the first row": fault("mask=(group > 0) & (group <= G)", "mask=(group > 1) & (group <= G)"),
    "the last group without its rows": fault("mask=group < G, other=M", "mask=group < G - 1, other=0"),
    "a group's end one row too early": fault("end = tl.minimum(end, M)", "end = tl.minimum(end, M) - (group < G)"),
}
"""In ``grouped_tiles``."""

FAULTS: dict[str, GemmFault] = {
    **{
        f"{kernel}: {what}": each
        for kernel in ("grouped-rows", "grouped-contraction")
        for what, each in OF_BOTH.items()
    },
    **{
        f"{kernel}, grouped_tiles: {what}": each
        for kernel in ("grouped-rows", "grouped-contraction")
        for what, each in OF_TILES.items()
    },
    # Rows: what is summed
    "grouped-rows: the first block of K left out": fault("tl.range(0, depth_steps)", "tl.range(1, depth_steps)"),
    "grouped-rows: the last block of K left out": fault("tl.range(0, depth_steps)", "tl.range(0, depth_steps - 1)"),
    "grouped-rows: the tail of K left out": fault("tl.cdiv(K, BLOCK_SIZE_K)", "K // BLOCK_SIZE_K", hides=True),
    "grouped-rows: the first block of K throughout": fault("at = k * BLOCK_SIZE_K", "at = 0 * k"),
    "grouped-rows: no mask of the tail of K, in both": fault(
        "depth, end, K)", "depth, end, K + 64)", "depth, N, K)", "depth, N, K + 64)", **BY_POINTERS, hides=True
    ),
    "grouped-rows: no mask of the tail of K, in a": fault(
        "depth, end, K)", "depth, end, K + 64)", **BY_POINTERS, hides=True
    ),
    "grouped-rows: no mask of the tail of K, in b": fault(
        "depth, N, K)", "depth, N, K + 64)", **BY_POINTERS, hides=True
    ),
    "grouped-rows, grouped_tiles: a masked tail that reads NaN": fault(
        "other=0.0)", 'other=float("nan"))', **BY_POINTERS, hides=True
    ),
    "grouped-rows: sums not cleared between tiles": fault(
        f"        {ZEROS}", "", "    # where nothing branches", f"    {ZEROS}    # where nothing branches"
    ),
    "grouped-rows: sums not cleared between groups": fault(
        f"        {ZEROS}",
        "        total = tl.where(group == last, total, 0.0)\n        last = group\n",
        "    # where nothing branches",
        f"    {ZEROS}    last = tl.program_id(0) * 0\n    # where nothing branches",
    ),
    "grouped-rows: sums that are rounded between blocks of K": fault(
        SUM_OF_ROWS, f"{SUM_OF_ROWS}.to(tl.bfloat16).to(tl.float32)", hides=True
    ),
    "grouped-rows: sums that start anew with each block of K": fault(SUM_OF_ROWS, "total = tl.dot(a_piece, b_piece.T)"),
    # Rows: whose
    "grouped-rows: the matrix of the first expert": fault(
        "b_ptr + (group * N)", "b_ptr + (0 * N)", "b.load([group * N + column", "b.load([column"
    ),
    "grouped-rows: the matrix of the next expert": fault(
        "b_ptr + (group * N)", "b_ptr + (group * N + N)", "b.load([group * N + column", "b.load([group * N + N + column"
    ),
    "grouped-rows: a group's first tile taken for the last group's": fault("(tiles_end <= tile)", "(tiles_end < tile)"),
    "grouped-rows: a group that begins at an aligned row": fault(
        "row, column = start + row_tile", "row, column = start // 16 * 16 + row_tile", hides=True
    ),
    "grouped-rows: rows read one too late": fault(
        "a.load([row, at])", "a.load([row + 1, at])", "piece(a_ptr, K, rows,", "piece(a_ptr, K, rows + 1,"
    ),
    "grouped-rows: rows of the group's first tile": fault("a.load([row, at])", "a.load([start, at])", **BY_DESCRIPTORS),
    "grouped-rows: columns of the first tile": fault(
        "b.load([group * N + column,", "b.load([group * N,", **BY_DESCRIPTORS
    ),
    "grouped-rows: the scale of the next row": fault("scale_a_ptr, rows, end", "scale_a_ptr, rows + 1, end", **SCALED),
    "grouped-rows: the scale of the next column": fault(
        "group * N, columns, N)", "group * N, columns + 1, N)", **SCALED
    ),
    "grouped-rows: scales of columns of the first expert": fault(
        "scale_b_ptr + group * N, columns", "scale_b_ptr, columns", **SCALED
    ),
    "grouped-rows: scales swapped": fault(
        "scale_a_ptr, rows, end, scale_b_ptr + group", "scale_b_ptr, rows, end, scale_a_ptr + group", **SCALED
    ),
    "grouped-rows: scales of rows counted from the group's start": fault(
        "scale_a_ptr, rows, end", "scale_a_ptr - start, rows, end", **SCALED
    ),
    # Rows: which tiles
    "grouped-rows: the last tile left out": fault("tl.sum(tiles, 0), tl.num", "tl.sum(tiles, 0) - 1, tl.num"),
    "grouped-rows: every second tile left out": fault("tl.num_programs(0), flatten", "2 * tl.num_programs(0), flatten"),
    "grouped-rows: the last column tile left out": fault(
        "across = tl.cdiv(N, BLOCK_SIZE_N)", "across = N // BLOCK_SIZE_N", hides=True
    ),
    "grouped-rows: the last row tile of a group left out": fault(
        "tl.cdiv(groups.end - groups.start, BLOCK_SIZE_M)",
        "((groups.end - groups.start) // BLOCK_SIZE_M)",
        "down = tl.cdiv(end - start, BLOCK_SIZE_M)",
        "down = (end - start) // BLOCK_SIZE_M",
        hides=True,
    ),
    # Rows: what is stored
    "grouped-rows: stored past the group's end": fault(
        "columns, end, N, result)",
        "columns, M, N, result)",
        "if row + BLOCK_SIZE_M <= end",
        "if row + BLOCK_SIZE_M <= M",
        hides=True,
    ),
    "grouped-rows: stored one row past the group's end": fault(
        "columns, end, N, result)", "columns, end + 1, N, result)", hides=True
    ),
    "grouped-rows: a tile with one row too many stored whole": fault(
        "if row + BLOCK_SIZE_M <= end", "if row + BLOCK_SIZE_M <= end + 1", **STORED_BY_DESCRIPTORS, hides=True
    ),
    "grouped-rows: the group's last row unwritten": fault(
        "columns, end, N, result)", "columns, end - 1, N, result)", **STORED_BY_POINTERS
    ),
    "grouped-rows: columns past the last": fault(
        "columns, end, N, result)", "columns, end, N + 16, result)", hides=True
    ),
    "grouped-rows: whole tiles stored at the group's start": fault(
        "out.store([row, column]", "out.store([start, column]", **STORED_BY_DESCRIPTORS
    ),
    "grouped-rows: rows of no group unwritten": fault(
        "tiles = tl.cdiv(M - first, lanes_m.shape[0]) * across", "tiles = 0 * across", hides=True
    ),
    "grouped-rows: the last rows of no group unwritten": fault(
        "tiles = tl.cdiv(M - first, lanes_m.shape[0]) * across",
        "tiles = (M - first) // lanes_m.shape[0] * across",
        hides=True,
    ),
    "grouped-rows: the last columns of rows of no group unwritten": fault(
        "across = tl.cdiv(N, lanes_n.shape[0])", "across = tl.maximum(N // lanes_n.shape[0], 1)", hides=True
    ),
    "grouped-rows: zeros past the last row": fault("columns, M, N, zeros)", "columns, M + 1, N, zeros)", hides=True),
    "grouped-rows: zeros in the last group": fault("groups.group == G)", "groups.group == G) - 1"),
    # Contraction: what is summed
    "grouped-contraction: the first block of rows left out": fault("tl.range(0, whole)", "tl.range(1, whole)"),
    "grouped-contraction: the last block of rows left out": fault("tl.range(0, whole)", "tl.range(0, whole - 1)"),
    "grouped-contraction: the tail of aligned rows left out": fault(
        "tl.cdiv(end - start, BLOCK_SIZE_K) if IS_WHOLE",
        "(end - start) // BLOCK_SIZE_K if IS_WHOLE",
        **SCALED,
        hides=True,
    ),
    "grouped-contraction: the masked tail left out": fault(
        "start + whole * BLOCK_SIZE_K < end", "start + whole * BLOCK_SIZE_K < start", hides=True
    ),
    "grouped-contraction: rows of the next group in the tail, of both": fault(
        "columns, depth, end, M", "columns, depth, M, M", hides=True
    ),
    "grouped-contraction: rows of the next group in the tail, of a": fault(
        "depth, rows, depth_end, N)",
        "depth, rows, M, N)",
        "rows, depth, N, depth_end)",
        "rows, depth, N, M)",
        hides=True,
    ),
    "grouped-contraction: rows of the next group in the tail, of b": fault(
        "depth, columns, depth_end, K)",
        "depth, columns, M, K)",
        "columns, depth, K, depth_end)",
        "columns, depth, K, M)",
        hides=True,
    ),
    "grouped-contraction, grouped_tiles: a masked tail that reads NaN": fault(
        "other=0.0)", 'other=float("nan"))', hides=True
    ),
    "grouped-contraction: pieces longer than the alignment taken for whole": fault(
        "IS_WHOLE: tl.constexpr = ALIGNED % BLOCK_SIZE_K == 0",
        "IS_WHOLE: tl.constexpr = ALIGNED > 1",
        **SCALED,
        hides=True,
    ),
    "grouped-contraction: sums not cleared between tiles": fault(
        f"        {ZEROS}", "", "    down, across = tl.cdiv", f"    {ZEROS}    down, across = tl.cdiv"
    ),
    "grouped-contraction: sums not cleared between groups": fault(
        f"        {ZEROS}",
        "        total = tl.where(group == last, total, 0.0)\n        last = group\n",
        "    down, across = tl.cdiv",
        f"    {ZEROS}    last = tl.program_id(0) * 0\n    down, across = tl.cdiv",
    ),
    "grouped-contraction: sums that are rounded between blocks of rows": fault(
        SUM_OF_CONTRACTION, f"{SUM_OF_CONTRACTION}.to(tl.bfloat16).to(tl.float32)", hides=True
    ),
    # Contraction: whose
    "grouped-contraction: what is added left out": fault("total += piece(to.added", "piece(to.added", hides=True),
    "grouped-contraction: what is added to the first group": fault(
        "Sum(added_ptr + place", "Sum(added_ptr", hides=True
    ),
    "grouped-contraction: rows of the next group": fault("groups.group == group", "groups.group == group + 1"),
    "grouped-contraction: groups that are taken for not aligned": fault(
        "padded_extents(offs_ptr, M, G, GROUPS, ALIGNED)",
        "padded_extents(offs_ptr, M, G, GROUPS, 1)",
        **SCALED,
        hides=True,
    ),
    "grouped-contraction, grouped_tiles: an empty group without a piece": fault(
        "tl.maximum(tl.cdiv(size, ALIGNMENT), 1)", "tl.cdiv(size, ALIGNMENT)", **SCALED, hides=True
    ),
    "grouped-contraction, grouped_tiles: a group without its last, partial piece": fault(
        "tl.cdiv(size, ALIGNMENT)", "(size // ALIGNMENT)", **SCALED, hides=True
    ),
    "grouped-contraction: scales of a's first group": fault(
        "scale_a_ptr + group * N, rows", "scale_a_ptr, rows", **SCALED
    ),
    "grouped-contraction: scales of b's first group": fault(
        "scale_b_ptr + group * K, columns", "scale_b_ptr, columns", **SCALED
    ),
    "grouped-contraction: the scale of a's next column": fault(
        "group * N, rows, N", "group * N, rows + 1, N", **SCALED
    ),
    "grouped-contraction: the scale of b's next column": fault(
        "group * K, columns, K)", "group * K, columns + 1, K)", **SCALED
    ),
    "grouped-contraction: scales swapped": fault(
        "scale_a_ptr + group * N, rows, N, scale_b_ptr", "scale_b_ptr + group * N, rows, N, scale_a_ptr", **SCALED
    ),
    # Contraction: which tiles
    "grouped-contraction: the last tile left out": fault("G * down * across, tl.num", "G * down * across - 1, tl.num"),
    "grouped-contraction: the last column tile left out": fault(
        "tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)", "tl.cdiv(N, BLOCK_SIZE_M), K // BLOCK_SIZE_N", hides=True
    ),
    "grouped-contraction: the last row tile left out": fault(
        "tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)", "N // BLOCK_SIZE_M, tl.cdiv(K, BLOCK_SIZE_N)", hides=True
    ),
    # Contraction: what is stored
    "grouped-contraction: an empty group unwritten": fault(
        "columns, N, K, result)", "columns, tl.where(end > start, N, 0), K, result)", **STORED_BY_POINTERS, hides=True
    ),
    "grouped-contraction: an empty group not stored": fault(
        "if DESCRIPTORS == 2:\n                out.store",
        "if DESCRIPTORS == 2 and end > start:\n                out.store",
        "            else:\n                store_masked",
        "            elif DESCRIPTORS < 2:\n                store_masked",
        **STORED_BY_DESCRIPTORS,
        hides=True,
    ),
    "grouped-contraction: rows past the last": fault(
        "columns, N, K, result)", "columns, N + 16, K, result)", **STORED_BY_POINTERS, hides=True
    ),
    "grouped-contraction: columns past the last": fault(
        "columns, N, K, result)", "columns, N, K + 16, result)", **STORED_BY_POINTERS, hides=True
    ),
    "grouped-contraction: every group stored as the first": fault(
        "out_ptr + group.to(tl.int64) * N * K, K", "out_ptr, K", "out.store([group,", "out.store([0,"
    ),
}
"""``KERNEL: what is wrong``, or ``KERNEL, MODULE: what is wrong`` of a module that the kernel takes code from."""
