"""Faults to plant in copies of the kernels: masks, offsets, tails, scales, counters, missing writes.

The interpreter runs programs in order: what waits for ever, or is written over by the next program, is no fault here.
"""

from __future__ import annotations

FAULTS: dict[str, tuple[str, ...]] = {
    "colwise, tiles: columns that are too near": ("return tl.cdiv(M, 16) * 16", "return M // 16 * 16"),
    "colwise, panels: a dropped tail": (
        "tiles = tl.cdiv(end - first, options.BLOCK_SIZE_ITER)",
        "tiles = (end - first) // options.BLOCK_SIZE_ITER",
    ),
    "colwise, panels: padding rows left out": ("* (groups + 1)", "* groups"),
    "colwise, panels: the maxima of another group": (
        "amax_ptr + group * matrix.K + columns,\n                in_panel",
        "amax_ptr + columns,\n                in_panel",
    ),
    "colwise, panels, tiles: a mask without its columns": (
        "whole[:, None] & (columns < matrix.K)[None, :]",
        "whole[:, None] & (columns < matrix.K + 1)[None, :]",
    ),
    "colwise, panels, tiles: edges unwritten": ("if (first < start) |", "if (first < 0) &"),
    "colwise, panels, tiles: NaN after a group": ("tl.store(q_columns + place, zero, mask=spoiled)", "pass"),
    "colwise, panels, tiles: an unaligned address taken for an aligned one": (
        "at = matrix.x_ptr + first",
        "at = (matrix.x_ptr.to(tl.int64) // 16 * 16).to(matrix.x_ptr.dtype) + first",
    ),
    "rowwise-2d: a mask without the tile's offset": (
        "inside = in_rows & (column + columns < K)",
        "inside = in_rows & (columns < K)",
    ),
    "rowwise-2d: scales unwritten": ("tl.store(scales_ptr + rows, scale, mask=rows < M)", "rows += 0"),
    "rowwise-2d, arithmetic: the scale of a NaN": (
        "tl.where(bits == infinity, 0.0, amax)",
        "tl.where(bits >= infinity, 0.0, amax)",
    ),
    "rowwise-2d, arithmetic: the scale of an infinity": ("tl.where(bits == infinity, 0.0, amax)", "amax"),
    "rowwise: a mask one column too long": ("(edge_columns < tail) &", "(edge_columns <= tail) &"),
    "rowwise: rows that are taken for aligned": (
        "shared = (M % 16 != 0) | (start % 16 != 0)",
        "shared = (start % 16 != 0)",
    ),
    "colwise-dual: the second matrix at the first's programs": (
        "tl.program_id(0) - matrix * programs_of_x",
        "tl.program_id(0)",
    ),
    "colwise-dual: the second matrix without programs": ('max(programs) if config["LEAD"] else sum', "max"),
    "colwise-3d, rowwise_2d: codes past the last row": (
        "in_rows = (rows < M)[",
        "in_rows = (rows < tl.cdiv(M, BLOCK_SIZE) * BLOCK_SIZE)[",
    ),
    "transpose-3d-atomic, transpose_3d: codes of another expert": ("* (K - 1),", "* (K - 2),"),
    "transpose-3d-atomic, transpose_3d, panels, tiles: rows after the last expert": (
        "tl.minimum(group + 1, matrix.G)",
        "(group + 1)",
    ),
    "transpose-3d-reduction, transpose_3d: an expert one row too short": (
        "scales_ptr, E * N,",
        "scales_ptr, E * N - 1,",
    ),
    "rowwise-factored: the column scales of another group": (
        "column_scales_ptr + block.group.to(tl.int64) * K",
        "column_scales_ptr + block.group.to(tl.int64) * 0",
    ),
    "rowwise-factored: padding rows divided": ("(block.group < G) & (block.rows > 0)", "block.rows > 0"),
    "mxfp8-dim0: a mask without its columns": (
        "inside = in_rows & (columns < K)",
        "inside = in_rows & (columns < 2 * K)",
    ),
    "mxfp8-dim0, mxfp8_arithmetic: the codes beside a NaN": ("tl.where(code == 255, 0x7FC00000, bits)", "bits"),
    "mxfp8-dim0, mxfp8_arithmetic: the scale of an infinity": (
        "special = tl.where(bits == 0x7F800000, 254, 255)",
        "special = 255",
    ),
    "mxfp8-dim1: rows of a block in another order": ("at % BLOCKS * 32 + at // BLOCKS", "at"),
    "mxfp8-dim1-3d, mxfp8_dim1: rows of the next expert": ("mask=(rows < M)[:, None] & in_columns", "mask=in_columns"),
    "mxfp8-dim1-3d-via-2d: scales of all experts in one piece": (
        "scales.unflatten(1, (E, blocks)).transpose(0, 1)",
        "scales.view(call.scales.shape)",
    ),
    "transposed-codes: shifts of another block": ("shifts_ptr + first", "shifts_ptr + 0"),
    "transposed-codes-3d: rows of another tile": ("(expert * N + row) * K", "expert * N * K"),
    "transposed-codes-3d, transposed_codes: codes of PACK rows in another order": (
        "(8 * number)",
        "(8 * (PACK - 1 - number))",
    ),
    "swiglu-rowwise: rows of no group read": ("(row + lanes < last)", "(row + lanes < M)"),
    "swiglu-rowwise, gate_and_up: interleaved taken for halves": (
        "if source.INTERLEAVED:\n        W",
        "if source.INTERLEAVED == 2:\n        W",
    ),
    "swiglu-rowwise: weights left out": ("h = h * rows.weights", "pass"),
    "swiglu-gradient: factors of another group": ("group.to(tl.int64) * (2 * source.N)\n    gate =", "0\n    gate ="),
    "swiglu-gradient: the maxima of the gate alone": (
        "largest_of_both(y_gate, y_up)",
        "largest_of_both(y_gate, y_gate)",
    ),
    "grouped-rows, grouped_tiles: row tiles of the first band alone": (
        "return band * BAND + inside % height",
        "return inside % height",
    ),
    "grouped-rows, grouped_tiles: a group's end one row too early": (
        "end = tl.minimum(end, M)",
        "end = tl.minimum(end, M) - (group < G)",
    ),
    "grouped-rows: sums that are cut off and not rounded": (
        "result = total.to(",
        "result = (total.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True).to(",
    ),
    "grouped-rows: the tail of K left out": ("tl.cdiv(K, BLOCK_SIZE_K)", "K // BLOCK_SIZE_K"),
    "grouped-rows: no mask of the tail of K, in a": ("depth, end, K)", "depth, end, K + 64)"),
    "grouped-rows: a group that begins at an aligned row": (
        "row, column = start + row_tile",
        "row, column = start // 16 * 16 + row_tile",
    ),
    "grouped-rows: stored one row past the group's end": ("columns, end, N, result)", "columns, end + 1, N, result)"),
    "grouped-rows: a tile with one row too many stored whole": (
        "if row + BLOCK_SIZE_M <= end",
        "if row + BLOCK_SIZE_M <= end + 1",
    ),
    "grouped-contraction: the masked tail left out": (
        "start + whole * BLOCK_SIZE_K < end",
        "start + whole * BLOCK_SIZE_K < start",
    ),
    "grouped-contraction, grouped_tiles: a masked tail that reads NaN": ("other=0.0)", 'other=float("nan"))'),
    "grouped-contraction: pieces longer than the alignment taken for whole": (
        "IS_WHOLE: tl.constexpr = ALIGNED % BLOCK_SIZE_K == 0",
        "IS_WHOLE: tl.constexpr = ALIGNED > 1",
    ),
    "grouped-contraction: what is added left out": ("total += piece(to.added", "piece(to.added"),
    "grouped-contraction: scales of a's first group": ("scale_a_ptr + group * N, rows", "scale_a_ptr, rows"),
    "grouped-contraction: the last column tile left out": (
        "tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)",
        "tl.cdiv(N, BLOCK_SIZE_M), K // BLOCK_SIZE_N",
    ),
    "grouped-contraction: an empty group not stored": (
        "if DESCRIPTORS == 2:\n                out.store",
        "if DESCRIPTORS == 2 and end > start:\n                out.store",
        "            else:\n                store_masked",
        "            elif DESCRIPTORS < 2:\n                store_masked",
    ),
    "expert-sort: equal experts in another order": (
        "lanes[None, :] < lanes[:, None]",
        "lanes[None, :] > lanes[:, None]",
    ),
    "expert-sort: experts of other devices": ("(ids > E), E, ids)", "(ids > E), E - 1, ids)"),
    "gathered-rows: another token's scale": ("scale_a_ptr + tokens)", "scale_a_ptr + tokens // 2)"),
    "gathered-rows: no zeros in rows of no group": (
        "out_ptr, one_of(groups.start, groups.group == G), M,",
        "out_ptr, M, M,",
    ),
    "gathered-transpose: no zeros after a group": (
        "is_row[:, None] & (columns < tile.K)[None, :]",
        "(columns < tile.K)",
    ),
    "gathered-transpose: a shift of another row": ("else shifts_ptr + first", "else shifts_ptr"),
    "gather-sum: a row left out": ("tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1 if TOP_K > 3 else TOP_K)"),
    "gather-sum: a bias without its weight": ("weight[:, None] * bias", "bias"),
    "shifted-transpose-3d: another scale": ("(scale > 0) & (scale < least)", "(scale > 64) & (scale < least)"),
    "shifted-transpose-3d: no shift": (
        "shifts_ptr + expert * N + row,\n            N - row",
        "None,\n            N - row",
    ),
    "cast-transpose-3d: the least of another expert": ("tl.load(least_ptr + expert)", "tl.load(least_ptr)"),
}
"""``KERNEL: what is wrong``, or ``KERNEL, MODULE, ...: what is wrong`` of a module that the one before it takes code
from -> words of the last file, and what stands there instead, in turn."""

