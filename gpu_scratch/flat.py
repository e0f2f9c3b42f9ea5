import torch, triton
import triton.language as tl
from fp8tune_kernels.gemm import grouped_tiles
from fp8tune_kernels.gemm.grouped_tiles import in_bands, one_of, padded_extents, piece, scaled, store_masked
from fp8tune_kernels.runtime.launching import launch_kernel


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def grouped_contraction_kernel(
    a_ptr: tl.tensor,  # (N, M) or, of bfloat16, (M, N), row-major
    b_ptr: tl.tensor,  # (K, M) or (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    scale_a_ptr: tl.tensor,  # (G, N); None without scales
    scale_b_ptr: tl.tensor,  # (G, K)
    out_ptr: tl.tensor,  # (G, N, K), row-major
    M: tl.tensor,  # rows of a and b, with those between groups
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,  # the alignment
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_N: tl.constexpr,  # of K
    BLOCK_SIZE_K: tl.constexpr,  # of M
    BAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLATTEN: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Tiles of BLOCK_SIZE_M by BLOCK_SIZE_N of one group's product, one after the other; GROUPS > G."""
    BY_ROWS: tl.constexpr = scale_a_ptr is None  # bfloat16 lies as it is
    # a group of codes that begins anywhere is out of reach: descriptors read from multiples of 16 bytes
    READS: tl.constexpr = DESCRIPTORS > 0 and (BY_ROWS or ALIGNED % 16 == 0)
    if not BY_ROWS and ALIGNED % 16 == 0:
        M = M // 16 * 16  # as it is already: so the compiler knows that loads may be wide
    if READS:
        if BY_ROWS:
            a = tl.make_tensor_descriptor(a_ptr, [M, N], [N, 1], [BLOCK_SIZE_K, BLOCK_SIZE_M])
            b = tl.make_tensor_descriptor(b_ptr, [M, K], [K, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N])
        else:
            a = tl.make_tensor_descriptor(a_ptr, [N, M], [M, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
            b = tl.make_tensor_descriptor(b_ptr, [K, M], [M, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
    if DESCRIPTORS == 2:
        out = tl.make_tensor_descriptor(
            out_ptr, [G, N, K], [tl.cast(N, tl.int64) * K, K, 1], [1, BLOCK_SIZE_M, BLOCK_SIZE_N]
        )
    groups = padded_extents(offs_ptr, M, G, GROUPS, ALIGNED)
    down, across = tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)
    IS_WHOLE: tl.constexpr = ALIGNED % BLOCK_SIZE_K == 0  # rows that follow a group's own are zeros
    for tile in tl.range(tl.program_id(0), G * down * across, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (down * across)
        is_mine = groups.group == group
        start, end = one_of(groups.start, is_mine), one_of(groups.end, is_mine)
        if not BY_ROWS and ALIGNED % 16 == 0:
            start = start // 16 * 16
        row_tile, column_tile = in_bands(tile % (down * across), down, across, BAND)
        row, column = row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
        rows, columns = row + tl.arange(0, BLOCK_SIZE_M), column + tl.arange(0, BLOCK_SIZE_N)

        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        whole = tl.cdiv(end - start, BLOCK_SIZE_K) if IS_WHOLE else (end - start) // BLOCK_SIZE_K
        for step in tl.range(0, whole):
            at = start + step * BLOCK_SIZE_K
            if READS and BY_ROWS:
                a_piece, b_piece = a.load([at, row]).T, b.load([at, column])
            elif READS:
                a_piece, b_piece = a.load([row, at]), b.load([column, at]).T
            else:
                depth = at + tl.arange(0, BLOCK_SIZE_K)
                depth_end = end if BY_ROWS else M
                a_piece, b_piece = _pieces(a_ptr, b_ptr, rows, columns, depth, depth_end, M, N, K, BY_ROWS)
            total = tl.dot(a_piece, b_piece, total)
        if not IS_WHOLE and start + whole * BLOCK_SIZE_K < end:
            depth = start + whole * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            a_piece, b_piece = _pieces(a_ptr, b_ptr, rows, columns, depth, end, M, N, K, BY_ROWS)
            total = tl.dot(a_piece, b_piece, total)
        if not BY_ROWS:
            total = scaled(total, scale_a_ptr + group * N, rows, N, scale_b_ptr + group * K, columns, K)
        result = total.to(tl.bfloat16)
        if DESCRIPTORS == 2:
            out.store([group, row, column], result.reshape(1, BLOCK_SIZE_M, BLOCK_SIZE_N))
        else:
            store_masked(out_ptr + group.to(tl.int64) * N * K, K, rows, columns, N, K, result)


@triton.jit
def _pieces(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    depth_end: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BY_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both operands of one multiplication by pointers, zero from ``depth_end`` on."""
    if BY_ROWS:
        a_piece = piece(a_ptr, N, depth, rows, depth_end, N).T
        b_piece = piece(b_ptr, K, depth, columns, depth_end, K)
    else:
        a_piece = piece(a_ptr, M, rows, depth, N, depth_end)
        b_piece = piece(b_ptr, M, columns, depth, K, depth_end).T
    return a_piece, b_piece



def contract(config, inputs, outputs):
    a, b, offs, scale_a, scale_b, alignment = inputs
    (M, N), K, G = a.shape, b.shape[1], offs.shape[0]
    tensors = (a, b, offs, scale_a, scale_b, *outputs)
    launch_kernel(grouped_contraction_kernel, grouped_tiles.programs(config, a.device), tensors, (M, N, K, G),
                  (grouped_tiles.groups_constant(G), alignment), grouped_tiles.kernel_options(config))


@triton.jit(do_not_specialize=["M", "G"])
def fused_kernel(
    a_ptr, b_ptr, offs_ptr, scale_a_ptr, scale_b_ptr, out_ptr, M, N, K, G,
    GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    BAND: tl.constexpr, DESCRIPTORS: tl.constexpr, num_stages: tl.constexpr,
):
    M = M // 16 * 16
    a = tl.make_tensor_descriptor(a_ptr, [N, M], [M, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
    b = tl.make_tensor_descriptor(b_ptr, [K, M], [M, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
    if DESCRIPTORS == 2:
        out = tl.make_tensor_descriptor(
            out_ptr, [G, N, K], [tl.cast(N, tl.int64) * K, K, 1], [1, BLOCK_SIZE_M, BLOCK_SIZE_N]
        )
    groups = padded_extents(offs_ptr, M, G, GROUPS, ALIGNED)
    down, across = tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)
    each, programs, program = down * across, tl.num_programs(0), tl.program_id(0)
    pieces = tl.maximum(tl.cdiv(groups.end - groups.start, BLOCK_SIZE_K), 1)
    first = groups.group * each + programs - 1 - program
    mine = (first + each) // programs - first // programs
    steps = tl.sum(tl.where(groups.group < G, mine * pieces, 0), 0)

    tile, step, last, group, row, column, at = program - programs, 0, 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for _ in tl.range(0, steps):
        if step == last:
            tile += programs
            group = tile // each
            is_mine = groups.group == group
            at = one_of(groups.start, is_mine) // 16 * 16
            last = one_of(pieces, is_mine)
            row_tile, column_tile = in_bands(tile % each, down, across, BAND)
            row, column = row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
            step = 0
        total = tl.dot(a.load([row, at]), b.load([column, at]).T, total)
        at += BLOCK_SIZE_K
        step += 1
        if step == last:
            rows, columns = row + tl.arange(0, BLOCK_SIZE_M), column + tl.arange(0, BLOCK_SIZE_N)
            result = scaled(total, scale_a_ptr + group * N, rows, N, scale_b_ptr + group * K, columns, K).to(tl.bfloat16)
            if DESCRIPTORS == 2:
                out.store([group, row, column], result.reshape(1, BLOCK_SIZE_M, BLOCK_SIZE_N))
            else:
                store_masked(out_ptr + group.to(tl.int64) * N * K, K, rows, columns, N, K, result)
            total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)


def fused(config, inputs, outputs):
    a, b, offs, scale_a, scale_b, alignment = inputs
    (M, N), K, G = a.shape, b.shape[1], offs.shape[0]
    tensors = (a, b, offs, scale_a, scale_b, *outputs)
    launch_kernel(fused_kernel, grouped_tiles.programs(config, a.device), tensors, (M, N, K, G),
                  (grouped_tiles.groups_constant(G), alignment), grouped_tiles.kernel_options(config))
