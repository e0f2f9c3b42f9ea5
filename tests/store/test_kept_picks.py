"""Picks that are kept beside the rows, and the views that show them."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from database_rows import H200, begin, config, end_finals, finished_sweep, problem, row, subject
from servers import on_both
from sqlalchemy import text

from fp8tune import lookups
from fp8tune.check import doctor
from fp8tune.check.repair import repair
from fp8tune.errors import DatabaseError
from fp8tune.records import Kind, Status
from fp8tune.store import views
from fp8tune.store.database import connect, label
from fp8tune.store.importing import import_file
from fp8tune.store.layers import opened_databases
from fp8tune.store.location import Databases
from fp8tune.store.results import Store
from fp8tune.sweep import picks
from fp8tune.sweep.picks import refresh_picks
from fp8tune_kernels.tables import Table

SMALL, LARGE = problem(K=1024), problem(K=5120)
DEFAULT, FASTER = config(64, 4, 2), config(32)


def filled(store: Store) -> None:
    """Two screened problems, finals of one of them on another GPU, and a failure."""
    finished_sweep(store, {SMALL: {DEFAULT: 30.0, FASTER: 20.0}, LARGE: {DEFAULT: 100.0, FASTER: 120.0}})
    sweep = begin(store, H200, "finals")
    store.record_ceiling(sweep, H200, 4000.0)
    timed = [(of, time_us, process) for of, time_us in ((DEFAULT, 90.0), (FASTER, 80.0)) for process in range(4)]
    for of, time_us, process in timed:
        made = row(time_us + process / 10, of=LARGE, config=of, device=H200, process=f"final {process}")
        store.add_many(sweep, [replace(made, stage=stage) for stage in ("screen", "final")])
    store.add(sweep, row(None, of=LARGE, config=config(128), device=H200, status=Status.WRONG))
    store.add(sweep, row(None, of=LARGE, config=config(128), kind=Kind.STATIC))
    store.mark_complete(sweep, subject(LARGE, H200), 3)
    end_finals(store, sweep, LARGE, H200)
    store.finish_sweep(sweep)


@pytest.fixture
def db(database: str) -> str:
    with Store.open(database, create=True) as store:
        filled(store)
        refresh_picks(store)
    return database


@pytest.fixture
def path(db: str) -> Path:
    """That of a file."""
    return Path(db)


def select(db: str | Path, query: str) -> list[dict[str, Any]]:
    with contextlib.closing(connect(str(db), create=False, writable=False)) as connection:
        return [dict(found) for found in connection.execute(text(query)).mappings()]


def execute(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@on_both
def test_a_moment_is_cut_to_its_second_as_python_cuts_it(db: str) -> None:
    with contextlib.closing(connect(db, create=False, writable=True)) as connection:
        connection.execute(text("UPDATE trials SET created_at = 1764073745.9997"))
        connection.commit()
    assert {found["measured_at"] for found in select(db, "SELECT * FROM v_trials")} == {"2025-11-25 12:29:05"}


@on_both
def test_a_browser_sees_the_picks(db: str) -> None:
    found = select(db, "SELECT * FROM v_picks")
    assert [(one["device"], one["shape"], one["verdict"], one["stage"]) for one in found] == [
        ("NVIDIA H100 80GB HBM3", "M=16640 K=1024 G=64", "quick", "screen"),
        ("NVIDIA H100 80GB HBM3", "M=16640 K=5120 G=64", "quick", "screen"),
        ("NVIDIA H200", "M=16640 K=5120 G=64", "certified", "final"),
    ]
    decided = found[-1]
    assert (decided["config"], decided["runner_up"], decided["processes"]) == (str(FASTER), str(DEFAULT), 4)
    assert decided["ceiling_share"] == pytest.approx(decided["gb_per_s"] / 4000.0)
    assert (decided["is_default"], decided["is_complete"], decided["is_current"]) == (0, 1, 1)
    assert decided["slowdown_upper_share"] <= 0
    assert decided["measured_at"][:2] == decided["decided_at"][:2] == "20"


@on_both
def test_a_pick_keeps_the_config_of_today_with_its_origin_and_the_stage_of_the_next_best(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ("colwise", "", None, tuple(DEFAULT.items()))
    monkeypatch.setattr(lookups, "table", lambda arch: Table((row,)))
    with Store.open(db) as store:
        refresh_picks(store)
        (pick,) = (pick for pick in store.kept_picks().picks if pick.device == H200)
    assert (pick.today, pick.today_origin, pick.runner_up_stage) == (DEFAULT, "shipped table", "final")
    assert pick.speedup_ratio == pytest.approx(90.0 / 80.0, rel=0.01)
    (seen,) = (pick for pick in select(db, "SELECT * FROM v_picks") if pick["device"] == H200.name)
    assert (seen["today"], seen["today_us"], seen["speedup_ratio"]) == (str(DEFAULT), pick.today_us, pick.speedup_ratio)


@on_both
def test_a_browser_sees_finals_and_trials(db: str) -> None:
    finals = select(db, "SELECT * FROM v_finals")
    assert [(one["config"], one["is_pick"], one["blocks"]) for one in finals] == [
        (str(FASTER), 1, 4),
        (str(DEFAULT), 0, 4),
    ]
    assert finals[0]["slowest_process_us"] == pytest.approx(80.3)
    trials = select(db, "SELECT * FROM v_trials")
    assert len(trials) == len(select(db, "SELECT id FROM trials"))
    assert {one["status"] for one in trials} == {"ok", "wrong"}
    assert {one["stage"] for one in trials} == {"screen", "final"}
    assert {one["kind"] for one in trials} == {"measured", "static"}
    (wrong,) = (one for one in trials if one["status"] == "wrong")
    assert (wrong["time_us"], wrong["reason"], wrong["config"]) == (None, "wrong", str(config(128)))


@on_both
def test_what_is_kept_is_what_was_decided(db: str) -> None:
    with Store.open(db, writable=False) as store:
        assert picks.are_current(store)
        evidence = store.evidence()
        assert picks.read(store) == picks.decide(evidence)
        assert len(picks.read(store, ["rowwise"]).picks) == len(picks.read(store, [], None).picks) == 0
        assert len(picks.read(store, ["colwise"], ["sm_90"]).picks) == 3


@on_both
def test_rows_that_come_later_make_them_stale(db: str) -> None:
    with Store.open(db) as store:
        finished_sweep(store, {problem(K=2048): {FASTER: 20.0}}, request="later")
        assert not picks.are_current(store)
        assert len(store.kept_picks().picks) == 3
        assert len(picks.read(store).picks) == 4
    assert {one["is_current"] for one in select(db, "SELECT * FROM v_picks")} == {0}
    with Store.open(db, writable=False) as store:
        (stale,) = doctor.check_picks(db, store)
    assert stale.fix == f"fp8tune doctor --repair --db {label(db)}"
    assert [finding.what for finding in repair(db)][-1] == f"{label(db)}: its picks were decided anew"
    assert {one["is_current"] for one in select(db, "SELECT * FROM v_picks")} == {1}
    assert len(select(db, "SELECT * FROM v_picks")) == 4
    with Store.open(db, writable=False) as store:
        assert not [*doctor.check_picks(db, store)]
    assert len(repair(db)) == 1


def test_other_tables_make_them_stale(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "REVISION", 0)
    with Store.open(str(path), writable=False) as store:
        assert not picks.are_current(store)


@on_both
def test_a_refresh_writes_what_changed(db: str) -> None:
    def decided_at() -> dict[str, float]:
        query = "SELECT shape || name AS about, decided_at FROM picks JOIN problems ON problems.id = problem_id "
        return {one["about"]: one["decided_at"] for one in select(db, query + "JOIN devices ON devices.id = device_id")}

    before = decided_at()
    with Store.open(db) as store:
        finished_sweep(store, {SMALL: {FASTER: 21.0}}, request="later")
        refresh_picks(store)
    after = decided_at()
    assert len(before) == len(after) == 3
    assert sum(before[about] == after[about] for about in before) == 2


def test_an_import_leaves_them_to_be_decided(path: Path, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "other.db"), create=True) as store:
        import_file(store, path)
        assert store.kept_picks().picks == ()
        assert not picks.are_current(store)
        assert len(refresh_picks(store).picks) == 3


@on_both
def test_what_is_forgotten_takes_its_picks_along(db: str) -> None:
    with Store.open(db) as store:
        store.forget([("problems", 1)])
        assert len(store.kept_picks().picks) == 2
        assert not picks.are_current(store)


def test_own_rows_are_decided_over_those_kept_in_the_base(path: Path, tmp_path: Path) -> None:
    own = str(tmp_path / "own.db")
    with Store.open(own, create=True) as store:
        finished_sweep(store, {SMALL: {config(128): 10.0}, problem(K=2048): {FASTER: 20.0}})
        store.add(begin(store, request="begun"), row(1.0, of=LARGE, device=H200))
    with opened_databases(Databases(own, str(path)), pytest.fail) as reader:
        found = picks.read(reader)
        assert found == picks.decide(reader.evidence())
    assert [(one.problem.shape["K"], one.time_us) for one in found.picks][:2] == [(1024, 10.0), (2048, 20.0)]
    assert len(found.picks) == 4


def older(path: Path) -> None:
    """What a fp8tune without picks and views left."""
    made = [*(f"VIEW {name}" for name in views.statements("sqlite")), "TABLE picks", "TABLE finalists"]
    execute(path, *(f"DROP {name}" for name in made))


def test_a_database_without_them_is_read_as_it_is_and_gets_them_by_the_next_write(path: Path) -> None:
    older(path)
    before = path.read_bytes()
    with Store.open(str(path), writable=False) as store:
        assert not picks.are_current(store)
        assert len(picks.read(store).picks) == 3
        assert store.unreadable() == {}
    assert path.read_bytes() == before
    with Store.open(str(path)) as store:
        refresh_picks(store)
    assert len(select(path, "SELECT * FROM v_picks WHERE is_current")) == 3


def test_views_of_an_older_fp8tune_are_made_anew(path: Path) -> None:
    execute(
        path, "DROP VIEW v_picks", "CREATE VIEW v_picks AS SELECT 1", "UPDATE meta SET value = '' WHERE name = 'views'"
    )
    with Store.open(str(path)) as store:
        begin(store)
    assert len(select(path, "SELECT verdict FROM v_picks")) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE picks SET time_us = 'x'",
        "UPDATE picks SET verdict = char(10)",
        "UPDATE picks SET kind = 'x'",
        "UPDATE problems SET routing = CAST(x'ff' AS TEXT) WHERE id = 1",
    ],
)
def test_damaged_ones_are_decided_anew(path: Path, statement: str) -> None:
    execute(path, statement)
    with Store.open(str(path)) as store:
        with pytest.raises(DatabaseError):
            store.kept_picks()
        assert len(picks.read(store).picks) == (2 if "problems" in statement else 3)
        refresh_picks(store)
        if "problems" not in statement:
            assert len(store.kept_picks().picks) == 3
