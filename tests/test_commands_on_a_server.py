"""Every command does with a PostgreSQL server what it does with a file, and no password is said or stored anywhere."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest import mock
from urllib.parse import quote, quote_plus

import pytest
from command_line import Ended, fp8tune
from database_rows import config, finished_sweep, problem
from places import PLANTED, PUBLISHED, ROOT
from servers import PASSWORD, USER, Server

import fp8tune as package
from fp8tune.errors import DatabaseError
from fp8tune.report import html
from fp8tune.store.results import Store

FAULTS, UNTOUCHED = (f"{PLANTED / name}:SPEC" for name in ("faults.py", "untouched.py"))
SWEEP = ("sweep", "--kernel", FAULTS, "--shapes", "tiny", "--grid", "num_warps=1,2", "--timer", "simulated:5")
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), quote_plus(PASSWORD), "se cret", "%2F%C3%BC")


def ran(db: str, *command: object, cwd: Path) -> Ended:
    """Run a command on the database that the environment names; it never prints the password."""
    with mock.patch.dict(os.environ, FP8TUNE_DB=db):
        done = fp8tune(*command, cwd=cwd)
    for secret in SECRETS:
        assert secret not in done.stdout + done.stderr, done
    return done


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, postgresql: Server) -> dict[str, str]:
    """A file and a server's database with the same rows."""
    folder = tmp_path_factory.mktemp("rows")
    file, server = str(folder / "rows.db"), postgresql.database()
    for command in ((*SWEEP, "--quick"), ("import", PUBLISHED)):
        done = ran(file, *command, cwd=folder)
        assert done.returncode == 0, done
    with Store.open(file) as store:
        finished_sweep(store, {problem(): {config(): 100.0, config(64): 101.0}})
    done = ran(server, "import", file, cwd=folder)
    assert done.returncode == 0, done
    return {"a file": file, "a server": server}


def alike(text: str, db: str, folder: Path) -> str:
    """Without what names the database, and how long something took."""
    for name in (db.replace(quote(PASSWORD, safe=""), "***"), str(folder)):
        text = text.replace(name, "DB")
    text = re.sub(r"(?m)^(writing the page|rows read|problems read).*\n", "", text)  # said of what takes seconds
    return re.sub(r" *\d+(\.\d+)? (s|min)\b", "", text)


READING = [
    ("show",),
    ("show", "--format", "json"),
    ("show", "--format", "csv", "--sort", "gain"),
    ("show", "--kernel", "colwise", "--arch", "sm_90"),
    ("show", "--failed"),
    ("show", "--op", "grouped-mm"),
    ("explain", "colwise", "M=16640,K=5120,G=64"),
    ("explain", "colwise", "M=16640,K=5120,G=64", "--format", "json"),
    ("export", "--arch", "sm_90", "--output", "table.py"),
    ("export", "--arch", "simulated", "--output", "table.py", "--kernel", FAULTS),
    ("export", "--arch", "sm_90", "--output", "table.py", "--check"),
    ("export", "--arch", "sm_90", "--for", "python", "--kernel", "colwise", "--output", "files"),
    ("report", "--output", "report.html"),
    ("compare", "HEAD..HEAD", "--kernel", f"{ROOT}/kernels/fp8tune_kernels/quantize/colwise.py:SPEC"),
    ("doctor", "--format", "json"),
]


