"""Kernels whose code test_ir compiles and reads."""

import triton
import triton.language as tl


@triton.jit
def loop(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    a, b, c = a_ptr + tl.arange(0, BLOCK), b_ptr + tl.arange(0, BLOCK), c_ptr + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, n, BLOCK):
        total += tl.load(a)
        tl.store(b, total)
        a += BLOCK
        b += BLOCK
        c += BLOCK
    tl.store(c, total)


@triton.jit
def until(a_ptr, b_ptr, n):
    i = 0
    at = a_ptr
    while i < n:
        i += tl.load(at).to(tl.int32)
        at += 1
    tl.store(b_ptr, i)


@triton.jit
def atomic(total_ptr, lock_ptr, unused_ptr):
    tl.atomic_xchg(lock_ptr, 1.0)
    tl.atomic_add(total_ptr, 1.0)


@triton.jit
def either(flag_ptr, a_ptr, b_ptr, c_ptr, n):
    if n == 7:
        return
    if tl.load(flag_ptr) > 0:
        at = a_ptr
        tl.store(c_ptr, 1.0)
    else:
        at = b_ptr
    tl.store(at, 1.0)


@triton.jit
def in_place(x_ptr, n, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at, mask=tl.arange(0, BLOCK) < n) * 2, mask=tl.arange(0, BLOCK) < n)


@triton.jit(noinline=True)
def _device(from_ptr, to_ptr):
    tl.store(to_ptr, tl.load(from_ptr))
    return 1


@triton.jit
def calls(a_ptr, b_ptr):
    _device(a_ptr + 1, b_ptr + 1)


@triton.jit
def descriptors(source, target_ptr, M, N, BLOCK: tl.constexpr):
    target = tl.make_tensor_descriptor(target_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def _cast(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def table(at_ptr, sizes_ptr, out_ptr):
    """Addresses in a tensor, cast in a function that it calls."""
    data = _cast(tl.load(at_ptr + tl.program_id(0)))
    for start in range(0, tl.load(sizes_ptr).to(tl.int32), 16):
        tl.store(out_ptr + tl.arange(0, 16), tl.load(data + start + tl.arange(0, 16)))


@triton.jit
def nested(at_ptr, which_ptr):
    """Load an address from a place that is loaded, too."""
    place = tl.load(which_ptr + tl.program_id(0))
    tl.store(tl.cast(tl.load(at_ptr + place) + 4, tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def address(x_ptr, to):
    tl.store(to.to(tl.pointer_type(tl.float32)), tl.load(x_ptr))


@triton.jit
def in_assembly(at_ptr):
    tl.inline_asm_elementwise(
        "{ st.global.b32 [$1], 1; mov.u32 $0, 0; }", "=r,l", [tl.load(at_ptr)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def aligned(x_ptr, offsets_ptr):
    """A pointer that is computed as an integer is based on an argument's memory."""
    at = (x_ptr.to(tl.int64) + tl.load(offsets_ptr)) & -16
    tl.store(at.to(tl.pointer_type(tl.float32)), tl.load(x_ptr) + 1)


@triton.jit
def seeded(x_ptr, seed, counts_ptr):
    """64-bit integers that become numbers."""
    at = tl.arange(0, 16)
    tl.store(x_ptr + tl.load(counts_ptr) + at, tl.rand(seed, at))
