"""On a GPU: kernels are right on their edges, planted faults are found, and calls are captured, replayed and ordered.

Trials run in a pool of workers, which compile side by side; one that hangs or breaks its GPU context ends.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from triton.runtime.jit import JITFunction
from wrappers import public_wrapper

from fp8tune.measure import checking
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.comparing import EXACT
from fp8tune.measure.device import limits, probe
from fp8tune.measure.trial import checked_block
from fp8tune.measure.worker import WorkerPool, usable_cores
from fp8tune.plan import grids
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune_kernels import catalog, contract_rows, interpreter, multiply_rows
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.gemm.grouped_contraction import SPEC as CONTRACTION
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.quantize.rowwise_2d import rowwise_2d_kernel
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS, Edge, KernelSpec

sys.path.append(str(ROOT / "tests" / "kernels"))

from kernel_faults import FAULTS, FAULTS_ON_HOPPER, SETTINGS
from on_edges import smallest
from planting import plant_foreign

pytestmark = pytest.mark.gpu

TRIAL_TIMEOUT_S = 120.0

SAMPLED_CONFIGS = 3
"""Of each kernel's grid, beside the default."""

ROW = {"M": 4096, "K": 5120, "N": 768, "E": 4}
"""A problem as a sweep times it, but small."""

SEVERAL_TILES = {
    "rowwise-2d": {**ROW, "N": 5120},
    "grouped-rows": {"M": 9472, "K": 512, "N": 2048, "E": 2},
    "grouped-contraction": {"M": 1024, "K": 2048, "N": 4352, "E": 2},
}
"""Each program has several tiles on a GPU of 132 multiprocessors: what is kept from one to the next is found there.
A kernel of rows that one tile holds has no such code, and its faults are not launched."""

KERNELS = [(kernel, layout) for kernel in catalog.KERNELS for layout in catalog.load(kernel).input_layouts]
each_kernel = pytest.mark.parametrize(("kernel", "layout"), KERNELS)


def problem_of(spec: KernelSpec, layout: str = "", row: dict[str, int] = ROW, **fields: Any) -> Problem:
    """The last problem of a row, in the FP8 format of this GPU."""
    *_, shape = spec.problems(row)
    dtype = default_fp8_dtype(running_arch(torch.device("cuda", torch.cuda.current_device())))
    in_dtype = dtype if spec.in_dtypes[0].startswith("float8") else spec.in_dtypes[0]
    routing = "ragged" if spec.routed else "none"
    problem = Problem(spec.name, NamedInts(shape), routing, layout or spec.input_layouts[0], in_dtype, dtype)
    return replace(problem, scale_mode=(*spec.scale_modes, "")[0], **fields)


def test_kernels_are_compiled_here() -> None:
    assert not interpreter.INTERPRETED
    assert isinstance(rowwise_2d_kernel, JITFunction)


# The check before the clock


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(min(16, usable_cores()))
    yield pool
    pool.close()


