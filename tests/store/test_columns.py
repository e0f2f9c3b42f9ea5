from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from fp8tune.errors import DatabaseError
from fp8tune.records import NamedInts
from fp8tune.store.columns import (
    LARGEST,
    LINE,
    AxesJson,
    KeyNames,
    NamedIntsText,
    Text,
    pack_samples,
    parse_named_ints,
    unpack_samples,
)

DIALECT = create_engine("sqlite://").dialect

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(lambda name: name not in _KEYWORDS)
_KEYWORDS = set(__import__("keyword").kwlist)
named_ints = st.dictionaries(names, st.integers(0, LARGEST), max_size=6).map(NamedInts)


@given(st.lists(st.integers(0, 10**12), max_size=200))
def test_samples_come_back_to_the_nanosecond(nanoseconds):
    samples = [value / 1000 for value in nanoseconds]
    assert unpack_samples(pack_samples(samples)) == tuple(samples)


def test_damaged_samples_are_one_line():
    with pytest.raises(DatabaseError, match="damaged"):
        unpack_samples(b"noise")


@given(named_ints)
def test_named_ints_read_back_in_their_order(items):
    assert list(parse_named_ints(str(items)).items()) == list(items.items())


@pytest.mark.parametrize(
    "text",
    [
        "M",
        "M=",
        "=1",
        "M=1  K=2",
        " M=1",
        "M=1\n",
        "M=-1",
        "M=1.5",
        "M=01",
        "M=0x10",
        "M=1_0",
        "M=٣",
        "import=1",
        "M=1 M=2",
        "../x=1",
        "a.b=1",
        '__import__("os")=1',
        f"M={2**63}",
        "M=99999999999999999999999",
    ],
)
def test_what_is_no_named_integer_is_refused(text):
    with pytest.raises(ValueError, match=r"name=integer|larger|twice"):
        parse_named_ints(text)


@given(st.text(max_size=60))
def test_parsing_any_text_gives_identifiers_or_a_value_error(text):
    try:
        items = parse_named_ints(text)
    except ValueError:
        return
    assert all(name.isidentifier() and name.isascii() and 0 <= value <= LARGEST for name, value in items.items())


def test_column_types_refuse_in_both_directions():
    bad = 'x"\n; DROP TABLE trials'
    for column in (Text("note", LINE), NamedIntsText(), AxesJson(), KeyNames()):
        with pytest.raises(DatabaseError):
            column.process_result_value(bad, DIALECT)
    with pytest.raises(DatabaseError):
        Text("note", LINE).process_bind_param(bad, DIALECT)
    with pytest.raises(DatabaseError):
        NamedIntsText().process_bind_param({"a b": 1}, DIALECT)
    with pytest.raises(DatabaseError):
        NamedIntsText().process_bind_param({"a": -1}, DIALECT)


def test_no_config_and_an_empty_config_differ():
    column = NamedIntsText()
    assert column.process_result_value(column.process_bind_param(None, DIALECT), DIALECT) is None
    assert column.process_result_value(column.process_bind_param(NamedInts(), DIALECT), DIALECT) == NamedInts()
