"""Rows that go in, and the studies, outcomes and rates that come out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from fp8tune.records import ClockLimits, Facts, Kind, NamedInts, Outcome, Status, Telemetry
from fp8tune.store.results import Store

BYTES_MOVED = 3 * 16640 * 5120


@pytest.fixture
def store(each_database: str) -> Iterator[Store]:
    with Store.open(each_database, create=True) as opened:
        yield opened


def rounds(store: Store) -> list[int]:
    return sorted(stored.round for stored in store.rows())


def add_times(store: Store, sweep: int, times: Sequence[tuple[float, str]], **more: Any) -> None:
    """Store a trial of each time and process, in rounds."""
    for round, (time_us, process) in enumerate(times):
        assert store.add(sweep, row(time_us, process=process, round=round, **more))


def test_a_row_comes_back_whole(store: Store) -> None:
    outcome = Outcome(
        Status.OK,
        100.125,
        samples_us=(100.096, 100.128, 131.2),
        tick_us=0.032,
        facts=Facts(40, 0, 4096, 0.43),
        telemetry=Telemetry(1980, 2619, 45, 412.5, 4),
    )
    trial = replace(row(stage="final", round=3), outcome=outcome, position=7)
    sweep = begin(store)
    assert store.add(sweep, trial)
    assert list(store.rows()) == [trial]
    assert list(store.rows(kernel="rowwise-2d")) == []
    assert [study.problem.shape for study in store.studies()] == [trial.problem.shape]
    assert str(next(store.rows()).config) == str(trial.config)
    assert store.tick_us(subject(), sweep) == 0.032
    (line,) = store.trials_frame().to_dict("records")
    values = {"min_us": 100.096, "median_us": 100.128, "max_us": 131.2, "samples": 3, "stage": "final", "round": 3}
    assert {name: line[name] for name in values} == {name: pytest.approx(value) for name, value in values.items()}
    assert (line["config"], line["shape"], line["gb_per_s"]) == (
        str(config()),
        str(problem().shape),
        pytest.approx(BYTES_MOVED / 100.125 / 1e3),
    )
    assert store.trials_frame(lambda study: False).empty


def test_a_trial_is_stored_once(store: Store) -> None:
    sweep = begin(store)
    turned = replace(
        row(),
        config=NamedInts(reversed(list(config().items()))),
        problem=replace(problem(), shape=NamedInts(reversed(list(problem().shape.items())))),
    )
    for trial, is_new in (
        (row(100.0), True),
        (row(101.0), False),
        (turned, False),
        (row(101.0, round=1), True),
        (row(101.0, process="w2"), True),
    ):
        assert store.add(sweep, trial) is is_new
    rows = [row(100.0 + index, config=config(block)) for index, block in enumerate((32, 64, 128))]
    assert [store.add_many(sweep, rows), store.add_many(sweep, rows)] == [2, 0]


def test_two_that_run_the_same_sweep_store_a_trial_once(store: Store) -> None:
    sweep, again = begin(store), begin(store, again=True)
    for place, trial, is_new in (
        (sweep, row(100.0, process="w1"), True),
        (sweep, row(101.0, process="w2"), False),
        (sweep, row(101.0, process="w2", round=1), True),
        (sweep, row(None, process="w2", status=Status.WRONG), True),
        (again, row(99.0, process="w2"), True),
    ):
        assert store.add(place, trial, once=True) is is_new
    assert [stored.process for stored in store.rows()] == ["w1", "w2", "w2", "w2"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(100.0, "w"), (150.0, "w"), (101.0, "w"), (99.0, "w"), (10.0, "w")], 100.0),  # without the extremes
        ([(100.0, "w1"), (130.0, "w2"), (90.0, "w2")], 100.0),  # a sweep that was killed and continued
    ],
)
def test_a_coarse_pass_counts_once(store: Store, times: Sequence[tuple[float, str]], expected: float) -> None:
    add_times(store, begin(store), times)
    assert stored_results(store)[0].times_us == (expected,)
    store.add(begin(store, again=True), row(110.0, process="w3"))
    assert len(stored_results(store)[0].times_us) == 1 + len({process for _, process in times})


def test_finals_replace_the_coarse_pass_once_they_ended_and_later_ones_replace_them(store: Store) -> None:
    sweep = begin(store)
    store.add(sweep, row(90.0))
    for process, times in {"a": (100.0, 90.0, 120.0), "b": (80.0, 82.0)}.items():
        add_times(store, sweep, [(time_us, process) for time_us in times], stage="final")
    store.add(sweep, row(101.0, stage="duplicate"))
    (result,) = stored_results(store)
    assert (result.stage, result.times_us, result.finals) == ("screen", (90.0,), ())
    timed = store.finals(subject(), sweep)[config()]
    assert [(times.stage, times.process, len(times.blocks)) for times in timed] == [
        ("final", "a", 3),
        ("final", "b", 2),
        ("duplicate", "w1", 1),
    ]
    end_finals(store, sweep)
    (result,) = stored_results(store)
    # of four blocks and more a quarter is cut at each end
    assert (result.stage, result.coarse_us, result.times_us) == ("final", 90.0, (81.0, pytest.approx(310 / 3)))
    assert [times.blocks[0] for times in result.finals] == [(0, 100.0), (0, 80.0)]
    assert [times.blocks[0][1] for times in result.control] == [101.0]
    store.finish_sweep(sweep)
    later = begin(store)
    store.add(later, row(70.0, stage="final"))
    end_finals(store, later)
    assert stored_results(store)[0].times_us == (70.0,)


def test_trials_that_come_together_are_one_commit_and_whatever_is_asked_next_knows_them(each_database: str) -> None:
    with Store.open(each_database, create=True) as store, Store.open(each_database, writable=False) as reader:
        sweep = begin(store)
        store.add_soon(sweep, row(process="alone"))
        with store.adding_together(3600.0):
            for number in range(5):
                store.add_soon(sweep, row(round=1, config=config(32, number)))
                store.add_soon(sweep, row(round=1, config=config(32, number), process="late"))  # the same round again
            assert rounds(reader) == [0]
            assert len(store.tried_in_rounds(subject())[1]) == 5
            assert len(rounds(reader)) == 6
            store.add_soon(sweep, row(round=2))
        with contextlib.suppress(KeyError), store.adding_together(3600.0):
            store.add_soon(sweep, row(round=3))
            raise KeyError
        store.add_soon(sweep, row(round=4))
        assert rounds(reader) == [0, 1, 1, 1, 1, 1, 2, 3, 4]


def test_wrong_once_is_wrong_for_ever_and_a_retry_clears_a_crash(store: Store) -> None:
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


def test_tried_knows_only_its_own_identity(store: Store) -> None:
    sweep, again = begin(store), begin(store, again=True)
    store.add(sweep, row(100.0, facts=Facts(40, 0, 0, 1.0)))
    assert store.tried(subject())[config()].facts.registers == 40
    assert list(store.tried(subject(), sweep=sweep)) == [config()]
    assert not store.tried(subject(), sweep=again)
    store.add(again, row(90.0, round=2))
    outcomes = store.tried_in_rounds(subject())
    assert {number: list(of_round) for number, of_round in outcomes.items()} == {0: [config()], 2: [config()]}
    assert store.tried_in_rounds(subject(), sweep=again).keys() == {2}
    newer, static = subject(version=replace(KERNEL, source_hash="bbbb")), replace(subject(), kind=Kind.STATIC)
    for stranger in (newer, static, subject(device=H200), subject(problem(K=2048))):
        assert not store.tried(stranger)


def test_an_unfinished_sweep_is_continued_but_not_at_another_power_limit(store: Store) -> None:
    def begin_at(watts: float | None, **options: Any) -> int:
        limits = ClockLimits(1980, 2619, watts)
        return store.begin_sweep("r", H100, command="", timer="t", limits=limits, **options)

    sweep = begin_at(700.0)
    assert begin_at(None) == begin_at(700.0) == sweep  # None: a machine that does not tell
    slower = begin_at(500.0)
    assert slower != sweep
    assert (begin_at(500.0), begin_at(700.0)) == (slower, sweep)
    ids = {sweep, slower, begin(store, H200), begin(store, request="other"), begin_at(700.0, again=True)}
    assert len(ids) == 5
    assert begin_at(700.0, again=True) in ids
    store.finish_sweep(sweep)
    assert begin_at(700.0) not in ids
    assert len(store.unfinished_sweeps()) == 5


def test_times_at_an_older_power_limit_do_not_count(store: Store) -> None:
    for watts, time_us in ((700.0, 100.0), (500.0, 130.0)):
        limits = ClockLimits(1980, 2619, watts)
        sweep = store.begin_sweep("r", H100, command="", limits=limits)
        store.add(sweep, row(time_us, process=f"{watts}"))
        store.mark_complete(sweep, subject(), 1)
    assert [result.coarse_us for result in stored_results(store)] == [130.0]
    assert store.tried_in_rounds(subject(), limits=limits)[0][config()].time_us == 130.0
    assert store.limits_of(store.sweep_uid(sweep)) == limits


def test_a_study_has_the_newest_declaration_and_is_complete_once_it_was_swept_to_the_end(store: Store) -> None:
    sweep, widened = begin(store), replace(KERNEL, axes=(*KERNEL.axes, ("waves_per_eu", (0, 2))))
    store.add(sweep, row())
    store.add(sweep, row(version=widened, process="w2"))
    assert [(study.version, study.complete) for study in store.studies()] == [(widened, False)]
    for _ in range(2):
        store.mark_complete(sweep, subject(version=widened), 1)
        assert store.studies()[0].complete


def test_studies_can_be_narrowed(store: Store) -> None:
    sweep = begin(store)
    store.add(sweep, row())
    store.add(sweep, row(None, kind=Kind.STATIC, device=replace(H100, arch="gfx942", name="")))
    assert len(store.studies()) == 2
    static, measured = {"arch": "gfx942"}, {"kinds": [Kind.MEASURED]}
    for filters, kinds in ((static, [Kind.STATIC]), (measured, [Kind.MEASURED]), ({"kernel": "rowwise-2d"}, [])):
        assert [study.kind for study in store.studies(**filters)] == kinds
        assert [study.kind for study in store.pools(**filters)] == kinds
    assert (store.arches(), store.kernels()) == (["gfx942", "sm_90"], ["colwise"])
    assert store.integrity() == []


def test_what_is_forgotten_takes_all_that_refers_to_it_along(store: Store) -> None:
    finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 90.0} for K in range(1024, 1054)})
    late = begin(store, request="other")
    store.add_many(late, [row(80.0, size=problem(K=1024), process="w2"), row(70.0, size=problem(K=9), process="w2")])
    assert store.forget([("sweeps", late)])["sweeps"] == 1
    assert [result.coarse_us for result in stored_results(store, problems=[problem(K=1024)])] == [90.0, 100.0]
    assert stored_results(store, problems=[problem(K=9)]) == []
    studies = [("studies", id) for id in range(2, 20)]
    assert store.forget([*studies, ("results", 1)]) == {"studies": 18, "results": 1}
    assert store.integrity() == []


def test_the_ceiling_is_the_copy_rate_of_the_sweep_or_the_fastest_kernel(store: Store) -> None:
    first, second = begin(store), begin(store, request="second")
    for sweep, gb_per_s in ((first, 2900.0), (first, 3018.0), (second, 2950.0)):
        store.record_ceiling(sweep, H100, gb_per_s)
    recorded = replace(problem(), input_layout="recorded-0123456789ab")  # no ceiling: it may address a part
    store.add(first, row(BYTES_MOVED / 3150.0 / 1e3, size=recorded))
    store.add(first, row())
    assert {result.ceiling_gb_per_s for result in stored_results(store)} == {3018.0}
    for block, gb_per_s in ((32, 2000.0), (64, 3100.0), (128, 4000.0)):  # no memory gives the last
        store.add(first, row(BYTES_MOVED / gb_per_s / 1e3, config=config(block, 8)))
    store.add(first, row(BYTES_MOVED / 3400.0 / 1e3, config=config(32, 8), device=H200))
    for filters in ({"device": H100}, {"kernel": "colwise", "device": H100}):
        rates = {(round(r.ceiling_gb_per_s or 0), r.copy_gb_per_s) for r in stored_results(store, **filters)}
        assert rates == {(3100, 3018.0)}
    assert {result.ceiling_gb_per_s for result in stored_results(store, device=H200)} == {None}  # no copy, no ceiling


def test_a_statement_that_is_broken_off_costs_nothing_else(each_database: str) -> None:
    """Ctrl-C in a notebook: the next statement works, and a file is left as one plain one."""
    store = Store.open(each_database, create=True)
    sweep = begin(store)

    def break_off(work: Any) -> None:
        def broken_off(*_: object) -> None:
            raise KeyboardInterrupt

        event.listen(store._engine, "do_execute", broken_off, once=True)
        with pytest.raises(KeyboardInterrupt):
            work()

    break_off(lambda: store.add(sweep, row(round=1)))
    assert store.add(sweep, row(round=1))
    break_off(lambda: list(store.rows()))
    store.close()
    with Store.open(each_database, writable=False) as again:
        assert rounds(again) == [1]
    if "://" not in each_database:
        path = Path(each_database)
        assert [file.name for file in path.parent.iterdir()] == ["results.db"]
        assert path.read_bytes()[18] == 1  # not WAL
