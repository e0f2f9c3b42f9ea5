"""On a GPU: the grouped GEMMs are right in fast configs, every planted fault is found, and they replay and compile.

Faults are compiled in a pool of workers, side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from fp8tune.measure import checking
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.trial import checked_block
from fp8tune.measure.worker import WorkerPool, usable_cores
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune_kernels import catalog
from fp8tune_kernels.gemm import grouped_contraction, grouped_rows
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT, contract_rows
from fp8tune_kernels.gemm.grouped_rows import multiply_rows
from fp8tune_kernels.gemm.token_groups import padded_rows
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS, Edge, KernelSpec

sys.path.append(str(ROOT / "tests" / "kernels"))

from gemm_mutants import BF16, FAULTS, FP8, GemmFault
from planting import plant_foreign

pytestmark = pytest.mark.gpu

TRIAL_TIMEOUT_S = 120.0
GEMMS = ("grouped-rows", "grouped-contraction")
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

SIZES = (0, 1, 15, 16, 17, 127, 128, 129, 0, 255)
"""Rows of each group: about the sizes of tiles and pieces; 12 more rows are of no group."""

ROUND = {
    "grouped-rows": NamedInts(M=9472, N=2048, K=512, G=2),
    "grouped-contraction": NamedInts(M=1024, N=4352, K=2048, G=2),
}
"""Problems as a sweep times them: nothing is left over of any block, and a band is full or not.

