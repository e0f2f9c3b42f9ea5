"""A pruned database gives the same picks and tables; its archive has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem

from fp8tune.store.results import FASTEST, Store

BLOCKS, WARPS = (16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with 30 configs on each of two problems: the pick of one is the slowest of the other."""
    monkeypatch.chdir(tmp_path)
    configs = [config(block, warps) for block in BLOCKS for warps in WARPS]
    with Store.open("rows.db", create=True) as store:
        orders = {problem(K=1024): configs, problem(K=2048): configs[::-1]}
        times = {size: {config: 100.0 + rank for rank, config in enumerate(order)} for size, order in orders.items()}
        finished_sweep(store, times)
    return "rows.db"


def output(database: str) -> list[str]:
    """Return the picks of a database, and the table that it gives."""
    shown = fp8tune("show", "colwise", "--format", "csv", "--db", database)
    exported = fp8tune("export", "--arch", "sm_90", "--allow-quick", "-o", f"{database}.py", "--db", database)
    assert (shown.returncode, exported.returncode) == (0, 0), shown.stderr + exported.stderr
    return [shown.stdout, Path(f"{database}.py").read_text()]


def test_prune_keeps_what_picks_rest_on_and_the_archive_keeps_everything(filled: str) -> None:
    before = output(filled)
    done = fp8tune("db", "prune", "--archive", "all.db.xz", "--db", filled)
    assert done.returncode == 0, done.stderr
    # Of 30 configs on each problem the fastest stay, and the pick of the other problem.
    removed = 2 * (30 - FASTEST - 1)
    assert f"removed {removed} results and 60 trials; {60 - removed} results are kept" in done.stdout
    assert output(filled) == before
    assert "removed 0 results" in fp8tune("db", "prune", "--db", filled).stdout
    assert fp8tune("db", "import", "all.db.xz", "--db", "again.db").returncode == 0
    assert output("again.db") == before
    with Store.open("again.db", writable=False) as store:
        assert len(list(store.rows())) == 60
