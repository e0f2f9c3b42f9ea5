"""Column-wise codes whose groups begin at multiples of an alignment: bytes, places, and what is refused."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import SHORT_LEAD, assert_same_bits, inputs_of, leads, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from own_tables import table_of

from fp8tune_kernels import catalog, quantize_colwise, quantize_colwise_dual, quantize_rowwise_colwise
from fp8tune_kernels.gemm import token_groups
from fp8tune_kernels.groups import padded_rows, taken_rows
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.spec import ROUTINGS, NamedInts, Problem

KERNELS = ("colwise", "colwise-dual", "rowwise-colwise")
FORMS = [(kernel, lead) for kernel in KERNELS for lead in leads(catalog.load(kernel))]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN, in the interpreter


@pytest.fixture
def short_lead(device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The interpreter takes ten milliseconds a turn: wrappers launch with few that have nothing to do."""
    rows = tuple((kernel, "", None, (("LEAD", SHORT_LEAD),)) for kernel in KERNELS)
    if device == "cpu":
        (tmp_path / "interpreter.py").write_text(table_of(*rows))
        monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
        lookup.forget()
    yield
    lookup.forget()


def problem(kernel: str, routing: str, alignment: int, **fields: Any) -> Problem:
    shape = {"M": 157, "K": 37, "G": 5, "alignment": alignment}
    return Problem(kernel, NamedInts({**shape, **({"N": 20} if kernel == "colwise-dual" else {})}), routing, **fields)


