"""``quantize_rowwise_colwise`` and ``quantize_colwise_transpose_3d``: two kernels' bytes each, and turns."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import SHORT_LEAD, assert_same_bits, poisoned
from hypothesis import given
from hypothesis import strategies as st
from own_tables import table_of

from fp8tune_kernels import (
    catalog,
    quantize_colwise,
    quantize_colwise_3d,
    quantize_colwise_transpose_3d,
    quantize_rowwise_2d,
    quantize_rowwise_colwise,
    quantize_transpose_3d_reduction,
)
from fp8tune_kernels.quantize import both_ways, weights
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.spec import NamedInts, Problem

M, K, N, E = 50, 24, 20, 3


@pytest.fixture(autouse=True)
def short_lead(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes ten milliseconds a turn, and the default waits with hundreds that have nothing to do."""
    if device == "cpu":
        waiting = [kernel for kernel in catalog.KERNELS if catalog.load(kernel).default.get("LEAD")]
        rows = tuple((kernel, "", None, (("LEAD", SHORT_LEAD),)) for kernel in waiting)
        (tmp_path / "interpreter.py").write_text(table_of(*rows))
        monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
        lookup.forget()
    yield
    lookup.forget()


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(M, K, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(0))


@pytest.fixture
def w(device: str) -> torch.Tensor:
    return weights.inputs(Problem("", NamedInts(E=E, N=N, K=K)), device)[0]


