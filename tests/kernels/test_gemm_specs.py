"""Which configs of the grouped GEMMs a sweep tries, on the shapes it is for: what won on an H200, and few others."""

import pytest

from fp8tune.plan import grids, shapes
from fp8tune.plan import problems as plan
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.gemm import grouped_configs
from fp8tune_kernels.gemm.grouped_configs import DEFAULT
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
    return [each for each in spec.configs if each != DEFAULT and spec.invalid(each, shape, limits) is None]


@pytest.mark.parametrize("layer", LAYERS)
def test_what_won_on_an_h200_is_tried(layer: str) -> None:
    shape = sizes(LAYERS[layer], FP8)
    back = NamedInts({**shape, "N": shape["K"], "K": shape["N"]})
    for kernel, layer_shape in ((ROWS, shape), (ROWS, back), (CONTRACTION, shape)):
        assert WIDE[0] in left(kernel, layer_shape)


def of_sets() -> list[tuple[str, Problem]]:
    rows = [row for name in ("grouped-mm", "models", "bench-models") for row in shapes.load(name).rows]
    return [(kernel, each) for kernel in catalog.GEMMS for each in plan.problems(catalog.load(kernel), rows)]


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
        found = left(kernel, sizes(LAYERS["Llama 4"], in_dtype), limits)
        if arch == "sm_80" and in_dtype == FP8:
            assert found == []
            reason = catalog.load(kernel).invalid(DEFAULT, sizes(LAYERS["Llama 4"], FP8), limits)
            assert reason == "FP8: sm_80 has no tensor cores for it, and Triton compiles none"
            continue
        assert found
        has_descriptors = arch in ("sm_90", "sm_100", "sm_120")
        assert {bool(each["DESCRIPTORS"]) for each in found} == {has_descriptors}


@pytest.mark.parametrize(
    ("changed", "shape", "reason"),
    [
        ({"DESCRIPTORS": 0}, {}, "DESCRIPTORS=0: the copy engine of sm_90 idles"),
        ({"num_warps": 64}, {}, "2048 threads a block, sm_90 has at most 1024"),
        ({"num_warps": 4}, {}, "256 sums a thread do not fit in registers beside what multiplies"),
        ({"PROGRAMS": 2}, {}, "2 programs need more registers than a multiprocessor of sm_90 has"),
        ({"num_stages": 4}, {}, "262144 bytes of tiles, sm_90 has 232448 of shared memory"),
        ({"num_stages": 2}, {}, "num_stages=2: shared memory holds 3"),
        ({"BLOCK_SIZE_K": 64, "num_stages": 5}, {}, "pieces of 64 bytes a row: descriptors copy 128 at a time"),
        ({}, {"K": 64}, "pieces of 128 for a depth of 64: half of each is outside"),
        ({"BAND": 16}, {"M": 16384, "G": 64}, "BAND=16: a group has 2 row tiles, in the order of BAND=8"),
        (
            {"BAND": 16},
            {"M": 32768, "N": 1024, "K": 256},
            "BAND=16: L2 holds the 786,432 bytes of a group in any order",
        ),
        (
            {
                "BLOCK_SIZE_M": 64,
                "BLOCK_SIZE_N": 128,
                "num_warps": 4,
                "BLOCK_SIZE_K": 64,
                "num_stages": 5,
                "PROGRAMS": 2,
            },
            {},
            "its tiles take 1.19 times the best estimate: reads and waste",
        ),
    ],
)
def test_each_reason(changed: dict[str, int], shape: dict[str, int], reason: str) -> None:
    spec, layer = catalog.load(ROWS), sizes(LAYERS["Llama 4"], FP8)
    assert spec.invalid(WIDE[0], layer, HOPPER) is None
    assert spec.invalid({**WIDE[0], **changed}, NamedInts({**layer, **shape}), HOPPER) == reason


def test_an_estimate_counts_half_a_tile_a_group_and_its_tails() -> None:
    """By hand: 256 rows of 2 groups, 128 more on average; 300 columns are 2 tiles of 256; a depth of 100 is 128."""
    work = grouped_configs.Work(2, 256, 300, 100, "down", 1)
    volume = (256 + 128) * 512 * 128
    assert grouped_configs.estimate(WIDE[0], work) == pytest.approx(volume / 665e12 + 2 * 256 * 300 / 4.3e12, abs=0)
    work = grouped_configs.Work(
        2, 256, 300, 100, "depth", 2
    )  # the depth is that of both groups: one piece each at least
    volume = 256 * 512 * (2 * 128)
    wanted = 2 * volume / 665e12 + 2 * 2 * 256 * 300 / 4.3e12
    assert grouped_configs.estimate(WIDE[0], work) == pytest.approx(wanted, abs=0)
    narrow = NamedInts({**WIDE[0], "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128})  # whose reads take longer
    read = 256 * 384 * (2 * 128) * (1 / 64 + 1 / 128) * 2
    wanted = read / 12.7e12 + 2 * 2 * 256 * 300 / 4.3e12
    assert grouped_configs.estimate(narrow, work) == pytest.approx(wanted, abs=0)


@pytest.mark.parametrize(("in_dtype", "size"), [(FP8, 1), (BF16, 2)])
def test_bytes_and_operations_are_those_of_rows_that_groups_have(in_dtype: str, size: int) -> None:
    M, N, K, G = (LAYERS["Kimi-K2"][dim] for dim in "MNKG")
    wanted = {ROWS: size * (M * K + G * N * K) + 2 * M * N, CONTRACTION: size * M * (N + K) + 2 * G * N * K}
    for kernel, moved in wanted.items():
        spec = catalog.load(kernel)
        assert spec.bytes_of(Problem(kernel, LAYERS["Kimi-K2"], "jagged", in_dtype=in_dtype)) == moved
        assert spec.flops is not None
        assert spec.flops(LAYERS["Kimi-K2"]) == 2 * M * N * K
