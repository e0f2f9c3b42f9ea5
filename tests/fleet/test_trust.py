"""GPUs that a fleet relies on: calibrations before the first finals, and GPUs that are left out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fp8tune.fleet import trust, units, worker
from fp8tune.fleet.events import Notice, WorkerEnded
from fp8tune.fleet.trust import Guard, UntrustedError
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.health import ErrorWatch, Health
from fp8tune.render.fleet import print_queue
from fp8tune.stats.calibration import COUNTED, is_calibrated
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweep import planning
from fp8tune.sweep.calibrate import PROCESSES
from fp8tune.sweep.events import Event
from fp8tune.sweep.options import Options

FEW = ("BLOCK_SIZE=16", "LEAD=0", "num_warps=2", "num_stages=1", "maxnreg=0")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "fleet.db"), create=True) as store:
        yield store


def gpu(rest: str = "", seed: int = 1) -> SimulatedBackend:
    return SimulatedBackend(f"simulated:{seed},gpu={rest}")


MATES = 5


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which GPUs 0 to 4 are calibrated, which are alike."""
    path = tmp_path_factory.mktemp("calibrated") / "fleet.db"
    with Store.open(str(path), create=True) as store:
        for number in range(MATES):
            assert trust.prepare(store, gpu(str(number))) == ()
    return path


