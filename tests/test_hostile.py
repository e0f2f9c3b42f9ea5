"""Databases and CSV files that carry code, quotes, newlines, escape sequences, huge numbers and path tricks.

Whatever a file holds is refused or quoted: it is never run, never a path, never part of a query, and reaches no
terminal as anything but visible text.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from any_text import CHARACTERS, any_text
from database_rows import H100, KERNEL, begin, config, finished_sweep, import_file, key_of, problem, row, table_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import String

from fp8tune import cli
from fp8tune.check import databases
from fp8tune.errors import DatabaseError, Fp8tuneError
from fp8tune.importing.published import COLUMNS
from fp8tune.records import Device, Facts, KernelVersion, Kind, NamedInts, Outcome, Row, Status, Subject
from fp8tune.store.results import Store
from fp8tune.store.schema import METADATA, Results, row_checksum
from fp8tune.store.texts import LARGEST
from fp8tune.sweeping import picks
from fp8tune.sweeping.session import lookup_key
from fp8tune.text import visible

HOSTILE = [
    "__import__('os').system('touch pwned')",
    "'); open('pwned', 'w').write('x'); ('",
    '"), ("x", "", None, ((__import__("os").system("touch pwned"), 1),)), ("',
    '"""\nimport os\nos.system("touch pwned")\n"""',
    "x'; DROP TABLE trials; --",
    "../../../pwned",
    "/tmp/pwned",
    "a\nb",
    "\x1b[2J\x1b]0;pwned\x07",
    "\x9b31m",
    "\u202egnitar\u202c",
    "[/red][link=file:///etc/passwd]",
    "{0.__class__} %s %(x)s ${HOME} `id`",
    "M=99999999999999999999999999 K=1",
    "9" * 5000,
    "",
    "\x00",
]
TEXT_COLUMNS = [
    (table.name, column.name)
    for table in METADATA.sorted_tables
    for column in table.columns
    if isinstance(getattr(column.type, "impl", column.type), String)
]
DB = ("--db", "results.db")
COMMANDS = [
    ("show", *DB),
    ("show", "--format", "csv", *DB),
    ("export", "--arch", "sm_90", "--allow-quick", "-o", "table.py", *DB),
]
DOCTOR = ("doctor", *DB)
UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

texts = st.one_of(st.sampled_from(HOSTILE), any_text(max_size=30))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0, config(64): 110.0}})
        store.record_ceiling(begin(store, request="second"), H100, 3000.0)
        store.record_launches({problem(): "{}"})
        store.record_check(1, KERNEL, "exact-inputs")
        store.add(begin(store, request="third"), row(None, status=Status.CRASHED, config=config(128)))
        picks.keep_current(store)
    return path


def planted(source: Path, target: Path, table: str, column: str, text: str) -> Path:
    """Copy a database with a text of our choice in one row, past constraints, and with fitting checksums."""
    shutil.copy(source, target)
    with contextlib.closing(sqlite3.connect(target)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        keys = ", ".join(f'"{name}"' for _, name, *_, key in connection.execute(f"PRAGMA table_info({table})") if key)
        # not in every row: a unique column holds it once
        first = f"SELECT {keys} FROM {table} ORDER BY {keys} LIMIT 1"
        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE ({keys}) = ({first})', (text,))
        renew_checksums(connection)
    return target


def renew_checksums(connection: sqlite3.Connection) -> None:
    """Make the checksums fit the rows, as somebody would who knows this program."""
    connection.row_factory = sqlite3.Row
    for table in METADATA.sorted_tables:
        for values in map(dict, connection.execute(f"SELECT * FROM {table}").fetchall() if "crc" in table.c else ()):
            more: list[object] = []
            if table is Results:
                query = "SELECT stage, process_id, round, time_us FROM trials WHERE stage AND time_us AND result_id = ?"
                more = [sorted(map(tuple, connection.execute(query, (values["id"],))))]
            crc = row_checksum(table, values, *more)
            keys = [column.name for column in table.primary_key]
            where = " AND ".join(f'"{name}" = ?' for name in keys)
            connection.execute(f"UPDATE {table} SET crc = ? WHERE {where}", (crc, *(values[name] for name in keys)))


def fp8tune(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with mock.patch.object(sys, "argv", ["fp8tune", *arguments]), pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def rows_of(module: str) -> tuple[tuple[object, ...], ...]:
    """The rows of a generated module: it holds five assignments of literals and runs without any builtin function."""
    body = ast.parse(module).body
    assert [type(node) for node in body] == [ast.Expr, *[ast.AnnAssign] * 5]
    for node in body[1:]:
        ast.literal_eval(node.value)  # type: ignore[attr-defined]
    namespace: dict[str, object] = {"__builtins__": {"tuple": tuple, "str": str, "int": int}}
    exec(compile(module, "generated", "exec"), namespace)
    assert {*namespace["NEAREST"]} <= {row[0] for row in namespace["ROWS"]}  # type: ignore[attr-defined]
    return tuple(row[:4] for row in namespace["ROWS"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("table", "column"), TEXT_COLUMNS)
def test_no_text_of_a_database_is_run_or_reaches_the_terminal(
    table: str,
    column: str,
    filled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(databases, "check_tables", lambda *_: [])  # to merge with the shipped ones takes a second
    commands = [*COMMANDS, DOCTOR]
    place = TEXT_COLUMNS.index((table, column))
    texts = HOSTILE[place % 4 :: 4]  # each column meets each command, not with each text
    assert len(texts) >= len(commands)
    for number, text in enumerate(texts):
        planted(filled, tmp_path / "results.db", table, column, text)
        command = commands[(number + place) % len(commands)]
        code, printed = fp8tune(capsys, *command)
        assert code in (0, 1, 2, 3), printed
        assert not UNSEEN.search(printed), (command, text)
        assert code != 2 or printed.splitlines()[-1].startswith("fp8tune: ")
        if Path("table.py").exists():
            rows_of(Path("table.py").read_text())
    assert {file.name for file in tmp_path.iterdir()} <= {"results.db", "table.py"}


def test_what_a_name_may_hold_is_shown_as_it_is(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are markup to the terminal library; to us they are a device's name."""
    name = "GPU [/red] :smile: [bold]x"
    database = planted(filled, tmp_path / "results.db", "devices", "name", name)
    code, printed = fp8tune(capsys, "show", "--db", str(database))
    assert code == 0
    assert name in printed


