"""Common parts of the grouped GEMMs: tiles of a persistent program, the grid of configs, and operands.

A launch has PROGRAMS programs a multiprocessor, whatever the sizes are; program p works on tiles p, p + programs and so
on. Tiles of a group follow each other, in bands of BAND row tiles: down a band first, then across, so that what the
programs read at one time is in L2. No value of ``offs`` is read on the host.

The grid is a list of the tiles that won on an H200, where 194 configs were timed on 13 layers of nine models: rows and
columns of a tile, warps, programs a multiprocessor. Left out, as no trial won with it: tiles of 256 rows, 8 warps on
fewer than 256 columns, three programs, bands of 4 or 32 row tiles, 2 stages where memory holds more.

:func:`estimate` is a roofline of a config's waste, in seconds of an H200; only ratios matter:

    volume   products that are computed, whole tiles and pieces: half a one is wasted in each group on average
    read     volume * (1 / BLOCK_SIZE_M + 1 / BLOCK_SIZE_N): what all tiles read, from L2
    seconds  max(volume / 665 T/s, read / 12.7 TB/s) + out / 4.3 TB/s

Measured on an H200, in FP8: no tile is faster than 1,333 TFLOP/s (M=131072 N=2048 K=7168 G=48); tiles of 64 x 256 reach
1,307 (M=32768 N=3072 K=5120 G=20), which reads 12.7 TB/s; a copy moves 4.3 TB/s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor

from .. import interpreter
from ..arches import ARCHES
from ..inputs import dtype_named
from ..quantize.factors import random_powers
from ..runtime.checks import FP8_DTYPES, check_values
from ..runtime.lookup import running_arch
from ..spec import DTYPE_FLAG, DTYPES, DeviceLimits, NamedInts, Problem

interpreter.install()

# Tiles

MOST_GROUPS = 4096
"""A program holds the ends of all groups in registers."""

LEAST_GROUPS_CONSTANT = 256
"""Of fewer groups the vector of ends is no faster, and each length has a binary of its own. So what is checked on small
problems is the binary that is timed."""


class Extents(NamedTuple):
    """The rows of all groups, a vector of each: group g has rows [start, end)."""

    group: tl.tensor
    start: tl.tensor
    end: tl.tensor


@triton.jit
def extents(offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, GROUPS: tl.constexpr) -> Extents:
    """The extents of G groups, then of the rows past the last one as group G, then of groups without a row."""
    group = tl.arange(0, GROUPS)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= G), other=0)
    start = tl.where(group <= G, start, M)
    end = tl.minimum(end, M)
    return Extents(group, tl.minimum(start, end), end)


@triton.jit
def padded_extents(
    offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr
) -> Extents:
    """The extents of groups that begin at multiples of ALIGNMENT rows, each with its rows alone: without those that
    follow it up to the next group. With ALIGNMENT 1 they are those of ``offs``."""
    group, start, end = extents(offs_ptr, M, G, GROUPS)
    if ALIGNMENT > 1:
        size = tl.where(group < G, end - start, 0)
        padded = tl.where(group < G, tl.maximum(tl.cdiv(size, ALIGNMENT), 1) * ALIGNMENT, 0)
        start = tl.cumsum(padded, 0) - padded
        end = start + size
    return Extents(group, start, end)


@triton.jit
def one_of(values: tl.tensor, is_mine: tl.tensor) -> tl.tensor:
    """The element of a vector where a mask is set, which is so once."""
    return tl.sum(tl.where(is_mine, values, 0), 0)


@triton.jit
def in_bands(tile: tl.tensor, down: tl.tensor, across: tl.tensor, BAND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The row tile and the column tile of a tile among ``down * across``, in bands of BAND row tiles."""
    band = tile // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    inside = tile - band * BAND * across
    return band * BAND + inside % height, inside // height


@triton.jit
def piece(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_end: tl.tensor,
    column_end: tl.tensor,
) -> tl.tensor:
    """A piece of a row-major matrix by pointers, zero past its ends."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=(rows < row_end)[:, None] & (columns < column_end)[None, :], other=0.0)


@triton.jit
def store_masked(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_end: tl.tensor,
    column_end: tl.tensor,
    values: tl.tensor,
) -> None:
    """Store a piece of a row-major matrix by pointers, up to its ends."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, values, mask=(rows < row_end)[:, None] & (columns < column_end)[None, :])


@triton.jit
def scaled(
    total: tl.tensor,
    scale_a_ptr: tl.tensor,
    rows: tl.tensor,
    row_end: tl.tensor,
    scale_b_ptr: tl.tensor,
    columns: tl.tensor,
    column_end: tl.tensor,
) -> tl.tensor:
    """A tile divided by a scale a row and a scale a column."""
    scale_a = tl.load(scale_a_ptr + rows, mask=rows < row_end, other=1.0)
    scale_b = tl.load(scale_b_ptr + columns, mask=columns < column_end, other=1.0)
    return total * _reciprocal(scale_a)[:, None] * _reciprocal(scale_b)[None, :]


