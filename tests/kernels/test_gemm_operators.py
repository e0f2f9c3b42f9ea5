"""``multiply_rows`` and ``contract_rows`` as a program calls them: on a CPU, traced, and on what they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fp8tune_kernels import catalog, contract_rows, interpreter, multiply_rows
from fp8tune_kernels.gemm import operands
from fp8tune_kernels.spec import NamedInts, Problem

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

FP8, BF16 = "float8_e4m3fn", "bfloat16"
WRAPPERS = {"grouped-rows": multiply_rows, "grouped-contraction": contract_rows}
each = pytest.mark.parametrize("kernel", WRAPPERS)
each_dtype = pytest.mark.parametrize("in_dtype", [FP8, "float8_e4m3fnuz", BF16])


def given(kernel: str, in_dtype: str, device: str = "cpu") -> tuple[Any, ...]:
    problem = Problem(kernel, NamedInts(M=75, N=32, K=48, G=3), "ragged", in_dtype=in_dtype)
    return catalog.load(kernel).inputs(problem, device)


@each
@each_dtype
def test_it_is_the_reference_on_a_cpu(kernel: str, in_dtype: str) -> None:
    inputs = given(kernel, in_dtype)
    (right,) = catalog.load(kernel).reference(*inputs)
    assert torch.equal(WRAPPERS[kernel](*inputs), right)
    assert not right.isnan().any()
    assert right.count_nonzero() > right.numel() // 2


@each_dtype
def test_rows_are_multiplied_by_what_codes_stand_for(in_dtype: str) -> None:
    """In float64: neither the reference's sums nor its order."""
    a, b, offs, scale_a, scale_b = given("grouped-rows", in_dtype)
    x, w = a.double(), b.double()
    if scale_a is not None:
        x, w = x / scale_a[:, None].double(), w / scale_b[:, :, None].double()
    wanted = torch.cat([x[rows] @ w[group].t() for group, rows in enumerate(groups(offs))])
    assert_close(multiply_rows(a, b, offs, scale_a, scale_b), wanted)


@each_dtype
def test_rows_are_contracted_by_what_codes_stand_for(in_dtype: str) -> None:
    a, b, offs, scale_a, scale_b, alignment, _ = given("grouped-contraction", in_dtype)
    x, y, wanted, place = a.double(), b.double(), [], 0
    for group, rows in enumerate(groups(offs)):
        size = rows.stop - rows.start
        product = x[place : place + size].t() @ y[place : place + size]
        if scale_a is not None:
            product = product / scale_a.view(3, -1, 1)[group].double() / scale_b.view(3, 1, -1)[group].double()
        wanted.append(product)
        place += size if alignment == 1 else max(1, math.ceil(size / alignment)) * alignment
    assert_close(contract_rows(a, b, offs, scale_a, scale_b, alignment), torch.stack(wanted))


@each_dtype
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_contracted_rows_are_added_before_they_are_rounded(in_dtype: str, dtype: torch.dtype) -> None:
    *inputs, _ = given("grouped-contraction", in_dtype)
    zeros, added = torch.zeros(3, 32, 48), torch.randn(3, 32, 48).to(dtype)
    before, sums = added.clone(), contract_rows(*inputs, zeros)
    assert torch.equal(sums.bfloat16(), contract_rows(*inputs))
    assert not torch.equal(sums, contract_rows(*inputs).float())
    assert torch.equal(contract_rows(*inputs, added), (added.float() + sums).to(dtype))
    assert torch.equal(added, before)


