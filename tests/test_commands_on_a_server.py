"""Commands do with a PostgreSQL server what they do with a file, and no password is printed or stored anywhere."""

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
from places import PLANTED, PUBLISHED
from servers import PASSWORD, USER, Server

from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store
from fp8tune.sweeping.picks import keep_current

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
TINY = ("--shapes", "tiny", "--grid", "num_warps=1,2", "--timer", "simulated:5", "--quick")
SWEEP = ("sweep", "--kernel", FAULTS, *TINY)
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
    """A file and a server's database with the same results."""
    folder = tmp_path_factory.mktemp("rows")
    file, server = str(folder / "rows.db"), postgresql.database()
    for command in (SWEEP, ("db", "import", PUBLISHED)):
        assert ran(file, *command, cwd=folder).returncode == 0
    with Store.open(file) as store:
        finished_sweep(store, {problem(): {config(): 100.0, config(64): 101.0}})
        keep_current(store)
    assert ran(server, "db", "import", file, cwd=folder).returncode == 0
    return {"a file": file, "a server": server}


def alike(text: str, db: str, folder: Path) -> str:
    """Return a text without the name of the database and without times that differ from run to run."""
    for name in (db.replace(quote(PASSWORD, safe=""), "***"), str(folder)):
        text = text.replace(name, "DB")
    return re.sub(r' *\d+(\.\d+)? (s|min)\b|last written [^"\n]*', "", text)


READING = [
    ("show", "--format", "json"),
    ("show", "colwise", "M=16640,K=5120,G=64", "--format", "json"),
    ("show", "--failed"),
    ("export", "--arch", "sm_90", "--allow-quick", "-o", "table.py"),
    ("doctor", "--format", "json"),
]


@pytest.mark.parametrize("command", READING, ids=lambda command: " ".join(map(str, command))[:60])
def test_a_command_that_reads_prints_the_same(command: tuple[str, ...], both: dict[str, str], tmp_path: Path) -> None:
    results = {}
    for where, db in both.items():
        folder = tmp_path / where
        folder.mkdir()
        done = ran(db, *command, cwd=folder)
        files = {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert not any(secret in text for text in files.values() for secret in SECRETS)
        results[where] = (done.returncode, alike(done.stdout, db, folder), alike(done.stderr, db, folder), files)
    assert results["a server"] == results["a file"]


def test_commands_that_write_do_the_same(postgresql: Server, tmp_path: Path) -> None:
    csv = tmp_path / "published.csv"
    csv.write_text("\n".join(PUBLISHED.read_text().splitlines()[:4]) + "\n")
    steps = [SWEEP, SWEEP, ("db", "import", csv), ("db", "import", csv), ("db", "forget", "trial:1", "--yes")]
    databases = {"a file": str(tmp_path / "rows.db"), "a server": postgresql.database()}
    results: dict[str, list[tuple[int, str]]] = {}
    for where, db in databases.items():
        done = [ran(db, *step, cwd=tmp_path) for step in [*steps, ("show", "--format", "csv")]]
        results[where] = [(end.returncode, alike(end.stdout, db, tmp_path)) for end in done]
    assert [code for code, _ in results["a server"]] == [0] * (len(steps) + 1)
    assert results["a server"][2:] == results["a file"][2:]
    with Store.open(databases["a file"]) as file, Store.open(databases["a server"]) as server:
        rows = [[(row.problem, row.config, row.stage, row.outcome) for row in s.rows()] for s in (file, server)]
    assert rows[0] == rows[1] != []
    assert "is a server" in ran(databases["a server"], "db", "prune", cwd=tmp_path).stderr


def test_no_password_is_in_a_row_or_the_log_of_the_server(postgresql: Server, tmp_path: Path) -> None:
    log, db = postgresql.folder / "log", postgresql.database()
    before = len(log.read_bytes())  # other tests let the server itself say the password
    assert ran(db, *SWEEP, cwd=tmp_path).returncode == 0
    name = db.rpartition("/")[2]
    tables = postgresql.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name)
    everything = "\n".join(str(postgresql.execute(f"SELECT * FROM {table}", name)) for (table,) in tables)
    assert "fp8tune sweep" in everything
    everything += log.read_bytes()[before:].decode()
    assert not [secret for secret in SECRETS if secret in everything]


def test_the_password_may_be_in_the_environment_or_a_file(
    postgresql: Server, both: dict[str, str], tmp_path: Path
) -> None:
    url = both["a server"].replace(f":{quote(PASSWORD, safe='')}", "")
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:{postgresql.port}:*:{USER}:{PASSWORD}\n")
    passfile.chmod(0o600)

    def ended(**variables: str) -> Ended:  # the driver's library reads the environment of the process
        with mock.patch.dict(os.environ, variables):
            return fp8tune("show", "colwise", "--db", url, "--format", "json", cwd=tmp_path)

    assert json.loads(ended(PGPASSWORD=PASSWORD).stdout)
    assert json.loads(ended(PGPASSFILE=str(passfile)).stdout)
    wrong = ended(PGPASSWORD="hunter2hunter2")
    assert (wrong.returncode, wrong.stderr.count("\n"), "hunter2" in wrong.stderr) == (2, 1, False), wrong.stderr
    assert "put the password into PGPASSWORD or ~/.pgpass" in wrong.stderr


@pytest.mark.parametrize("command", [("show",), ("db", "import", PUBLISHED)])
def test_a_password_or_another_server_on_the_command_line_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    for url in ("postgresql://me:hunter2@host/name", "postgresql://me@host/name?password=hunter2"):
        done = fp8tune(*command, "--db", url, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "FP8TUNE_DB" in done.stderr
        assert "hunter2" not in done.stderr
    for scheme in ("mysql", "mariadb", "mssql+pyodbc", "oracle", "postgres"):
        done = fp8tune(*command, "--db", f"{scheme}://me@host:3306/db", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"{scheme}://... cannot be used" in done.stderr


def test_what_a_server_repeats_is_printed_without_the_password(postgresql: Server) -> None:
    """A server that names the URL itself, as a proxy or an extension may."""
    db = postgresql.database()
    name = db.rpartition("/")[2]
    Store.open(db, create=True).close()
    text = f"$$ BEGIN RAISE EXCEPTION 'no rows from {db.replace('%', '%%')}, password {PASSWORD}'; END $$"
    postgresql.execute(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS {text}", name)
    postgresql.execute("CREATE TRIGGER refuse BEFORE INSERT ON sweeps EXECUTE FUNCTION refuse()", name)
    with Store.open(db) as store, pytest.raises(DatabaseError, match="no rows from postgresql") as raised:
        finished_sweep(store, {problem(): {config(): 100.0}})
    assert not [secret for secret in SECRETS if secret in str(raised.value)]
