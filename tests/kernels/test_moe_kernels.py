"""The kernels of a layer: right on every edge, faults found there, what they move, what their wrappers refuse."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planting import planted

from fp8tune.measure import checking, edges
from fp8tune_kernels import (
    catalog,
    multiply_gathered_rows,
    multiply_rows,
    sort_by_expert,
    sum_rows_of_tokens,
    transpose_codes,
    transpose_codes_to_one_scale,
    transpose_gathered_codes,
)
from fp8tune_kernels.spec import Edge, KernelSpec, NamedInts, Problem

FP8 = torch.float8_e4m3fn
TILES = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}

CONFIGS: dict[str, list[dict[str, int]]] = {
    "expert-sort": [{}, {"BLOCK_SIZE": 16}, {"BLOCK_SIZE": 128}],
    "gathered-rows": [
        {**TILES, "DESCRIPTORS": 2},
        {},
        {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "DESCRIPTORS": 1, "num_stages": 3},
    ],
    "gathered-transpose": [{}, {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64, "HELD_MIB": 0}],
    "gather-sum": [{}, {"BLOCK_SIZE_T": 8, "BLOCK_SIZE_K": 256}],
    "shifted-transpose-3d": [{}, {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 32}],
    "cast-transpose-3d": [{}, {"ROWS": 4, "BLOCK_SIZE_K": 64, "LAG": 2}],
}
"""Kernel -> what configs have beside the default's."""

ROUND = {
    "expert-sort": NamedInts(M=512, G=4),
    "gathered-rows": NamedInts(M=384, N=128, K=128, G=2),
    "gathered-transpose": NamedInts(M=384, K=128, G=2),
    "gather-sum": NamedInts(M=128, K=1024),
    "shifted-transpose-3d": NamedInts(E=2, N=256, K=128),
    "cast-transpose-3d": NamedInts(E=2, N=256, K=128, one_scale=1),
}
"""Problems as a sweep times them, but small."""


@functools.cache
def checked_on(kernel: str) -> tuple[checking.Tensors, ...]:
    """The tensors of the round problem and of its edges; faults share them, as they are whole after a check."""
    spec = catalog.load(kernel)
    problem = Problem(kernel, ROUND[kernel], "balanced" if spec.routed else "none", in_dtype=spec.in_dtypes[0])
    cases = [Edge("", problem), *edges.edges_of(spec, problem)]
    small = [case for case in cases if case.problem.shape.get("M", 0) < 20_000]  # the largest sort has its own test
    built = [checking.build_edge(spec, case, "cpu") for case in small]
    return tuple(sorted(built, key=lambda tensors: tensors.in_a_row_bytes))  # a fault is found sooner


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """A worker process runs other tests afterwards."""
    yield
    checked_on.cache_clear()


def wrong_on(spec: KernelSpec, kernel: str, beside: dict[str, int]) -> Iterator[str]:
    """How the outputs of each case differ from the reference's."""
    config = NamedInts({**spec.default, **beside})
    for number, tensors in enumerate(checked_on(kernel)):
        if wrong := replace(tensors, spec=spec).check(config, [number]):
            yield wrong


@pytest.mark.parametrize(
    ("kernel", "beside"), [(kernel, beside) for kernel, configs in CONFIGS.items() for beside in configs]
)
def test_every_edge_is_right(kernel: str, beside: dict[str, int]) -> None:
    assert list(wrong_on(catalog.load(kernel), kernel, beside)) == []


