"""Faults to plant in copies of the kernels that round sizes, random values and aligned addresses hide.

Written like those of :mod:`mutants`, some of which are faults of edges too: :data:`COUNTED`.
"""

from __future__ import annotations

from mutants import FAULTS

Fault = tuple[str, str]
"""The text of a module, and what stands there instead."""

PANELS = (
    "colwise, panels",
    "colwise-dual, panels",
    "rowwise, panels",
    "transpose-3d-atomic, transpose_3d, panels",
    "transpose-3d-reduction, transpose_3d, panels",
)
BOTH_WAYS = ("rowwise-colwise, both_ways", "colwise-transpose-3d, both_ways")
UNEVEN = ("colwise, panels", "colwise-dual, panels", "rowwise, panels", "rowwise-colwise, both_ways")
WHOLE_ROWS = ("rowwise-2d", "colwise-3d, rowwise_2d")
BLOCKS_OF_ROWS = ("mxfp8-dim1", "mxfp8-dim1-3d, mxfp8_dim1", "mxfp8-dim1-3d-via-2d, mxfp8_dim1")
"""A kernel, and the modules from its file to the one whose code it shares with others."""


def aligned(pointer: str) -> str:
    """The aligned address at or before a pointer."""
    return f"({pointer}.to(tl.int64) // 16 * 16).to({pointer}.dtype)"


OF_SCALES: dict[str, Fault] = {
    "the scale of a NaN": ("tl.where(bits == infinity, 0.0, amax)", "tl.where(bits >= infinity, 0.0, amax)"),
    "the scale of an infinity": ("tl.where(bits == infinity, 0.0, amax)", "amax"),
    "the scale of zeros": ("tl.maximum(bits, float32_bits(1e-12))", "bits"),
    "the scale of huge values": ("scale = (exponent + 127", "scale = (tl.maximum(exponent, -64) + 127"),
}
"""In ``arithmetic``, which all but the MXFP8 kernels take their scales from."""

OF_BLOCK_SCALES: dict[str, Fault] = {
    "the scale of a NaN": ("special = tl.where(bits == 0x7F800000, 254, 255)", "special = 254"),
    "the scale of an infinity": ("special = tl.where(bits == 0x7F800000, 254, 255)", "special = 255"),
    "the scale of zeros": ("tl.maximum(exponent + 127, 0)", "(exponent + 127)"),
    "the codes beside a NaN": ("tl.where(code == 255, 0x7FC00000, bits)", "bits"),
    "the codes beside an infinity": ("tl.maximum((254 - code) << 23, 0x400000)", "((254 - code) << 23)"),
    "the scale of huge values": ("(bits >> 23) - (FP8", "tl.minimum(bits >> 23, 200) - (FP8"),
}
"""In ``mxfp8_arithmetic``."""

OF_TILES: dict[str, Fault] = {
    "an unaligned address taken for an aligned one": (
        "at = matrix.x_ptr + first",
        f"at = {aligned('matrix.x_ptr')} + first",
    ),
    "the edge at a group's end unwritten": FAULTS["colwise, panels, tiles: the edge at a group's end unwritten"],
    "a mask without its columns": FAULTS["colwise, panels, tiles: a mask without its columns"],
}
"""In ``tiles``."""

OF_UNEVEN_TILES: dict[str, Fault] = {"edges unwritten": FAULTS["colwise, panels, tiles: edges unwritten"]}
"""Where groups begin anywhere."""

OF_ALIGNED_TILES: dict[str, Fault] = {
    "NaN after a group": ("tl.store(q_columns + place, zero, mask=spoiled)", "pass"),
    "no zeros after a group": ("units_of(matrix, start, end) * matrix.ALIGNMENT - place", "(end - start) - place"),
    "an empty group without zeros": (
        "tl.maximum(tl.cdiv(end - start, matrix.ALIGNMENT), 1)",
        "tl.cdiv(end - start, matrix.ALIGNMENT)",
    ),
}
"""Where groups begin at multiples of an alignment."""

ALIGNED = ("colwise, panels", "colwise-dual, panels", "rowwise-colwise, both_ways")