@triton.jit
def _reciprocal(scale: tl.tensor) -> tl.tensor:
    """1 / scale, rounded as torch rounds it: Triton's ``/`` may be two units in the last place off."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


def groups_constant(groups: int) -> int:
    """GROUPS of a launch: a power of two above the number of groups. Raises ValueError for more than 4,095 groups."""
    if groups >= MOST_GROUPS:
        raise ValueError(f"offs has {groups} groups, wanted fewer than {MOST_GROUPS}: a program holds all their ends")
    return max(LEAST_GROUPS_CONSTANT, 1 << groups.bit_length())


def programs(config: Mapping[str, int], device: torch.device) -> int:
    """Programs to launch: PROGRAMS a multiprocessor."""
    return config["PROGRAMS"] * multiprocessors(device)


def multiprocessors(device: torch.device) -> int:
    """SMs or CUs: those of the compiler's target for meta tensors; 2 on a CPU, so that programs have several tiles."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2


def kernel_options(config: Mapping[str, int]) -> dict[str, int]:
    """Return what a config says to the kernel and its compiler: all but PROGRAMS."""
    return {name: value for name, value in config.items() if name != "PROGRAMS"}


# Configs

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (64, 128),
    "BLOCK_SIZE_N": (128, 256),
    "BLOCK_SIZE_K": (64, 128),
    "BAND": (8, 16),
    "DESCRIPTORS": (0, 1, 2),
    "PROGRAMS": (1, 2),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
"""DESCRIPTORS: 0 loads and stores by pointers, on any GPU; 1 loads operands by tensor descriptors, which Hopper's and
Blackwell's copy engine serves (TMA); 2 stores whole tiles by them too. PROGRAMS: of a multiprocessor."""

_TILES = (
    (64, 128, 4, 2),
    (64, 256, 4, 1),
    (128, 128, 4, 1),
    (128, 128, 4, 2),
    (128, 256, 8, 1),
)
"""Rows, columns, warps and programs a multiprocessor."""

_OTHERS = ("BLOCK_SIZE_K", "BAND", "DESCRIPTORS", "num_stages")

CONFIGS = tuple(
    NamedInts(dict(zip(AXES, (rows, columns, depth, band, descriptors, programs, warps, stages), strict=True)))
    for rows, columns, warps, programs in _TILES
    for depth, band, descriptors, stages in itertools.product(*map(AXES.__getitem__, _OTHERS))
)
"""The grid."""

DEFAULT = NamedInts(dict(zip(AXES, (128, 128, 64, 8, 0, 1, 8, 2), strict=True)))
"""What any GPU takes, and what is launched where the table has nothing."""

WITHOUT_FP8 = ("sm_80", "sm_86", "sm_87")
"""NVIDIA's arches for which Triton compiles no e4m3fn."""

MOST_SUMS = 128
"""Of a tile, in the registers of a thread."""

OTHER_REGISTERS = 40
"""Of a thread, beside its sums: addresses and loop counters, at least."""

WORSE = 1.15
"""Times the best estimate, beyond which a config is pruned. Of the 194 on 13 layers, none within 2 % of the best had
more than 1.08."""

COPIED_BYTES = 128
"""Of a row of a piece, the most that the copy engine swizzles. Where two programs share the memory, half may do."""

HELD_BYTES = 25 << 20
"""Half of the L2 of an H100 or H200."""

PRODUCTS_PER_S = 665e12
READ_BYTES_PER_S = 12.7e12
STORED_BYTES_PER_S = 4.3e12


class Work(NamedTuple):
    """Work of a kernel on a shape, in the names of its tiles: ``groups`` products of ``down`` rows by ``across``
    columns, each a sum over ``depth``."""

    groups: int
    down: int
    across: int
    depth: int
    ragged: str
    """What differs from group to group, and is given as the sum over groups: ``down`` or ``depth``."""
    element_size: int
    """Bytes of an element of the operands."""


def element_size(shape: Mapping[str, int]) -> int:
    """Bytes of one operand's element: of FP8, where a shape names no dtype."""
    return 2 if DTYPES[shape.get(DTYPE_FLAG, DTYPES.index("float8_e4m3fn"))] == "bfloat16" else 1


