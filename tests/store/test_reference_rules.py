"""Trials that say whether a config's bytes are right, where references change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from database_rows import KERNEL, begin, config, row, subject

from fp8tune.records import Status
from fp8tune.store.results import Store

OK, WRONG, CRASHED, REFUSED = Status.OK, Status.WRONG, Status.CRASHED, Status.COMPILE_ERROR


@pytest.fixture
def store(each_database: str) -> Iterator[Store]:
    with Store.open(each_database, create=True) as opened:
        yield opened


def judge(store: Store, reference: str, *statuses: Status) -> None:
    """Store a finished sweep with a trial of one round each."""
    sweep = begin(store)
    if reference:
        store.record_reference(sweep, KERNEL, reference)
    for number, status in enumerate(statuses):
        time_us = 100.0 if status is OK else None
        store.add(sweep, row(time_us, process=f"w{sweep}", status=status, round=number))
    store.finish_sweep(sweep)


def status(store: Store) -> Status:
    (study,) = store.studies()
    return study.failures.get(config(), OK)


def tried(store: Store, today: str, number: int = 0) -> Status | None:
    result = store.tried_in_rounds(subject(), reference=today).get(number, {})
    return result[config()].status if result else None


CASES = [
    # Each step: reference, statuses of the rounds -> status of the config, and of its first round by reference.
    ("another reference judges anew", ("a", [WRONG], WRONG, {"a": WRONG, "b": None})),
    ("another reference judges anew", ("b", [OK], OK, {"b": OK})),
    ("another reference judges anew", ("c", [WRONG], WRONG, {"b": OK, "c": WRONG})),
    ("the reference may have raised", ("a", [REFUSED], REFUSED, {"a": REFUSED, "b": None})),
    ("no reference judged a crash", ("a", [CRASHED], CRASHED, {"b": CRASHED})),
    ("an unknown reference is believed where it is right", ("", [OK], OK, {"a": OK})),
    ("an unknown reference is believed where it is right", ("", [WRONG, OK], WRONG, {"": WRONG, "a": OK})),
    ("an unknown reference is believed where it is right", ("a", [OK, OK], OK, {"a": OK})),
    ("wrong stands until a later sweep runs that round again", ("a", [OK, WRONG, OK], WRONG, {})),
    ("wrong stands until a later sweep runs that round again", ("a", [OK], WRONG, {})),
    ("wrong stands until a later sweep runs that round again", ("a", [OK, OK], OK, {})),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in CASES))
def test_rules(store: Store, rule: str) -> None:
    for reference, statuses, expected, outcomes in (step for name, step in CASES if name == rule):
        judge(store, reference, *statuses)
        assert status(store) is expected
        assert {today: tried(store, today) for today in outcomes} == outcomes


def test_wrong_in_a_confirmation_stands_until_a_later_sweep_begins_anew(store: Store) -> None:
    """A coarse pass that only goes on does not launch the first round again."""
    sweep = begin(store)
    store.add(sweep, row(100.0, process="w1"))
    store.add(sweep, row(None, process="final 00", status=WRONG, stage="final"))
    store.finish_sweep(sweep)
    assert status(store) is WRONG
    begun = begin(store)
    store.add(begun, row(100.0, process="w2", round=2))
    assert status(store) is WRONG
    store.add(begun, row(100.0, process="w3", round=0))
    assert status(store) is OK


def test_references_travel_with_their_rows(store: Store, tmp_path: Path) -> None:
    judge(store, "aaaa", WRONG)
    with Store.open(str(tmp_path / "other.db"), create=True) as second:
        judge(second, "bbbb", OK)
        second.merge(store)
        store.merge(second)
        assert status(store) is status(second) is OK
