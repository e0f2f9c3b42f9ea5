"""Units and leases in the database, in a file and on a server."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from database_rows import H100, begin, row

from fp8tune.store import units
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import LeaseLostError, Queue, QueuedSweep, Unit

SWEEP = QueuedSweep("sweep", "NVIDIA H100", '{"options": {}}', "fp8tune sweep --db postgresql://me:hunter2@host/db")


def unit(number: int, kernel: str = "colwise", **changes: object) -> Unit:
    whole = Unit(f"unit-{number}", SWEEP.key, number, kernel, "aaaa", (f"problem-{number}",), ("M=1",))
    return replace(whole, **changes)  # type: ignore[arg-type]


@pytest.fixture
def db(each_database: str) -> str:
    return each_database


def filled(db: str, *added: Unit) -> Store:
    store = Store.open(db, create=True)
    assert store.add_units(SWEEP, added) == len(added)
    return store


def lease_of(store: Store, worker: str = "me", **options: object) -> units.Lease:
    lease = store.take_unit("NVIDIA H100", worker, **options)  # type: ignore[arg-type]
    assert lease is not None
    return lease


def test_adding_again_adds_nothing_and_undoes_nothing(db: str) -> None:
    with filled(db, unit(0), unit(1)) as store:
        store.finish_unit(lease_of(store))
        assert store.add_units(SWEEP, [unit(0), unit(1), unit(2)]) == 1
        assert store.count_units() == Counter({UnitState.DONE: 1, UnitState.WAITING: 2})
        assert store.count_units("NVIDIA H200") == Counter()
        assert "hunter2" not in store.queue().sweeps[0].command
        store.add(begin(store), row())
        assert store.forget_units("another") == 0
        assert store.forget_units(SWEEP.key) == 3
        assert store.queue() == Queue()
        assert len(list(store.rows())) == 1


def test_two_workers_never_get_the_same(db: str) -> None:
    filled(db, *map(unit, range(24))).close()
    keys: list[str] = []

    def take_all(number: int) -> None:
        with Store.open(db) as store:
            while (lease := store.take_unit("NVIDIA H100", f"worker {number}")) is not None:
                keys.append(lease.unit.key)

    threads = [threading.Thread(target=take_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(keys) == sorted(f"unit-{number}" for number in range(24))


def test_the_longest_first_then_the_kernel_at_hand_then_the_one_nobody_is_at(db: str) -> None:
    others = [unit(n, kernel, expected_s=5) for n, kernel in enumerate(("rowwise", "colwise", "colwise"), start=1)]
    with filled(db, unit(0, "mxfp8-dim0", expected_s=8), *others) as store:
        assert lease_of(store, last_kernel="colwise").unit.kernel == "mxfp8-dim0"
        assert lease_of(store, last_kernel="colwise").unit.key == "unit-2"
        assert lease_of(store, last_kernel="mxfp8-dim0").unit.key == "unit-1"  # somebody is at colwise
        assert lease_of(store).unit.key == "unit-3"
        assert store.take_unit("NVIDIA H100", "me") is None
        assert store.take_unit("NVIDIA H200", "me") is None


def test_a_lease_that_ends_gives_its_unit_back_and_its_owner_can_do_nothing_more(db: str) -> None:
    with filled(db, unit(0)) as store:
        zombie = lease_of(store, "zombie", lease_s=0.05)
        time.sleep(0.1)
        assert store.count_units() == Counter({UnitState.WAITING: 1})
        mine = lease_of(store, "mine")
        assert (mine.unit, mine.attempt) == (zombie.unit, 2)
        for act in (store.finish_unit, store.renew_lease):
            with pytest.raises(LeaseLostError, match="was given to another worker"):
                act(zombie)
        for end in (store.fail_unit, store.give_back_unit):
            with pytest.raises(LeaseLostError):
                end(zombie, "too late")
        store.finish_unit(mine)
        store.finish_unit(mine)  # a commit whose answer was lost is repeated
        (done,) = store.queue().units
    assert (done.state, done.worker, done.attempts) == (UnitState.DONE, "mine", 2)


def test_within_a_fence_nothing_is_stored_once_the_lease_is_lost(db: str) -> None:
    with filled(db, unit(0)) as store:
        sweep = begin(store)
        lease = lease_of(store, lease_s=0.05)
        with store.fenced([lease]):
            assert store.add(sweep, row(process="before"))
            time.sleep(0.1)
            with Store.open(db) as second:
                assert second.return_expired_units() == 1
            with pytest.raises(LeaseLostError):
                store.add(sweep, row(process="after"))
            with pytest.raises(LeaseLostError):
                store.record_ceiling(sweep, H100, 3000.0)
        assert [stored.process for stored in store.rows()] == ["before"]
        assert store.add(sweep, row(process="outside"))


def test_a_unit_is_finished_with_the_rows_that_wait(db: str) -> None:
    with filled(db, unit(0)) as store:
        sweep = begin(store)
        lease = lease_of(store)
        with store.fenced([lease]), store.adding_together(60.0):
            store.add_soon(sweep, row())
            store.add_soon(sweep, row(round=1))
            store.finish_unit(lease)
            with Store.open(db, writable=False) as second:
                assert [stored.round for stored in second.rows()] == [0, 1]


def test_a_renewed_lease_lasts_and_one_given_back_in_order_costs_no_attempt(db: str) -> None:
    with filled(db, unit(0)) as store:
        lease = lease_of(store, lease_s=0.3)
        for _ in range(4):
            time.sleep(0.1)
            store.renew_lease(lease)
        assert store.return_expired_units() == 0
        store.give_back_unit(lease, "told to end postgresql://me:hunter2@host/db")
        (waiting,) = store.queue().units
        assert (waiting.state, waiting.attempts) == (UnitState.WAITING, 0)
        assert waiting.reason == "told to end postgresql://me:***@host/db"


@pytest.mark.parametrize("dies", [False, True])
def test_attempts_are_bounded(db: str, dies: bool) -> None:
    with filled(db, unit(0)) as store:
        for number in range(1, units.MAX_ATTEMPTS + 1):
            lease = lease_of(store, lease_s=0.0 if dies else 60.0)
            assert lease.attempt == number
            if not dies:
                assert (store.fail_unit(lease, "it broke") is UnitState.FAILED) == (number == units.MAX_ATTEMPTS)
            time.sleep(0.002)
        assert store.take_unit("NVIDIA H100", "me") is None
        (failed,) = store.queue().units
        reason = "its worker gave no sign of life until its lease ended" if dies else "it broke"
        assert (failed.state, failed.reason) == (UnitState.FAILED, reason)
        assert store.add_units(SWEEP, ()) == 0  # queued again
        assert lease_of(store).attempt == 1