def offsets(device: str, *ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_they_write_what_two_kernels_write(
    x: torch.Tensor, w: torch.Tensor, device: str, dtype: torch.dtype, power_of_two: bool
) -> None:
    offs, options = offsets(device, 3, 3, 40, M), {"float8_dtype": dtype, "power_of_two": power_of_two}
    two = *quantize_rowwise_2d(x, **options), *quantize_colwise(x, offs, **options)
    assert_same_bits(quantize_rowwise_colwise(x, offs, **options), two)
    two = *quantize_colwise_3d(w, **options), *quantize_transpose_3d_reduction(w, **options)
    assert_same_bits(quantize_colwise_transpose_3d(w, **options), two)


@pytest.mark.parametrize("used", [0, 1, 16, 33, M - 1])
def test_rows_past_the_last_group_have_codes_of_their_own_and_no_columns(
    x: torch.Tensor, device: str, used: int
) -> None:
    offs = offsets(device, used // 2, used)
    x[used + 1 :: 2] = float("nan")
    rows, scales, columns, column_scales = quantize_rowwise_colwise(x, offs, float8_dtype=torch.float8_e4m3fn)
    assert_same_bits((rows, scales), quantize_rowwise_2d(x, float8_dtype=torch.float8_e4m3fn))
    assert scales.isnan().any() == (used + 1 < M)
    assert not columns[used:].view(torch.uint8).any()
    assert not column_scales.isnan().any()


def test_a_nan_stays_in_its_row_and_in_its_column_of_the_group(x: torch.Tensor, w: torch.Tensor, device: str) -> None:
    x[7, 5], w[1, 7, 5] = -float("nan"), -float("nan")
    _, rows, _, columns = quantize_rowwise_colwise(x, offsets(device, 20, M))
    assert rows.isnan().nonzero().tolist() == [[7, 0]]
    assert columns.isnan().nonzero().tolist() == [[5]]
    _, scales, _, transposed = quantize_colwise_transpose_3d(w)
    assert scales.isnan().nonzero().tolist() == [[1, 0, 5]]
    assert transposed.isnan().nonzero().tolist() == [[1, 0, 7]]


@pytest.mark.parametrize("shape", [(0, K), (M, 0), (0, 0)])
def test_an_empty_matrix_has_scales_all_the_same(shape: tuple[int, int], device: str) -> None:
    outputs = quantize_rowwise_colwise(torch.empty(shape, device=device), offsets(device, 0, shape[0]))
    assert [len(output) for output in outputs] == [shape[0], shape[0], shape[0], 2 * shape[1]]
    assert all((scales == 2.0**48).all() for scales in outputs[1::2])  # of an all-zero slice


@pytest.mark.parametrize("shape", [(0, N, K), (E, 0, K), (E, N, 0), (E, 0, 0)])
def test_empty_weights_have_scales_all_the_same(shape: tuple[int, int, int], device: str) -> None:
    outputs = quantize_colwise_transpose_3d(torch.empty(shape, device=device).transpose(1, 2))
    assert [tuple(scales.shape) for scales in outputs[1::2]] == [(shape[0], 1, shape[1]), (shape[0], 1, shape[2])]
    assert all((scales == 2.0**48).all() for scales in outputs[1::2])


def wrong_arguments() -> list[Any]:
    x, offs = torch.zeros(M, K), torch.tensor([10, M], dtype=torch.int32)
    return [
        pytest.param(x[0], offs, "x has shape", id="one dimension"),
        pytest.param(x.double(), offs, "x is torch.float64", id="float64"),
        pytest.param(x.t(), offs, "x has strides", id="transposed"),
        pytest.param(x, offs.long(), "offs is torch.int64", id="offs in int64"),
        pytest.param(x, offs[:0], "offs has shape", id="no group"),
        pytest.param(x, offs.to("meta"), "offs is on meta", id="offs elsewhere"),
    ]


@pytest.mark.parametrize(("wrong", "offs", "named"), wrong_arguments())
def test_wrong_arguments_are_refused(wrong: torch.Tensor, offs: torch.Tensor, named: str, device: str) -> None:
    offs = offs if offs.is_meta else offs.to(device)
    with pytest.raises(ValueError, match=f"^{named}.*wanted"):
        quantize_rowwise_colwise(wrong.to(device), offs)


def test_wrong_weights_are_refused(w: torch.Tensor) -> None:
    for wrong, named in ((w[0], "w has shape"), (w.double(), "w is torch.float64"), (w.contiguous(), "w has strides")):
        with pytest.raises(ValueError, match=f"^{named}.*wanted"):
            quantize_colwise_transpose_3d(wrong)


def test_torch_compile_traces_them_whole(x: torch.Tensor, w: torch.Tensor, device: str) -> None:
    def both(x: torch.Tensor, offs: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *quantize_rowwise_colwise(x * 2, offs), *quantize_colwise_transpose_3d(w * 2)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, experts in ((M, E), (33, 2)):
        arguments = x[:rows], offsets(device, 7, rows), w[:experts]
        assert_same_bits(compiled(*arguments), both(*arguments))


def test_the_operators_are_what_torch_library_expects(x: torch.Tensor, w: torch.Tensor, device: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operators, offs = torch.ops.fp8tune, offsets(device, 7, M)
    torch.library.opcheck(operators.quantize_rowwise_colwise, (x, offs, None, True), test_utils=checks)
    torch.library.opcheck(operators.quantize_colwise_transpose_3d, (w, None, False), test_utils=checks)


# Turns, as the docstring of fp8tune_kernels.quantize.both_ways has them


def begins(pieces: list[int]) -> list[int]:
    found = [0]
    for one, following in itertools.pairwise(pieces):
        found.append(found[-1] + one + max(0, one - following))
    return found


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 40))
def test_no_two_pieces_share_half_a_turn_and_little_is_live(pieces: list[int], lead: int) -> None:
    maxima, casts, live = set(), set(), {}
    for group, begin in enumerate(begins(pieces)):
        for piece in range(pieces[group]):
            first, last = begin + piece, begin + pieces[group] + lead + piece
            assert first not in maxima
            assert last not in casts
            maxima.add(first)
            casts.add(last)
            assert last >= begin + pieces[group]  # no cast before its group's last maxima
            for turn in range(first, last):
                live.setdefault(turn, []).append(group)
    for groups in live.values():
        assert len(groups) <= max(pieces[group] for group in groups) + lead


@pytest.mark.parametrize(("routing", "lead"), [("zipf", 1), ("one-giant", 7), ("empty", 3)])
def test_many_groups_of_any_size(routing: str, lead: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the 128 that are counted at once, with turns that take maxima only, cast only, or do neither."""
    made: list[torch.Tensor] = []
    work_for = both_ways.work_for
    monkeypatch.setattr(both_ways, "work_for", lambda *sizes: made.append(work_for(*sizes)) or made[-1])
    spec = catalog.load("rowwise-colwise")
    inputs = spec.inputs(Problem(spec.name, NamedInts(M=700, K=20, G=131), routing), device)
    expected = spec.reference(*inputs)
    outputs = poisoned(spec, inputs, expected)
    config = {**spec.default, "LEAD": lead}
    spec.launch(config, inputs, outputs)
    assert_same_bits(outputs, expected)

    ends = [*inputs[1].tolist(), 700]
    starts = [end // 16 * 16 for end in (0, *ends)]
    pieces = [max(1, -(-(end - start) // config["BLOCK_SIZE_ITER"])) for start, end in zip(starts, ends, strict=False)]
    turns = begins(pieces)[-1] + 2 * pieces[-1] + lead
    assert int(made[0][0]) == turns + both_ways.programs(config, 700, 20, 131, inputs[0].device)
