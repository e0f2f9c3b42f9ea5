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