@pytest.mark.parametrize("command", READING, ids=lambda command: " ".join(map(str, command))[:60])
def test_a_command_that_reads_says_the_same(
    command: tuple[str, ...], both: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "_library", lambda: "")  # the same script, and long to pack and to compare
    ended, files = {}, {}
    for where, db in both.items():
        folder = tmp_path / where
        folder.mkdir()
        done = ran(db, *command, cwd=folder)
        ended[where] = (done.returncode, alike(done.stdout, db, folder), alike(done.stderr, db, folder))
        written = {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
        files[where] = {path: alike(text, db, folder) for path, text in written.items()}
        assert not any(secret in text for text in written.values() for secret in SECRETS)
    assert ended["a server"] == ended["a file"]
    assert files["a server"].keys() == files["a file"].keys()
    if command[0] == "export":
        assert files["a server"] == files["a file"]


def test_commands_that_write_do_the_same(postgresql: Server, tmp_path: Path) -> None:
    csv = tmp_path / "published.csv"
    csv.write_text("\n".join(PUBLISHED.read_text().splitlines()[:4]) + "\n")
    steps = [
        (*SWEEP, "--quick"),
        (*SWEEP, "--quick"),  # finished already
        ("calibrate", "--timer", "simulated:5"),
        ("import", csv),
        ("import", csv),  # brings nothing
        ("forget", "results:1"),
        ("show", "--format", "csv"),
    ]
    databases = {"a file": str(tmp_path / "rows.db"), "a server": postgresql.database()}
    ended: dict[str, list[tuple[object, ...]]] = {}
    for where, db in databases.items():
        for step in steps:
            done = ran(db, *step, cwd=tmp_path)
            last = [line for line in alike(done.stdout, db, tmp_path).splitlines() if line]
            ended.setdefault(where, []).append((step[0], done.returncode, last[-1:] if step[0] != "doctor" else []))
    assert ended["a server"] == ended["a file"]
    assert [code for _, code, _ in ended["a server"]] == [0] * len(steps)
    with Store.open(databases["a file"]) as file, Store.open(databases["a server"]) as server:
        rows = {
            where: [(row.problem, row.config, row.stage, row.outcome) for row in store.rows()]
            for where, store in {"a file": file, "a server": server}.items()
        }
        assert rows["a server"] == rows["a file"] != []


def test_rows_of_a_server_go_into_a_small_file(both: dict[str, str], tmp_path: Path) -> None:
    done = ran(both["a server"], "compact", cwd=tmp_path)
    assert done.returncode == 2
    assert "-o FILE writes its rows into a small file" in done.stderr
    done = ran(both["a server"], "compact", "-o", "small.db", "--archive", "all.db.xz", cwd=tmp_path)
    assert done.returncode == 0, done
    for name in ("small.db", "all.db.xz"):
        if name.endswith(".xz"):
            assert ran(str(tmp_path / "again.db"), "import", name, cwd=tmp_path).returncode == 0
            name = "again.db"
        shown = [
            ran(db, "show", "--format", "csv", cwd=tmp_path).stdout for db in (str(tmp_path / name), both["a server"])
        ]
        assert shown[0] == shown[1]


def test_python_reads_it_as_a_file(both: dict[str, str]) -> None:
    found = {where: package.open(db) for where, db in both.items()}
    for name in ("picks", "finals", "trials"):
        frames = {where: getattr(results, name)() for where, results in found.items()}
        assert frames["a server"].equals(frames["a file"]), name


def test_no_password_is_in_a_row_or_the_server_s_log(postgresql: Server, tmp_path: Path) -> None:
    db = postgresql.database()
    assert ran(db, *SWEEP, "--quick", cwd=tmp_path).returncode == 0
    name = db.rpartition("/")[2]
    tables = postgresql.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name)
    everything = "\n".join(str(postgresql.execute(f"SELECT * FROM {table}", name)) for (table,) in tables)
    assert "fp8tune sweep" in everything
    log = (postgresql.folder / "log").read_text()
    for secret in SECRETS:
        assert secret not in everything
        assert secret not in log


def test_the_password_may_be_in_the_environment_or_a_file(
    postgresql: Server, both: dict[str, str], tmp_path: Path
) -> None:
    url = both["a server"].replace(f":{quote(PASSWORD, safe='')}", "")
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:{postgresql.port}:*:{USER}:{PASSWORD}\n")
    passfile.chmod(0o600)

    def ended(**given: str) -> Ended:  # the driver's library reads the environment of the process
        with mock.patch.dict(os.environ, given):
            return fp8tune("show", "--db", url, "--format", "json", "--kernel", "colwise", cwd=tmp_path)

    assert len(json.loads(ended(PGPASSWORD=PASSWORD).stdout)) >= 1
    assert len(json.loads(ended(PGPASSFILE=str(passfile)).stdout)) >= 1
    wrong = ended(PGPASSWORD="hunter2hunter2")
    assert (wrong.returncode, wrong.stderr.count("\n"), "hunter2" in wrong.stderr) == (2, 1, False), wrong.stderr
    assert "refused the login: put the password into PGPASSWORD or ~/.pgpass" in wrong.stderr
    without = ended(PGPASSWORD="", PGPASSFILE=str(tmp_path / "missing"))
    assert (without.returncode, without.stderr.count("\n")) == (2, 1), without.stderr


def test_a_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    for command in (SWEEP, ("show",), ("doctor",), ("import", PUBLISHED)):
        for url in ("postgresql://me:hunter2@host/name", "postgresql://me@host/name?password=hunter2"):
            done = fp8tune(*command, "--db", url, cwd=tmp_path)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
            assert "FP8TUNE_DB" in done.stderr
            assert "hunter2" not in done.stderr


@pytest.mark.parametrize("scheme", ["mysql", "mysql+pymysql", "mariadb", "mssql+pyodbc", "oracle", "postgres"])
def test_other_servers_are_refused_with_one_line(scheme: str, tmp_path: Path) -> None:
    db = f"{scheme}://me@host:3306/db"
    line = f"fp8tune: {scheme}://... cannot be used: tested are SQLite (a file) and PostgreSQL (postgresql://USER@HOST/NAME)"
    for command in (SWEEP, ("show",), ("import", PUBLISHED), ("forget", "results:1"), ("calibrate",), ("compact",)):
        done = fp8tune(*command, "--db", db, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")
    assert fp8tune("doctor", "--db", db, cwd=tmp_path).returncode == 1


def test_what_a_server_repeats_is_said_without_the_password(postgresql: Server) -> None:
    """A server that speaks of the URL itself, as a proxy or an extension may."""
    db = postgresql.database()
    name = db.rpartition("/")[2]
    with Store.open(db, create=True):
        pass
    said = f"$$ BEGIN RAISE EXCEPTION 'no rows from {db.replace('%', '%%')}, password {PASSWORD}'; END $$"
    postgresql.execute(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS {said}", name)
    postgresql.execute("CREATE TRIGGER refuse BEFORE INSERT ON sweeps EXECUTE FUNCTION refuse()", name)
    with Store.open(db) as store, pytest.raises(DatabaseError, match="no rows from postgresql") as raised:
        finished_sweep(store, {problem(): {config(): 100.0}})
    assert "\n" not in str(raised.value)
    for secret in SECRETS:
        assert secret not in str(raised.value)
