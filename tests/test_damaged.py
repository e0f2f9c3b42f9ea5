"""Databases of which any byte, or any one value, is another: no command ends in a traceback.

The values are what a damaged disk, another program or an adversary leaves: of another type, endless, out of any range.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import shutil
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from database_rows import H100, KERNEL, begin, config, end_finals, finished_sweep, problem, row
from places import PUBLISHED, PUBLISHED_OPERATIONS

from fp8tune import cli
from fp8tune.check import databases
from fp8tune.comparing import sides
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import Revision
from fp8tune.importing.files import import_file
from fp8tune.records import Code, Device, Facts, Kind
from fp8tune.report import html
from fp8tune.store.results import Store
from fp8tune.store.schema import METADATA

MUTANTS = int(os.environ.get("FP8TUNE_MUTANTS", "10"))
"""Damaged databases of each sort."""
COMMANDS = (
    ("show",),
    ("show", "--wide"),
    ("export", "--arch", "sm_90", "--output", "table.py"),
    ("doctor",),
    ("report", "--output", "report.html"),
    ("compare", "HEAD..HEAD"),
)
JUNK = (
    None,
    0,
    -1,
    2**63 - 1,
    1e308,
    float("inf"),
    "",
    "x" * 3000,
    "NaN",
    b"\xff\xfe",
    "[" * 100_000,
    '[["a",[Infinity]]]',
    '[["a",[1e400]]]',
    '[["a",{"b":1}]]',
    "M=9223372036854775807 K=9223372036854775807",
    "unstated",
    "K=1",
)
PLACES = [
    (table.name, column.name, number)
    for table in METADATA.sorted_tables
    for column in table.columns
    for number in range(len(JUNK))
]
random.Random(0).shuffle(PLACES)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of everything that a database may hold."""
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=k): {config(b): 100.0 + b for b in (32, 64, 128)} for k in (1024, 2048)})
        sweep = begin(store, request="finals")
        for block, process, number in [(b, p, n) for b in (32, 64) for p in ("final 00", "final 01") for n in range(2)]:
            for stage in ("final", "duplicate") if block == 64 else ("final",):
                made = row(100.0 + block + number, of=problem(K=1024), config=config(block), process=process)
                store.add(sweep, replace(made, stage=stage, round=number))
        end_finals(store, sweep, problem(K=1024))
        store.record_ceiling(sweep, H100, 3000.0)
        store.record_launches({problem(K=1024): "{}"})
        store.record_flops({problem(K=1024): 1000})
        store.record_check(sweep, KERNEL, "exact-inputs")
        compiled = Facts(40, 0, 4096, 0.4, Code(resident_warps=8))
        for block in (32, 64, 128):
            static = row(None, of=problem(K=1024), config=config(block), kind=Kind.STATIC, facts=compiled)
            store.add(sweep, replace(static, device=Device("sm_90", triton="3.7.1")))
        import_file(store, PUBLISHED)
        import_file(store, PUBLISHED_OPERATIONS)
    return path


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a damaged copy goes; commands run beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "sides", _planted_sides)
    # what no database changes: the shipped tables and the script of a report take as long as all else
    no_tables = functools.partial(databases.check_tables, path_of=lambda arch: tmp_path / "none" / f"{arch}.py")
    monkeypatch.setattr(databases, "check_tables", no_tables)
    monkeypatch.setattr(html, "_library", lambda: "")
    logging.getLogger("fp8tune").handlers = [logging.lastResort]  # as outside of pytest
    logging.getLogger("fp8tune").propagate = False
    yield tmp_path / "results.db"
    logging.getLogger("fp8tune").handlers, logging.getLogger("fp8tune").propagate = [], True


def _planted_sides(*_: object) -> Sides:
    """The planted rows' hash on both: to read the real ones of 13 kernels takes a second."""
    same = (KERNEL.source_hash, KERNEL.source_hash)
    return Sides(Path(), Revision("a", "a"), Revision("b", "b"), (Kernel(KERNEL.kernel, KERNEL.kernel, same),))


def fp8tune(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with mock.patch.object(sys, "argv", ["fp8tune", *arguments]), pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def run_half(number: int, capsys: pytest.CaptureFixture[str], database: Path, empty: Path) -> None:
    """Run every second command; any other exception than SystemExit fails the test.

    Of two damaged databases with numbers in sequence all commands run, of each sort of them on the half.
    """
    for command in COMMANDS[number % 2 :: 2]:
        code, _, said = fp8tune(capsys, *command, "--db", str(database))
        assert code in (0, 1, 2, 3), (command, said)
        assert code != 2 or len([line for line in said.splitlines() if line.startswith("fp8tune: ")]) == 1
    empty.unlink(missing_ok=True)
    assert fp8tune(capsys, "db", "import", str(database), "--db", str(empty))[0] in (0, 2)


@pytest.mark.parametrize("mutant", range(MUTANTS))
def test_damaged_bytes_are_no_traceback(
    mutant: int, filled: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(mutant)
    content = bytearray(filled.read_bytes())
    for _ in range(generator.choice([1, 8, 64])):
        at = generator.randrange(len(content))
        content[at] = generator.choice([0, 255, content[at] ^ 1 << generator.randrange(8)])
    damaged.write_bytes(content)
    run_half(mutant, capsys, damaged, damaged.with_name("empty.db"))


@pytest.mark.parametrize(("table", "column", "number"), PLACES[:MUTANTS])
def test_one_value_of_junk_is_no_traceback(
    table: str, column: str, number: int, filled: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if planted(filled, damaged, table, column, JUNK[number]):
        run_half(PLACES.index((table, column, number)), capsys, damaged, damaged.with_name("empty.db"))


def planted(source: Path, target: Path, table: str, column: str, value: object) -> bool:
    """Make a copy with a value of our choice in one row; False where SQLite itself has no such value there."""
    shutil.copy(source, target)
    with contextlib.closing(sqlite3.connect(target)) as connection, connection:
        keys = ", ".join(f'"{name}"' for _, name, *_, key in connection.execute(f"PRAGMA table_info({table})") if key)
        where = f"({keys}) = (SELECT {keys} FROM {table} ORDER BY {keys} DESC LIMIT 1)"
        try:
            connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE {where}', (value,))
        except sqlite3.Error:
            return False
    return True
