"""The public function of each kernel: the reference's bytes, in all modes of torch, and refusals in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_edges import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from wrappers import public_wrapper

import fp8tune_kernels as kernels
from fp8tune_kernels import catalog, interpreter
from fp8tune_kernels.gemm import grouped_tiles
from fp8tune_kernels.spec import NamedInts, Problem

pytestmark = [
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on infinities, in the interpreter
]

FP8, BF16 = "float8_e4m3fn", "bfloat16"

each_kernel = pytest.mark.parametrize("kernel", catalog.KERNELS)
each_quantizer = pytest.mark.parametrize("kernel", catalog.QUANTIZERS)


def inputs_of(kernel: str, in_dtype: str = "") -> tuple[Any, ...]:
    """The kernel's own small inputs: what its launch and its reference take."""
    spec = catalog.load(kernel)
    shape = NamedInts({**next(spec.problems({"M": 64, "K": 32, "N": 48, "E": 2}))})
    if "G" in shape:
        shape = NamedInts({**shape, "G": 3})
    dtype, mode = in_dtype or spec.in_dtypes[0], (*spec.scale_modes, "")[0]
    problem = Problem(kernel, shape, "ragged" if spec.routed else "none", in_dtype=dtype, scale_mode=mode)
    return spec.inputs(problem, "cpu")


def arguments_of(kernel: str) -> tuple[Any, ...]:
    """The inputs as the public function takes them: a quantizer's dtype, scale mode and alignment are keywords."""
    inputs = inputs_of(kernel)
    return tuple(x for x in inputs if isinstance(x, torch.Tensor)) if kernel in catalog.QUANTIZERS else inputs


