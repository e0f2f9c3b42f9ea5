"""The schema: one identity a row, and the columns that later work needs."""

from __future__ import annotations

import pytest

from fp8tune.store.schema import METADATA, unique_names


@pytest.mark.parametrize("table", METADATA.sorted_tables, ids=str)
def test_every_row_has_an_identity_without_nulls(table) -> None:
    names = unique_names(table)
    assert names
    assert "id" not in names
    assert not any(table.c[name].nullable for name in names)
