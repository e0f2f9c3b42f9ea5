"""A process that opens a database a second time keeps the locks of the first connection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from database_rows import begin, row

from fp8tune.store.results import Store

SWITCH = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1], timeout=0).execute('PRAGMA journal_mode=DELETE'))"


def test_another_process_cannot_remove_the_log_of_a_database_that_is_opened_twice(tmp_path: Path) -> None:
    """A worker and its heartbeat had the same file open; another worker that ended then removed their log."""
    path = str(tmp_path / "results.db")
    with Store.open(path, create=True) as store:
        sweep = begin(store)
        assert store.add(sweep, row())
        with Store.open(path):
            ended = subprocess.run([sys.executable, "-c", SWITCH, path], capture_output=True, text=True, check=False)
            assert "database is locked" in ended.stderr
        assert store.add(sweep, row(round=1))
    with Store.open(path, writable=False) as store:
        assert len(list(store.rows())) == 2
