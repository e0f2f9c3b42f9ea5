"""Kernels as libraries write them, and a program that launches each: hooks, tuples, tuners of other classes, dicts."""

import os
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.runtime import Autotuner
from triton.tools.tensor_descriptor import TensorDescriptor

CONFIGS = [triton.Config({"B": 64}), triton.Config({"B": 128})]
IS_KEY_CHECKED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)  # against the kernel's arguments
HOOKED = []  # block of each launch that called a hook


def blocks(n):
    return lambda config: (triton.cdiv(n, config["B"]),)


@triton.jit
def copy(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


copied = triton.autotune(CONFIGS, ["n"])(copy)
hooked = triton.autotune(
    CONFIGS,
    ["n"],
    pre_hook=lambda arguments, reset_only=False: HOOKED.append(arguments["B"]),
    prune_configs_by={"perf_model": lambda **arguments: 1.0, "top_k": 1},
)(copy)


@triton.autotune(CONFIGS, ["n"])
@triton.jit
def wrong_block(x, y, n, B: tl.constexpr):
    """Wrong by one where B is 128."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n) + (B == 128), mask=at < n)


@triton.autotune(CONFIGS, ["n"])
@triton.jit
def drops_tail(x, y, n, B: tl.constexpr):
    """Drop the elements past the last whole block where B is 128; no round size shows it."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    end = n // B * B if B == 128 else n
    tl.store(y + at, tl.load(x + at, mask=at < end), mask=at < end)


@triton.autotune(CONFIGS, ["n"], reset_to_zero=["total"])
@triton.jit
def accumulate(x, total, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(total, tl.sum(tl.load(x + at, mask=at < n, other=0), 0))


@triton.autotune(CONFIGS, ["n"], restore_value=["x"])
@triton.jit
def double_in_place(x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def run_in_memory():
    x, y, total = torch.ones(256), torch.empty(256), torch.zeros(1)
    accumulate[blocks(256)](x, total, 256)
    double_in_place[blocks(256)](x, 256)
    for kernel in (wrong_block, drops_tail):
        kernel[blocks(256)](x, y, 256)
    assert (total.item(), y.unique().tolist()) == (256, [2])


def zeroed(*names):
    """One lambda for each config, as backward kernels with atomics have it."""
    return lambda args: [args[name].zero_() for name in names]


@triton.autotune(
    [triton.Config({"B": b}, num_warps=w, pre_hook=zeroed("total")) for b in (256, 1024) for w in (2, 4)], ["n"]
)
@triton.jit
def column_sum(x, total, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(total + at % 32, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


def run_column_sum():
    for n in (1600, 6400):
        total = torch.zeros(32)
        column_sum[blocks(n)](torch.ones(n), total, n)
        assert bool((total == n / 32).all())


def set_blocks(args):
    args["x"].block_shape = args["y"].block_shape = [args["ROWS"], 64]


@triton.autotune([triton.Config({"ROWS": rows}, pre_hook=set_blocks) for rows in (16, 32)], ["rows"])
@triton.jit
def copy_rows(x, y, rows, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS
    y.store([at, 0], x.load([at, 0]))


def run_copy_rows():
    x = torch.arange(96 * 64, dtype=torch.float32).view(96, 64)
    y = torch.empty_like(x)
    descriptors = [TensorDescriptor.from_tensor(item, [1, 1]) for item in (x, y)]
    copy_rows[lambda config: (triton.cdiv(96, config["ROWS"]),)](*descriptors, 96)
    assert torch.equal(x, y)


@triton.autotune(CONFIGS, ["n"])
@triton.jit
def fails(x, n, B: tl.constexpr):
    tl.static_assert(B > 4096, "an optional path that this GPU lacks")


def run_fails():
    try:
        fails[(16,)](torch.empty(1000), 1000)
    except Exception:
        return
    raise AssertionError


class RoundedTuner(Autotuner):
    """Rounds keys up, replaces ``run()``, and puts other configs in the place of those that it declares."""

    def run(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False), **kwargs)
        self.configs = self.configs[:1]
        best = self.cache.setdefault(tuple(-(-named[name] // 32) for name in self.keys), self.configs[0])
        return self.fn.run(*args, **kwargs, **best.all_kwargs())


class Policy(RoundedTuner):
    """Inherits ``run()``, as each policy of a library's tuner does."""


@triton.jit
def number(x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, at, mask=at < n)


rounded = Policy(number, number.arg_names, CONFIGS, ["n"], None, None)
BY_WIDTH = {
    width: triton.autotune([triton.Config({"B": 64 * width}), triton.Config({"B": 128})], ["n"])(number)
    for width in (1, 4)
}
LAYER = SimpleNamespace(kernel=triton.autotune(CONFIGS[::-1], ["n"])(number))


def run_number(kernel, n):
    x = torch.empty(n)
    kernel[blocks(n)](x, n)
    assert bool((x == torch.arange(n)).all())


def run_tuners():
    for n in (1000, 1010, 2000):
        run_number(rounded, n)
    for kernel in (*BY_WIDTH.values(), LAYER.kernel):
        run_number(kernel, 2000)


@triton.autotune(CONFIGS, ["n"])
@triton.jit
def blend(parts, weights, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    left = tl.load(parts[0] + at, mask=at < n) * weights[0]
    right = tl.load(parts[1][0] + at, mask=at < n) * weights[1] + parts[1][1]
    tl.store(y + at, left + right, mask=at < n)


def run_blend():
    a, b = torch.rand(1000), torch.rand(1000)
    y = torch.empty_like(a)
    blend[blocks(1000)]((a, (b, 5)), (2, 3), y, 1000)
    assert torch.allclose(y, 2 * a + 3 * b + 5)


@triton.autotune(CONFIGS, ["n", "MODE", "TO", *([] if IS_KEY_CHECKED else ["gone"])])
@triton.jit
def cast(x, y, n, scale, MODE: tl.constexpr, TO: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at, mask=at < n) * scale
    if MODE == "silu":
        v = v * tl.sigmoid(v)
    tl.store(y + at, v.to(TO), mask=at < n)


def run_cast():
    x = torch.rand(2000)
    for mode in ("silu", "none"):
        y = torch.empty_like(x, dtype=torch.float16)
        cast[blocks(2000)](x, y, 2000, 0.5, mode, tl.float16)
    assert torch.equal(y, (x / 2).half())


@triton.jit
def fill(x, n, value, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, value, mask=at < n)


def run_fill():
    for n in (3000, 7000):
        x = torch.empty(n)
        fill[blocks(n)](x, n, 2.0, B=256, num_warps=2)
        assert bool((x == 2).all())
    number[blocks(640)](torch.empty(640), 640, B=64)  # which tuners launch, too


@triton.autotune(CONFIGS, key=[])
@triton.jit
def double_all(at_ptr, sizes_ptr, B: tl.constexpr):
    data = tl.load(at_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes_ptr + tl.program_id(0))
    for start in range(0, size, B):
        at = start + tl.arange(0, B)
        tl.store(data + at, 2 * tl.load(data + at, mask=at < size), mask=at < size)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def fill_at(to, n, x, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(tl.cast(to, tl.pointer_type(tl.float32)) + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def add_seed(x, y, n, seed, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n) + (seed % 7), mask=at < n)


def run_addresses():
    parts = [torch.ones(size) for size in (300, 70)]
    double_all[(2,)](torch.tensor([part.data_ptr() for part in parts]), torch.tensor([300, 70], dtype=torch.int32))
    x, y = torch.rand(256), torch.empty(256)
    fill_at[blocks(256)](y.data_ptr(), 256, x)
    add_seed[blocks(256)](x, y, 256, 2**46 + 1)


def fitted(configs, args, **rest):
    """Triton times whatever this returns: no config of it is declared."""
    result = []
    for config in configs:
        block = min(config.kwargs["B"], triton.next_power_of_2(args["n"]))
        result.append(triton.Config({"B": block, "EVEN": args["n"] % block == 0}, num_warps=config.num_warps))
    return result


def not_too_large(configs, args, **rest):
    return [config for config in configs if args["n"] <= int(os.environ.get("LARGEST", 100_000))]


def pruned_by(function):
    configs = [triton.Config({"B": 1024}), triton.Config({"B": 512})]
    return triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": function})


@pruned_by(fitted)
@triton.jit
def increment(x, y, n, B: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(y + at, tl.load(x + at) + 1)
    else:
        tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@pruned_by(not_too_large)
@triton.jit
def limited(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def run_pruned(kernel, *sizes):
    for n in sizes:
        x = torch.rand(n)
        y = torch.empty_like(x)
        kernel[blocks(n)](x, y, n)
        assert torch.equal(y, x + 1)


@triton.autotune([triton.Config({"ROWS": rows}) for rows in (1, 2)], key=["columns"])
@triton.heuristics({"B": lambda args: triton.next_power_of_2(args["columns"])})
@triton.jit
def softmax(x, y, rows, columns, stride, ROWS: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    for row in range(tl.program_id(0) * ROWS, min(rows, (tl.program_id(0) + 1) * ROWS)):
        value = tl.load(x + row * stride + at, mask=at < columns, other=float("-inf"))
        power = tl.exp(value - tl.max(value, 0))
        tl.store(y + row * stride + at, power / tl.sum(power, 0), mask=at < columns)


def softmaxed(x):
    return torch.softmax(x, -1)


def run_softmax(rows, columns):
    x = torch.randn(rows, columns)
    y = torch.empty_like(x)
    softmax[lambda config: (triton.cdiv(rows, config["ROWS"]),)](x, y, rows, columns, x.stride(0))


@triton.jit
def twice(x):
    return x + x


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def gather(x_ptr, index_ptr, count_ptr, n, scale, DTYPE: tl.constexpr, FUNCTION: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    index = tl.load(index_ptr + at, mask=at < n, other=0)
    x = tl.load(x_ptr + index, mask=at < n).to(DTYPE)
    tl.store(x_ptr + index, FUNCTION(x) * scale, mask=at < n)
    tl.atomic_add(count_ptr, 1)


def run_gather(n, scale=2.0):
    x = torch.ones(2 * n, dtype=torch.bfloat16)
    index, count = torch.arange(n, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    gather[blocks(n)](x[n:], index, count, n, scale=scale, DTYPE=tl.float32, FUNCTION=twice)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def in_blocks(x, y, order, n, B: tl.constexpr):
    """Copy the blocks in an order that has a number for each block."""
    at = tl.load(order + tl.program_id(0)) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def backwards(config, *, order, n, **others):
    return {"order": torch.arange(n // config["B"] - 1, -1, -1, dtype=order.dtype, device=order.device)}


def main():
    for run in (run_column_sum, run_copy_rows, run_fails, run_tuners, run_blend, run_cast, run_fill, run_in_memory):
        run()
    run_addresses()
    run_pruned(increment, 5000, 4096, 100)
    run_pruned(limited, 700, 5000)
    for rows, columns in ((4, 64), (4, 64), (4, 64), (2, 128)):
        run_softmax(rows, columns)
    run_gather(100)
    run_gather(100, float("inf"))