OF_WHOLE_ROWS: dict[str, Fault] = {
    "the last block of rows left out": (
        'programs = -(-M // config["BLOCK_SIZE"])',
        'programs = M // config["BLOCK_SIZE"]',
    ),
    "codes past the last row": ("in_rows = (rows < M)[", "in_rows = (rows < tl.cdiv(M, BLOCK_SIZE) * BLOCK_SIZE)["),
    "scales past the last row": (
        "tl.store(scales_ptr + rows, scale, mask=rows < M)",
        "tl.store(scales_ptr + rows, scale)",
    ),
    "the last tile in no maximum": (
        "tl.range(0, K, BLOCK_SIZE_ITER,",
        "tl.range(0, K // BLOCK_SIZE_ITER * BLOCK_SIZE_ITER,  BLOCK_SIZE_ITER,",
    ),
    "columns of the next row": (
        "inside = in_rows & (column + columns < K)\n            largest",
        "inside = in_rows\n            largest",
    ),
    "an unaligned address taken for an aligned one": ("x_rows = x_ptr +", f"x_rows = {aligned('x_ptr')} +"),
}
"""In ``rowwise_2d``."""

OF_PARTIAL_BLOCKS: dict[str, Fault] = {
    "the scales of the last, partial block": ("(blocks < tl.cdiv(M, 32))", "(blocks < M // 32)"),
    "scales of another column": ("lines[None, :] * tl.cdiv(M, 32)", "lines[None, :] * (M // 32)"),
}
"""In ``mxfp8_dim1``, where nothing is padded."""

OF_BLOCKS_OF_ROWS: dict[str, Fault] = {
    "the last tile of columns left out": ('-(-K // config["BLOCK_SIZE_K"])', '(K // config["BLOCK_SIZE_K"])'),
    "an unaligned address taken for an aligned one": ("x_rows = x_ptr +", f"x_rows = {aligned('x_ptr')} +"),
}
"""In ``mxfp8_dim1``."""

