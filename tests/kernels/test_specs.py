"""Properties of every spec that the tuner relies on."""

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_lookup import table_of
from wrappers import public_wrapper

from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES, default_fp8_dtype
from fp8tune_kernels.quantize import swiglu_gradient, swiglu_rowwise, whole_rows
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.runtime.lookup import compiling_for
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES, ROUTINGS, KernelSpec, NamedInts, Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROW = {"M": 16640, "K": 5120, "N": 8192, "E": 16}


def problem_of(spec: KernelSpec) -> Problem:
    routing = "jagged" if spec.routed else "none"
    mode = (*spec.scale_modes, "")[0]
    return Problem(spec.name, next(spec.problems(ROW)), routing, in_dtype=spec.in_dtypes[0], scale_mode=mode)


def for_every_kernel(check: Callable[[KernelSpec, Problem], None]) -> Callable[[], None]:
    """Make one test of all kernels: a case each would take longer than the check."""

    def test() -> None:
        for kernel in catalog.KERNELS:
            spec = catalog.load(kernel)
            try:
                check(spec, problem_of(spec))
            except Exception as error:
                error.add_note(kernel)
                raise

    return test


@for_every_kernel
def test_the_default_is_in_the_grid_and_valid_everywhere(spec: KernelSpec, problem: Problem) -> None:
    assert list(spec.default) == list(spec.axes)
    assert all(spec.default[name] in values for name, values in spec.axes.items())
    shape = {**next(spec.problems({**ROW, "K": 8192})), DTYPE_FLAG: DTYPES.index("bfloat16")}  # sm_80 knows no FP8
    for arch in ARCHES.values():
        assert spec.invalid(spec.default, shape, arch.limits()) is None


@for_every_kernel
def test_dozens_of_configs_are_worth_trying_and_not_thousands(spec: KernelSpec, problem: Problem) -> None:
    shape = next(spec.problems({**ROW, "K": 8192}))
    grid = [NamedInts(dict(zip(spec.axes, values, strict=True))) for values in itertools.product(*spec.axes.values())]
    reasons = [spec.invalid(config, shape, ARCHES["sm_90"].limits()) for config in spec.configs or grid]
    most = 40 if spec.flops else 200  # a GEMM takes longer, and so does each trial
    least = 10 if spec.name in (*catalog.GEMMS, *catalog.MOE) else 4 if spec.name in catalog.ON_HOPPER else 40
    assert least <= reasons.count(None) <= most
    assert all(reason and "\n" not in reason for reason in reasons if reason is not None)


@for_every_kernel
def test_the_lookup_key_never_holds_the_exact_number_of_rows(spec: KernelSpec, problem: Problem) -> None:
    assert "M" not in spec.key
    if "M" in problem.shape:
        second = replace(problem, shape=NamedInts({**problem.shape, "M": problem.shape["M"] + 16}))
        assert spec.lookup_key(problem) == spec.lookup_key(second)


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.KERNELS if kernel not in catalog.ON_HOPPER])
@pytest.mark.parametrize("right", [True, False])
def test_the_wrapper_looks_up_the_key_that_the_table_is_written_by(
    kernel: str, right: bool, monkeypatch: pytest.MonkeyPatch, device: str, tmp_path: Path
) -> None:
    """In a table that has the default for this key, and for all others tiles that Triton refuses."""
    spec = catalog.load(kernel)
    problem = spec.scaled_down(problem_of(spec))
    key = spec.lookup_key(problem) if right else dict.fromkeys(spec.key, 1)
    size = "TILE" if spec.name == "rowwise-factored" else "BLOCK"
    refused = tuple((name, 3) for name in spec.axes if name.startswith(size))
    short_lead = (("LEAD", 1),) if spec.default.get("LEAD") else ()
    rows = ((spec.name, "", tuple(sorted(key.items())), short_lead), (spec.name, "", None, refused))
    (tmp_path / f"{lookup.running_arch(torch.device(device))}.py").write_text(table_of(*rows))
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    lookup.forget()
    inputs = spec.inputs(problem, device)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    wrapper = public_wrapper(spec)
    mode = next((value for value in inputs if isinstance(value, bool | str)), None)
    arguments = (*tensors, None, mode) if spec.name in catalog.QUANTIZERS else inputs
    expected = (
        nullcontext() if right else pytest.raises(Exception, match=r"power of 2|at \d+:\d+|arange")
    )  # interpreted, compiled
    try:
        with expected:
            getattr(torch.ops.fp8tune, wrapper.__name__)(*arguments)
    finally:
        lookup.forget()