def invalid(config: Mapping[str, int], work: Work, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    unfit = _unfit(config, work.element_size, limits)
    if unfit or config == DEFAULT:
        return unfit
    if reason := _idle(config, work, limits):
        return reason
    ratio = estimate(config, work) / _least(work, limits)
    return f"its tiles take {ratio:.2f} times the best estimate: reads and waste" if ratio > WORSE else None


def _unfit(config: Mapping[str, int], element_size: int, limits: DeviceLimits) -> str | None:
    """Return which limit of the device a config exceeds."""
    if element_size == 1 and limits.arch in WITHOUT_FP8:
        return f"FP8: {limits.arch} has no tensor cores for it, and Triton compiles none"
    if config["DESCRIPTORS"] and not _has_descriptors(limits.arch):
        return f"DESCRIPTORS={config['DESCRIPTORS']}: {limits.arch} has no copy engine for tiles"
    threads = config["num_warps"] * limits.warp_size
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    sums = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"] // threads
    if sums > MOST_SUMS:
        return f"{sums} sums a thread do not fit in registers beside what multiplies"
    programs = config["PROGRAMS"]
    if (sums + OTHER_REGISTERS) * threads * programs > limits.registers_per_block:
        return f"{programs} programs need more registers than a multiprocessor of {limits.arch} has"
    count = _shared_bytes(config, element_size, limits)
    if count > limits.shared_bytes_per_block:
        return f"{count} bytes of tiles, {limits.arch} has {limits.shared_bytes_per_block} of shared memory"
    return None


def _idle(config: Mapping[str, int], work: Work, limits: DeviceLimits) -> str | None:
    """Return what of the device or of the config has nothing to do."""
    if not config["DESCRIPTORS"] and _has_descriptors(limits.arch):
        return f"DESCRIPTORS=0: the copy engine of {limits.arch} idles"
    stages = config["num_stages"]
    deeper = {**config, "num_stages": stages + 1}
    if stages < AXES["num_stages"][-1] and config["DESCRIPTORS"] and not _unfit(deeper, work.element_size, limits):
        return f"num_stages={stages}: shared memory holds {stages + 1}"
    deep, depth = config["BLOCK_SIZE_K"], _of_group(work, "depth")
    if deep * work.element_size < COPIED_BYTES and config["DESCRIPTORS"] and config["PROGRAMS"] == 1:
        return f"pieces of {deep * work.element_size} bytes a row: descriptors copy {COPIED_BYTES} at a time"
    if deep >= 2 * depth:
        return f"pieces of {deep} for a depth of {depth}: half of each is outside"
    return _same_order(config, work)


def _same_order(config: Mapping[str, int], work: Work) -> str | None:
    """Return the reason if a shorter band orders the tiles of a group alike, or no order matters."""
    band, down = config["BAND"], _of_group(work, "down")
    shorter = max((item for item in AXES["BAND"] if item < band), default=0)
    if not shorter:
        return None
    tiles = -(-down // config["BLOCK_SIZE_M"])
    if tiles <= shorter:
        return f"BAND={band}: a group has {tiles} row tiles, in the order of BAND={shorter}"
    count = (down + work.across) * _of_group(work, "depth") * work.element_size
    if count <= HELD_BYTES:
        return f"BAND={band}: L2 holds the {count:,} bytes of a group in any order"
    return None


def _of_group(work: Work, name: str) -> int:
    """A size of a group; the mean of one that differs."""
    size: int = getattr(work, name)
    return max(1, size // work.groups) if work.ragged == name else size


@functools.lru_cache(maxsize=1024)
def _least(work: Work, limits: DeviceLimits) -> float:
    """The best estimate of the grid."""
    fit = [config for config in CONFIGS if _unfit(config, work.element_size, limits) is None]
    return min(estimate(config, work) for config in fit or [DEFAULT])


def estimate(config: Mapping[str, int], work: Work) -> float:
    """Seconds, as the module says."""
    down, across, deep = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    sizes = {"down": (work.down, down), "across": (work.across, across), "depth": (work.depth, deep)}
    volume = 1  # a sum over groups is one of the sizes: the others are not multiplied by them
    for name, (size, block) in sizes.items():
        if name == work.ragged:
            volume *= max(size + work.groups * block // 2, work.groups * block)
        else:
            volume *= -(-size // block) * block
    read = volume * (1 / down + 1 / across) * work.element_size
    stored = 2 * work.down * work.across * (1 if work.ragged == "down" else work.groups)
    products = volume * work.element_size  # bfloat16 runs at half the rate
    return max(products / PRODUCTS_PER_S, read / READ_BYTES_PER_S) + stored / STORED_BYTES_PER_S


def _shared_bytes(config: Mapping[str, int], element_size: int, limits: DeviceLimits) -> int:
    """Return the bytes of a multiprocessor: stages of both operands, and the tile that is stored by a descriptor.

    On AMD the last stage is in registers.
    """
    down, across, deep = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    stages = config["num_stages"] - (0 if limits.warp_size == 32 else 1)
    staged = (down + across) * deep * element_size * stages
    stored = 2 * down * across if config["DESCRIPTORS"] == 2 else 0
    return (staged + stored) * config["PROGRAMS"]


def _has_descriptors(arch: str) -> bool:
    """Return True if tensor descriptors are served by hardware."""
    return ARCHES[arch].backend == "cuda" and int(arch.removeprefix("sm_")) >= 90 if arch in ARCHES else False


# Operands

SPREAD = 64.0
"""The standard deviation of random codes: a row of normal values is scaled until its largest is about 448."""

ADDRESS_BYTES = 16
"""Where memory begins that tensor descriptors and wide loads read."""


def random_operand(problem: Problem, rows: int, columns: int, device: str, number: int = 0) -> torch.Tensor:
    """``(rows, columns)``, row-major, of the problem's input dtype: codes or bfloat16. ``number``: which operand."""
    dtype = dtype_named(problem.in_dtype)
    if torch.device(device).type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(2 * problem.seed + number)
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device, generator=generator)
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        return values.mul_(SPREAD).clamp_(-limit, limit).to(dtype)
    return values.to(dtype)


def random_scales(problem: Problem, shapes: Sequence[int | tuple[int, ...]], device: str) -> list[torch.Tensor | None]:
    """Powers of two from 1/8 to 8, float32, of each shape; None beside operands that are not FP8."""
    if dtype_named(problem.in_dtype) not in FP8_DTYPES:
        return [None] * len(shapes)
    sizes = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
    seeds = [replace(problem, seed=problem.seed + 1 + number) for number in range(len(sizes))]
    return [random_powers(seed, shape, device, -3, 3) for seed, shape in zip(seeds, sizes, strict=True)]


def check_products(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    count_a: int,
    count_b: int,
    **sizes: int,
) -> None:
    """Raise ValueError unless a grouped GEMM can multiply operands of these shapes, with so many scales."""
    check_dtypes(a, b)
    check_multiples("b", **sizes)
    for name, scale, count in (("scale_a", scale_a, count_a), ("scale_b", scale_b, count_b)):
        if (scale is None) != (a.dtype == torch.bfloat16):
            expected = "None: bfloat16 has no scales" if scale is not None else f"{count} scales beside {a.dtype}"
            raise ValueError(f"{name} is {'None' if scale is None else 'a tensor'}, wanted {expected}")
        if scale is not None:
            check_values(name, scale, count, torch.float32, a.device)
    check_addresses(a=a, b=b)


def check_addresses(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor on a GPU begins at a multiple of 16 bytes; a traced one has no address."""
    for name, tensor in tensors.items():
        if tensor.is_cuda and not isinstance(tensor, FakeTensor) and (past := tensor.data_ptr() % ADDRESS_BYTES):
            raise ValueError(f"{name} begins {past} bytes past a multiple of 16: copy it")


def check_dtypes(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError unless both operands are of one dtype that a grouped GEMM multiplies, on one device."""
    if a.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise ValueError(f"a is {a.dtype}, wanted torch.bfloat16, torch.float8_e4m3fn or torch.float8_e4m3fnuz")
    if refusal := _refusal(a.dtype, running_arch(a.device)):
        raise ValueError(f"a is {a.dtype}, {refusal}")
    if b.dtype != a.dtype:
        raise ValueError(f"b is {b.dtype}, wanted {a.dtype} as a")
    if b.device != a.device:
        raise ValueError(f"b is on {b.device}, wanted {a.device} as a")


@functools.cache
def _refusal(dtype: torch.dtype, arch: str) -> str | None:
    """Return why an arch does not multiply operands of a dtype."""
    if dtype == torch.float8_e4m3fnuz and arch.startswith("sm_"):
        return "an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn"
    if dtype == torch.float8_e4m3fn and arch in WITHOUT_FP8:
        return f"which Triton does not compile for {arch}: wanted torch.bfloat16"
    return None


def are_multiples(*sizes: int) -> bool:
    """Return True if sizes are positive multiples of 16: rows then begin at 16 bytes."""
    return all(size > 0 and size % ADDRESS_BYTES == 0 for size in sizes)


def check_multiples(name: str, **sizes: int) -> None:
    """Raise ValueError unless :func:`are_multiples`."""
    if not are_multiples(*sizes.values()):
        layout = " and ".join(f"{dim}={size}" for dim, size in sizes.items())
        raise ValueError(f"{name} has {layout}, wanted positive multiples of {ADDRESS_BYTES}")


DECLARED: dict[str, Any] = {
    "axes": AXES,
    "configs": CONFIGS,
    "default": DEFAULT,
    "key": ("M_bucket", "N", "K", "G", DTYPE_FLAG),
    "rule": "exact-inputs",
    "flops": lambda shape: 2 * shape["M"] * shape["N"] * shape["K"],
}
"""Fields that the grouped GEMMs share."""