def groups(offs: torch.Tensor) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise([0, *offs.tolist()])]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To bfloat16's rounding, and float32's where terms cancel."""
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5 * float(wanted.abs().max()))


@each
@each_dtype
def test_meta_tensors_have_the_shape_and_dtype(kernel: str, in_dtype: str) -> None:
    inputs = given(kernel, in_dtype, "meta")
    out, (right,) = WRAPPERS[kernel](*inputs), catalog.load(kernel).outputs(*inputs)
    assert (out.shape, out.stride(), out.dtype, out.is_meta) == (right.shape, right.stride(), torch.bfloat16, True)


@each
@pytest.mark.parametrize("in_dtype", [FP8, BF16])
def test_it_is_an_operator_as_torch_wants_them(kernel: str, in_dtype: str) -> None:
    operator = getattr(torch.ops.fp8tune, WRAPPERS[kernel].__name__).default
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    schema = ("test_schema",) if in_dtype == BF16 else ()  # it multiplies inputs, which float8 does not know
    torch.library.opcheck(operator, given(kernel, in_dtype), test_utils=(*schema, *tests))


@each
@pytest.mark.parametrize("in_dtype", [FP8, BF16])
def test_it_traces_as_one_graph(kernel: str, in_dtype: str) -> None:
    inputs = given(kernel, in_dtype)
    compiled = torch.compile(lambda *arguments: WRAPPERS[kernel](*arguments) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), WRAPPERS[kernel](*inputs) * 2)


@each
def test_parameters_are_multiplied_without_a_gradient(kernel: str) -> None:
    a, b, *rest = given(kernel, BF16)
    out = WRAPPERS[kernel](a.requires_grad_(), b.requires_grad_(), *rest)
    assert not out.requires_grad


@each
def test_under_autocast_nothing_changes(kernel: str) -> None:
    inputs = given(kernel, FP8)
    wanted = WRAPPERS[kernel](*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(WRAPPERS[kernel](*inputs), wanted)


@each
@pytest.mark.parametrize(
    ("ends", "says"), [((40, 24, 75), "group 1 at row 24, before"), ((24, 40, 999), "group 2 at row 999 of")]
)
def test_offsets_that_cut_no_groups_are_refused_on_a_cpu(kernel: str, ends: tuple[int, ...], says: str) -> None:
    a, b, _, *rest = given(kernel, BF16)
    with pytest.raises(ValueError, match=says):
        WRAPPERS[kernel](a, b, torch.tensor(ends, dtype=torch.int32), *rest)


A, B, OFFS, SCALE_A, SCALE_B, ALIGNMENT, ADDED = range(7)

REFUSED: list[tuple[str, int, Any, str]] = [
    (FP8, A, lambda a: a.float(), "^a is torch.float32, wanted torch.bfloat16, torch.float8_e4m3fn or"),
    (FP8, B, lambda b: b.to(torch.bfloat16), "^b is torch.bfloat16, wanted torch.float8_e4m3fn as a"),
    (FP8, B, lambda b: b.to("meta"), "^b is on meta, wanted cpu as a"),
    (FP8, OFFS, lambda offs: offs.long(), "^offs is torch.int64, wanted torch.int32"),
    (FP8, OFFS, lambda offs: offs.to("meta"), "^offs is on meta, wanted cpu as a"),
    (FP8, OFFS, lambda offs: offs[:0], r"^offs has shape \(0,\), wanted \(G,\)"),
    (FP8, SCALE_A, lambda scale: None, r"^scale_a is None, wanted \d+ scales beside torch.float8_e4m3fn"),
    (FP8, SCALE_B, lambda scale: None, "^scale_b is None, wanted"),
    (FP8, SCALE_B, lambda scale: scale.double(), "^scale_b is torch.float64 of shape .* wanted .* torch.float32"),
    (FP8, SCALE_A, lambda scale: scale[1:], "^scale_a is torch.float32 of shape"),
    (FP8, SCALE_A, lambda scale: torch.stack([scale, scale], 1)[:, 0], r"^scale_a .* strides \(2,\), wanted"),
    (FP8, SCALE_A, lambda scale: scale.to("meta"), "^scale_a is on meta, wanted cpu as a"),
    (BF16, SCALE_A, lambda scale: torch.ones(75), "^scale_a is a tensor, wanted None: bfloat16 has no scales"),
]

REFUSED_OF: dict[str, list[tuple[str, int, Any, str]]] = {
    "grouped-rows": [
        (FP8, A, lambda a: a.t(), r"^a has shape \(48, 75\) and strides \(1, 48\), wanted row-major \(M, K\)"),
        (FP8, A, lambda a: a[:, :32].contiguous(), r"^a has shape \(75, 32\), wanted \(M, 48\): K of b"),
        (FP8, B, lambda b: b.mT, r"^b has shape .* wanted row-major \(E, N, K\)"),
        (FP8, B, lambda b: b[:2], "^offs has 3 groups, wanted 2: one for each expert of b"),
        (FP8, B, lambda b: b[:, :24].contiguous(), "^b has N=24 and K=48, wanted positive multiples of 16"),
    ],
    "grouped-contraction": [
        (FP8, A, lambda a: a.contiguous(), "^a has shape .* wanted column-major codes"),
        (FP8, A, lambda a: a[None], "^a has shape .* wanted column-major codes"),
        (BF16, B, lambda b: b.t().contiguous().t(), "^b has shape .* wanted row-major bfloat16"),
        (BF16, B, lambda b: b[:64].contiguous(), "^b has 64 rows, wanted 75 as a"),
        (BF16, B, lambda b: b[:, :24].contiguous(), "^a and b has N=32 and K=24, wanted positive multiples of 16"),
        (FP8, ALIGNMENT, lambda _: 24, "^alignment is 24, wanted 1 or, of codes, a power of two from 16 on"),
        (FP8, ALIGNMENT, lambda _: 8, "^alignment is 8, wanted 1 or"),
        (FP8, ALIGNMENT, lambda _: 1024, "^a has 512 rows, wanted a multiple of alignment=1024 and a piece for each"),
        (FP8, ALIGNMENT, lambda _: 256, "^a has 512 rows, wanted a multiple of alignment=256 and a piece for each"),
        (BF16, ALIGNMENT, lambda _: 128, "^alignment is 128, wanted 1 or"),
        (FP8, ADDED, lambda _: torch.zeros(3, 32, 48).half(), "^added must be row-major bfloat16 or float32"),
        (FP8, ADDED, lambda _: torch.zeros(3, 48, 32), r"^added must be .* got torch.float32 of shape \(3, 48, 32\)"),
        (FP8, ADDED, lambda _: torch.zeros(3, 48, 32).mT, r"^added must be .* strides \(1536, 1, 32\)"),
    ],
}


@pytest.mark.parametrize(
    ("kernel", "in_dtype", "place", "changed", "says"),
    [(kernel, *case) for kernel in WRAPPERS for case in (*REFUSED, *REFUSED_OF[kernel])],
)
def test_what_no_kernel_takes_is_refused_in_one_line(
    kernel: str, in_dtype: str, place: int, changed: Any, says: str
) -> None:
    inputs = [*given(kernel, in_dtype)]
    inputs[place] = changed(inputs[place])
    with pytest.raises(ValueError, match=says) as raised:
        WRAPPERS[kernel](*inputs)
    assert "\n" not in str(raised.value)


def test_4096_groups_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    a, b, _, *rest = given("grouped-contraction", BF16)
    with pytest.raises(ValueError, match=r"^offs has 4096 groups, wanted fewer than 4096"):
        contract_rows(a, b, torch.zeros(4096, dtype=torch.int32), *rest)


@pytest.mark.parametrize(
    ("dtype", "arch", "says"),
    [
        (torch.float8_e4m3fnuz, "sm_90", "an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn"),
        (torch.float8_e4m3fn, "sm_80", "which Triton does not compile for sm_80: wanted torch.bfloat16"),
        (torch.float8_e4m3fn, "sm_90", None),
        (torch.float8_e4m3fnuz, "gfx942", None),
        (torch.bfloat16, "sm_80", None),
    ],
)
def test_an_arch_refuses_the_formats_that_it_does_not_multiply(dtype: torch.dtype, arch: str, says: str | None) -> None:
    assert operands._refusal(dtype, arch) == says