@for_every_kernel
def test_inputs_are_seeded_and_never_constant(spec: KernelSpec, problem: Problem) -> None:
    small = spec.scaled_down(problem)
    first, again, second = (spec.inputs(item, DEVICE)[0] for item in (small, small, replace(small, seed=1)))
    assert torch.equal(first.float(), again.float())
    assert not torch.equal(first.float(), second.float())
    assert first.float().std() > 0.5


@for_every_kernel
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(spec: KernelSpec, problem: Problem) -> None:
    small = spec.scaled_down(problem)
    real, meta = spec.inputs(small, DEVICE), spec.inputs(small, "meta")
    for here, there in zip((*real, *spec.outputs(*real)), (*meta, *spec.outputs(*meta)), strict=True):
        if isinstance(here, torch.Tensor):
            assert there.is_meta
            assert (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)
        else:
            assert here == there


@for_every_kernel
def test_the_reference_has_the_outputs_layout(spec: KernelSpec, problem: Problem) -> None:
    inputs = spec.inputs(spec.scaled_down(problem), DEVICE)
    for right, output in zip(spec.reference(*inputs), spec.outputs(*inputs), strict=True):
        assert (right.shape, right.stride(), right.dtype) == (output.shape, output.stride(), output.dtype)


@for_every_kernel
def test_the_llama4_sizes_scale_down_to_few_problems(spec: KernelSpec, problem: Problem) -> None:
    full = [
        Problem(spec.name, shape, routing)
        for groups in (1, 4, 16, 64, 128)
        for shape in spec.problems({**ROW, "E": groups})
        for routing in (ROUTINGS[:1] if spec.routed else ("none",))
    ]
    small = {spec.scaled_down(item) for item in full}
    assert len(small) <= (4 if spec.name == "cast-transpose-3d" else 2)  # with a scale per row, and with one
    assert all(spec.scaled_down(item) == item for item in small)


M, N, K, G = 800, 256, 512, 4

BYTES = {
    **dict.fromkeys(catalog.QUANTIZERS, 3),
    **dict.fromkeys(catalog.TRANSPOSERS, 2),
}
"""For each element of the matrices: two of bfloat16, and one for each of its codes."""