Each program has several tiles on a GPU of 132 multiprocessors: what is kept from one tile to the next is found there.
"""


def config(kernel: str, in_dtype: str, tiles: tuple[int, int, int], **others: int) -> NamedInts:
    """Bfloat16 takes twice the memory: its tiles are half as deep."""
    down, across, deep = tiles
    sizes = {"BLOCK_SIZE_M": down, "BLOCK_SIZE_N": across, "BLOCK_SIZE_K": deep if in_dtype == FP8 else deep // 2}
    return NamedInts({**catalog.load(kernel).default, **sizes, **others})


def configs(kernel: str, in_dtype: str) -> list[NamedInts]:
    """The default, and those that are fast on Hopper."""
    fast = [
        config(kernel, in_dtype, (128, 256, 128), num_warps=8, num_stages=3, DESCRIPTORS=2),
        config(kernel, in_dtype, (128, 256, 128), num_warps=8, num_stages=4, DESCRIPTORS=1),
        config(kernel, in_dtype, (128, 128, 64), num_warps=4, num_stages=4, PROGRAMS=2, DESCRIPTORS=2),
    ]
    return [catalog.load(kernel).default, *(fast if ON_HOPPER else ())]


def operands(
    spec: KernelSpec, in_dtype: str, ends: list[int], rows: int, N: int, K: int, content: str = "random"
) -> checking.Tensors:
    """The tensors of a check, with groups that end where it is said."""
    problem = Problem(spec.name, NamedInts(M=rows, N=N, K=K, G=len(ends)), "balanced", in_dtype=in_dtype)

    def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
        given = list(spec.inputs(problem, device))
        given[2] = torch.tensor(ends, dtype=torch.int32, device=device)
        return tuple(given)

    return checking.build_edge(replace(spec, inputs=inputs), Edge("sizes", problem, content), "cuda")


@pytest.mark.parametrize("content", ["random", "huge", "nan", "infinite", "tiny", "zeros"])
@pytest.mark.parametrize("in_dtype", [FP8, BF16])
@pytest.mark.parametrize("kernel", GEMMS)
def test_groups_of_every_size_are_right(kernel: str, in_dtype: str, content: str) -> None:
    spec = catalog.load(kernel)
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    on = operands(spec, in_dtype, ends, ends[-1] + 12, 272, 144, content)
    for each in configs(kernel, in_dtype):
        assert on.check(each) is None, each


@pytest.mark.parametrize("in_dtype", [FP8, BF16])
@pytest.mark.parametrize("kernel", GEMMS)
def test_long_sums_are_exact_on_every_layout(kernel: str, in_dtype: str) -> None:
    """2 ** 14 terms, of which 13 fractional bits are kept: see ``fill_integers``."""
    spec = catalog.load(kernel)
    shape = {"grouped-rows": (1000, 272, 2**14), "grouped-contraction": (2**14, 272, 272)}[kernel]
    for routing in ROUTINGS:
        rows, N, K = shape
        on = operands(spec, in_dtype, group_ends(routing, rows, 4), rows, N, K)
        for each in configs(kernel, in_dtype):
            assert on.check(each) is None, (routing, each)


@pytest.mark.parametrize("kernel", GEMMS)
def test_no_launch_of_many_differs(kernel: str) -> None:
    for in_dtype in (FP8, BF16):
        on = operands(catalog.load(kernel), in_dtype, [100, 100, 900, 1990], 2000, 1024, 1024)
        for each in configs(kernel, in_dtype):
            assert on.check_in_a_row(each) is None, each


# Planted faults


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(min(16, usable_cores()))
    yield pool
    pool.close()


def places(number: int, kernel: str, fault: GemmFault) -> list[tuple[str, NamedInts]]:
    """FP8 in a config of each way to load and store that has the fault, bfloat16 in one; fast ones take turns."""
    found = []
    for in_dtype in fault.dtypes:
        given = configs(kernel, in_dtype)
        given = given[::-1] if number % 2 else given
        own = {each["DESCRIPTORS"]: each for each in given if each["DESCRIPTORS"] in fault.descriptors}
        several = list(own.values())
        found += [
            (in_dtype, each)
            for each in (several if in_dtype == FP8 else several[number // 2 % max(1, len(several)) :][:1])
        ]
    return found


def answer(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except Exception as error:  # a worker that hung or died has found something, too, but not by its bytes
        return Outcome(Status.CRASHED, reason=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")


def test_every_planted_fault_is_found(pool: WorkerPool, tmp_path: Path) -> None:
    asked: dict[tuple[str, str, NamedInts], Future[Outcome]] = {}
    for number, (title, fault) in enumerate(FAULTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        planted = plant_foreign(title, fault.changes, folder)
        for in_dtype, each in places(number, planted.kernel, fault):
            problem = Problem(planted.name, ROUND[planted.kernel], "balanced", in_dtype=in_dtype)
            arm = KernelArm(planted.reference, problem, each)
            asked[title, in_dtype, each] = pool.submit(TRIAL_TIMEOUT_S, checked_block, arm, "cuda", 0, times=False)
    answers = {what: answer(future) for what, future in asked.items()}
    # what does not compile, or ends its worker, is no pick either
    missed = [(*what, outcome) for what, outcome in answers.items() if outcome.status is Status.OK]
    print(f"\nfound {len(answers) - len(missed)} of {len(answers)}", *missed, sep="\n  ")
    for (title, in_dtype, each), outcome in answers.items():
        print(f"{title} | {in_dtype} DESCRIPTORS={each['DESCRIPTORS']} | {outcome.reason[-120:]}")
    assert not missed


# Beside torch's GEMM and float64


def random_fp8(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(rows, columns, device="cuda", generator=generator)
    return values.mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)


def random_scales(count: int, seed: int) -> torch.Tensor:
    """Of any value: what is exact is not asked of them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(count, device="cuda", generator=generator) + 0.5


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


LAYOUTS = ([128, 128, 640, 1152, 2048], [0, 0, 2048, 2048, 2048], [16, 400, 416, 2032, 2048])


