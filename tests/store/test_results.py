from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import (
    H100,
    H200,
    KERNEL,
    begin,
    config,
    end_finals,
    finished_sweep,
    problem,
    row,
    stored_results,
    subject,
)
from sqlalchemy import event

from fp8tune.errors import DatabaseError
from fp8tune.records import ClockLimits, Facts, Kind, NamedInts, Outcome, Status, Telemetry
from fp8tune.store.results import Store
from fp8tune.store.units import LeaseLostError, QueuedSweep, Unit


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.db"


@pytest.fixture
def store(each_database):
    with Store.open(each_database, create=True) as opened:
        yield opened


def siblings(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def test_a_sweep_does_not_go_on_at_another_power_limit(store):
    def begin_at(watts: float | None, again: bool = False) -> int:
        limits = ClockLimits(1980, 2619, watts)
        return store.begin_sweep("r", H100, command="", commit="", timer="t", seed=0, again=again, limits=limits)

    sweep = begin_at(700.0)
    assert begin_at(700.0) == sweep
    assert begin_at(None) == sweep  # a machine that does not tell
    other = begin_at(500.0)
    assert other != sweep
    assert (begin_at(500.0), begin_at(700.0)) == (other, sweep)


def test_a_row_comes_back_whole(store):
    given = replace(
        row(100.125, facts=Facts(40, 0, 4096, 0.43), stage="final", round=3),
        outcome=Outcome(
            Status.OK,
            100.125,
            samples_us=(100.096, 100.128, 131.2),
            tick_us=0.032,
            facts=Facts(40, 0, 4096, 0.43),
            telemetry=Telemetry(1980, 2619, 45, 412.5, 4),
        ),
        position=7,
    )
    assert store.add(begin(store), given)
    assert list(store.rows()) == [given]
    assert list(store.rows(kernel="rowwise-2d")) == []
    assert [item.problem.shape for item in store.studies()] == [given.problem.shape]
    assert str(next(store.rows()).config) == str(given.config)


def test_a_double_is_not_stored(store):
    sweep = begin(store)
    assert store.add(sweep, row(100.0))
    assert not store.add(sweep, row(101.0))
    assert store.add(sweep, row(101.0, round=1))
    assert store.add(sweep, row(101.0, process="w2"))
    assert len(list(store.rows())) == 3


def test_bulk_and_single_rows_are_the_same(store):
    rows = [row(100.0 + index, config=config(block)) for index, block in enumerate((32, 64, 128))]
    sweep = begin(store)
    assert store.add(sweep, rows[1])
    assert store.add_many(sweep, rows) == 2
    assert store.add_many(sweep, rows) == 0


def test_bulk_is_all_or_nothing(store):
    sweep = begin(store)
    with pytest.raises(DatabaseError, match="was not stored"):
        store.add_many(sweep, [row(), replace(row(config=config(64)), note="two\nlines")])
    assert store.studies() == []
    assert store.add(sweep, row())  # ids of what was rolled back are forgotten
    assert len(store.studies()) == 1


def test_a_process_counts_once_with_the_median_of_its_blocks(store):
    sweep = begin(store)
    for process, times in {"w1": (100.0, 90.0, 120.0), "w2": (80.0, 82.0)}.items():
        for round_, time_us in enumerate(times):
            store.add(sweep, row(time_us, process=process, round=round_, stage="final"))
    end_finals(store, sweep)
    (item,) = stored_results(store)
    assert item.times_us == (81.0, pytest.approx(310 / 3))  # of four blocks and more a quarter is cut at each end
    assert [visit.blocks[0] for visit in item.finals] == [(0, 100.0), (0, 80.0)]


def test_a_process_with_many_blocks_counts_without_its_fastest_and_slowest(store):
    sweep = begin(store)
    for round_, time_us in enumerate((100.0, 150.0, 101.0, 99.0, 10.0)):
        store.add(sweep, row(time_us, round=round_))
    assert stored_results(store)[0].times_us == (100.0,)


def test_a_screen_in_two_processes_is_the_screen_in_one(store):
    """As when a sweep was killed and continued, or a config took its worker down."""
    sweep = begin(store)
    for round_, (time_us, process) in enumerate(((100.0, "w1"), (130.0, "w2"), (90.0, "w2"))):
        store.add(sweep, row(time_us, process=process, round=round_))
    assert stored_results(store)[0].times_us == (100.0,)
    again = begin(store, again=True)
    store.add(again, row(110.0, process="w3"))
    assert len(stored_results(store)[0].times_us) == 3


def test_two_that_run_the_same_sweep_store_a_trial_once(store):
    sweep = begin(store)
    assert store.add(sweep, row(100.0, process="w1"), once=True)
    assert not store.add(sweep, row(101.0, process="w2"), once=True)
    assert store.add(sweep, row(101.0, process="w2", round=1), once=True)
    assert store.add(sweep, row(None, process="w2", status=Status.WRONG), once=True)
    assert store.add(begin(store, again=True), row(99.0, process="w2"), once=True)
    assert [made.process for made in store.rows()] == ["w1", "w2", "w2", "w2"]


def test_trials_that_come_together_are_one_commit_and_whatever_is_asked_next_knows_them(each_database):
    with Store.open(each_database, create=True) as store, Store.open(each_database, writable=False) as other:
        sweep = begin(store)
        store.add_soon(sweep, row(process="alone"))
        with store.adding_together(3600.0):
            for number in range(5):
                store.add_soon(sweep, row(round=1, config=config(32, number)))
                store.add_soon(sweep, row(round=1, config=config(32, number), process="late"))  # the same round again
            assert [found.process for found in other.rows()] == ["alone"]
            assert len(store.tried_in_rounds(subject())[1]) == 5
            assert len(list(other.rows())) == 6
            store.add_soon(sweep, row(round=2))
        with contextlib.suppress(KeyError), store.adding_together(3600.0):
            store.add_soon(sweep, row(round=3))
            raise KeyError
        store.add_soon(sweep, row(round=4))
        assert sorted(found.round for found in other.rows()) == [0, 1, 1, 1, 1, 1, 2, 3, 4]


def test_trials_that_wait_are_not_stored_once_the_unit_is_lost(each_database):
    with Store.open(each_database, create=True) as store:
        sweep = begin(store)
        store.add_units(QueuedSweep("s", "gpu", "{}"), [Unit("u", "s", 0, "colwise", "aaaa", ())])
        lease = store.take_unit("gpu", "me")
        with store.fenced([lease]), contextlib.ExitStack() as together:
            together.enter_context(store.adding_together(3600.0))
            store.add_soon(sweep, row())
            store.add_soon(sweep, row(round=1))
            with Store.open(each_database) as other:
                other.return_units_of("me", "lost")
            with pytest.raises(LeaseLostError):
                store.tried(subject())
        assert [found.round for found in store.rows()] == [0]


def test_finals_replace_the_screen_once_they_ran_to_their_end(store):
    sweep = begin(store)
    store.add(sweep, row(90.0))
    store.add(sweep, row(100.0, stage="final"))
    store.add(sweep, row(101.0, stage="duplicate"))
    (item,) = stored_results(store)
    assert (item.stage, item.times_us, item.finals) == ("screen", (90.0,), ())
    end_finals(store, sweep)
    (item,) = stored_results(store)
    assert (item.stage, item.times_us, item.coarse_us) == ("final", (100.0,), 90.0)
    assert [times.blocks[0][1] for times in item.control] == [101.0]


def test_later_finals_replace_the_earlier_ones(store):
    for time_us in (100.0, 90.0):
        sweep = begin(store, again=True)
        store.add(sweep, row(time_us, stage="final"))
        end_finals(store, sweep)
        store.finish_sweep(sweep)
    (item,) = stored_results(store)
    assert item.times_us == (90.0,)


def test_wrong_once_is_wrong_for_ever_and_a_retry_clears_a_crash(store):
    sweep = begin(store)
    for status, block in ((Status.WRONG, 32), (Status.CRASHED, 64)):
        store.add(sweep, row(None, status=status, config=config(block)))
        time.sleep(0.002)
        store.add(sweep, row(100.0, process="w2", config=config(block)))
    (study,) = store.studies()
    assert study.failures == {config(32): Status.WRONG}
    assert [(result.config, result.times_us) for result in study.results] == [(config(64), (100.0,))]
    tried = store.tried(subject())
    assert [tried[config(block)].status for block in (32, 64)] == [Status.WRONG, Status.OK]
    assert tried[config(64)].time_us == 100.0


def test_tried_knows_only_its_own_identity(store):
    sweep = begin(store)
    store.add(sweep, row(100.0, facts=Facts(40, 0, 0, 1.0)))
    again = begin(store, again=True)
    assert store.tried(subject())[config()].facts.registers == 40
    assert list(store.tried(subject(), sweep=sweep)) == [config()]
    assert not store.tried(subject(), sweep=again)
    store.add(again, row(90.0, round=2))
    assert {n: list(of_round) for n, of_round in store.tried_in_rounds(subject()).items()} == {
        0: [config()],
        2: [config()],
    }
    assert store.tried_in_rounds(subject(), sweep=again).keys() == {2}
    assert not store.tried(subject(version=replace(KERNEL, source_hash="bbbb")))
    assert not store.tried(subject(device=H200))
    assert not store.tried(replace(subject(), kind=Kind.STATIC))
    assert not store.tried(subject(problem(K=2048)))


def test_an_unfinished_sweep_is_continued(store):
    first = begin(store)
    assert begin(store) == first
    assert begin(store, H200) != first
    assert begin(store, request="other") != first
    anew = begin(store, again=True)
    assert anew != first
    assert begin(store, again=True) == anew
    store.finish_sweep(first)
    assert begin(store) != first
    assert len(store.unfinished_sweeps()) == 4


def test_a_problem_is_complete_once_it_was_swept_to_the_end(store):
    sweep = begin(store)
    store.add(sweep, row())
    assert not store.studies()[0].complete
    store.mark_complete(sweep, subject(), 1)
    store.mark_complete(sweep, subject(), 1)
    assert store.studies()[0].complete


def test_the_ceiling_is_that_of_the_sweep(store):
    first, second = begin(store), begin(store, request="second")
    store.record_ceiling(first, H100, 2900.0)
    store.record_ceiling(first, H100, 3018.0)
    store.record_ceiling(second, H100, 2500.0)
    store.add(first, row())
    assert stored_results(store)[0].ceiling_gb_per_s == 3018.0


def test_shapes_and_configs_are_the_same_in_any_order(store):
    sweep = begin(store)
    assert store.add(sweep, row())
    turned = replace(
        row(),
        config=NamedInts(reversed(list(config().items()))),
        problem=replace(problem(), shape=NamedInts(reversed(list(problem().shape.items())))),
    )
    assert not store.add(sweep, turned)


def test_the_newest_declaration_of_a_source_is_kept(store):
    sweep = begin(store)
    store.add(sweep, row())
    widened = replace(KERNEL, axes=(*KERNEL.axes, ("waves_per_eu", (0, 2))))
    store.add(sweep, row(version=widened, process="w2"))
    assert [item.version for item in store.studies()] == [widened]


def test_evidence_can_be_narrowed(store):
    sweep = begin(store)
    store.add(sweep, row())
    store.add(sweep, row(None, kind=Kind.STATIC, device=replace(H100, arch="gfx942", name="")))
    assert len(store.studies()) == 2
    assert [item.kind for item in store.studies(arch="gfx942")] == [Kind.STATIC]
    assert [item.kind for item in store.studies(kinds=[Kind.MEASURED])] == [Kind.MEASURED]
    assert store.studies(kernel="rowwise-2d") == []
    assert store.arches() == ["gfx942", "sm_90"]
    assert store.kernels() == ["colwise"]
    assert store.integrity() == []


def test_what_is_forgotten_takes_all_that_refers_to_it_along(store):
    finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 90.0} for K in range(1024, 1054)})
    other = begin(store, request="other")
    store.add_many(other, [row(80.0, of=problem(K=1024), process="w2"), row(70.0, of=problem(K=9), process="w2")])
    assert store.forget([("sweeps", other)]) == {"sweeps": 1}
    assert [result.coarse_us for result in stored_results(store, problems=[problem(K=1024)])] == [90.0, 100.0]
    assert stored_results(store, problems=[problem(K=9)]) == []
    studies = [("studies", id) for id in range(2, 20)]
    assert store.forget([*studies, ("results", 1)]) == {"studies": 18, "results": 1}
    assert store.integrity() == []


