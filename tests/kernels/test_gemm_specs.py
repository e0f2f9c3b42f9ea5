"""Configs of the grouped GEMMs that a sweep tries: those that won on an H200, and few more."""

import pytest

from fp8tune.plan import grids, shapes
from fp8tune.plan import problems as plan
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.gemm.grouped_tiles import DEFAULT
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES, NamedInts, Problem

ROWS, CONTRACTION = catalog.GEMMS
HOPPER = ARCHES["sm_90"].limits()
FP8, BF16 = "float8_e4m3fn", "bfloat16"
LAYERS = {
    "Kimi-K2": NamedInts(M=16384, N=2048, K=7168, G=48),
    "gpt-oss-120b": NamedInts(M=16384, N=2880, K=2880, G=64),
    "Qwen3-30B-A3B": NamedInts(M=32768, N=768, K=2048, G=128),
    "Qwen3-30B-A3B fused": NamedInts(M=32768, N=1536, K=2048, G=128),
    "DeepSeek-MoE-16B": NamedInts(M=65536, N=1408, K=2048, G=64),
    "Llama 4": NamedInts(M=16640, N=8192, K=5120, G=16),
    "Mixtral-8x7B": NamedInts(M=16384, N=14336, K=4096, G=8),
}


def config(rows: int, columns: int, depth: int, warps: int, stages: int, descriptors: int, programs: int) -> NamedInts:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "DESCRIPTORS", "PROGRAMS")
    values = (rows, columns, depth, warps, stages, descriptors, programs)
    return NamedInts({**dict(zip(names, values, strict=True)), "BAND": 8})


WIDE = (config(128, 256, 128, 8, 3, 2, 1), config(128, 256, 128, 8, 4, 1, 1))


def sizes(layer: NamedInts, in_dtype: str) -> NamedInts:
    return NamedInts({**layer, DTYPE_FLAG: DTYPES.index(in_dtype)})


def left(kernel: str, shape: NamedInts, limits=HOPPER) -> list[NamedInts]:
    spec = catalog.load(kernel)
    return [item for item in spec.configs if item != DEFAULT and spec.invalid(item, shape, limits) is None]


@pytest.mark.parametrize("layer", LAYERS)
def test_what_won_on_an_h200_is_tried(layer: str) -> None:
    shape = sizes(LAYERS[layer], FP8)
    back = NamedInts({**shape, "N": shape["K"], "K": shape["N"]})
    for kernel, layer_shape in ((ROWS, shape), (ROWS, back), (CONTRACTION, shape)):
        assert WIDE[0] in left(kernel, layer_shape)


def of_sets() -> list[tuple[str, Problem]]:
    rows = [row for name in ("grouped-mm", "models", "bench-models") for row in shapes.load(name).rows]
    return [(kernel, item) for kernel in catalog.GEMMS for item in plan.problems(catalog.load(kernel), rows)]


def test_few_configs_are_left_on_each_shape() -> None:
    """A trial takes 60 to 100 ms, and 240 problems are to be swept in 8 minutes."""
    counts = []
    for kernel, problem in of_sets():
        spec = catalog.load(kernel)
        tried = grids.configs(spec, problem, spec.axes, HOPPER)
        counts.append(sum(not reason for reason in tried.values()))
        assert 3 <= counts[-1] <= 30, problem
        assert all("\n" not in reason for reason in tried.values())
    assert sum(counts) / len(counts) <= 20


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", catalog.GEMMS)
def test_every_arch_has_configs_to_try_and_each_fits(kernel: str, arch: str) -> None:
    limits = ARCHES[arch].limits()
    for in_dtype in (FP8, BF16):
        result = left(kernel, sizes(LAYERS["Llama 4"], in_dtype), limits)
        if arch == "sm_80" and in_dtype == FP8:
            assert result == []
            reason = catalog.load(kernel).invalid(DEFAULT, sizes(LAYERS["Llama 4"], FP8), limits)
            assert reason == "FP8: sm_80 has no tensor cores for it, and Triton compiles none"
            continue
        assert result
        has_descriptors = arch in ("sm_90", "sm_100", "sm_120")
        assert {bool(item["DESCRIPTORS"]) for item in result} == {has_descriptors}


@pytest.mark.parametrize(("in_dtype", "size"), [(FP8, 1), (BF16, 2)])
def test_bytes_and_operations_are_those_of_rows_that_groups_have(in_dtype: str, size: int) -> None:
    M, N, K, G = (LAYERS["Kimi-K2"][dim] for dim in "MNKG")
    expected = {ROWS: size * (M * K + G * N * K) + 2 * M * N, CONTRACTION: size * M * (N + K) + 2 * G * N * K}
    for kernel, moved in expected.items():
        spec = catalog.load(kernel)
        assert spec.bytes_of(Problem(kernel, LAYERS["Kimi-K2"], "jagged", in_dtype=in_dtype)) == moved
        assert spec.flops is not None
        assert spec.flops(LAYERS["Kimi-K2"]) == 2 * M * N * K