@pytest.mark.parametrize("ends", LAYOUTS, ids=str)
def test_rows_are_torchs_and_near_float64(ends: list[int]) -> None:
    M, N, K, G = 2048, 384, 512, len(ends)
    a, b = random_fp8(M, K, 0), random_fp8(G * N, K, 1).view(G, N, K)
    scale_a, scale_b = random_scales(M, 2), random_scales(G * N, 3).view(G, N)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    starts = [0, *ends]
    right = torch.cat(
        [
            a[s:e].double() @ each.double().t() / scale_a[s:e, None].double() / scale.double()
            for s, e, each, scale in zip(starts, ends, b, scale_b, strict=False)
        ]
    )
    out = multiply_rows(a, b, offs, scale_a, scale_b)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, right) < 3e-3  # half a unit of bfloat16's 8 bits, and what tensor cores cut off
    if ON_HOPPER:
        torchs = torch._scaled_grouped_mm(
            a,
            b.transpose(1, 2),
            scale_a.reciprocal(),
            scale_b.reciprocal(),
            offs,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        assert relative_error(out, torchs) < 1e-3


@pytest.mark.parametrize("ends", LAYOUTS, ids=str)
def test_contractions_are_torchs_and_near_float64(ends: list[int]) -> None:
    N, K, G = 384, 512, len(ends)
    sizes = [e - s for s, e in zip([0, *ends], ends, strict=False)]
    padded = torch.tensor([max(1, -(-size // ALIGNMENT)) * ALIGNMENT for size in sizes]).cumsum(0).tolist()
    rows = 2048 + G * ALIGNMENT
    a, b = (random_fp8(size, rows, seed).t() for seed, size in enumerate((N, K)))
    scale_a, scale_b = random_scales(G * N, 2), random_scales(G * K, 3)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    grouped_contraction.constrain((a, b, offs, scale_a, scale_b, ALIGNMENT))
    right = torch.stack(
        [
            a[s:e].double().t() @ b[s:e].double() / of_a[:, None].double() / of_b.double()
            for s, e, of_a, of_b in zip([0, *padded], padded, scale_a.view(G, N), scale_b.view(G, K), strict=False)
        ]
    )
    out = contract_rows(a, b, offs, scale_a, scale_b, ALIGNMENT)
    assert relative_error(out, right) < 3e-3
    if ON_HOPPER:
        torchs = torch._scaled_grouped_mm(
            a.t(),
            b,
            scale_a.reciprocal(),
            scale_b.reciprocal(),
            torch.tensor(padded, dtype=torch.int32, device="cuda"),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        assert relative_error(out, torchs) < 1e-3


# Sizes, streams and graphs


@pytest.mark.parametrize("in_dtype", [FP8, BF16])
@pytest.mark.parametrize("kernel", GEMMS)
def test_without_a_row(kernel: str, in_dtype: str) -> None:
    on = operands(catalog.load(kernel), in_dtype, [0, 0, 0], 0, 272, 144)
    for each in configs(kernel, in_dtype):
        assert on.check(each) is None, each


def launch_all(spec: KernelSpec, inputs: tuple[Any, ...], in_dtype: str) -> Iterator[torch.Tensor]:
    for each in configs(spec.name, in_dtype):
        (out,) = spec.outputs(*inputs)
        out.view(torch.int16).fill_(0x5A5A)
        spec.launch(each, inputs, (out,))
        yield out


def needs(gigabytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free >> 30} are free")


def test_more_elements_of_the_experts_and_of_the_output_than_an_int32_counts() -> None:
    """Of 17 experts of 2 ** 27 elements the last lies past 2 ** 31; so do the rows of out past 2 ** 17."""
    needs(30)
    spec, N, K, G = grouped_rows.SPEC, 16384, 8192, 17
    for rows, size_n, size_k, groups in ((300, N, K, G), (2**17 + 300, N + 16, 16, 2)):
        ends = [7] * (groups - 1) + [rows - 5]
        a, b = (
            torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
            for shape in ((rows, size_k), (groups, size_n, size_k))
        )
        for seed, each in enumerate((a, b)):
            bits = each.view(torch.uint8)
            bits.random_(0, 2, generator=torch.Generator("cuda").manual_seed(seed)).mul_(0x80).add_(0x38)  # 1 and -1
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        inputs = (a, b, offs, torch.ones(rows, device="cuda"), torch.ones(groups, size_n, device="cuda"))
        last = slice(max(7, rows - 2000), rows - 5)
        right = (a[last].float() @ b[-1].float().t()).bfloat16()
        first = (a[:7].float() @ b[0].float().t()).bfloat16()
        assert max(b.numel(), rows * size_n) > 2**31
        for out in launch_all(spec, inputs, FP8):
            assert torch.equal(out[last], right)
            assert torch.equal(out[:7], first)
            assert not out[-5:].any()
            del out


def test_more_elements_of_the_gradient_and_of_its_operands_than_an_int32_counts() -> None:
    needs(30)
    for rows, N, K, G in ((300, 16384, 8192, 17), (2**18 + 384, 8208, 16, 2)):
        ends = [7] * (G - 1) + [rows]
        total = padded_rows(rows, G, ALIGNMENT)
        a, b = (torch.zeros(size, total, dtype=torch.float8_e4m3fn, device="cuda") for size in (N, K))
        for seed, each in enumerate((a, b)):
            bits = each.view(torch.uint8)
            bits.random_(0, 2, generator=torch.Generator("cuda").manual_seed(seed)).mul_(0x80).add_(0x38)
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        inputs = (a.t(), b.t(), offs, torch.ones(G * N, device="cuda"), torch.ones(G * K, device="cuda"), ALIGNMENT)
        grouped_contraction.constrain(inputs)
        assert max(a.numel(), G * N * K) > 2**31
        place = ALIGNMENT * (G - 1)
        right = (a[-2000:, place:].float() @ b[:, place:].float().t()).bfloat16()
        for out in launch_all(grouped_contraction.SPEC, inputs, FP8):
            assert torch.equal(out[-1, -2000:], right)
            assert not out[1:-1].any()
            del out


@pytest.mark.parametrize("in_dtype", [FP8, BF16])
@pytest.mark.parametrize("kernel", GEMMS)
def test_a_captured_launch_replays_on_other_groups(kernel: str, in_dtype: str) -> None:
    spec = catalog.load(kernel)
    call = {"grouped-rows": multiply_rows, "grouped-contraction": contract_rows}[kernel]
    shape = NamedInts(M=1040, N=272, K=528, G=5)
    inputs = spec.inputs(Problem(kernel, shape, "balanced", in_dtype=in_dtype), "cuda")
    call(*inputs)  # a binary is loaded at its first launch, which no capture may contain
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*inputs)
    for seed, routing in enumerate(ROUTINGS, 1):
        other = Problem(kernel, shape, routing, in_dtype=in_dtype, seed=seed)
        on = checking.build_edge(spec, Edge("", other, "integers"), "cuda")
        for given, value in zip(inputs, on.inputs, strict=True):
            if isinstance(given, torch.Tensor):
                given.copy_(value)
        out.view(torch.int16).fill_(0x5A5A)
        graph.replay()
        assert torch.equal(out.view(torch.int16), on.expected[0].view(torch.int16)), routing


@pytest.mark.parametrize("kernel", GEMMS)
def test_torch_compile_of_a_whole_graph_gives_the_same(kernel: str) -> None:
    spec = catalog.load(kernel)
    call = {"grouped-rows": multiply_rows, "grouped-contraction": contract_rows}[kernel]
    inputs = spec.inputs(Problem(kernel, NamedInts(M=1040, N=272, K=528, G=5), "ragged", in_dtype=FP8), "cuda")
    compiled = torch.compile(lambda *given: call(*given) * 2, fullgraph=True)
    assert torch.equal(compiled(*inputs), call(*inputs) * 2)


@pytest.mark.parametrize("kernel", GEMMS)
def test_nothing_waits_for_the_device(kernel: str) -> None:
    spec = catalog.load(kernel)
    call = {"grouped-rows": multiply_rows, "grouped-contraction": contract_rows}[kernel]
    inputs = spec.inputs(Problem(kernel, NamedInts(M=1040, N=272, K=528, G=5), "ragged", in_dtype=FP8), "cuda")
    call(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