def test_merging_keeps_every_row_once(tmp_path, store):
    with Store.open(str(tmp_path / "other.db"), create=True) as other:
        finished_sweep(other, {problem(): {config(32): 100.0, config(64): 90.0}}, H200)
        begun = begin(other, H200, "unfinished")
        other.add(begun, row(80.0, device=H200, config=config(128), facts=Facts(40, 0, 0, 1.0)))
        other.record_ceiling(begun, H200, 4000.0)
        finished_sweep(store, {problem(): {config(32): 110.0}})
        store.add(begin(store), row(None, kind=Kind.STATIC))
        assert store.merge(other) == (3, 0)
        assert store.merge(other) == (0, 3)
        ours = [item for item in store.studies() if item.device == H200]
        theirs = other.studies()
        assert [replace(item, newest=0) for item in ours] == [replace(item, newest=0) for item in theirs]
        assert len(list(store.rows())) == 5
        assert store.integrity() == []


def test_the_fastest_kernel_of_a_device_is_the_ceiling_where_it_is_faster_than_the_copy(store):
    sweep = begin(store)
    store.record_ceiling(sweep, H100, 3000.0)
    bytes_moved = 3 * 16640 * 5120
    for block, gb_per_s in ((32, 2000.0), (64, 3150.0), (128, 4000.0)):  # no memory gives the last
        store.add(sweep, row(bytes_moved / gb_per_s / 1e3, config=config(block)))
    store.add(sweep, row(bytes_moved / 3400.0 / 1e3, config=config(32, 8), device=H200))
    found = stored_results(store, device=H100)
    assert {(round(each.ceiling_gb_per_s), each.copy_gb_per_s) for each in found} == {(3150, 3000.0)}
    assert {each.ceiling_gb_per_s for each in stored_results(store, device=H200)} == {None}  # no copy, no ceiling
    assert {round(each.ceiling_gb_per_s) for each in stored_results(store, kernel="colwise", device=H100)} == {3150}