MOVED: dict[str, tuple[dict[str, int], int]] = {
    "swiglu-rowwise": ({"M": M, "N": N, "G": G}, 5 * M * N),
    "swiglu-gradient": ({"M": M, "N": N, "G": G}, 8 * M * N),
    "expert-sort": ({"M": M, "G": G}, 20 * M + 4 * G),
    "gathered-rows": ({"M": M, "N": N, "K": K, "G": G}, M // 8 * K + G * N * K + 2 * M * N),
    "gathered-transpose": ({"M": M, "K": K, "G": G}, M // 8 * K + M * K),
    "gather-sum": ({"M": M, "K": K}, 2 * M * K + 2 * M // 8 * K),
    "shifted-transpose-3d": ({"E": G, "N": N, "K": K}, 2 * G * N * K),
    "cast-transpose-3d": ({"E": G, "N": N, "K": K, "one_scale": 1}, 4 * G * N * K),
}
"""Kernel -> a shape, and its bytes; test_gemm_specs.py has the GEMMs."""


@for_every_kernel
def test_bytes_moved_are_those_of_inputs_and_outputs(spec: KernelSpec, problem: Problem) -> None:
    if spec.name in BYTES:
        fields = [x for x in spec.inputs(problem, "meta") if isinstance(x, torch.Tensor) and x.is_floating_point()]
        elements = sum(matrix.numel() for matrix in fields if matrix.dtype != torch.float32)  # scales
        scales = elements // 32 if spec.name.startswith("mxfp8") else 0  # of MXFP8 a byte for every 32
        assert spec.bytes_moved(problem.shape) == BYTES[spec.name] * elements + scales
    elif spec.name in MOVED:
        shape, target = MOVED[spec.name]
        assert spec.bytes_of(Problem(spec.name, NamedInts(shape), in_dtype=spec.in_dtypes[0])) == target


def test_bytes_and_small_problems_are_derived_where_a_spec_gives_none() -> None:
    def inputs(problem: Problem, device: str) -> tuple[torch.Tensor, ...]:
        return (torch.empty(problem.shape["M"], problem.shape["K"], device=device),)

    spec = replace(catalog.load("rowwise-2d"), inputs=inputs, outputs=lambda x: (x.new_empty(x.shape),))
    problem = Problem(spec.name, NamedInts(M=1000, K=8))
    assert spec.bytes_moved(problem.shape) == 2 * 4 * 8000  # nothing but float32: no scales
    assert spec.bytes_moved({"M": 0, "K": 8}) == 0
    assert spec.bytes_moved({"M": 2**40, "K": 2**40}) >= 2**80
    assert catalog.load("colwise").bytes_moved({"M": 8, "K": 8, "G": 0}) == 0
    assert spec.scaled_down(problem).shape == NamedInts(M=29, K=8)
    assert replace(spec, interpreted={"K": 3}).scaled_down(problem).shape == NamedInts(M=157, K=3)
    fields = replace(spec, bytes_moved=lambda shape: 7, scaled_down=lambda problem: problem)
    assert (fields.bytes_moved(problem.shape), fields.scaled_down(problem)) == (7, problem)


def test_arches_know_their_fp8_format() -> None:
    assert default_fp8_dtype("gfx942") == default_fp8_dtype("gfx90a") == "float8_e4m3fnuz"
    assert {default_fp8_dtype(name) for name in ("sm_90", "sm_100", "gfx950", "interpreter")} == {"float8_e4m3fn"}
    assert all(name == arch.arch for name, arch in ARCHES.items())
    assert ARCHES["sm_90"].limits(multiprocessors=114).multiprocessors == 114


@for_every_kernel
def test_a_span_says_where_the_input_is_read_once(spec: KernelSpec, problem: Problem) -> None:
    """Compare with ``invalid``: a loop of one turn has no use for stages."""
    limits = ARCHES["sm_90"].limits()
    for size, *values in itertools.product((100, 14336), *spec.axes.values()):
        shape = dict.fromkeys("MNKEG", size)
        config = dict(zip(spec.axes, values, strict=True))
        reason = spec.invalid(config, shape, limits) or ""
        if config["num_stages"] > 1 and "threads a block" not in reason and not _has_rows_in_registers(spec):
            assert (spec.span is not None and spec.span.holds(config, shape)) == ("read once" in reason)
        if spec.name == "rowwise-factored" and config["num_stages"] > 1 and config != spec.default:
            assert spec.span.holds(config, shape) == ("walked twice" not in reason)


def _has_rows_in_registers(spec: KernelSpec) -> bool:
    """Their programs go from row to row, which is a loop of many turns."""
    return spec.span is not None and spec.span.values_a_thread is not None


# Stages of whole rows

COMPILED_BYTES = [
    *((768, 8192, 3, 2, 49184), (768, 8192, 4, 2, 73760), (8192, 2048, 4, 2, 98368), (28672, 2048, 3, 2, 262272)),
    *((768, 8192, 3, 3, 73760), (8192, 2048, 4, 3, 147520), (14336, 2048, 3, 3, 196672), (28672, 2048, 3, 3, 393344)),
]
"""N, TILE, stages, matrices, and the shared memory that Triton 3.7.1 gives a block of both kernels for sm_90."""


@pytest.mark.parametrize(("N", "TILE", "stages", "matrices", "compiled"), COMPILED_BYTES)
def test_shared_memory_of_stages_is_that_of_the_compiler(
    N: int, TILE: int, stages: int, matrices: int, compiled: int
) -> None:
    config = {"BLOCK_SIZE_M": 16, "TILE": TILE, "num_warps": 8, "num_stages": stages}
    assert 0 <= whole_rows.shared_bytes(config, N, matrices) - compiled <= whole_rows.EXCHANGED_BYTES


@pytest.mark.parametrize("kernel", catalog.GATED)
def test_stages_that_a_block_has_no_shared_memory_for_are_neither_timed_nor_launched(kernel: str) -> None:
    """A row of short rows may be the nearest of longer ones."""
    spec = catalog.load(kernel)
    config = NamedInts(BLOCK_SIZE_M=16, TILE=2048, num_warps=32, num_stages=3)
    short, long = ({"M": 512, "N": N, "G": 4} for N in (8192, 32768))
    assert spec.invalid(config, short, ARCHES["sm_90"]) is None
    reason = spec.invalid(config, long, ARCHES["sm_90"])
    assert reason is not None
    assert re.search(r"bytes of rows in 3 stages, sm_90 has 232448 of shared memory a block$", reason)
    assert "shared" not in (spec.invalid(config, long, ARCHES["gfx942"]) or "")

    matrices = {"swiglu-rowwise": swiglu_rowwise, "swiglu-gradient": swiglu_gradient}[kernel].MATRICES
    for arch, stages in (("sm_90", 1), ("gfx942", 3)):
        with compiling_for(arch):
            launched = [whole_rows.options(config, N, matrices, torch.device("meta")) for N in (8192, 32768)]
        assert launched == [{"BLOCK_SIZE_M": 16, "num_warps": 32, "num_stages": number} for number in (3, stages)]