@pytest.fixture
def mates(calibrated: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of it."""
    with Store.open(str(shutil.copy(calibrated, tmp_path / "mates.db"))) as store:
        yield store


def test_calibrations_come_newest_last(store: Store) -> None:
    first, second = gpu("1"), gpu("2")
    for backend in (first, second, first):
        sweep = store.begin_sweep("test", backend.device, command="", commit="", timer="", seed=0)
        store.record_calibration(sweep, backend.device, "a", 1.0)
    assert list(store.calibrations()) == list(store.calibrations(first.device)) == [second.device, first.device]
    assert store.calibrations(replace(first.device, name="another")) == {}


# Before the first unit


def test_a_gpu_is_calibrated_once(mates: Store) -> None:
    before = mates.calibration(gpu("1").device)
    assert before[COUNTED] == PROCESSES
    assert trust.prepare(mates, gpu("1")) == ()
    assert mates.calibration(gpu("1").device) == before


def test_a_budget_of_a_minute_goes_to_units(store: Store, mates: Store) -> None:
    """It spent 44 s of 60 on calibration."""
    (said,) = trust.prepare(store, gpu("1"), 60.0)
    assert said == "not calibrated, the defaults are taken: its own takes longer than it saves"
    assert "process_sd" not in store.calibration(gpu("1").device)
    (said,) = trust.prepare(mates, gpu("7"), 60.0)
    assert "the calibration of GPUs of its name is taken" in said


def test_with_a_minute_nothing_is_compiled_or_launched_before_the_first_unit(store: Store) -> None:
    """It took 45 s of 60 on an H100."""

    class Untouched(SimulatedBackend):
        def copy_gb_per_s(self) -> float:
            raise AssertionError("a copy was launched")

        def worker(self, tree: object = None) -> SimulatedBackend:
            raise AssertionError("a process was begun")

    for left_s, work_s in ((60.0, math.inf), (105.9, math.inf), (119.0, 84.0)):
        Guard(store, Untouched("simulated:1,gpu=1")).prepare(left_s, work_s)
    with pytest.raises(AssertionError, match="a copy was launched"):
        Guard(store, Untouched("simulated:1,gpu=1")).prepare(121.0)


def test_the_copy_of_the_first_unit_leaves_a_slow_gpu_out_after_it(mates: Store) -> None:
    store = mates
    guard = Guard(store, gpu("7,slower=0.2"))
    guard.prepare(60.0)
    guard.examine()
    sweep = store.begin_sweep("a unit", gpu("7").device, command="", commit="", timer="", seed=0)
    store.record_ceiling(sweep, gpu("7").device, 2500.0)
    with pytest.raises(UntrustedError, match="that GPUs of its name have"):
        guard.examine()
    again = Guard(store, gpu("1"))
    again.prepare(60.0)
    sweep = store.begin_sweep("a unit", gpu("1").device, command="", commit="", timer="", seed=0)
    store.record_ceiling(sweep, gpu("1").device, 2500.0)
    with pytest.raises(UntrustedError, match="that it had before"):
        again.examine()


@pytest.mark.parametrize(
    ("quick", "expected_s", "is_calibrated"), [(False, 900.0, True), (False, 800.0, False), (True, 900.0, None)]
)
def test_a_worker_goes_by_the_finals_that_wait(
    tmp_path: Path, quick: bool, expected_s: float, is_calibrated: bool | None
) -> None:
    """A calibration may take a twentieth of what waits: 44 s of 880."""
    db = str(tmp_path / "fleet.db")
    options = Options(("colwise",), shapes=("tiny",), timer="simulated:1", quick=quick, grid=FEW)
    with Store.open(db, create=True) as store:
        plan = planning.expanded(planning.planned(options))
        sweep = units.queued(plan)
        unit = replace(next(units.units_of(plan, sweep.key)), expected_s=expected_s)
        store.add_units(sweep, [unit])
        store.add_units(replace(sweep, key="other", device="another"), [replace(unit, key="other", sweep_key="other")])
    nothing = worker.WorkerOptions(db, "simulated:1,gpu=1", time_budget_s=86_400.0)
    said = [e.text for e in worker.work(nothing, lambda *_: iter(())) if isinstance(e, Notice)]
    assert [text.partition(":")[0] for text in said] == (
        ["not calibrated, the defaults are taken"] if is_calibrated is False else []
    )
    with Store.open(db, writable=False) as store:
        assert ("process_sd" in store.calibration(gpu("1").device)) is (is_calibrated is True)


def test_a_gpu_is_calibrated_before_its_first_finals(tmp_path: Path) -> None:
    """A quick sweep on an H100 waited 40 s for a calibration that nothing of it goes by."""
    db = str(tmp_path / "fleet.db")

    def queue(*, quick: bool) -> None:
        options = Options(("colwise",), shapes=("tiny",), timer="simulated:1", quick=quick, grid=FEW)
        with Store.open(db, create=True) as store:
            units.add(store, planning.expanded(planning.planned(options)))

    def done(store: Store, plan: object) -> Iterator[Event]:
        calibrated.append(is_calibrated(store.calibration(gpu("1").device)))
        if len(calibrated) == 1:
            queue(quick=False)
        return iter(())

    calibrated: list[bool] = []
    queue(quick=True)
    events = list(worker.work(worker.WorkerOptions(db, "simulated:1,gpu=1"), done))
    quick, *with_finals = calibrated
    assert (quick, set(with_finals)) == (False, {True})
    assert not [event for event in events if isinstance(event, Notice)]  # it is whole: nothing to be told


# GPUs that are left out


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (Health(slowed=("hardware thermal",)), "slowed down: hardware thermal"),
        (Health(other_processes=1), "1 other process uses it"),
        (Health(other_processes=3), "3 other processes use it"),
        (Health(errors=("Xid 79, it fell off the bus",)), "its driver reports Xid 79"),
    ],
)
def test_an_ill_gpu_takes_no_units_and_the_reason_is_kept_until_it_is_well(
    store: Store, read: Health, said: str
) -> None:
    backend = gpu("1")
    for act in (Guard.prepare, Guard.examine):
        with pytest.raises(UntrustedError, match=said):
            act(Guard(store, backend, "host:1", read=lambda *_, **__: read))
        (noted,) = store.exclusions()
        assert (noted.device, noted.uuid_hash, noted.worker) == ("simulated:1", backend.device.uuid_hash, "host:1")
        assert said in noted.reason
    Guard(store, backend, "host:1").prepare(60.0)
    assert store.exclusions() == []


def test_a_copy_far_below_the_mates_leaves_a_gpu_out_and_is_not_remembered(mates: Store) -> None:
    with pytest.raises(UntrustedError, match=r"83% of the 3,0\d\d that GPUs of its name have"):
        trust.prepare(mates, gpu("7,slower=0.2"))
    assert mates.calibration(gpu("7").device) == {}


def test_a_copy_far_below_its_own_of_before_leaves_a_gpu_out(mates: Store) -> None:
    with pytest.raises(UntrustedError, match="that it had before"):
        trust.prepare(mates, gpu("1,slower=0.2"))


def test_a_gpu_that_is_wrong_where_all_are_right_is_left_out(store: Store) -> None:
    with pytest.raises(UntrustedError, match=r"colwise .* is wrong here"):
        trust.prepare(store, gpu("1,wrong=1"))


def test_an_excluded_worker_leaves_its_units_to_others_and_the_queue_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(tmp_path / "fleet.db")
    options = Options(("colwise",), shapes=("tiny",), timer="simulated:1", quick=True, grid=FEW)
    with Store.open(db, create=True) as store:
        queued = units.add(store, planning.expanded(planning.planned(options)))
    *_, ended = worker.work(worker.WorkerOptions(db, "simulated:1,gpu=1,wrong=1", name="host:1"))
    assert isinstance(ended, WorkerEnded)
    assert ended.is_in_vain
    assert ended.reason.startswith("its GPU is not relied on: colwise")
    assert ended.waiting == queued.new
    with Store.open(db, writable=False) as store:
        assert {(of.state, of.attempts) for of in store.queue().units} == {(UnitState.WAITING, 0)}
    *_, ended = worker.work(worker.WorkerOptions(db, "simulated:1,gpu=2"))
    assert isinstance(ended, WorkerEnded)
    assert (ended.done, ended.reason) == (queued.new, "")
    with Store.open(db, writable=False) as store:
        print_queue(store.queue(), "fleet.db", "json", store.exclusions())
        told = json.loads(capsys.readouterr().out)
        print_queue(store.queue(), "fleet.db", "table", store.exclusions())
    assert told["units"]
    (excluded,) = told["excluded"]
    assert (excluded["worker"], "wrong here" in excluded["reason"]) == ("host:1", True)
    printed = capsys.readouterr().out
    assert "GPUs that are left out" in printed
    assert "wrong here" in printed


class FakeNvml:
    NVMLError = type("NVMLError", (Exception,), {})
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self) -> None:
        self.counted, self.rows, self.xids = 2, (0, 0, 0, 0), [13, 31]

    def __getattr__(self, name: str) -> object:
        def event(*_: object) -> object:
            if not self.xids:
                raise self.NVMLError
            return type("Event", (), {"eventData": self.xids.pop(0)})

        answers = {
            "nvmlDeviceGetTotalEccErrors": lambda *_: self.counted,
            "nvmlDeviceGetRemappedRows": lambda *_: self.rows,
            "nvmlEventSetWait": event,
        }
        return answers.get(name, lambda *_: 1)


def test_errors_of_the_hardware_are_told_from_those_of_kernels_that_are_tried() -> None:
    nvml = FakeNvml()
    watch = ErrorWatch(nvml)
    assert watch.errors() == ()  # what was counted before, and an application's errors
    nvml.counted, nvml.xids = 3, [79, 13, 79]
    assert watch.errors() == ("1 uncorrectable memory error since this began", "Xid 79, it fell off the bus")
    nvml.counted, nvml.rows = 2, (0, 1, 1, 0)
    assert watch.errors() == ("a memory row that waits for a reset to be replaced",)
