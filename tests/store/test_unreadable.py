"""What the writer takes the reader reads; one row that cannot be read costs no other."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, KERNEL, begin, config, finished_sweep, problem, row
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Facts, NamedInts, Outcome, Row, Status
from fp8tune.store import unreadable
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store

numbers = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-7, 1e-6, 1e308, 5e-324]))
integers = st.one_of(st.integers(-(2**65), 2**65), st.sampled_from([0, 1, 2**63 - 1, 2**31]))
sizes = st.dictionaries(st.sampled_from(["M", "K", "G", "class", "a b", ""]), integers).map(NamedInts)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
axes = st.lists(st.tuples(st.sampled_from(["a", "b c"]), st.lists(st.one_of(integers, numbers), max_size=2)))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A good row of which some values are any."""
    made = row(draw(st.one_of(st.just(100.0), numbers, st.none())))
    values = {
        "problem": lambda: replace(made.problem, shape=draw(sizes), routing=draw(texts)),
        "config": lambda: draw(sizes),
        "version": lambda: replace(
            KERNEL, axes=tuple((a, tuple(b)) for a, b in draw(axes)), key=tuple(draw(st.lists(texts)))
        ),
        "device": lambda: replace(H100, name=draw(texts), multiprocessors=draw(integers)),
        "outcome": lambda: Outcome(
            Status.OK,
            100.0,
            draw(texts),
            samples_us=tuple(draw(st.lists(numbers, max_size=3))),
            tick_us=draw(numbers),
            facts=Facts(draw(integers)),
        ),
        "bytes_moved": lambda: draw(integers),
        "note": lambda: draw(texts),
        "process": lambda: draw(texts),
        "round": lambda: draw(integers),
    }
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)):
        made = replace(made, **{name: values[name]()})
    return made


@settings(max_examples=20)
@given(rows())
def test_what_the_writer_takes_the_reader_reads(given: Row) -> None:
    with Store.open("sqlite://", create=True) as store:
        try:
            store.add(begin(store), given)
        except DatabaseError as error:
            assert "\n" not in str(error)
            return
        assert store.unreadable() == {}
        (read,) = store.rows()
        assert (read.problem, read.config, read.device) == (given.problem, given.config, given.device)
        assert read.version == given.version
        assert len(store.evidence()) == 1


@pytest.mark.parametrize("time_us", [0.0, 1e-7, -1.0, float("nan"), float("inf"), 1e300])
def test_a_time_that_would_not_be_read_is_not_stored(time_us: float) -> None:
    with Store.open("sqlite://", create=True) as store:
        with pytest.raises(DatabaseError, match="no time above 0"):
            store.add(begin(store), row(time_us))
        assert store.evidence() == []


def damage(path: Path, statement: str) -> None:

    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two problems of two configs each."""
    path = tmp_path / "results.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=k): {config(): 100.0, config(64): 90.0} for k in (1024, 2048)})
    return path


@pytest.mark.parametrize(
    ("statement", "name", "left"),
    [
        ("UPDATE trials SET time_us = 0 WHERE id = 1", "trials:1", 3),
        ("UPDATE trials SET time_us = -1 WHERE id = 2", "trials:2", 3),
        ("UPDATE trials SET status = x'ff' WHERE id = 2", "trials:2", 3),
        ("UPDATE trials SET stage = CAST(x'ff' AS TEXT) WHERE id = 2", "trials:2", 3),
        ("UPDATE problems SET shape = 'M=9223372036854775807 K=2' WHERE id = 1", "problems:1", 2),
        ("DELETE FROM configs WHERE id = 1", "configs:1", 2),
        ("UPDATE candidates SET note = CAST(x'ff' AS TEXT) WHERE id = 4", "candidates:4", 3),
    ],
)
def test_the_other_rows_are_read_and_the_one_can_be_forgotten(
    path: Path, statement: str, name: str, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage(path, statement)
    with Store.open(str(path)) as store:
        assert len(store.evidence()) == len(store.evidence()) == left
        assert f"left out {name}, which" in caplog.text
        assert len(caplog.messages) == 1  # once
        assert store.forget([unreadable.parse_name(name)])
        assert store.unreadable() == {}
        assert len(store.evidence()) == left


def test_an_import_of_a_database_with_one_such_row_is_refused_whole_and_names_it(path: Path, tmp_path: Path) -> None:
    damage(path, "UPDATE trials SET time_us = 0 WHERE id = 4")
    with Store.open(str(tmp_path / "ours.db"), create=True) as store:
        with pytest.raises(DatabaseError, match=r"trials:4: time_us: refused '0\.0'.*nothing was imported"):
            import_file(store, path)
        assert store.evidence() == []


@pytest.mark.parametrize("text", ["trials", "trials:x", "meta:1", "nothing:1", "trials:1; DROP TABLE trials", ""])
def test_what_names_no_row_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="names no row"):
        unreadable.parse_name(text)