def check(one: Problem, content: str, config: dict[str, int], device: str) -> None:
    spec = catalog.load(one.kernel)
    inputs = inputs_of(spec, one, content, device)
    expected = spec.reference(*inputs)
    outputs = poisoned(spec, inputs, expected)
    assert spec.unwritten is not None
    spec.unwritten(inputs, outputs)  # a launch that writes there is found as well
    spec.launch({**spec.default, "BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 64, **config}, inputs, outputs)
    assert_same_bits(outputs, expected)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kernel", "lead"), FORMS)
def test_every_routing_gives_the_reference_bytes(kernel: str, lead: dict[str, int], routing: str, device: str) -> None:
    """Both contents at both alignments, over the routings; which goes with which is another one for each kernel."""
    number = ROUTINGS.index(routing) + FORMS.index((kernel, lead))
    check(problem(kernel, routing, (16, 128)[number % 2]), ("random", "nan")[number // 2 % 2], lead, device)


@pytest.mark.parametrize(("kernel", "lead"), FORMS)
def test_dtypes_formats_and_blocks_give_the_reference_bytes(kernel: str, lead: dict[str, int], device: str) -> None:
    of_float32 = problem(kernel, "ragged", 64, in_dtype="float32", scale_mode="exact")
    check(of_float32, "infinite", lead, device)
    check(problem(kernel, "empty", 32, fp8_dtype="float8_e5m2"), "nan", {**lead, "BLOCK_SIZE_ITER": 128}, device)
    check(problem(kernel, "zipf", 256), "nan", {**lead, "BLOCK_SIZE": 128}, device)  # pieces of zeros alone


@pytest.mark.parametrize("lead", leads(catalog.load("colwise")))
def test_more_groups_than_are_counted_at_once(lead: dict[str, int], device: str) -> None:
    one = Problem("colwise", NamedInts(M=300, K=5, G=131, alignment=16), "ragged")
    check(one, "random", lead, device)


def test_the_reference_puts_groups_where_token_groups_pads_them() -> None:
    x = torch.randn(100, 3)
    offs = torch.tensor([0, 40, 40, 41, 90], dtype=torch.int32)
    q, _ = catalog.load("colwise").reference(x, offs, torch.float8_e5m2, True, 16)
    padded, _ = token_groups.pad(x, offs)
    assert q.shape == padded.shape
    assert torch.equal(q.float() != 0, padded != 0)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 9),
    st.sampled_from(leads(catalog.load("colwise"))),
)
@settings(max_examples=20, deadline=None)
def test_groups_begin_where_they_must_with_zeros_between(
    sizes: list[int], alignment: int, beyond: int, lead: dict[str, int]
) -> None:
    """On the CPU, against the codes of each group alone."""
    ends = list(itertools.accumulate(sizes))
    x = torch.randn(ends[-1] + beyond, 3, generator=torch.Generator().manual_seed(sum(sizes))) + 8
    offs = torch.tensor(ends, dtype=torch.int32)
    spec = catalog.load("colwise")
    inputs = x, offs, torch.float8_e4m3fn, True
    config = {**spec.default, **lead, "BLOCK_SIZE": 16, "BLOCK_SIZE_ITER": 64}
    plain, aligned = spec.reference(*inputs), spec.outputs(*inputs, alignment)
    assert aligned[0].shape == (padded_rows(len(x), len(sizes), alignment), 3)
    assert aligned[0].stride() == (1, len(aligned[0]))
    spec.launch(config, (*inputs, alignment), aligned)
    assert torch.equal(plain[1], aligned[1])
    place = 0
    for end, size in zip(ends, sizes, strict=True):
        taken = taken_rows(size, alignment)
        assert taken % alignment == 0
        assert 0 <= taken - size < alignment or (size, taken) == (0, alignment)
        codes = aligned[0].view(torch.uint8)[place : place + taken]
        assert torch.equal(codes[:size], plain[0].view(torch.uint8)[end - size : end])
        assert not codes[size:].any()
        place += taken
    assert place <= len(aligned[0])


WRAPPERS: list[Callable[..., Any]] = [quantize_colwise, quantize_rowwise_colwise]


@pytest.mark.usefixtures("short_lead")
def test_wrappers_and_operators_take_it_as_their_last_argument(device: str) -> None:
    x = torch.randn(50, 24, dtype=torch.bfloat16, device=device)
    offs = torch.tensor([7, 7, 40], dtype=torch.int32, device=device)
    dtype, P = torch.float8_e5m2, padded_rows(50, 3, 16)
    operators = torch.ops.fp8tune
    for wrapper in WRAPPERS:
        operator = getattr(operators, wrapper.__name__)
        q, scales = wrapper(x, offs, float8_dtype=dtype, alignment=16)[-2:]
        plain, same_scales = wrapper(x, offs, float8_dtype=dtype)[-2:]
        assert (q.shape, q.stride()) == ((P, 24), (1, P))
        assert torch.equal(scales, same_scales)
        assert torch.equal(q[32:65].float(), plain[7:40].float())
        assert torch.equal(operator(x, offs, dtype, True)[-2].float(), plain.float())
        assert torch.equal(operator(x, offs, dtype, True, 16)[-2][:80].float(), q[:80].float())
        assert wrapper(x.to("meta"), offs.to("meta"), float8_dtype=dtype, alignment=16)[-2].stride() == (1, P)
    q_x, _, q_y, _ = quantize_colwise_dual(x, x[:, :16].contiguous(), offs, float8_dtype=dtype, alignment=16)
    assert torch.equal(q_x[:80].float(), quantize_colwise(x, offs, float8_dtype=dtype, alignment=16)[0][:80].float())
    assert q_y.shape == (P, 16)


@pytest.mark.usefixtures("short_lead")
def test_torch_compile_traces_it_whole(device: str) -> None:
    x = torch.randn(50, 24, dtype=torch.bfloat16, device=device)
    offs = torch.tensor([7, 7, 50], dtype=torch.int32, device=device)

    def codes(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return quantize_colwise(x, offs, alignment=16)[0][:16].float()

    compiled = torch.compile(codes, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x, offs), codes(x, offs))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fp8tune.quantize_colwise, (x, offs, None, True, 16), test_utils=checks)


@pytest.mark.parametrize("alignment", [0, 3, 8, -16, 48])
def test_other_alignments_are_refused(alignment: int, device: str) -> None:
    x, offs = torch.zeros(50, 24, device=device), torch.tensor([50], dtype=torch.int32, device=device)
    says = f"^alignment is {alignment}, wanted 1 or a power of two from 16 on$"
    for wrapper in WRAPPERS:
        with pytest.raises(ValueError, match=says):
            wrapper(x, offs, alignment=alignment)
    with pytest.raises(ValueError, match=says):
        quantize_colwise_dual(x, x, offs, alignment=alignment)
