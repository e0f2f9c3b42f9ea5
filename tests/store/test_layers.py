"""Own rows over those of a base: what each method reads of which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, H200, begin, config, finished_sweep, problem, row, studies_of, subject

from fp8tune.records import Kind, Status
from fp8tune.stats.rank import competing
from fp8tune.store import layers, location
from fp8tune.store.layers import Reader
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store
from fp8tune.sweeping import picks as kept_picks

SIZE = problem(K=1024)


@pytest.fixture
def databases(each_database: str, tmp_path: Path) -> location.Databases:
    """A user's own, a file or a server's, over a base, which is a file."""
    return location.Databases(each_database, str(tmp_path / "base.db"))


@contextmanager
def both(databases: location.Databases) -> Iterator[tuple[Store, Store]]:
    """The own database and the base, to be filled."""
    with Store.open(str(databases.own), create=True) as own, Store.open(str(databases.base), create=True) as base:
        yield own, base


@contextmanager
def read(databases: location.Databases) -> Iterator[Reader]:
    with layers.opened_databases(databases, pytest.fail) as reader:
        yield reader


def picks(reader: Reader) -> dict[tuple[int, str], float]:
    evidence = reader.studies(keep=competing)
    times = ((study.problem.shape["K"], study.device.name, study.choice.time_us) for study in studies_of(evidence))
    return {(K, device): round(time_us, 9) for K, device, time_us in times}  # of logarithms


def test_own_rows_stand_for_the_bases_and_all_else_is_read_of_both(databases: location.Databases) -> None:
    second = problem(K=2048)
    with both(databases) as (own, base):
        finished_sweep(base, {SIZE: {config(32): 100.0}, second: {config(32): 200.0}})
        finished_sweep(base, {SIZE: {config(32): 70.0}}, H200)
        finished_sweep(own, {SIZE: {config(64): 90.0}})
        for store, values in ((base, {"a": 1.0, "b": 2.0}), (own, {"b": 3.0})):
            for name, value in values.items():
                store.record_calibration(begin(store), H100, name, value)
        base.record_launches({SIZE: '{"of": "base"}', second: '{"of": "base"}'})
        own.record_launches({SIZE: '{"of": "own"}'})
    with read(databases) as reader:
        assert picks(reader) == {(1024, H100.name): 90.0, (2048, H100.name): 200.0, (1024, H200.name): 70.0}
        assert sorted(single.outcome.time_us or 0 for single in reader.rows()) == [70.0, 90.0, 200.0]
        assert sorted(reader.trials_frame()["time_us"]) == [70.0, 90.0, 200.0]
        assert set(reader.tally(subject(SIZE)).outcomes) == {config(64)}
        assert set(reader.tally(subject(second)).outcomes) == {config(32)}
        assert len(subjects_of(reader.pools())) == 3
        assert (reader.arches(), reader.kernels()) == (["sm_90"], ["colwise"])
        assert reader.commit(subject(second)) == "c0ffee"
        assert reader.calibration(H100) == {"a": 1.0, "b": 3.0}
        assert reader.recorded_launches() == {SIZE: '{"of": "own"}', second: '{"of": "base"}'}


def test_what_was_imported_counts_once(databases: location.Databases) -> None:
    with both(databases) as (own, base):
        finished_sweep(base, {SIZE: {config(32): 100.0, config(64): 120.0}})
        own.merge(base)
    with read(databases) as reader, Store.open(str(databases.base), writable=False) as base:
        assert reader.studies() == base.studies()
        assert list(reader.rows()) == list(base.rows())


def test_an_unfinished_own_sweep_hides_no_finished_rows(databases: location.Databases) -> None:
    with both(databases) as (own, base):
        finished_sweep(base, {SIZE: {config(32): 100.0}})
        own.add(begin(own), row(50.0, size=SIZE, config=config(64)))
    with read(databases) as reader:
        assert picks(reader) == {(1024, H100.name): 100.0}
        assert set(reader.tried(subject(SIZE))) == {config(32)}
        assert [single.config for single in reader.rows()] == [config(32)]
        with Store.open(str(databases.own)) as own:  # rows that are stored while both are open are seen
            finished_sweep(own, {SIZE: {config(64): 90.0}}, request="other")
        assert set(reader.tally(subject(SIZE)).outcomes) == {config(64)}


def test_own_results_win_whatever_the_code(databases: location.Databases) -> None:
    newer = replace(subject(SIZE).version, source_hash="bbbb")
    with both(databases) as (own, base):
        finished_sweep(base, {SIZE: {config(32): 10.0}})
        sweep = begin(own)
        own.add(sweep, row(90.0, size=SIZE, version=newer))
        own.mark_complete(sweep, subject(SIZE, version=newer), 1)
    with read(databases) as reader:
        assert picks(reader) == {(1024, H100.name): 90.0}
        assert {single.version.source_hash for single in reader.studies() if single.version} == {"bbbb"}


def test_what_was_not_timed_is_read_of_one_database(databases: location.Databases) -> None:
    with both(databases) as (own, base):
        checked = [row(None, size=SIZE, config=config(block), kind=Kind.INTERPRETER) for block in (32, 64)]
        base.add_many(begin(base), checked)
        own.add(begin(own), row(None, size=SIZE, config=config(64), kind=Kind.INTERPRETER, status=Status.WRONG))
    with read(databases) as reader:
        (study,) = reader.studies()
        assert study.failures == {config(64): Status.WRONG}
        outcomes = reader.tally(replace(subject(SIZE), kind=Kind.INTERPRETER)).outcomes
        assert {size: outcome.status for size, outcome in outcomes.items()} == {config(64): "wrong"}
        assert len(list(reader.rows())) == 1


def test_kept_picks_of_both_are_joined_and_nothing_is_decided_again(
    databases: location.Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(databases) as (own, base):
        finished_sweep(base, {SIZE: {config(32): 100.0}, problem(K=2048): {config(32): 200.0}})
        finished_sweep(own, {SIZE: {config(64): 110.0}})
        for store, K in ((own, 2048), (base, 1024), (base, 4096)):
            published = row(50.0, size=problem(K=K), kind=Kind.PUBLISHED, device=H200)
            store.add(begin(store), replace(published, source="a/b#1"))
        for store in (own, base):
            kept_picks.keep_current(store)
    monkeypatch.setattr(kept_picks, "read_studies", pytest.fail)
    with read(databases) as reader:
        joined = [(pick.problem.shape["K"], pick.kind, pick.time_us) for pick in kept_picks.read(reader)]
    # A published row counts only where neither database has a measurement.
    expected = [(1024, Kind.MEASURED, 110.0), (2048, Kind.MEASURED, 200.0), (4096, Kind.PUBLISHED, 50.0)]
    assert sorted(joined) == [(K, kind, pytest.approx(time_us)) for K, kind, time_us in expected]
