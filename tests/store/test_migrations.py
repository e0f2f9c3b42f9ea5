"""Every schema that there has been, from the tables of its time: opened, read, migrated and merged."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import begin, row
from sqlalchemy import Inspector, create_engine, inspect, text
from sqlalchemy.schema import CreateTable

from fp8tune.errors import DatabaseError
from fp8tune.records import Kind, Subject
from fp8tune.stats.study import process_us
from fp8tune.store import migrations
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store
from fp8tune.store.schema import METADATA
from fp8tune_kernels.spec import NamedInts

VERSIONS = sorted((Path(__file__).parent / "versions").glob("*.sql"))
FIRST = NamedInts(BLOCK_SIZE=32, num_warps=4)


@pytest.fixture(params=VERSIONS, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return built(request.param, tmp_path)


def built(version: Path, folder: Path) -> Path:
    path = folder / f"{version.stem}.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(version.read_text())
    return path


def number_of(path: Path) -> int:
    return int(path.stem[:2])


def check_rows(store: Store, number: int) -> None:
    """All that the rows of the fixtures say, by the schema they were written with."""
    assert store.schema_version == migrations.SCHEMA_VERSION
    assert (store.unreadable(), store.integrity()) == ({}, [])
    assert store.counts()["sm_90", Kind.MEASURED] == (2 if number < 2 else 8)
    measured = {entry.config: entry for entry in store.evidence(kinds=[Kind.MEASURED])}
    default = measured[NamedInts(BLOCK_SIZE=64, num_warps=4)]
    assert (measured[FIRST].version.source_hash, measured[FIRST].ceiling_gb_per_s) == ("a6a4153271148844", 3000.0)
    assert measured[FIRST].complete
    assert measured[FIRST].times_us == ((100.0,) if number < 2 else (98.0,))  # of the sweep that started last
    assert {row.stage for row in store.rows()} == ({"screen"} if number < 2 else {"screen", "final", "duplicate"})
    if number >= 2:
        assert [(one.run.sweep, process_us(one)) for one in default.duplicate] == [("bbbb", 108.5)]
        (static,) = store.evidence(kinds=[Kind.STATIC])
        assert (static.facts.code.resident_warps, static.facts.code.fp8_conversions) == (64, 8)
    assert [row.note for row in store.published()] == (["before"] if number >= 3 else [])
    finished = store.finished_sweep("request", measured[FIRST].device)
    assert len(finished or []) == (1 if number < 2 else 0)  # the newest finished sweep completed nothing
    of = Subject(measured[FIRST].version, measured[FIRST].device, Kind.MEASURED, measured[FIRST].problem)
    assert len(store.tried(of, reference="f431c99687791ea5")) == 2
    assert len(store.tried(of, reference="another")) == (0 if number >= 5 else 2)


def test_reading_changes_no_byte(old: Path) -> None:
    before = old.read_bytes()
    with Store.open(str(old), writable=False) as store:
        check_rows(store, number_of(old))
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_opening_for_writing_migrates(old: Path) -> None:
    with Store.open(str(old)) as store:
        check_rows(store, number_of(old))
    assert b"hunter2" not in old.read_bytes()
    with contextlib.closing(sqlite3.connect(old)) as connection:
        stored = connection.execute("SELECT name FROM migrations ORDER BY applied_at").fetchall()
        assert sorted(stored) == sorted((name,) for name in migrations.MIGRATIONS)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    before = old.read_bytes()
    with Store.open(str(old), writable=False) as store:
        check_rows(store, number_of(old))
    assert old.read_bytes() == before
    check_tables(inspect(create_engine(f"sqlite:///{old}")))


def check_tables(there: Inspector) -> None:
    """They are those of a new database."""
    new = create_engine("sqlite://")
    METADATA.create_all(new)
    wanted = inspect(new)
    assert sorted(there.get_table_names()) == sorted(wanted.get_table_names())
    for table in wanted.get_table_names():
        columns = [{column["name"]: column["nullable"] for column in one.get_columns(table)} for one in (there, wanted)]
        assert columns[0] == columns[1]
        assert there.get_indexes(table) == wanted.get_indexes(table)


def test_an_import_takes_rows_of_every_version(old: Path, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "ours.db"), create=True) as store:
        assert import_file(store, old).added > 0
        check_rows(store, number_of(old))
        assert import_file(store, old).added == 0


def test_versions_can_be_merged_with_each_other(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "ours.db"), create=True) as store:
        for version in VERSIONS:
            import_file(store, built(version, tmp_path))
        check_rows(store, number_of(VERSIONS[-1]))


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    old = built(VERSIONS[-1], tmp_path)
    with contextlib.closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("CREATE VIEW migrations AS SELECT 'x' AS name")  # nothing can be recorded in it
    with contextlib.closing(sqlite3.connect(old)) as connection:
        before = list(connection.iterdump())
    with pytest.raises(DatabaseError):
        Store.open(str(old))
    with contextlib.closing(sqlite3.connect(old)) as connection:
        assert list(connection.iterdump()) == before


def test_what_was_applied_is_not_applied_again(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    Store.open(str(path), create=True).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = '2'")
        connection.execute("UPDATE migrations SET applied_at = 1.0")
        connection.execute("DELETE FROM migrations WHERE name = 'stage duplicate'")
    Store.open(str(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        newer = connection.execute("SELECT name FROM migrations WHERE applied_at > 1").fetchall()
    assert newer == [("stage duplicate",)]


def test_a_hash_whose_new_one_has_rows_already_stays(tmp_path: Path) -> None:
    old = built(VERSIONS[0], tmp_path)
    with contextlib.closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("INSERT INTO kernel_versions VALUES (2, 'colwise', 'b960d6787f0da121', '', '[]', '')")
    with Store.open(str(old)) as store:
        assert store.timed_sources() == {"colwise": {"8b6c5121011a684a"}}


def test_a_server_gets_timing_and_codegen_too(postgresql_url: str) -> None:
    with Store.open(postgresql_url, create=True) as store:
        assert store.add(begin(store), row())
    engine = create_engine(postgresql_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:  # as it was: the constraint goes with its columns
        for column in ("timing", "codegen"):
            connection.execute(text(f"ALTER TABLE devices DROP COLUMN {column} CASCADE"))
        names = "arch, name, uuid_hash, multiprocessors, driver, runtime, torch, triton"
        connection.execute(text(f"ALTER TABLE devices ADD UNIQUE ({names})"))
        connection.execute(text("DELETE FROM migrations WHERE name = 'devices have timing and codegen'"))
        connection.execute(
            text(f"UPDATE meta SET value = '{migrations.SCHEMA_VERSION - 1}' WHERE name = 'schema_version'")
        )
    with Store.open(postgresql_url) as store:
        (stored,) = store.rows()
        assert (stored.device.timing, stored.device.codegen) == ("events", "fp_fusion=1")
        gated = replace(row(), device=replace(stored.device, timing="gated"))
        assert store.add(begin(store, request="gated"), gated)
        assert {each.device.timing for each in store.rows()} == {"events", "gated"}
    (unique,) = inspect(engine).get_unique_constraints("devices")
    assert {"timing", "codegen"} <= set(unique["column_names"])
    assert "UNIQUE" in str(CreateTable(METADATA.tables["devices"]))  # what a process makes after a migration
    engine.dispose()


@pytest.mark.parametrize("section", re.findall(r"^\[(.*)\]$", migrations.RENAMED_HASHES.read_text(), re.MULTILINE))
def test_renamed_hashes_belong_to_a_migration_and_name_each_once(section: str) -> None:
    renamed = migrations.renamed_hashes(section)
    assert renamed
    assert section in migrations.MIGRATIONS
    assert len({(kernel, old) for kernel, old, _ in renamed}) == len(renamed)
    assert not {(kernel, old) for kernel, old, _ in renamed} & {(kernel, new) for kernel, _, new in renamed}
