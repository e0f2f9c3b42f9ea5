"""A fault planted in a copy of a kernel must not pass the check that comes before the clock."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8tune.measure import Bench
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

SHAPES = {
    "colwise": NamedInts(M=101, K=40, G=3),
    "colwise-dual": NamedInts(M=101, N=40, K=24, G=3),
    "rowwise": NamedInts(N=21, M=1301, G=2),
    "rowwise-2d": NamedInts(M=5, K=9001),
}
"""No block divides a dim, and every kernel's default takes more than one tile or block."""

PADDING = 7
"""Rows past the last group."""

# The interpreter runs programs in order: what one writes into the next one's share is written over, and so not seen.
FAULTS = {
    "colwise: a mask without the group's start": ("whole = (chunks >= start) &", "whole ="),
    "colwise: a mask one row too early": ("inside = (rows >= start)", "inside = (rows >= start - 1)"),
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
}
"""``KERNEL: what is wrong`` -> the kernel's own text, which occurs once or more, and what stands there instead."""


FENCE = 1 << 16
"""Elements on either side of a tensor."""


def planted(kernel: str, folder: Path, right: str = "", wrong: str = "") -> KernelSpec:
    """The spec of a copy of a kernel's file with a fault in it, and without the operator: that can exist only once."""
    text = Path(str(importlib.util.find_spec(catalog.module_name(kernel)).origin)).read_text()
    assert right in text
    text = text.replace(right, wrong) if right else text
    path = folder / "planted.py"
    path.write_text(text.partition("\n_operator:")[0])
    found = importlib.util.spec_from_file_location(f"planted_{folder.name}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.SPEC


def check(spec: KernelSpec, kernel: str, device: str) -> str | None:
    """What a sweep's check says of the kernel's default config."""
    problem = Problem(kernel, SHAPES[kernel], "ragged" if spec.routed else "none", scale_mode="exact")
    inputs = spec.inputs(problem, device)
    for offs in inputs:
        if isinstance(offs, torch.Tensor) and offs.dtype == torch.int32:
            offs.clamp_(max=problem.shape["M"] - PADDING)
    expected = catalog.load(kernel).reference(*inputs)
    inputs, outputs = map(fenced, (inputs, spec.outputs(*inputs)))
    return Bench(spec, problem, inputs, outputs, expected).check(spec.default)


def fenced(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with every tensor copied between two fences of memory: a fault may go past a tensor's end, not wild."""
    return tuple(_fenced(value) if isinstance(value, torch.Tensor) else value for value in values)


def _fenced(tensor: torch.Tensor) -> torch.Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(FENCE + span + FENCE, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), FENCE).copy_(tensor)


@pytest.mark.parametrize("kernel", SHAPES)
def test_a_copy_without_a_fault_passes(kernel: str, tmp_path: Path, device: str) -> None:
    assert check(planted(kernel, tmp_path), kernel, device) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path, device: str) -> None:
    kernel = fault.partition(":")[0]
    wrong = check(planted(kernel, tmp_path, *FAULTS[fault]), kernel, device)
    assert wrong is not None
    assert "elements differ, first at" in wrong
