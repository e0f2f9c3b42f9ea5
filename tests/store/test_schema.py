from __future__ import annotations

import pytest
from sqlalchemy import UniqueConstraint, create_engine, inspect

from fp8tune.store.schema import METADATA, Trials

KEPT = {
    "sweeps": {"uid", "request", "seed", "timer", "commit"},
    "trials": {"stage", "round", "position", "status", "reason", "time_us", "tick_us", "samples", "created_at"},
    "workers": {"process", "commit"},
    "problems": {"kernel", "shape", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed"},
    "candidates": {"registers", "spill_bytes", "shared_bytes", "compile_s", "source", "note", "bytes_moved"},
    "devices": {"arch", "name", "uuid_hash", "multiprocessors", "driver", "runtime", "torch", "triton"},
    "kernel_versions": {"source_hash", "default", "axes", "key"},
}


@pytest.fixture(scope="module")
def tables():
    engine = create_engine("sqlite://")
    METADATA.create_all(engine)
    return inspect(engine)


@pytest.mark.parametrize("table", KEPT)
def test_what_a_row_keeps_has_a_column(tables, table):
    assert KEPT[table] <= {column["name"] for column in tables.get_columns(table)}


def test_telemetry_has_columns(tables):
    names = {column["name"] for column in tables.get_columns("trials")}
    assert {"sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "throttle_reasons"} <= names


@pytest.mark.parametrize("table", [table for table in METADATA.sorted_tables if "id" in table.c], ids=str)
def test_every_row_has_an_identity_without_nulls(table):
    unique = [item for item in table.constraints if isinstance(item, UniqueConstraint)]
    assert len(unique) == 1
    assert not any(column.nullable for column in unique[0].columns)


def test_ranking_reads_one_index():
    (summary,) = Trials.indexes
    names = ["candidate_id", "stage", "worker_id", "status", "time_us", "created_at", "sweep_id", "round"]
    assert [column.name for column in summary.columns] == names
