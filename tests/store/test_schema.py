"""The schema: one identity a row, and the columns that later work needs."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, inspect

from fp8tune.store.schema import METADATA, unique_names

NEEDED = {
    "devices": {"timing", "codegen", "driver", "torch", "triton"},
    "sweeps": {"ptxas", "power_limit_w", "sm_clock_limit_mhz", "memory_clock_mhz", "timer", "git_commit"},
    "results": {"registers", "spill_bytes", "shared_bytes", "compile_s"},
    "codes": {"code_hash", "settings"},
    "shared_launches": {"name", "problem_id", "weight"},
    "decisions": {"today_id", "today_origin", "today_us", "speedup_ratio"},
}


@pytest.mark.parametrize("table", NEEDED)
def test_columns_that_later_work_needs(table: str) -> None:
    engine = create_engine("sqlite://")
    METADATA.create_all(engine)
    assert NEEDED[table] <= {column["name"] for column in inspect(engine).get_columns(table)}


@pytest.mark.parametrize("table", METADATA.sorted_tables, ids=str)
def test_every_row_has_an_identity_without_nulls(table) -> None:
    names = unique_names(table)
    assert names
    assert "id" not in names
    assert not any(table.c[name].nullable for name in names)
