"""Packed columns and samples come back bit for bit; bytes that nobody packed are refused."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import DatabaseError
from fp8tune.store import packing
from fp8tune.store.texts import LONGEST_US
from fp8tune.store.packing import Columns, pack, pack_blocks, unpack_blocks

INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
TICKS = st.integers(0, 10**6).map(lambda steps: steps * 32 / 1000)
TIMES = st.one_of(TICKS, st.floats(0, LONGEST_US), st.integers(0, 10**9).map(lambda ns: ns / 1000))


def bits(values: list[object]) -> list[object]:
    """Values of which 0.0 and -0.0, and 1 and 1.0, differ."""
    return [struct.pack("<d", value) if isinstance(value, float) else value for value in values]


def columns_of(values: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(st.one_of(st.none(), values), max_size=60)


ANY_COLUMNS = {
    "integers": columns_of(INTEGERS),
    "numbers": columns_of(st.floats(allow_nan=False, allow_infinity=False)),
    "texts": columns_of(st.text()),
    "few": columns_of(st.sampled_from([0.032, 0.0, -0.0, 1.5])),
    "moments": columns_of(st.floats(1.7e9, 1.8e9)),
    "ticks": columns_of(TICKS),
}


@given(st.fixed_dictionaries(ANY_COLUMNS))
def test_columns_come_back_bit_for_bit(columns: dict[str, list[object]]) -> None:
    found = Columns(pack(columns))  # type: ignore[arg-type]
    assert {name: bits(found.values(name)) for name in found.names} == {n: bits(v) for n, v in columns.items()}


@given(st.lists(st.lists(TIMES, max_size=20), max_size=8))
def test_samples_come_back_bit_for_bit(blocks: list[list[float]]) -> None:
    assert [bits(list(block)) for block in unpack_blocks(pack_blocks(blocks))] == [bits(block) for block in blocks]


@pytest.mark.parametrize("blocks", [[], [[]], [[], [1.0], []], [[0.0]], [[0.1, 1e-9, LONGEST_US]], [[120.032] * 9]])
def test_few_samples_come_back(blocks: list[list[float]]) -> None:
    assert unpack_blocks(pack_blocks(blocks)) == [tuple(block) for block in blocks]


@pytest.mark.parametrize("sample", [math.nan, math.inf, -math.inf, -0.032, 2 * LONGEST_US])
def test_what_is_no_time_is_refused(sample: float) -> None:
    with pytest.raises(DatabaseError, match="no time of a sample"):
        pack_blocks([[1.0], [sample]])


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**63, b"x", (1,)])
def test_what_no_column_holds_is_refused(value: object) -> None:
    with pytest.raises(DatabaseError, match="neither integers nor finite numbers nor texts"):
        pack({"column": [value]})  # type: ignore[list-item]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(blob: bytes) -> None:
    for damaged in (blob, zlib.compress(blob), zlib.compress(b'[["counts","i",0,1,9,0,null]]\n' + blob)):
        with pytest.raises(DatabaseError, match="damaged"):
            unpack_blocks(damaged)


def test_a_packed_text_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGEST_PACKED", 10_000)
    with pytest.raises(DatabaseError, match="damaged"):
        Columns(zlib.compress(b"[]\n" + bytes(20_000)))


def test_samples_of_a_gpu_take_little_more_than_a_byte_each() -> None:
    block = [100.0 + 0.032 * (number % 9) for number in range(200)]
    assert len(pack_blocks([[round(sample, 3) for sample in block]] * 20)) < 1000