EDGE_FAULTS: dict[str, Fault] = {
    **{
        f"{modules}, arithmetic: {what}": fault
        for modules in (
            "rowwise",
            *(each for each in PANELS if each != "rowwise, panels"),
            *BOTH_WAYS,
            *WHOLE_ROWS,
            "rowwise-factored",
        )
        for what, fault in OF_SCALES.items()
    },
    **{
        f"{modules}, mxfp8_arithmetic: {what}": fault
        for modules in ("mxfp8-dim0", *BLOCKS_OF_ROWS)
        for what, fault in OF_BLOCK_SCALES.items()
    },
    **{f"{modules}, tiles: {what}": fault for modules in (*PANELS, *BOTH_WAYS) for what, fault in OF_TILES.items()},
    **{f"{modules}, tiles: {what}": fault for modules in UNEVEN for what, fault in OF_UNEVEN_TILES.items()},
    **{f"{modules}, tiles: {what}": fault for modules in ALIGNED for what, fault in OF_ALIGNED_TILES.items()},
    **{f"{modules}: {what}": fault for modules in WHOLE_ROWS for what, fault in OF_WHOLE_ROWS.items()},
    **{f"{modules}: {what}": fault for modules in BLOCKS_OF_ROWS for what, fault in OF_BLOCKS_OF_ROWS.items()},
    **{f"{modules}: {what}": fault for modules in BLOCKS_OF_ROWS[:2] for what, fault in OF_PARTIAL_BLOCKS.items()},
    **{
        f"rowwise-factored: {what}": fault
        for what, fault in {
            "the last rows of a block left out": ("tl.cdiv(block.rows, ROWS)", "block.rows // ROWS"),
            "codes past the last row of a block": (
                "in_rows = number * ROWS + lanes < block.rows",
                "in_rows = number * ROWS + lanes < BLOCK_SIZE_M",
            ),
            "padding rows divided": ("(block.group < G) & (block.rows > 0)", "block.rows > 0"),
            "an unaligned address taken for an aligned one": (
                "    at = x_ptr + row.to(tl.int64) * K",
                f"    at = {aligned('x_ptr')} + row.to(tl.int64) * K",
            ),
        }.items()
    },
    **{
        f"transposed-codes: {what}": fault
        for what, fault in {
            "no zeros after a group": (
                "            BLOCK_SIZE_M,\n            FP8_MAX,",
                "            left,\n            FP8_MAX,",
            ),
            "an empty group without zeros": (
                "tl.maximum(tl.cdiv(ends - starts, 128), 1)",
                "tl.cdiv(ends - starts, 128)",
            ),
        }.items()
    },
    "transposed-codes-3d, transposed_codes: an unaligned address taken for an aligned one": (
        "from_ptr = tile.q_ptr.to(",
        f"from_ptr = {aligned('tile.q_ptr')}.to(",
    ),
    **{
        f"{modules}: codes past the last column": ("exist = (columns < tile.K)", "exist = (columns < tile.K + 1)")
        for modules in ("transposed-codes", "transposed-codes-3d, transposed_codes")
    },
    "transposed-codes-3d: rows of the next expert": (
        "        N - row,\n        0.0,",
        "        BLOCK_SIZE_M,\n        0.0,",
    ),
    "rowwise: the last block of rows left out": ('-(-N // config["BLOCK_SIZE"])', '(N // config["BLOCK_SIZE"])'),
    "rowwise: rows that are taken for aligned": (
        "shared = (M % 16 != 0) | (start % 16 != 0)",
        "shared = (start % 16 != 0)",
    ),
    "rowwise: columns of no group that are read": ("read_tail = tl.where(group < G, tail, 0)", "read_tail = tail"),
    "rowwise: an unaligned address taken for an aligned one": (
        "x_rows = x_ptr + first",
        f"x_rows = {aligned('x_ptr')} + first",
    ),
    "mxfp8-dim0: the last tile of rows left out": ('-(-M // config["BLOCK_SIZE_M"])', '(M // config["BLOCK_SIZE_M"])'),
    "mxfp8-dim0: codes past the last row": (
        "in_rows = (rows < M)",
        "in_rows = (rows < tl.cdiv(M, BLOCK_SIZE_M) * BLOCK_SIZE_M)",
    ),
    "mxfp8-dim0: an unaligned address taken for an aligned one": (
        "tl.load(x_ptr + at",
        f"tl.load({aligned('x_ptr')} + at",
    ),
    "mxfp8-dim1-3d, mxfp8_dim1: columns that are taken for aligned": (
        "rows // 16 * 16 < M if WHOLE_CHUNKS else rows < M",
        "rows // 16 * 16 < M",
    ),
    "mxfp8-dim1-3d, mxfp8_dim1: rows of the next expert": ("mask=(rows < M)[:, None] & in_columns", "mask=in_columns"),
    "mxfp8-dim1-3d-via-2d: padding that counts": (
        "blocks * MX_BLOCK - N)) if",
        "blocks * MX_BLOCK - N), value=9.0) if",
    ),
    "mxfp8-dim1-3d-via-2d: codes of padding": ("(E, blocks * MX_BLOCK))[:, :N])", "(E, blocks * MX_BLOCK))[:, -N:])"),
    "mxfp8-dim1-3d-via-2d: the scales of the last, partial block, in the copy": (
        "scales.copy_(together[1].unflatten(1, (E, blocks)).transpose(0, 1))",
        "scales[..., : N // 32].copy_(together[1].unflatten(1, (E, blocks)).transpose(0, 1)[..., : N // 32])",
    ),
}

COUNTED = (
    "colwise, tiles: columns that are too near",
    "colwise, panels: padding rows left out",
    "colwise, panels: padding rows read",
    "colwise, panels, tiles: a maximum without the group's start",
    "colwise, panels, tiles: a maximum one row too long",
    "colwise, panels, tiles: a mask without the group's start",
    "colwise, panels, tiles: groups that begin a chunk late",
    "rowwise: a mask without the group's start",
    "rowwise: a mask one column too long",
    "rowwise: a dropped tail",
    "rowwise-2d: a dropped tail",
    "colwise-3d, rowwise_2d: a dropped tail",
    "mxfp8-dim0: a dropped tail",
    "mxfp8-dim0: a mask without its columns",
    "mxfp8-dim0: scales of another row",
    "mxfp8-dim0: scales of the last block unwritten",
    "mxfp8-dim1: a dropped tail",
    "mxfp8-dim1: a mask without its columns",
    "mxfp8-dim1-3d, mxfp8_dim1: a dropped tail",
    "mxfp8-dim1-3d, mxfp8_dim1: a mask without its columns",
    "mxfp8-dim1-3d-via-2d: experts that are not padded",
)
"""Faults of :data:`mutants.FAULTS` that a round problem hides too."""

FAULTS_OF_EDGES: dict[str, Fault] = {**EDGE_FAULTS, **{title: FAULTS[title] for title in COUNTED}}
"""All of them, by the titles of :data:`mutants.FAULTS`."""
