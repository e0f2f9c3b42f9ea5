"""Faults to plant in copies of the kernels, each in one file: masks, offsets, tails, counters, missing writes."""

# The interpreter runs programs in order: what one writes into the next one's share is written over, and so not seen.
# Scratch memory has no guard bytes: no fault here writes past its end, or leaves in it what an earlier launch wrote.
FAULTS = {
    "colwise, tiles: columns that are too near": ("return tl.cdiv(M, 16) * 16", "return M // 16 * 16"),
    "colwise-dual: the second matrix at the first's programs": (
        "tl.program_id(0) - matrix * programs_of_x",
        "tl.program_id(0)",
    ),
    "colwise-dual: the second matrix without programs": ('max(programs) if config["LEAD"] else sum', "max"),
    "colwise-dual: the second matrix in no panel": ("is_of_y.to(tl.int32), 1) + 1", "is_of_y.to(tl.int32), 0) + 1"),
    "colwise-dual: pieces counted with the first matrix's": ("work_y_ptr, K", "work_x_ptr, K"),
    # Walking twice
    "colwise, panels: a dropped tail": (
        "tiles = tl.cdiv(end - first, options.BLOCK_SIZE_ITER)",
        "tiles = (end - first) // options.BLOCK_SIZE_ITER",
    ),
    "colwise, panels: the second tile in no maximum": (
        "tl.range(1, tl.where(group < matrix.G",
        "tl.range(2, tl.where(group < matrix.G",
    ),
    "colwise, panels: the last tile's maxima alone": ("tl.maximum(largest, fold(x, FOLDED))", "fold(x, FOLDED)"),
    "colwise, panels: padding rows left out": ("* (groups + 1)", "* groups"),
    "colwise, panels: padding rows read": ("tl.where(group < matrix.G, end, start)", "end"),
    "colwise, panels: the group's scales elsewhere": (
        "    tl.store(matrix.scales_ptr + group.to(tl.int64) * matrix.K",
        "    tl.store(matrix.scales_ptr + group.to(tl.int64)",
    ),
    "colwise, panels: scales unwritten": (
        "inside = columns < tl.where(group < matrix.G, matrix.K, 0)\n    tl",
        "inside = columns < 0\n    tl",
    ),
    "colwise, panels: the first tile unwritten": (
        "store_tile(matrix, q_ptr, kept_tile, q",
        "store_tile(matrix, q_ptr, Tile(first, rows, columns, start, start), q",
    ),
    # Panels. What would wait for ever is no fault here (a lag too short, a panel's count elsewhere); that a cast waits
    # for its panel at all can be seen only where programs run side by side.
    "colwise, panels: pieces of the padding rows left out": (
        "tl.where(groups <= matrix.G, pieces",
        "tl.where(groups < matrix.G, pieces",
    ),
    "colwise, panels: the last piece left out": ("while ticket < 2 * pieces", "while ticket < 2 * pieces - 1"),
    "colwise, panels: an empty group without a piece": (
        "tl.maximum(tl.cdiv(end - first_row(matrix, start), BLOCK_SIZE_ITER), 1)",
        "tl.cdiv(end - first_row(matrix, start), BLOCK_SIZE_ITER)",
    ),
    "colwise, panels: the second piece in no maximum": (
        "columns, largest, mask=in_group",
        "columns, largest, mask=in_group & (first == first_row(matrix, start))",
    ),
    "colwise, panels: the maxima of another group": (
        "amax_ptr + group * matrix.K + columns,\n                in_panel",
        "amax_ptr + columns,\n                in_panel",
    ),
    "colwise, panels: padding rows read by a piece": ('end, start), "")', 'end, end), "")'),
    "colwise, panels: scales of panels unwritten": (
        "in_group & (first == first_row(matrix, start))",
        "in_group & (start < 0)",
    ),
    "colwise, panels: scales of another group": (
        "            tl.store(matrix.scales_ptr + group.to(tl.int64) * matrix.K + columns",
        "            tl.store(matrix.scales_ptr + columns",
    ),
    "colwise, panels: edges left out where groups begin unevenly": ("if uneven != 0", "if uneven < 0"),
    "colwise, panels: an uneven group that is not noticed": (
        "groups <= matrix.G, group_end(matrix, groups) % 16",
        "groups <= 0, group_end(matrix, groups) % 16",
    ),
    "colwise, panels: edges by the maxima of another group": (
        "inside,\n                options",
        "inside & (group == 0),\n                options",
    ),
    "colwise, panels: counters that do not start at zero": (
        "torch.zeros(1 + panels + groups * columns,",
        "torch.full((1 + panels + groups * columns,), 3,",
    ),
    # Tiles, which both take
    **{
        f"colwise, panels, tiles: {what}": change
        for what, change in {
            "a maximum without the group's start": ("((rows >= start - first) & (rows", "((rows"),
            "a maximum one row too long": ("(rows < end - first))[:", "(rows <= end - first))[:"),
            "rows read one too late": (
                "(rows[:, None] * matrix.K + columns",
                "((rows[:, None] + 1) * matrix.K + columns",
            ),
            "a mask without the group's start": ("(chunks >= start - first) & (chunks", "(chunks"),
            "a mask without its columns": (
                "whole[:, None] & (columns < matrix.K)[None, :]",
                "whole[:, None] & (columns < matrix.K + 1)[None, :]",
            ),
            "maxima of some rows": ("tl.standard._elementwise_max", "tl.standard._sum_combine"),
            "edges unwritten": ("if (first < start) |", "if (first < 0) &"),
            "the edge at a group's end unwritten": ("tl.cdiv(last - first, 16)", "(last - first) // 16"),
            "groups that begin a chunk late": ("return start // 16 * 16", "return (start + 15) // 16 * 16"),
        }.items()
    },
    "rowwise: a mask without the group's start": ("return (chunks >= head) &", "return"),
    "rowwise: a mask one column too long": ("(edge_columns < tail) &", "(edge_columns <= tail) &"),
    "rowwise: the group's scales elsewhere": ("group.to(tl.int64) * N + rows", "group.to(tl.int64) + rows"),
    "rowwise: a dropped tail": ("tiles = tl.cdiv(longest, BLOCK_SIZE_ITER)", "tiles = longest // BLOCK_SIZE_ITER"),
    "rowwise: the kept tile unwritten": (
        "q_rows + columns, q, mask=",
        "q_rows + columns, q, mask=(rows < 0)[:, None] & ",
    ),
    "rowwise: rows of a view that are too far apart": (
        "M, N, G, M, 0, 1)",
        "M, N, G, tl.cdiv(M, 16) * 16, 0, 1)",
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
    **{
        f"{kernel}, {fault}": change
        for kernel in ("transpose-3d-atomic", "transpose-3d-reduction")
        for fault, change in {
            "transpose_3d: codes of another expert": ("* (K - 1),", "* (K - 2),"),
            "transpose_3d: an expert one row too short": ("scales_ptr, E * N,", "scales_ptr, E * N - 1,"),
            "transpose_3d, panels, tiles: rows after the last expert": (
                "tl.minimum(group + 1, matrix.G)",
                "(group + 1)",
            ),
        }.items()
    },
    "transpose-3d-atomic, transpose_3d, panels: the maxima of another expert": (
        "amax_ptr + group * matrix.K + columns,\n                in_panel",
        "amax_ptr + columns,\n                in_panel",
    ),
    "transpose-3d-reduction, transpose_3d, panels: a dropped tail": (
        "tiles = tl.cdiv(end - first, options.BLOCK_SIZE_ITER)",
        "tiles = (end - first) // options.BLOCK_SIZE_ITER",
    ),
    # Both ways
    "rowwise-colwise, tiles: columns that are too near": (
        "return tl.cdiv(M, 16) * 16",
        "return M // 16 * 16",
    ),
    **{
        f"rowwise-colwise, both_ways: {what}": change
        for what, change in {
            "the second block of rows in no column's maximum": (
                "tl.where(new.group < matrix.G, matrix.K, 0)",
                "tl.where((new.group < matrix.G) & (first == first_row(matrix, new.start)), matrix.K, 0)",
            ),
            "the second block of columns in no row's maximum": (
                "of_rows, mask=inside",
                "of_rows, mask=inside & (new_panel == 0)",
            ),
            "columns' maxima of another group": ("amax_ptr + old.group * matrix.K + columns", "amax_ptr + columns"),
            "rows' maxima of another block": ("amax_ptr + first + rows, mask", "amax_ptr + rows, mask"),
            "padding rows left out": ("tl.where(groups <= matrix.G, blocks", "tl.where(groups < matrix.G, blocks"),
            "padding rows with codes in their columns": ("if old.group < matrix.G:", "if old.group <= matrix.G:"),
            "turns between groups of other length uncounted": ("blocks += tl.maximum(", "blocks += tl.minimum("),
            "the last piece left out": ("while turn < turns", "while turn < turns - 1"),
            "scales of columns unwritten": (
                "inside &= old_tile.first == first_row(matrix, old.start)",
                "inside &= old.start < 0",
            ),
            "scales of rows unwritten": ("old_panel == 0,", "old_panel < 0,"),
            "scales of the last piece's group": (
                "scales_ptr + old.group.to(tl.int64)",
                "scales_ptr + new.group.to(tl.int64)",
            ),
            "the edge between two groups unwritten": (
                "old_tile.first + options.BLOCK_SIZE_ITER",
                "old_tile.first + 16",
            ),
            "rows of the group before written again": (
                "inside = (rows >= start - first) & (rows < end - first)",
                "inside = rows < end - first",
            ),
            "codes of rows a column too far": (
                "first.to(tl.int64) * matrix.K + (rows",
                "first.to(tl.int64) * matrix.K + 1 + (rows",
            ),
            "counters that do not start at zero": (
                "torch.zeros(2 + groups + groups * columns + rows,",
                "torch.full((2 + groups + groups * columns + rows,), 3,",
            ),
        }.items()
    },
    "colwise-transpose-3d: codes of another expert": ("* (K - 1),", "* (K - 2),"),
    "colwise-transpose-3d: an expert one row too short": (
        "scales_transposed_ptr, E * N,",
        "scales_transposed_ptr, E * N - 1,",
    ),
    **{
        f"rowwise-factored: {what}": change
        for what, change in {
            "the column scales of another group": (
                "column_scales_ptr + block.group.to(tl.int64) * K",
                "column_scales_ptr + block.group.to(tl.int64) * 0",
            ),
            "padding rows divided": ("(block.group < G) & (block.rows > 0)", "block.rows > 0"),
            "a dropped tail": ("tiles = tl.cdiv(K, WIDTH)", "tiles = K // WIDTH"),
            "the last tile's maxima alone": (
                "largest = tl.maximum(largest, largest_of_rows(y))",
                "largest = largest_of_rows(y)",
            ),
            "a block without its last row": ("in range(block.rows)", "in range(block.rows - 1)"),
            "scales unwritten": (
                "            tl.store(scales_ptr + row + lanes, scale, mask=in_rows)\n            for",
                "            for",
            ),
            "the last blocks left out": ("padded_rows(M, G, ALIGNMENT) //", "M //"),
        }.items()
    },
    "rowwise-factored, factors: a factor half as large": ("254 - exponent, 0", "253 - exponent, 0"),
    **{
        f"transposed-codes: {what}": change
        for what, change in {
            "an empty group without zeros": (
                "tl.maximum(tl.cdiv(ends - starts, 128), 1)",
                "tl.cdiv(ends - starts, 128)",
            ),
            "rows of the next group": ("inside = rows < tile.left", "inside = rows <= tile.left"),
            "the last blocks left out": ("programs := blocks *", "programs := blocks // 3 *"),
            "shifts of another block": ("shifts_ptr + first", "shifts_ptr + 0"),
            "a column too far": (
                "columns.to(tl.int64)[None, :] * (tile",
                "(columns + 1).to(tl.int64)[None, :] * (tile",
            ),
            "a group that begins too early": ("row = start + place - begin", "row = start"),
        }.items()
    },
    "transposed-codes, tiles: columns that are too near": (
        "tl.cdiv(M + G * ALIGNMENT, ALIGNMENT) * ALIGNMENT",
        "tl.cdiv(M, ALIGNMENT) * ALIGNMENT",
    ),
    "transposed-codes-3d: codes of another expert": ("expert * N * K + row", "expert * N + row"),
    "transposed-codes-3d: rows of another tile": ("(expert * N + row) * K", "expert * N * K"),
    "transposed-codes-3d, transposed_codes: codes of PACK rows in another order": (
        "(8 * number)",
        "(8 * (PACK - 1 - number))",
    ),
    "transposed-codes-3d: the last expert left out": ("programs := E *", "programs := (E - 1) *"),
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
    "mxfp8-dim1-3d-via-2d: codes of another expert": (
        "q.copy_(together[0]",
        "q.copy_(together[0].view(torch.uint8).roll(32, 0).view(q.dtype)",
    ),
    "mxfp8-dim1-3d-via-2d: scales of all experts in one piece": (
        "scales.copy_(together[1].unflatten(1, (E, blocks)).transpose(0, 1))",
        "scales.copy_(together[1].view(scales.shape))",
    ),
    "mxfp8-dim1-3d-via-2d: experts that are not padded": (
        "if N % MX_BLOCK else w",
        "if N < 0 else w.repeat(1, 2, 1)[:, : blocks * MX_BLOCK]",
    ),
}
"""``KERNEL: what is wrong``, or ``KERNEL, MODULE, ...: what is wrong`` for a module that the one before it takes code
from -> the text of the last file, which occurs once or more, and what stands there instead."""