def answer(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except Exception as error:  # a worker that hung or died has found something, too, but not by its bytes
        return Outcome(Status.CRASHED, reason=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")


def test_every_kernel_is_right_on_its_edges(pool: WorkerPool) -> None:
    device = probe()
    assert device is not None
    requests: dict[tuple[str, str, NamedInts], Future[Outcome]] = {}
    for kernel, layout in KERNELS:
        spec = catalog.load(kernel)
        problem = problem_of(spec, layout)
        trials = [
            config for config, pruned in grids.configs(spec, problem, spec.axes, limits(device)).items() if not pruned
        ]
        others = random.Random(kernel + layout).sample(trials[1:], min(SAMPLED_CONFIGS, len(trials) - 1))
        for config in (spec.default, *others):
            arm = KernelArm(kernel, problem, config)
            requests[kernel, layout, config] = pool.submit(TRIAL_TIMEOUT_S, checked_block, arm, "cuda", 0, times=False)
    answers = {what: answer(future) for what, future in requests.items()}
    wrong = [(*what, outcome) for what, outcome in answers.items() if outcome.status is not Status.OK]
    print(f"\nright {len(answers) - len(wrong)} of {len(answers)}", *wrong, sep="\n  ")
    assert not wrong


def test_every_planted_fault_is_found(pool: WorkerPool, tmp_path: Path) -> None:
    """In the default, or in the config with short blocks."""
    requests: dict[str, list[Future[Outcome]]] = {}
    is_hopper = running_arch(torch.device("cuda", torch.cuda.current_device())) == "sm_90"
    faults = {**FAULTS, **(FAULTS_ON_HOPPER if is_hopper else {})}
    for number, (title, fault) in enumerate(faults.items()):
        (folder := tmp_path / str(number)).mkdir()
        name, reference = plant_foreign(title, fault, folder)
        kernel, *modules = title.partition(":")[0].split(", ")
        spec = catalog.load(kernel)
        problem = problem_of(spec, spec.input_layouts[-1 if "panels" in modules else 0], SEVERAL_TILES.get(kernel, ROW))
        configs = [spec.default, smallest(spec)]
        configs += [NamedInts({**config, "LEAD": 0}) for config in configs if 0 in spec.axes.get("LEAD", ())]
        configs = [NamedInts({**config, **SETTINGS.get(title, {})}) for config in configs]
        arms = [KernelArm(reference, replace(problem, kernel=name), config) for config in configs]
        requests[title] = [pool.submit(TRIAL_TIMEOUT_S, checked_block, arm, "cuda", 0, times=False) for arm in arms]
    answers = {title: [answer(future) for future in futures] for title, futures in requests.items()}
    # what does not compile, or ends its worker, is no pick either
    missed = [title for title, results in answers.items() if all(item.status is Status.OK for item in results)]
    print(f"\nfound {len(answers) - len(missed)} of {len(answers)}", *missed, sep="\n  ")
    assert not missed


# Calls in programs


def operands(spec: KernelSpec, problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The inputs, and those that the public function takes as they are."""
    inputs = spec.inputs(problem, "cuda")
    tensors = tuple(item for item in inputs if isinstance(item, torch.Tensor))
    return inputs, tensors if spec.name in catalog.QUANTIZERS else inputs


def differences(outputs: Any, expected: tuple[torch.Tensor, ...]) -> list[Any]:
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    return [EXACT.difference(output, right) for output, right in zip(results, expected, strict=True) if right.numel()]


SMALL = {"M": 1040, "K": 528, "N": 272, "E": 3}


@each_kernel
def test_a_captured_call_waits_for_nothing_and_replays_the_right_bytes(kernel: str, layout: str) -> None:
    spec = catalog.load(kernel)
    problem = problem_of(spec, layout, SMALL)
    built = checking.build(spec, Edge("", problem, "integers" if spec.flops else "random"), "cuda")
    inputs = built.inputs
    arguments = tuple(x for x in inputs if isinstance(x, torch.Tensor)) if kernel in catalog.QUANTIZERS else inputs
    call = public_wrapper(spec)
    call(*arguments)  # a binary is loaded at its first launch, which no capture may contain
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*arguments)
    for seed, routing in enumerate(("one-giant", "empty", "balanced"), 1):
        second = replace(problem, seed=seed, routing=routing if spec.routed else "none")
        values = checking.build(spec, Edge("", second, "integers" if spec.flops else "random"), "cuda")
        for tensor, value in zip(inputs, values.inputs, strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(value)
        graph.replay()
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        if spec.unwritten is not None:
            spec.unwritten(inputs, results)
        assert not any(differences(outputs, values.expected)), routing


@each_kernel
def test_a_call_on_a_side_stream_is_in_that_streams_order(kernel: str, layout: str) -> None:
    """A launcher that kept the stream of an earlier launch would read the input before it is there."""
    spec = catalog.load(kernel)
    inputs, arguments = operands(spec, problem_of(spec, layout, SMALL))
    call, first = public_wrapper(spec), inputs[0]
    expected = call(*arguments)
    right = first.clone(memory_format=torch.preserve_format)
    first.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        first.copy_(right)
        outputs = call(*arguments)
    stream.synchronize()
    written = expected if isinstance(expected, tuple) else (expected,)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    if spec.unwritten is not None:
        spec.unwritten(inputs, written)
        spec.unwritten(inputs, results)
    assert not any(differences(results, written))


# The grouped GEMMs beside torch's, and on long sums


@pytest.mark.parametrize("in_dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("kernel", catalog.GEMMS)
def test_long_sums_are_exact_on_every_layout(kernel: str, in_dtype: str) -> None:
    """2 ** 14 terms, of which 13 fractional bits are kept: see ``fill_integers``."""
    spec = catalog.load(kernel)
    M, N, K = {"grouped-rows": (1000, 272, 2**14), "grouped-contraction": (2**14, 272, 272)}[kernel]
    for routing in ROUTINGS:
        problem = Problem(kernel, NamedInts(M=M, N=N, K=K, G=4), routing, in_dtype=in_dtype)
        assert checking.build(spec, Edge("", problem), "cuda").check(spec.default) is None, routing


def relative_error(results: torch.Tensor, right: torch.Tensor) -> float:
    return float((results.double() - right.double()).norm() / right.double().norm())


def random_fp8(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(rows, columns, device="cuda", generator=generator)
    return values.mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("routing", ["jagged", "empty", "ragged"])
def test_products_are_near_float64_with_scales_of_any_value(routing: str) -> None:
    M, N, K, G = 2048, 384, 512, 5
    ends = group_ends(routing, M, G)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    scale_a, scale_b = (torch.rand(size, device="cuda") + 0.5 for size in (M, G * N))
    a, b = random_fp8(M, K, 0), random_fp8(G * N, K, 1).view(G, N, K)
    x, w = a.double() / scale_a[:, None].double(), b.double() / scale_b.view(G, N, 1).double()
    right = torch.cat([x[s:e] @ w[g].t() for g, (s, e) in enumerate(itertools.pairwise([0, *ends]))])
    out = multiply_rows(a, b, offs, scale_a, scale_b.view(G, N))
    assert (
        relative_error(out[: ends[-1]], right) < 3e-3
    )  # half a unit of bfloat16's 8 bits, and what tensor cores cut off

    sizes = [e - s for s, e in itertools.pairwise([0, *ends])]
    starts = [0, *itertools.accumulate(max(1, -(-size // ALIGNMENT)) * ALIGNMENT for size in sizes)]
    rows = M + G * ALIGNMENT
    a, b = (random_fp8(size, rows, seed).t() for seed, size in enumerate((N, K)))
    scale_a, scale_b = (torch.rand(G * size, device="cuda") + 0.5 for size in (N, K))
    CONTRACTION.constrain((a, b, offs, scale_a, scale_b, ALIGNMENT, None))
    products = [a[s:e].double().t() @ b[s:e].double() for s, e in itertools.pairwise(starts)]
    right = torch.stack(products) / scale_a.view(G, N, 1).double() / scale_b.view(G, 1, K).double()
    assert relative_error(contract_rows(a, b, offs, scale_a, scale_b, ALIGNMENT), right) < 3e-3
