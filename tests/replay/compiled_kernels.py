"""Kernels whose code is compiled and read. Names of arguments begin with what the kernel does to their memory.

``r`` reads, ``w`` writes, ``rw`` both, ``no`` neither; ``at`` reads addresses, ``to`` is one, ``i`` reads integers.
"""

import triton
import triton.language as tl


@triton.jit
def loop(r_a, w_b, w_c, n, BLOCK: tl.constexpr):
    a, b, c = r_a + tl.arange(0, BLOCK), w_b + tl.arange(0, BLOCK), w_c + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, n, BLOCK):
        total += tl.load(a)
        tl.store(b, total)
        a += BLOCK
        b += BLOCK
        c += BLOCK
    tl.store(c, total)


@triton.jit
def until(r_a, w_b, n):
    i = 0
    at = r_a
    while i < n:
        i += tl.load(at).to(tl.int32)
        at += 1
    tl.store(w_b, i)


@triton.jit
def atomic(rw_total, rw_lock, no_x):
    tl.atomic_xchg(rw_lock, 1.0)
    tl.atomic_add(rw_total, 1.0)


@triton.jit
def either(r_flag, w_a, w_b, w_c, n):
    if n == 7:
        return
    if tl.load(r_flag) > 0:
        at = w_a
        tl.store(w_c, 1.0)
    else:
        at = w_b
    tl.store(at, 1.0)


@triton.jit
def in_place(rw_x, n, BLOCK: tl.constexpr):
    at = rw_x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at, mask=tl.arange(0, BLOCK) < n) * 2, mask=tl.arange(0, BLOCK) < n)


@triton.jit(noinline=True)
def _device(from_ptr, to_ptr):
    tl.store(to_ptr, tl.load(from_ptr))
    return 1


@triton.jit
def calls(r_a, w_b):
    _device(r_a + 1, w_b + 1)


@triton.jit
def descriptors(r_source, w_target, M, N, BLOCK: tl.constexpr):
    target = tl.make_tensor_descriptor(w_target, [M, N], [N, 1], [BLOCK, BLOCK])
    target.store([0, 0], r_source.load([0, 0]))


@triton.jit
def _cast(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def table(at_x, i_sizes, w_out):
    """Addresses in a tensor, cast in a function that it calls."""
    data = _cast(tl.load(at_x + tl.program_id(0)))
    for start in range(0, tl.load(i_sizes).to(tl.int32), 16):
        tl.store(w_out + tl.arange(0, 16), tl.load(data + start + tl.arange(0, 16)))


@triton.jit
def nested(at_x, i_which):
    """Load an address from a place that is loaded, too."""
    place = tl.load(i_which + tl.program_id(0))
    tl.store(tl.cast(tl.load(at_x + place) + 4, tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def address(r_x, to):
    tl.store(to.to(tl.pointer_type(tl.float32)), tl.load(r_x))


@triton.jit
def in_assembly(at_x):
    tl.inline_asm_elementwise(
        "{ st.global.b32 [$1], 1; mov.u32 $0, 0; }", "=r,l", [tl.load(at_x)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def aligned(rw_x, i_offsets):
    """A pointer that is computed as an integer is based on an argument's memory."""
    at = (rw_x.to(tl.int64) + tl.load(i_offsets)) & -16
    tl.store(at.to(tl.pointer_type(tl.float32)), tl.load(rw_x) + 1)


@triton.jit
def seeded(w_x, seed, i_counts):
    """64-bit integers that become numbers."""
    at = tl.arange(0, 16)
    tl.store(w_x + tl.load(i_counts) + at, tl.rand(seed, at))
