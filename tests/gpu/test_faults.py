"""The seven planted faults on a real GPU: each becomes a row, every other row is what it would have been."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import PLANTED

from fp8tune.measure import gpus
from fp8tune.measure.backends import ProcessBackend
from fp8tune.options import SweepOptions
from fp8tune.records import Kind, Row, Status
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune.sweeping.events import TrialDone

FAULTS = f"{PLANTED / 'gpu_faults.py'}:SPEC"

EXPECTED = {
    0: (Status.OK, ""),
    1: (Status.COMPILE_ERROR, "planted"),
    2: (Status.OUT_OF_RESOURCES, "shared memory"),
    3: (Status.OUT_OF_MEMORY, "allocate"),
    4: (Status.CRASHED, "illegal memory access"),
    5: (Status.TIMEOUT, "no answer in 10 s"),
    6: (Status.CRASHED, "SIGABRT"),
    7: (Status.WRONG, "one-giant"),
    8: (Status.OK, ""),
}


def rows_of(store: Store, **values: object) -> tuple[list[Row], int]:
    """(rows of new trials, how many were answered from the database)"""
    options = SweepOptions(kernel=(FAULTS,), **values)  # type: ignore[arg-type]
    plan = planning.expanded(planning.planned(options))
    done = [event for event in session.run(store, plan) if isinstance(event, TrialDone)]
    return [event.row for event in done if not event.from_database], sum(event.from_database for event in done)


@pytest.mark.gpu
def test_every_fault_is_a_row_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessBackend, "trial_timeout_s", 10.0)
    monkeypatch.setattr(gpus, "_is_used", lambda *_: False)  # by other tests: no time is compared here
    shapes = tmp_path / "one.toml"
    shapes.write_text("[[rows]]\nM = 4096\nK = 512\nN = 512\nE = 4\n")
    with Store.open(str(tmp_path / "results.db"), create=True) as store:
        rows, _ = rows_of(store, shapes=(str(shapes),))
        first = {row.config["FAULT"]: row for row in rows if row.round == 0 and row.config}
        assert {fault: row.outcome.status for fault, row in first.items()} == {
            fault: status for fault, (status, _) in EXPECTED.items()
        }
        for fault, row in first.items():
            assert EXPECTED[fault][1] in row.outcome.reason
            assert row.kind is Kind.MEASURED
            assert (row.outcome.time_us is not None) == (row.outcome.status is Status.OK)
        again, stored = rows_of(store, shapes=(str(shapes),))
        assert (again, stored) == ([], sum(row.stage == "screen" for row in rows))
        retried, _ = rows_of(store, shapes=(str(shapes),), grid=("FAULT=0,1",), again=True)
        assert {row.config["FAULT"] for row in retried if row.config} == {0, 1}