FAULTS = {
    "expert-sort: equal experts in another order": (
        "lanes[None, :] < lanes[:, None]",
        "lanes[None, :] > lanes[:, None]",
    ),
    "expert-sort: experts of other devices": ("(ids > E), E, ids)", "(ids > E), E - 1, ids)"),
    "expert-sort: another token": ("pairs // TOP_K, mask=inside", "pairs, mask=inside"),
    "expert-sort: weights as they lie": ("tl.store(row_weights_ptr + row,", "tl.store(row_weights_ptr + pairs,"),
    "gathered-rows: another token's scale": ("scale_a_ptr + tokens)", "scale_a_ptr + tokens // 2)"),
    "gathered-rows: another token": ("tokens.to(tl.int64)[:, None] * K", "(tokens // 2).to(tl.int64)[:, None] * K"),
    "gathered-rows: no zeros in rows of no group": (
        "out_ptr, one_of(groups.start, groups.group == G), M,",
        "out_ptr, M, M,",
    ),
    "gathered-rows: the last piece left out": (
        "depth_steps = tl.cdiv(K, BLOCK_SIZE_K)",
        "depth_steps = K // BLOCK_SIZE_K",
    ),
    "gathered-transpose: no zeros after a group": (
        "is_row[:, None] & (columns < tile.K)[None, :]",
        "(columns < tile.K)",
    ),
    "gathered-transpose: a shift of another row": ("else shifts_ptr + first", "else shifts_ptr"),
    "gathered-transpose: another token": ("tokens[:, None] * tile.K", "(tokens // 2)[:, None] * tile.K"),
    "gathered-transpose: a row twice": ("words * 4 + 1", "words * 4 + 2"),
    "cast-transpose-3d: a row twice": ("words * 4 + 1", "words * 4 + 2"),
    "cast-transpose-3d: the last rows left out": ("< weights.N - row)[:", "< weights.N - row - 16)[:"),
    "cast-transpose-3d: a shift of another row": ("weights.N + row + rows, mask", "weights.N + rows, mask"),
    "cast-transpose-3d: the least of another expert": ("tl.load(least_ptr + expert)", "tl.load(least_ptr)"),
    "cast-transpose-3d: scales that are 0 count": ("& (scale > 0) & (scale < infinity)", "& (scale < infinity)"),
    "cast-transpose-3d: the last piece of a long row left out": (
        "tl.range(0, K, WIDTH",
        "tl.range(0, K - WIDTH, WIDTH",
    ),
    "gather-sum: a row left out": ("tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1 if TOP_K > 3 else TOP_K)"),
    "gather-sum: no bias of the last expert": ("(expert < E))", "(expert < E - 1))"),
    "gather-sum: a bias without its weight": ("weight[:, None] * bias", "bias"),
    "gather-sum: sums in bfloat16": ("total += tl.load(", "total = total.to(tl.bfloat16).to(tl.float32) + tl.load("),
    "shifted-transpose-3d: another scale": ("(scale > 0) & (scale < least)", "(scale > 64) & (scale < least)"),
    "shifted-transpose-3d: a scale of 0": ("(scale > 0) & (scale < least)", "scale < least"),
    "shifted-transpose-3d: the first rows alone": (
        "for first in range(0, N, BLOCK_SIZE):\n        scale = tl.load(scales + first + lanes, mask="
        "first + lanes < N, other=1.0",
        "for first in range(0, 1):\n        scale = tl.load(scales + first + lanes, mask=first + lanes < N, other=1.0",
    ),
    "shifted-transpose-3d: no shift": (
        "shifts_ptr + expert * N + row,\n            N - row",
        "None,\n            N - row",
    ),
}
"""Kernel and fault -> right words, and wrong ones in their place."""


@pytest.mark.parametrize("title", FAULTS)
def test_a_planted_fault_is_found(title: str, tmp_path: Path) -> None:
    kernel = title.partition(":")[0]
    spec = planted(title, tmp_path, *FAULTS[title])
    assert any(next(wrong_on(spec, kernel, beside), "") for beside in CONFIGS[kernel][:2])


def test_a_sort_of_more_blocks_than_are_added_up_at_a_time() -> None:
    """With blocks of 16 pairs, 1,025 of them."""
    ids = torch.randint(0, 2, (16 * 1024 + 1, 1), generator=torch.Generator().manual_seed(0))
    spec = catalog.load("expert-sort")
    inputs = ids, torch.rand(ids.shape), 2
    outputs = spec.outputs(*inputs)
    spec.launch({**spec.default, "BLOCK_SIZE": 16}, inputs, outputs)
    for output, right in zip(outputs, spec.reference(*inputs), strict=True):
        assert torch.equal(output, right)


# What the kernels save: the same bytes as those on copied rows


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(16).to(FP8)


def rows_of(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)[tokens.long()].view(FP8)