FAULTS_ON_HOPPER = {
    f"{kernel}, warp_specialized: {title}": fault
    for kernel, titles in {
        "grouped-rows-hopper": {
            "a group's end one row too early": (
                "gl.load(offs_ptr + gl.minimum(group + 1, G - 1))",
                "gl.load(offs_ptr + gl.minimum(group + 1, G - 1)) - 1",
            ),
            "the tail of K left out": ("gl.cdiv(K, BLOCK_SIZE_K)", "K // BLOCK_SIZE_K"),
            "scales of the first expert": ("scale_b_ptr + group * width + columns", "scale_b_ptr + columns"),
            "a tile with one row too many stored whole": (
                "row + BLOCK_SIZE_M <= row_end:",
                "row + BLOCK_SIZE_M <= row_end + 1:",
            ),
            "stored one row past the group's end": ("m < row_end, 1", "m < row_end + 1, 1"),
            "no zeros in rows of no group": ("m < M, 1", "m < begin, 1"),
        },
        "grouped-contraction-hopper": {
            "no piece of an empty group": (
                "gl.maximum(gl.cdiv(end - begin, ALIGNED), 1)",
                "gl.cdiv(end - begin, ALIGNED)",
            ),
            "the last column tile left out": (
                "gl.cdiv(width, BLOCK_SIZE_N)",
                "gl.maximum(gl.cdiv(width, BLOCK_SIZE_N) - 1, 1)",
                "gl.cdiv(K if ALIGNED else N, BLOCK_SIZE_N)",
                "gl.maximum(gl.cdiv(K if ALIGNED else N, BLOCK_SIZE_N) - 1, 1)",
            ),
            "what is added left out": ("result.load(sums).to(gl.float32)", "0.0 * result.load(sums).to(gl.float32)"),
            "stored one row past the group's end": ("m < row_end, 1", "m < row_end + 1, 1"),
        },
    }.items()
    for title, fault in titles.items()
}
"""Faults in code that runs on Hopper alone."""

SETTINGS = {
    "colwise, panels: a dropped tail": {"LEAD": 0},
    "colwise, panels: padding rows left out": {"LEAD": 0},
    "grouped-rows: no mask of the tail of K, in a": {"DESCRIPTORS": 0},
    "grouped-rows: a tile with one row too many stored whole": {"DESCRIPTORS": 2},
    "grouped-contraction: an empty group not stored": {"DESCRIPTORS": 2},
}
"""Of the config whose code has the fault, where not every one has it."""

LARGE = (
    "colwise, panels, tiles: NaN after a group",
    "colwise, panels, tiles: an unaligned address taken for an aligned one",
    "grouped-rows, grouped_tiles: row tiles of the first band alone",
    "grouped-rows: sums that are cut off and not rounded",
    "grouped-contraction: what is added left out",
)
"""Faults that only large edges show, which are checked first then: it saves seconds."""
