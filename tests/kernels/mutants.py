"""Faults to plant in copies of the kernels, each in one file: masks, offsets, tails, what is never written."""

# The interpreter runs programs in order: what one writes into the next one's share is written over, and so not seen.
# Scratch memory has no fences: no fault here writes past its end, or leaves in it what an earlier launch wrote.
FAULTS = {
    "colwise: a mask without the group's start": ("whole = (chunks >= start) &", "whole ="),
    "colwise: a mask one row too early": ("rows >= start) & (", "rows >= start - 1) & ("),
    "colwise: the group's scales elsewhere": ("group.to(tl.int64) * K + columns", "group.to(tl.int64) + columns"),
    "colwise: a maximum one row too long": ("(rows < end))[:, None]", "(rows <= end))[:, None]"),
    "colwise: rows read one too late": ("rows.to(tl.int64)[:, None] * K", "(rows.to(tl.int64)[:, None] + 1) * K"),
    "colwise: a dropped tail of the maximum": ("tl.cdiv(read_end - first,", "((read_end - first) //"),
    "colwise: a dropped tail of the cast": (
        "tiles = tl.cdiv(end - first, BLOCK_SIZE_ITER)",
        "tiles = (end - first) // BLOCK_SIZE_ITER",
    ),
    "colwise: padding rows left out": ("* (G + 1)\n", "* G\n"),
    "colwise: scales unwritten": ("mask=columns < tl.where(group < G, K, 0)", "mask=columns < 0"),
    "colwise: edges unwritten": ("if (start % 16 != 0) |", "if (start < 0) &"),
    "colwise-dual: the second matrix at the first's programs": (
        "program -= programs_of_x",
        "program = tl.program_id(0)",
    ),
    "colwise-dual: the second matrix left out": (' + -(-K // config["BLOCK_SIZE"])', ""),
    "rowwise: a mask without the group's start": ("return (chunks >= head) &", "return"),
    "rowwise: a mask one column too long": ("(edge_columns < tail) &", "(edge_columns <= tail) &"),
    "rowwise: the group's scales elsewhere": ("group.to(tl.int64) * N + rows", "group.to(tl.int64) + rows"),
    "rowwise: a dropped tail": ("tiles = tl.cdiv(longest, BLOCK_SIZE_ITER)", "tiles = longest // BLOCK_SIZE_ITER"),
    "rowwise: the kept tile unwritten": (
        "q_rows + columns, q, mask=",
        "q_rows + columns, q, mask=(rows < 0)[:, None] & ",
    ),
    "rowwise: edges in no maximum": ("tl.max(magnitude(edges), 1)", "tl.max(magnitude(edges), 1) * 0"),
    "rowwise-2d: a mask without the tile's offset": (
        "inside = in_rows & (column + columns < K)",
        "inside = in_rows & (columns < K)",
    ),
    "rowwise-2d: a mask without the last rows": ("in_rows = (rows < M)", "in_rows = (rows < M - 1)"),
    "rowwise-2d: columns read one too late": (
        "tl.load(x_rows + column + columns",
        "tl.load(x_rows + column + 1 + columns",
    ),
    "rowwise-2d: a dropped tail": ("tiles = tl.cdiv(K, BLOCK_SIZE_ITER)", "tiles = K // BLOCK_SIZE_ITER"),
    "rowwise-2d: scales unwritten": ("tl.store(scales_ptr + rows, scale, mask=rows < M)", "rows += 0"),
    "colwise-3d, rowwise_2d: a mask without the last rows": ("in_rows = (rows < M)", "in_rows = (rows < M - 1)"),
    "colwise-3d, rowwise_2d: a dropped tail": ("tiles = tl.cdiv(K, BLOCK_SIZE_ITER)", "tiles = K // BLOCK_SIZE_ITER"),
    "colwise-3d: the last column left out": ("E * N, K", "E * N - 1, K"),
    "transpose-3d-atomic: a mask one column too long": (
        "mask=columns < tl.where(start == 0, K, 0)",
        "mask=columns <= K",
    ),
    "transpose-3d-atomic: the maxima of another expert": (
        "tl.load(amax_ptr + expert * K + columns",
        "tl.load(amax_ptr + columns",
    ),
    "transpose-3d-atomic: a dropped tail": (
        "tl.minimum(start + ROWS, N)",
        "tl.minimum(start + ROWS, N // BLOCK_SIZE_N * BLOCK_SIZE_N)",
    ),
    "transpose-3d-atomic: scales unwritten": ("mask=columns < tl.where(start == 0, K, 0)", "mask=columns < 0"),
    "transpose-3d-atomic, transpose_3d: a mask one row too long": (
        "mask=(rows < N)[:, None] & in_columns)",
        "mask=(rows <= N)[:, None] & in_columns)",
    ),
    "transpose-3d-atomic, transpose_3d: rows read one too late": (
        "w_columns + rows.to(tl.int64)[:, None] * K",
        "w_columns + (rows.to(tl.int64)[:, None] + 1) * K",
    ),
    "transpose-3d-reduction: a dropped tail": ("tiles = tl.cdiv(N, BLOCK_SIZE_N)", "tiles = N // BLOCK_SIZE_N"),
    "transpose-3d-reduction: codes of another expert": ("(expert * K + columns)[None, :] * N", "columns[None, :] * N"),
    "transpose-3d-reduction: the first tile unwritten": (
        "    cast_tile(q_columns, rows, first, scale, N, in_columns, FP8_MAX)",
        "    rows += 0",
    ),
    "transpose-3d-reduction, transpose_3d: a mask without its columns": (
        "mask=(rows < N)[:, None] & in_columns)",
        "mask=(rows < N)[:, None] & (in_columns | True))",
    ),
    "mxfp8-dim0: a mask without its columns": (
        "inside = in_rows & (columns < K)",
        "inside = in_rows & (columns < 2 * K)",
    ),
    "mxfp8-dim0: a mask without the last rows": ("in_rows = (rows < M)", "in_rows = (rows < M - 1)"),
    "mxfp8-dim0: scales of another row": ("* tl.cdiv(K, 32) + blocks[None, :]", "* (K // 32) + blocks[None, :]"),
    "mxfp8-dim0: a dropped tail": ('-(-K // config["BLOCK_SIZE_K"])', '(K // config["BLOCK_SIZE_K"])'),
    "mxfp8-dim0: scales of the last block unwritten": ("(blocks < tl.cdiv(K, 32))", "(blocks < K // 32)"),
    **{
        f"{kernel}: {what}": change
        for kernel in ("mxfp8-dim1", "mxfp8-dim1-3d, mxfp8_dim1")
        for what, change in {
            "a mask without its columns": ("in_columns = (columns < K)", "in_columns = (columns < K + 1)"),
            "a mask without the last rows": ("mask=(rows < M)[:, None]", "mask=(rows < M - 1)[:, None]"),
            "rows of a block in another order": ("at % BLOCKS * 32 + at // BLOCKS", "at"),
            "a dropped tail": ('-(-M // config["BLOCK_SIZE_M"])', '(M // config["BLOCK_SIZE_M"])'),
            "scales unwritten": ("mask=in_blocks & in_columns", "mask=in_blocks & (columns < 0)[None, :]"),
        }.items()
    },
    "mxfp8-dim1-3d-via-2d, mxfp8_dim1: rows of a block in another order": ("at % BLOCKS * 32 + at // BLOCKS", "at"),
    "mxfp8-dim1-3d-via-2d: codes of another expert": ("q.copy_(together[0]", "q.copy_(together[0].roll(32, 0)"),
    "mxfp8-dim1-3d-via-2d: scales of all experts in one piece": (
        "scales.copy_(together[1].unflatten(1, (E, blocks)).transpose(0, 1))",
        "scales.copy_(together[1].view(scales.shape))",
    ),
    "mxfp8-dim1-3d-via-2d: experts that are not padded": (
        "if N % MX_BLOCK else w",
        "if N < 0 else w.repeat(1, 2, 1)[:, : blocks * MX_BLOCK]",
    ),
}
"""``KERNEL: what is wrong``, or ``KERNEL, MODULE: what is wrong`` for a module that the kernel launches from -> that
file's own text, which occurs once or more, and what stands there instead."""
