"""The public functions ``quantize_rowwise`` and ``quantize_colwise_dual``: what they return, refuse, and trace."""

from collections.abc import Callable

import pytest
import torch
from cases import assert_same_bits

from fp8tune_kernels import catalog, quantize_colwise, quantize_colwise_dual, quantize_rowwise

N, M, K = 24, 50, 40

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
}


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(N, M, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(0))


@pytest.fixture
def y(device: str) -> torch.Tensor:
    return torch.randn(M, K, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(1))


def offsets(device: str, *ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_rowwise_is_the_reference(x: torch.Tensor, device: str, layout: str, power_of_two: bool) -> None:
    x, offs = LAYOUTS[layout](x), offsets(device, 3, 3, 40, M)
    outputs = quantize_rowwise(x, offs, float8_dtype=torch.float8_e5m2, power_of_two=power_of_two)
    assert_same_bits(outputs, catalog.load("rowwise").reference(x, offs, torch.float8_e5m2, power_of_two))


@pytest.mark.parametrize("columns", [M, 48, 1])
def test_rowwise_writes_the_same_of_either_layout(x: torch.Tensor, device: str, columns: int) -> None:
    """48 columns make every row of q start at a multiple of 16 bytes, 50 do not."""
    offs = offsets(device, columns // 2, columns)
    outputs = [quantize_rowwise(change(x[:, :columns]), offs) for change in LAYOUTS.values()]
    assert_same_bits(*outputs)
    assert outputs[0][0].is_contiguous()
    assert outputs[0][1].shape == (2 * N,)


def test_rowwise_of_a_transposed_view_is_colwise_transposed(y: torch.Tensor, device: str) -> None:
    offs = offsets(device, 7, M)
    q, scales = quantize_rowwise(y.t(), offs)
    column_major, same_scales = quantize_colwise(y, offs)
    assert torch.equal(q.view(torch.uint8), column_major.t().view(torch.uint8))
    assert torch.equal(scales, same_scales)


def test_the_second_matrix_may_be_wider_or_narrower(x: torch.Tensor, y: torch.Tensor, device: str) -> None:
    a, offs = x.t().contiguous(), offsets(device, 3, 3, 40, M)
    assert_same_bits(quantize_colwise_dual(a, y, offs), (*quantize_colwise(a, offs), *quantize_colwise(y, offs)))
    assert_same_bits(quantize_colwise_dual(y, a, offs), (*quantize_colwise(y, offs), *quantize_colwise(a, offs)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("used", [0, 1, 16, 33, M - 1])
def test_columns_past_the_last_group_are_zeros_and_in_no_scale(
    x: torch.Tensor, device: str, used: int, layout: str
) -> None:
    x, offs = LAYOUTS[layout](x), offsets(device, used // 2, used)
    x[:, used:] = float("nan")
    outputs = quantize_rowwise(x, offs, float8_dtype=torch.float8_e4m3fn)
    assert not outputs[0][:, used:].view(torch.uint8).any()
    assert not outputs[1].isnan().any()
    assert_same_bits(outputs, catalog.load("rowwise").reference(x, offs, torch.float8_e4m3fn, True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_stays_in_its_row_and_group(x: torch.Tensor, device: str, layout: str) -> None:
    x = LAYOUTS[layout](x)
    x[5, 7] = -float("nan")
    q, scales = quantize_rowwise(x, offsets(device, 20, M), float8_dtype=torch.float8_e4m3fn)
    assert scales.isnan().nonzero().tolist() == [[5]]
    codes = q.view(torch.uint8)
    assert (codes[5, :20] == 0x7F).all()
    assert ((codes & 0x7F) == 0x7F).sum() == 20


@pytest.mark.parametrize("shape", [(0, M), (N, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: str) -> None:
    empty, offs = torch.empty(shape, dtype=torch.bfloat16, device=device), offsets(device, 0, shape[1])
    for x in (empty, empty.t().contiguous().t()):
        q, scales = quantize_rowwise(x, offs)
        assert q.shape == shape
        assert (scales == 2.0**48).all()  # of an all-zero slice: 448 / 1e-12, rounded down to a power of two
    other = torch.ones(shape[1], 3, dtype=torch.bfloat16, device=device)
    assert_same_bits(
        quantize_colwise_dual(empty.t().contiguous(), other, offs),
        (*quantize_colwise(empty.t().contiguous(), offs), *quantize_colwise(other, offs)),
    )


def test_what_rowwise_cannot_take_is_refused(x: torch.Tensor, device: str) -> None:
    offs = offsets(device, M)
    for wrong, named in ((x[0], "x has shape"), (x.double(), "x is torch.float64"), (x[:, ::2], "x has strides")):
        with pytest.raises(ValueError, match=f"^{named}.*wanted"):
            quantize_rowwise(wrong, offs)
    with pytest.raises(ValueError, match=r"^offs is torch.int64.*wanted"):
        quantize_rowwise(x, offs.long())


def test_what_colwise_dual_cannot_take_is_refused(y: torch.Tensor, device: str) -> None:
    offs = offsets(device, M)
    for wrong, named in (
        (y[:-1], f"y has {M - 1} rows"),
        (y.float(), f"y has {M} rows of torch.float32"),
        (y.to("meta"), f"y has {M} rows of torch.bfloat16 on meta"),
        (y.t(), "y has strides"),
    ):
        with pytest.raises(ValueError, match=f"^{named}.*wanted"):
            quantize_colwise_dual(y, wrong, offs)
    with pytest.raises(ValueError, match=r"^x has shape.*wanted"):
        quantize_colwise_dual(y[0], y, offs)


def test_torch_compile_traces_them_whole(x: torch.Tensor, y: torch.Tensor, device: str) -> None:
    def all_three(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *quantize_rowwise(x * 2, offs), *quantize_rowwise(y.t(), offs), *quantize_colwise_dual(y * 2, y, offs)

    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (M, 33):
        arguments = (x[:, :rows].contiguous(), y[:rows], offsets(device, 7, rows))
        assert_same_bits(compiled(*arguments), all_three(*arguments))


def test_the_operators_are_what_torch_library_expects(x: torch.Tensor, y: torch.Tensor, device: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operators, offs = torch.ops.fp8tune, offsets(device, 7, M)
    torch.library.opcheck(operators.quantize_rowwise, (x, offs, None, True), test_utils=checks)
    torch.library.opcheck(operators.quantize_rowwise, (y.t(), offs, None, False), test_utils=checks)
    torch.library.opcheck(operators.quantize_colwise_dual, (y, y + 1, offs, None, True), test_utils=checks)