def test_a_recorded_kernel_is_no_ceiling(store):
    sweep = begin(store)
    store.record_ceiling(sweep, H100, 3000.0)
    bytes_moved = 3 * 16640 * 5120
    store.add(sweep, row(bytes_moved / 3150.0 / 1e3, of=replace(problem(), input_layout="recorded-0123456789ab")))
    assert {each.ceiling_gb_per_s for each in stored_results(store)} == {3000.0}


def test_a_statement_that_is_broken_off_costs_nothing_else(each_database: str) -> None:
    """Ctrl-C in a notebook: the next statement works, and a file is left as one plain one."""
    store = Store.open(each_database, create=True)
    sweep = begin(store)
    assert store.add(sweep, row(process="a"))

    def break_off_the_next() -> None:
        def broken_off(*_: object) -> None:
            raise KeyboardInterrupt

        event.listen(store._engine, "do_execute", broken_off, once=True)

    break_off_the_next()
    with pytest.raises(KeyboardInterrupt):
        store.add(sweep, row(process="b"))
    assert store.add(sweep, row(process="b"))
    break_off_the_next()
    with pytest.raises(KeyboardInterrupt):
        list(store.rows())
    store.close()
    with Store.open(each_database, writable=False) as again:
        assert sorted(found.process for found in again.rows()) == ["a", "b"]
    if "://" not in each_database:
        assert siblings(path := Path(each_database)) == ["results.db"]
        assert path.read_bytes()[18] == 1  # not WAL
