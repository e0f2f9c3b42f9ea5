"""No password of a database URL is printed or stored, however it is spelled and wherever the URL stands."""

from __future__ import annotations

import sqlite3
import string
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from database_rows import H100, begin
from hypothesis import given
from hypothesis import strategies as st

from fp8tune import cli
from fp8tune.redaction import command_line, passwords, redacted, without
from fp8tune.store import schema
from fp8tune.store.results import Store

# no word of a message or URL is made of these alone
PASSWORDS = st.text("XYZQ0123456789" + "@:/?&=%# +;!'\"\\é-", min_size=6, max_size=20).filter(
    lambda text: text == text.strip() and sum(character in "XYZQ0123456789" for character in text) >= 5
)
USERS = st.text(string.ascii_lowercase, max_size=8)
QUERY = ("password", "passwd", "sslpassword", "PASSWORD", "p%61ssword", "pwd")


@st.composite
def urls(draw: st.DrawFn, parsed: bool = False) -> tuple[str, str]:
    """(a URL with a password, as it is spelled there), as a user may quote it or not."""
    password = draw(PASSWORDS)
    quoted = draw(st.sampled_from([quote_plus(password), quote(password, safe="")]))
    if draw(st.booleans()):
        spelled = draw(st.sampled_from([quoted, password]))
        url = f"postgresql+psycopg://{draw(USERS)}:{spelled}@localhost:1/db"
    else:
        spelled = draw(st.sampled_from([quoted, password.replace("&", "")]))
        url = f"postgresql://host/db?sslmode=disable&{draw(st.sampled_from(QUERY))}={spelled}"
        password = password.replace("&", "") if spelled != quoted else password
        url += draw(st.sampled_from(["", "&connect_timeout=1"]))
    return url, password if spelled != quoted else quoted


@given(urls(), st.sampled_from(["{}", "--db={}"]))
def test_a_stored_command_holds_no_password(url: tuple[str, str], how: str) -> None:
    text, password = url
    command = command_line(["sweep", "--kernel", "colwise", how.format(text), "--quick"])
    assert password not in command
    assert command.startswith("fp8tune sweep --kernel colwise ")
    assert command.endswith(" --quick")
    assert password not in redacted(command)


@given(urls())
def test_a_message_holds_no_password_in_any_spelling(url: tuple[str, str]) -> None:
    text, password = url
    for message in (text, f"{text} cannot be used", f"fp8tune sweep --db {text} --quick"):
        if " --" not in password:
            assert password not in redacted(message)
    assert password not in without(passwords(text), f"the driver says: {password!s} is no password")


@pytest.mark.parametrize(
    "text",
    [
        "fp8tune sweep --db results.db",
        "postgresql://user@host:5432/db?sslmode=require",
        "sqlite:////tmp/a:b/results.db",
        "C:/a/b:c@d/results.db",
        "https://github.com/pytorch/ao --kernel mine@2",
        "postgresql://host/db?passfile=/home/me/.pgpass",
    ],
)
def test_what_holds_no_password_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_the_rest_of_a_command_stays() -> None:
    message = redacted("fp8tune sweep --db postgresql://me:secret@host/db --kernel a@b --seed 1")
    assert message == "fp8tune sweep --db postgresql://me:***@host/db --kernel a@b --seed 1"


def stored_with(path: Path, command: str) -> None:
    with Store.open(str(path), create=True) as store:
        begin(store)
    with sqlite3.connect(path) as connection:
        table = schema.Sweeps
        row = connection.execute("select * from sweeps").fetchone()
        values = {**dict(zip(table.c.keys(), row, strict=True)), "command": command}
        crc = schema.row_checksum(table, values)
        connection.execute("update sweeps set command = ?, crc = ?", (command, crc))
    connection.close()


OLD = "fp8tune sweep --db postgresql://me:hunter2@host/db?sslpassword=hunter2 --quick"


def test_a_password_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(str(path), create=True) as store:
        store.begin_sweep("r", H100, command=OLD, commit="", timer="", seed=0)
        assert "hunter2" not in store.unfinished_sweeps()[0]
    assert b"hunter2" not in path.read_bytes()


def test_an_import_takes_over_no_password(tmp_path: Path) -> None:
    foreign, path = tmp_path / "foreign.db", tmp_path / "results.db"
    stored_with(foreign, OLD)
    with Store.open(str(path), create=True) as store, Store.open(str(foreign), writable=False) as source:
        store.merge(source)
        assert "hunter2" not in store.unfinished_sweeps()[0]
    assert b"hunter2" not in path.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "--db", "postgresql://me:hunter2@127.0.0.1:1/db"],
        ["show", "postgresql://me:hunter2@127.0.0.1:1/db"],
        ["doctor", "--db=postgresql://127.0.0.1:1/db?user=me&password=hunter2"],
        ["doctor", "--db", "mysql://me:hunter2@127.0.0.1:1/db", "--format", "json"],
        ["sweep", "--timer", "simulated:1", "--db", "postgresql://me:hunter2@127.0.0.1:x1/db"],
        ["export", "--arch", "sm_90", "--db", "nosuch://me:hunter2@h/db"],
        ["show", "--seed=postgresql://me:hunter2@h/db"],
        ["db", "import", "postgresql://me:hunter2@h/db"],
        ["export", "--arch", "gfx942", "--db", "none.db", "-o", "postgresql://me:hunter2@h/db"],
        ["sweep", "--kernel", "postgresql://me:hunter2@h/db.py:SPEC"],
        ["sweep", "--timer", "simulated:1", "--shapes", "postgresql://me:hunter2@h/db.toml"],
    ],
)
def test_no_command_prints_a_password(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fp8tune", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    output = "".join(capfd.readouterr())
    assert output
    assert "hunter2" not in output
