"""A compacted database gives the same picks and tables; its archive has all of it; damaged results can be removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem

from fp8tune.store.prune import FASTEST
from fp8tune.store.results import Store

BLOCKS, WARPS = (16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with 30 configs on each of two problems: the pick of one is the slowest of the other."""
    monkeypatch.chdir(tmp_path)
    configs = [config(block, warps) for block in BLOCKS for warps in WARPS]
    with Store.open("rows.db", create=True) as store:
        orders = {problem(K=1024): configs, problem(K=2048): configs[::-1]}
        times = {of: {each: 100.0 + rank for rank, each in enumerate(order)} for of, order in orders.items()}
        finished_sweep(store, times)
    return "rows.db"


def output(database: str) -> list[str]:
    """What is shown of a database, and the table that it gives."""
    shown = fp8tune("show", "--kernel", "colwise", "--format", "csv", "--db", database)
    exported = fp8tune("export", "--arch", "sm_90", "--output", f"{database}.py", "--db", database)
    assert (shown.returncode, exported.returncode) == (0, 0), shown.stderr + exported.stderr
    return [shown.stdout, Path(f"{database}.py").read_text()]


def test_compact_keeps_what_picks_rest_on_and_the_archive_keeps_everything(filled: str) -> None:
    before = output(filled)
    done = fp8tune("compact", "--archive", "all.db.xz", "--db", filled, "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Of 30 configs on each problem the fastest stay, and the pick of the other problem.
    removed = 2 * (30 - FASTEST - 1)
    assert (report["results_removed"], report["trials_removed"], report["results_kept"]) == (removed, 60, 60 - removed)
    assert output(filled) == before
    assert json.loads(fp8tune("compact", "--db", filled, "--format", "json").stdout)["results_removed"] == 0
    assert fp8tune("import", "all.db.xz", "--db", "again.db").returncode == 0
    assert output("again.db") == before
    with Store.open("again.db", writable=False) as store:
        assert len(list(store.rows())) == 60


def test_compact_into_another_file_leaves_the_database(filled: str) -> None:
    before = Path(filled).read_bytes()
    assert fp8tune("compact", "-o", "small.db", "--db", filled).returncode == 0
    assert Path(filled).read_bytes() == before
    assert output("small.db") == output(filled)
    assert fp8tune("compact", "-o", "small.db", "--db", filled).returncode == 2  # is there already


def test_forget_removes_a_result_with_its_trials(filled: str) -> None:
    done = fp8tune("forget", "results:1", "--db", filled, "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["rows"]) == (0, ["results:1"]), done.stderr
    with Store.open(filled, writable=False) as store:
        assert len(list(store.rows())) == 59
    assert fp8tune("forget", "trials:1", "--db", filled).returncode == 2
