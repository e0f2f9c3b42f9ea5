"""Rows of `fp8tune bench --op` with given times, and small layers on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fp8tune.bench import grouped as bench_grouped
from fp8tune.bench import grouped_contenders as grouped_steps
from fp8tune.bench.cells import Timing
from fp8tune.bench.grouped import Row
from fp8tune.bench.layers import Layer
from fp8tune.bench.operation import BF16, BOTH, FORWARD, FP8, GRAPH, MXFP8, QUANTIZE_WEIGHTS, QUANTIZED, Operands
from fp8tune.bench.operation import Operation as Operation
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM, FP8_ONCE
from fp8tune.bench.operations import OPERATIONS
from fp8tune.bench.options import BenchOptions, OperationName
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.records import Device, NamedInts

LAYER = NamedInts(M=96, N=32, K=48, G=3)

GROUPED = ("grouped-mm", "mxfp8-grouped-mm")
"""Operations that are one grouped GEMM: tests/bench/test_bench_moe_mlp.py has the other."""

each_operation = pytest.mark.parametrize("operation", [OPERATIONS[name] for name in GROUPED], ids=GROUPED)

FAST = {(BF16, FORWARD): 50.0, (FP8, FORWARD): 40.0, (BF16, BOTH): 180.0, (FP8, BOTH): 120.0, (FP8, GRAPH): 110.0}
MXFP8_FAST = {(MXFP8 if who == FP8 else who, step): us for (who, step), us in FAST.items()}
ONCE = {(FP8_ONCE, QUANTIZED): 90.0, (FP8, QUANTIZE_WEIGHTS): 40.0}


def timed(
    steps: Mapping[tuple[str, str], float | None],
    part_us: float | None = 10.0,
    operation: Operation = FP8_GROUPED_MM,
    arch: str = "sm_90",
    others_us: float | None = 20.0,
    **layer: Any,
) -> Row:
    """Every part takes as long, and so does every other GEMM in its place."""
    timings = {step: Timing(us, "" if us else "planted") for step, us in steps.items()}
    given = dict.fromkeys(operation.all_parts, others_us) | dict.fromkeys(operation.parts, part_us)
    parts = {part: Timing(us, "" if us else "planted") for part, us in given.items()}
    one = Layer(operation.name, LAYER, "jagged", **layer)
    return Row(one, Device(arch, "a GPU"), False, timings, parts, {operation.ours: 1 << 30})


def small(operation: Operation = FP8_GROUPED_MM, routing: str = "balanced", **given: Any) -> Layer:
    return Layer(operation.name, NamedInts(M=96, N=32, K=64, G=3), routing, **given)


def operands(one: Layer, torch_device: str = "cpu") -> Operands:
    return grouped_steps.operands_of(one, torch_device)


def simulated(*, op: str = "grouped-mm", time_budget_s: float | None = None, **options: Any) -> list[Row]:
    """No kernel runs."""
    backend = SimulatedBackend("simulated:1")
    given = BenchOptions(op=OperationName(op), **options)
    problems = bench_grouped.problems_of(given, backend)
    extent = bench_grouped.Extent(not given.alone, given.variants)
    return list(bench_grouped.run(backend, problems, time_budget_s, extent))
