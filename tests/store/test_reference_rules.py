"""Trials that say whether a config's bytes are right, where references change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from database_rows import KERNEL, begin, config, row, subject

from fp8tune.records import Status
from fp8tune.store.results import Store

OK, WRONG, CRASHED = Status.OK, Status.WRONG, Status.CRASHED


@pytest.fixture
def store(each_database: str) -> Iterator[Store]:
    with Store.open(each_database, create=True) as opened:
        yield opened


def judged(store: Store, reference: str, *statuses: Status) -> int:
    """A finished sweep with a trial of one round each."""
    sweep = begin(store)
    if reference:
        store.record_reference(sweep, KERNEL, reference)
    for number, status in enumerate(statuses):
        time_us = 100.0 if status is OK else None
        store.add(sweep, row(time_us, process=f"w{sweep}", status=status, round=number))
    store.finish_sweep(sweep)
    return sweep


def status(store: Store) -> Status:
    (study,) = store.studies()
    return study.failures.get(config(), OK)


def tried(store: Store, today: str, number: int = 0) -> Status | None:
    result = store.tried_in_rounds(subject(), reference=today).get(number, {})
    return result[config()].status if result else None


def test_what_another_reference_judged_is_judged_anew(store: Store) -> None:
    judged(store, "aaaa", WRONG)
    assert (status(store), tried(store, "aaaa"), tried(store, "bbbb")) == (WRONG, WRONG, None)
    judged(store, "bbbb", OK)
    assert (status(store), tried(store, "bbbb")) == (OK, OK)
    judged(store, "cccc", WRONG)
    assert (status(store), tried(store, "bbbb"), tried(store, "cccc")) == (WRONG, OK, WRONG)


def test_what_failed_under_another_reference_is_tried_again(store: Store) -> None:
    judged(store, "aaaa", Status.COMPILE_ERROR)  # the reference may have raised
    assert (tried(store, "aaaa"), tried(store, "bbbb")) == (Status.COMPILE_ERROR, None)


def test_right_by_an_unknown_reference_stands_and_wrong_by_one_is_tried_again(store: Store) -> None:
    judged(store, "", OK)
    assert (status(store), tried(store, "aaaa")) == (OK, OK)
    judged(store, "", WRONG, OK)
    assert (status(store), tried(store, "")) == (WRONG, WRONG)
    assert (tried(store, "aaaa"), tried(store, "aaaa", 1)) == (OK, OK)
    judged(store, "aaaa", OK, OK)
    assert (status(store), tried(store, "aaaa")) == (OK, OK)


def test_wrong_in_any_round_stands_until_a_later_sweep_runs_that_round_again(store: Store) -> None:
    judged(store, "aaaa", OK, WRONG, OK)
    assert status(store) is WRONG
    judged(store, "aaaa", OK)
    assert status(store) is WRONG
    judged(store, "aaaa", OK, OK)
    assert status(store) is OK


def test_a_failure_that_no_reference_judged_stands(store: Store) -> None:
    judged(store, "aaaa", CRASHED)
    assert tried(store, "bbbb") is CRASHED


def test_references_travel_with_their_rows(store: Store, tmp_path: Path) -> None:
    judged(store, "aaaa", WRONG)
    with Store.open(str(tmp_path / "other.db"), create=True) as second:
        judged(second, "bbbb", OK)
        second.merge(store)
        store.merge(second)
        assert status(store) is status(second) is OK