def test_visible_text_is_one_line_that_controls_nothing() -> None:
    text = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not UNSEEN.search(visible(text))
    assert "\n" not in visible(text)
    harmless = re.sub(r"[\n\ud800-\udfff]", "", UNSEEN.sub("", text))
    assert visible(harmless) == harmless


# Fuzz: import -> export -> exec

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=settings.default.max_examples // 2)

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True, alphabet=CHARACTERS)
names = st.one_of(st.sampled_from(["num_warps", "K", "class", "a b", "\n", '"']), identifiers, any_text(max_size=6))
numbers = st.one_of(st.integers(0, LARGEST), st.sampled_from([-1, LARGEST + 1, 10**30, 0, 1]))
mappings = st.dictionaries(names, numbers, min_size=1, max_size=4).map(NamedInts)


@contextlib.contextmanager
def two_databases() -> Iterator[tuple[Path, Store]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(str(Path(folder) / "ours.db"), create=True) as ours,
    ):
        yield Path(folder) / "theirs.db", ours


@FUZZ
@given(mappings, mappings, texts, texts)
def test_a_merged_database_exports_what_it_holds_or_is_refused(
    launch: NamedInts, key: NamedInts, kernel: str, device: str
) -> None:
    version = KernelVersion(kernel, "aaaa", launch, tuple((name, (value,)) for name, value in launch.items()), ())
    gpu = Device("sm_90", device)
    size = problem()
    size = type(size)(kernel, size.shape, size.routing)
    made = Row(size, launch, gpu, Kind.MEASURED, Outcome(Status.OK, 100.0), version, key, source="", process="w1")
    with two_databases() as (path, ours):
        try:
            with Store.open(str(path), create=True) as theirs:
                sweep = begin(theirs, gpu)
                theirs.add(sweep, made)
                theirs.mark_complete(sweep, Subject(version, gpu, Kind.MEASURED, size), 1)
            import_file(ours, path)
            module = table_text(ours.studies(), "sm_90")
        except DatabaseError as error:
            assert "\n" not in str(error)
            return
    pairs, looked_up = tuple(launch.items()), tuple(sorted(key.items()))
    assert rows_of(module) == ((kernel, "", looked_up, pairs), (kernel, "", None, pairs))


fields = st.fixed_dictionaries(
    {
        "source": st.one_of(st.just("pytorch/ao#1"), texts),
        "device": st.one_of(st.just("AMD Instinct MI300X"), texts),
        "arch": st.one_of(st.just("gfx942"), texts),
        "kernel": st.one_of(st.just("colwise"), texts),
        "shape": st.one_of(st.just("M=16640 K=5120 G=64"), texts),
        "config": st.one_of(
            st.dictionaries(identifiers, st.integers(0, 2**70), min_size=1, max_size=3).map(NamedInts).map(str), texts
        ),
        "us": st.one_of(st.just("100"), st.floats().map(str), texts),
        "note": st.one_of(st.just(""), texts),
    }
)


@FUZZ
@given(fields)
def test_a_csv_exports_what_it_says_or_is_refused(line: dict[str, str]) -> None:
    """The config counts as compiled without spills, so that it may be exported."""
    with two_databases() as (path, ours):
        path = path.with_suffix(".csv")
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerow(line)
            import_file(ours, path, lookup_key=lookup_key)
            (published,) = ours.rows()
            if published.config is None or published.lookup_key is None:
                return
            compiled = KernelVersion("colwise", "aaaa")
            ours.add(begin(ours), _static(published, compiled))
            module = table_text(ours.studies(), "gfx942")
        except (Fp8tuneError, UnicodeEncodeError) as error:
            assert isinstance(error, UnicodeEncodeError) or "\n" not in str(error)
            return
    assert str(published.config) == line["config"]
    if line["arch"] == "gfx942" and line["kernel"] == "colwise":
        pairs = tuple(sorted(published.config.items()))
        assert [row[3] for row in rows_of(module)] == [pairs, pairs]


def _static(published: Row, version: KernelVersion) -> Row:
    outcome = Outcome(Status.OK, facts=Facts(registers=32, spill_bytes=0, shared_bytes=0))
    return Row(published.problem, published.config, Device(published.device.arch), Kind.STATIC, outcome, version)


def test_the_fuzz_reaches_the_table() -> None:
    """Were every row refused, the properties above would hold of nothing."""
    with two_databases() as (path, ours):
        with Store.open(str(path), create=True) as theirs:
            finished_sweep(theirs, {problem(): {config(): 100.0}})
        import_file(ours, path)
        rows = rows_of(table_text(ours.studies(), "sm_90"))
    assert [row[2] for row in rows] == [tuple(sorted(key_of(problem()).items())), None]