def outputs_of(kernel: str, arguments: tuple[Any, ...], **options: Any) -> tuple[torch.Tensor, ...]:
    outputs = public_wrapper(catalog.load(kernel))(*arguments, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_every_kernel_is_exported_by_the_package() -> None:
    for kernel in catalog.KERNELS:
        name = public_wrapper(catalog.load(kernel)).__name__
        assert name.startswith("quantize_") == (kernel in (*catalog.QUANTIZERS, *catalog.GATED))
        assert name in kernels.__all__
        assert callable(getattr(kernels, name))
    assert set(kernels.__all__) <= set(dir(kernels))
    with pytest.raises(AttributeError, match="quantize_nothing"):
        kernels.quantize_nothing  # noqa: B018


@each_quantizer
def test_options_of_a_quantizer_are_those_of_its_reference(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mode by the kernel, on the interpreter."""
    spec, tensors = catalog.load(kernel), arguments_of(kernel)
    option, modes = ("scale_mode", ("floor", "rceil")) if kernel[:2] == "mx" else ("power_of_two", (True, False))
    for value in modes:
        outputs = outputs_of(kernel, tensors, float8_dtype=torch.float8_e5m2, **{option: value})
        assert_same_bits(outputs, spec.reference(*tensors, torch.float8_e5m2, value))
        monkeypatch.setattr(interpreter, "INTERPRETED", True)


@each_kernel
def test_a_cpu_runs_the_reference_and_follows_no_gradient(kernel: str) -> None:
    arguments = arguments_of(kernel)
    right = catalog.load(kernel).reference(*inputs_of(kernel))
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float32):
            x.requires_grad_()
    outputs = outputs_of(kernel, arguments)
    assert not any(output.requires_grad for output in outputs)
    assert_same_bits(outputs, tuple(x.detach() for x in right))


@each_kernel
def test_it_is_an_operator_as_torch_wants_them(kernel: str) -> None:
    operator = getattr(torch.ops.fp8tune, public_wrapper(catalog.load(kernel)).__name__).default
    arguments = arguments_of(kernel)
    if kernel in catalog.QUANTIZERS:
        arguments = (*arguments, None, "floor" if kernel.startswith("mxfp8") else True)
    reads_codes = any(isinstance(x, torch.Tensor) and x.itemsize == 1 for x in arguments)
    schema = () if reads_codes else ("test_schema",)  # it multiplies inputs, which float8 does not know
    tests = (*schema, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.parametrize("kernel", ["colwise", "colwise-dual"])
def test_alignment_is_the_last_argument(kernel: str) -> None:
    tensors, dtype = arguments_of(kernel), torch.float8_e5m2
    expected = catalog.load(kernel).reference(*tensors, dtype, True, 16)
    for outputs in (
        outputs_of(kernel, tensors, float8_dtype=dtype, alignment=16),
        getattr(torch.ops.fp8tune, f"quantize_{kernel.replace('-', '_')}")(*tensors, dtype, True, 16),
    ):
        for x, right in zip(outputs, expected, strict=True):
            assert (x.shape, x.stride()) == (right.shape, right.stride())
            assert torch.equal(x[:64].float(), right[:64].float())  # past the last group nothing is written
    for alignment in (0, 3, 8, -16, 48):
        with pytest.raises(ValueError, match=f"^alignment is {alignment}, wanted 1 or a power of two from 16 on$"):
            outputs_of(kernel, tensors, alignment=alignment)


# Refusals


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.KERNELS if catalog.load(kernel).routed])
def test_offsets_that_cut_no_groups_are_refused_on_a_cpu(kernel: str) -> None:
    for ends, message in (((40, 24, 64), "group 1 at row 24, before"), ((24, 40, 999), "group 2 at row 999 of")):
        offs = torch.tensor(ends, dtype=torch.int32)
        changed = (offs if isinstance(x, torch.Tensor) and x.shape == (3,) else x for x in arguments_of(kernel))
        with pytest.raises(ValueError, match=message):
            outputs_of(kernel, tuple(changed))


@each_quantizer
def test_other_matrices_and_dtypes_are_refused_by_every_quantizer(kernel: str) -> None:
    first, *rest = arguments_of(kernel)
    for x in (first[0], first.double(), first.to(torch.int32), first[..., ::2]):
        with pytest.raises(ValueError, match=f"^[xwy] is {x.dtype} of shape .*, wanted"):
            outputs_of(kernel, (x, *rest))
    with pytest.raises(ValueError, match=r"^float8_dtype is torch\.float16, wanted one of torch\.float8_e4m3fn"):
        outputs_of(kernel, (first, *rest), float8_dtype=torch.float16)


OFFS = torch.tensor([10, 20, 64], dtype=torch.int32)
TOKENS, ROW_OF = torch.zeros(9, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
X, Y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(64, 48, dtype=torch.bfloat16)
ROWS, Q, ONES = torch.zeros(6, 16).bfloat16(), torch.zeros(64, 32).to(torch.float8_e4m3fn), torch.ones(64)
W = torch.zeros(2, 24, 24).to(torch.float8_e4m3fn).mT
A, B = torch.zeros(5, 32).bfloat16(), torch.zeros(3, 16, 32).bfloat16()

REFUSED: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("offs", kernels.quantize_colwise, (X, OFFS.long()), {}),
    ("offs", kernels.quantize_colwise, (X, OFFS.to("meta")), {}),
    ("y", kernels.quantize_colwise_dual, (X, Y[1:], OFFS), {}),
    ("w", kernels.quantize_colwise_3d, (W.float().contiguous(),), {}),
    ("scale_mode", kernels.quantize_mxfp8_dim0, (X,), {"scale_mode": "ceil"}),
    ("column_scales", kernels.quantize_rowwise_factored, (X, OFFS, ONES), {}),
    ("q", kernels.transpose_codes, (X, OFFS), {}),
    ("shifts", kernels.transpose_codes, (Q, OFFS, ONES[:3]), {}),
    ("q", kernels.transpose_codes_3d, (W,), {}),
    ("activation", kernels.quantize_swiglu_rowwise, (X, OFFS), {"activation": "gelu"}),
    ("layout", kernels.quantize_swiglu_rowwise, (X, OFFS), {"layout": "thirds"}),
    ("x", kernels.quantize_swiglu_rowwise, (X[:, :3], OFFS), {}),
    ("x", kernels.quantize_swiglu_rowwise, (X.float(), OFFS), {}),
    ("bias", kernels.quantize_swiglu_rowwise, (X, OFFS), {"bias": ONES}),
    ("weights", kernels.quantize_swiglu_rowwise, (X, OFFS), {"weights": ONES[1:]}),
    ("topk_ids", kernels.sort_by_expert, (torch.zeros(3, 2), torch.zeros(3, 2), 4), {}),
    ("experts", kernels.sort_by_expert, (ROW_OF, torch.zeros(3, 2), 0), {}),
    ("rows", kernels.sum_rows_of_tokens, (ROWS.float(), ROW_OF), {}),
    ("bias, ids and weights", kernels.sum_rows_of_tokens, (ROWS, ROW_OF, ROWS), {}),
    ("bias", kernels.sum_rows_of_tokens, (ROWS, ROW_OF, ROWS[:, :8], ROW_OF, torch.zeros(3, 2)), {}),
    ("token_of_row", kernels.multiply_gathered_rows, (A, B, OFFS, TOKENS.long()), {}),
    ("shifts", kernels.transpose_gathered_codes, (Q, OFFS, TOKENS, torch.zeros(5)), {}),
    ("q", kernels.transpose_codes_to_one_scale, (Q, torch.zeros(5)), {}),
]

A_AT, B_AT, OFFS_AT, SCALE_A_AT, SCALE_B_AT, ALIGNMENT_AT, ADDED_AT = range(7)

REFUSED_BY_GEMMS: list[tuple[str, str, str, int, Any]] = [
    *[
        (name, kernel, dtype, place, change)
        for kernel in ("grouped-rows", "grouped-contraction")
        for name, dtype, place, change in (
            ("a", FP8, A_AT, lambda a: a.float()),
            ("b", FP8, B_AT, lambda b: b.to(torch.bfloat16)),
            ("offs", FP8, OFFS_AT, lambda offs: offs.long()),
            ("scale_a", FP8, SCALE_A_AT, lambda _: None),
            ("scale_b", FP8, SCALE_B_AT, lambda scale: scale.double()),
            ("scale_a", FP8, SCALE_A_AT, lambda scale: torch.stack([scale, scale], 1)[:, 0]),
            ("scale_a", BF16, SCALE_A_AT, lambda _: torch.ones(64)),
        )
    ],
    ("a", "grouped-rows", FP8, A_AT, lambda a: a.t()),
    ("b", "grouped-rows", FP8, A_AT, lambda a: a[:, :16].contiguous()),
    ("b", "grouped-rows", FP8, B_AT, lambda b: b.mT),
    ("offs", "grouped-rows", FP8, B_AT, lambda b: b[:2]),
    ("b", "grouped-rows", FP8, B_AT, lambda b: b[:, :24].contiguous()),
    ("a", "grouped-contraction", FP8, A_AT, lambda a: a.contiguous()),
    ("b", "grouped-contraction", BF16, B_AT, lambda b: b.t().contiguous().t()),
    ("b", "grouped-contraction", BF16, B_AT, lambda b: b[1:].contiguous()),
    ("alignment", "grouped-contraction", FP8, ALIGNMENT_AT, lambda _: 24),
    ("a", "grouped-contraction", FP8, ALIGNMENT_AT, lambda _: 1024),
    ("alignment", "grouped-contraction", BF16, ALIGNMENT_AT, lambda _: 128),
    ("added", "grouped-contraction", FP8, ADDED_AT, lambda _: torch.zeros(3, 48, 32).half()),
]


def test_wrong_operands_are_refused_by_name_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [*REFUSED]
    for name, kernel, in_dtype, place, change in REFUSED_BY_GEMMS:
        operands = [*inputs_of(kernel, in_dtype)]
        operands[place] = change(operands[place])
        calls.append((name, public_wrapper(catalog.load(kernel)), tuple(operands), {}))
    for name, function, arguments, options in calls:
        with pytest.raises(ValueError, match=f"^{name} (is|has|begins|must)[^\n]*$"):
            function(*arguments, **options)
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    a, b, _, *rest = inputs_of("grouped-contraction", BF16)
    with pytest.raises(ValueError, match=r"^offs has 4096 groups, wanted fewer than 4096"):
        kernels.contract_rows(a, b, torch.zeros(4096, dtype=torch.int32), *rest)


def test_an_arch_refuses_the_formats_that_it_does_not_multiply() -> None:
    for dtype, arch, message in (
        (torch.float8_e4m3fnuz, "sm_90", "an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn"),
        (torch.float8_e4m3fn, "sm_80", "which Triton does not compile for sm_80: wanted torch.bfloat16"),
        (torch.float8_e4m3fn, "sm_90", None),
        (torch.float8_e4m3fnuz, "gfx942", None),
        (torch.bfloat16, "sm_80", None),
    ):
        assert grouped_tiles._refusal(dtype, arch) == message


@pytest.mark.filterwarnings("error")  # torch 2.13 only warns where an address of a traced tensor is read
def test_a_traced_tensor_on_a_gpu_has_no_address_to_check() -> None:
    with FakeTensorMode():
        traced = torch.empty(64, 64, device="cuda")
    grouped_tiles.check_addresses(a=traced)


def test_help_of_an_operator_has_its_arguments_and_layouts() -> None:
    text = kernels.quantize_rowwise_2d.__doc__
    assert text.startswith("quantize_rowwise_2d(Tensor x, ")
    assert "(M, K), row-major" in text