def test_gathering_kernels_give_the_bytes_of_those_on_copied_rows() -> None:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 6, (45, 3), generator=draw)
    offs, row_of, tokens, _ = sort_by_expert(ids, torch.rand(45, 3, generator=draw), 5)
    assert torch.equal(tokens[row_of.long()], torch.arange(45, dtype=torch.int32)[:, None].expand(45, 3))
    a, b = codes(45, 64), codes(5, 48, 64, seed=2)
    scale_a, scale_b = (torch.exp2(torch.randint(-3, 4, shape, generator=draw).float()) for shape in ((45,), (5, 48)))
    mine = multiply_gathered_rows(a, b, offs, tokens, scale_a, scale_b)
    right = multiply_rows(rows_of(a, tokens), b, offs, scale_a[tokens.long()], scale_b)
    assert torch.equal(mine, right)
    shifts = torch.exp2(-torch.randint(0, 9, (135,), generator=draw).float())
    places = int(((offs.diff(prepend=offs.new_zeros(1)) + 127) // 128).clamp(min=1).sum()) * 128  # what is written
    for shift in (shifts, None):
        mine = transpose_gathered_codes(a, offs, tokens, shift)[:places].view(torch.uint8)
        assert torch.equal(mine, transpose_codes(rows_of(a, tokens), offs, shift)[:places].view(torch.uint8))


def test_one_scale_an_expert_stands_for_the_same_values() -> None:
    """Where no value becomes subnormal."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randint(1, 16, (2, 32, 48), generator=draw).float().to(FP8).transpose(1, 2)  # (E, K, N)
    scales = torch.exp2(torch.randint(-2, 3, (2, 32), generator=draw).float())
    transposed, of_columns = transpose_codes_to_one_scale(q, scales)
    assert transposed.mT.is_contiguous()
    assert torch.equal(of_columns, scales.amin(1, keepdim=True).expand(2, 48))
    mine = transposed.float() / of_columns[:, None, :]
    assert torch.equal(mine, (q.float() / scales[:, None, :]).mT)


def test_bytes_moved_are_those_of_tokens_and_rows() -> None:
    M, N, K, G = 800, 256, 512, 4
    sizes = {
        "expert-sort": ({"M": M, "G": G}, 20 * M + 4 * G),
        "gathered-rows": ({"M": M, "N": N, "K": K, "G": G}, M // 8 * K + G * N * K + 2 * M * N),
        "gathered-transpose": ({"M": M, "K": K, "G": G}, M // 8 * K + M * K),
        "gather-sum": ({"M": M, "K": K}, 2 * M * K + 2 * M // 8 * K),
        "shifted-transpose-3d": ({"E": G, "N": N, "K": K}, 2 * G * N * K),
        "cast-transpose-3d": ({"E": G, "N": N, "K": K, "one_scale": 1}, 4 * G * N * K),
    }
    assert set(sizes) == set(catalog.MOE)
    for kernel, (shape, right) in sizes.items():
        spec = catalog.load(kernel)
        assert spec.bytes_of(Problem(kernel, NamedInts(shape), in_dtype=spec.in_dtypes[0])) == right, kernel


# Refusals

OFFS, TOKENS = torch.tensor([4, 9], dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
ROWS, ROW_OF = torch.zeros(6, 16).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
A, B = torch.zeros(5, 32).bfloat16(), torch.zeros(2, 16, 32).bfloat16()
SCALES = torch.ones(5), torch.ones(2, 16)
Q = torch.zeros(5, 32).to(FP8)

REFUSED: list[tuple[Any, tuple[Any, ...], str]] = [
    (sort_by_expert, (torch.zeros(3, 2), torch.zeros(3, 2), 4), "topk_ids must be contiguous int32 or int64"),
    (sort_by_expert, (ROW_OF, torch.zeros(2, 2), 4), "topk_weights must be contiguous"),
    (sort_by_expert, (ROW_OF, torch.zeros(3, 2), 0), "experts must be at least 1, got 0"),
    (sum_rows_of_tokens, (ROWS.float(), ROW_OF), "rows must be row-major"),
    (sum_rows_of_tokens, (ROWS, ROW_OF[:2]), "row_of must have shape"),
    (sum_rows_of_tokens, (ROWS, ROW_OF.long()), "row_of must be contiguous int32"),
    (sum_rows_of_tokens, (ROWS, ROW_OF, ROWS), "bias, ids and weights must be given together"),
    (sum_rows_of_tokens, (ROWS, ROW_OF, ROWS[:, :8], ROW_OF, torch.zeros(3, 2)), "bias must be row-major"),
    (multiply_gathered_rows, (A, B, OFFS, TOKENS.long()), "token_of_row must be contiguous int32"),
    (multiply_gathered_rows, (A.to(FP8), B.to(FP8), OFFS + 1, TOKENS, *SCALES), "offs ends group 1 at row 10 of 9"),
    (multiply_gathered_rows, (A[:, :16], B, OFFS, TOKENS), "a has shape"),
    (multiply_gathered_rows, (A, B, OFFS, TOKENS), "a must be FP8 values"),
    (transpose_gathered_codes, (A, OFFS, TOKENS), "q is torch.bfloat16"),
    (transpose_gathered_codes, (Q, OFFS + 1, TOKENS), "offs ends group 1 at row 10 of 9"),
    (transpose_gathered_codes, (Q, OFFS, TOKENS, torch.zeros(5)), "shifts is torch.float32"),
    (transpose_codes_to_one_scale, (Q, torch.zeros(5)), "q is torch.float8_e4m3fn of shape"),
    (transpose_codes_to_one_scale, (torch.zeros(2, 16, 32).to(FP8).mT, torch.zeros(31)), "scales is torch.float32"),
]


@pytest.mark.parametrize(("function", "arguments", "says"), REFUSED)
def test_what_a_kernel_cannot_take_is_refused_in_one_line(function: Any, arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        function(*arguments)
    assert "\n" not in str(refusal.value)
