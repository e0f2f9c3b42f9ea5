"""Which GPUs a fleet relies on: remembered calibrations, mates that differ, and GPUs that are left out."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8tune.calibrate.record import calibrate
from fp8tune.check.doctor import check_database, check_own
from fp8tune.check.finding import Level
from fp8tune.choose import calibration, reliance
from fp8tune.choose.calibration import COUNTED, Origin, allowance, is_calibrated, known_of, processes_within
from fp8tune.choose.levels import COPY, levels
from fp8tune.fleet import trust, units, worker
from fp8tune.fleet.events import Notice, WorkerEnded
from fp8tune.fleet.trust import Guard, UntrustedError, level_line
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.health import ErrorWatch, Health
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Problem, Status
from fp8tune.render.fleet import print_queue
from fp8tune.store.results import Store
from fp8tune.store.units import UnitState
from fp8tune.sweep import planning
from fp8tune.sweep.events import Event
from fp8tune.sweep.options import Options

H200 = Device("sm_90", "NVIDIA H200", "aaaa", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
MATE, OTHER = replace(H200, uuid_hash="bbbb"), replace(H200, uuid_hash="cccc")
FEW = ("BLOCK_SIZE=16", "LEAD=0", "num_warps=2", "num_stages=1", "maxnreg=0")
WHOLE = {"process_sd": 0.001, "block_sd": 0.002, "timer_tick_us": 0.032, "empty_kernel_us": 9.0, COPY: 4160.0}


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


# Whose calibration counts


def test_a_gpu_is_remembered_by_its_id_and_driver_whatever_torch_there_is() -> None:
    measured = {H200: WHOLE}
    assert known_of(H200, measured).origin is Origin.OWN
    assert known_of(replace(H200, torch="2.13.0", triton="3.7.1"), measured).origin is Origin.OWN
    assert known_of(replace(H200, driver="590.0"), measured).origin is Origin.NONE
    assert (
        known_of(replace(H200, uuid_hash=""), {replace(H200, uuid_hash="", torch="2.13.0"): WHOLE}).origin
        is Origin.NONE
    )


def test_a_gpu_without_a_calibration_takes_its_mates_and_never_their_speed() -> None:
    noisier = {**WHOLE, "process_sd": 0.003, "empty_kernel_us": 11.0, COUNTED: 20.0}
    known = known_of(H200, {MATE: WHOLE, OTHER: noisier, H200: {COPY: 4000.0}})
    assert known.origin is Origin.MATES
    assert known.values == {
        "process_sd": 0.003, "block_sd": 0.002, "timer_tick_us": 0.032, "empty_kernel_us": 10.0, COPY: 4000.0,
    }  # fmt: skip
    assert not known.is_whole


@pytest.mark.parametrize("field", ["arch", "name", "driver", "runtime", "torch", "triton"])
def test_a_device_that_differs_in_more_than_the_id_is_no_mate(field: str) -> None:
    assert known_of(H200, {replace(MATE, **{field: "other"}): WHOLE}).origin is Origin.NONE


def test_the_newest_calibration_of_another_torch_counts() -> None:
    old, new = replace(H200, torch="2.9.0"), replace(H200, torch="2.10.0")
    found = known_of(H200, {old: WHOLE, new: {**WHOLE, "process_sd": 0.002}})
    assert found.values["process_sd"] == 0.002


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
    assert before[COUNTED] == calibration.FULL
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


def test_a_short_budget_shortens_the_calibration_and_a_longer_one_makes_up_for_it(store: Store) -> None:
    ticks = SimpleNamespace(now=0.0)

    def read(*_: object, **__: object) -> Health:
        ticks.now += 2.0  # what the copy takes comes off the calibration's share
        return Health()

    (said,) = Guard(store, gpu("1"), clock=lambda: ticks.now, read=read).prepare(640.0)
    assert "calibrated with 12 processes instead of 20" in said
    assert store.calibration(gpu("1").device)[COUNTED] == 12
    trust.prepare(store, gpu("1"), 600.0)
    assert store.calibration(gpu("1").device)[COUNTED] == 12
    assert trust.prepare(store, gpu("1"), 3600.0) == ()
    assert store.calibration(gpu("1").device)[COUNTED] == 20


def test_a_calibration_that_takes_longer_than_foreseen_is_broken_off(store: Store) -> None:
    ticks = iter(range(0, 10_000, 10))  # ten seconds a process
    guard = Guard(store, gpu("1"), clock=lambda: next(ticks))
    (said,) = guard.prepare(1200.0)
    assert "not calibrated" in said
    assert "process_sd" not in store.calibration(gpu("1").device)


def test_what_a_calibration_takes_fits_into_its_time() -> None:
    assert [processes_within(seconds) for seconds in (6.0, 21.0, 21.3, 30.0, 44.0, math.inf)] == [0, 0, 8, 12, 20, 20]


@pytest.mark.parametrize(
    ("left_s", "work_s", "is_known", "processes"),
    [
        (60.0, math.inf, False, 0),
        (105.0, math.inf, False, 0),
        (107.0, math.inf, False, 8),  # 21.2 s, and a quarter of the 85.8 s after it
        (300.0, 84.0, False, 0),
        (300.0, 86.0, False, 8),
        (300.0, 86.0, True, 0),  # its mates' serve
        (500.0, 500.0, True, 10),  # a twentieth
        (881.0, 881.0, False, 20),
        (86_400.0, 86.0, False, 8),
        (86_400.0, 10.0, False, 0),
        (math.inf, 10.0, True, 20),
    ],
)
def test_a_calibration_is_made_where_it_pays(left_s: float, work_s: float, is_known: bool, processes: int) -> None:
    """A tenth of 145 s on each of two H100s allowed none, and the finals took 1.33 times as long."""
    assert allowance(left_s, work_s, is_known=is_known).processes == processes


def test_one_gpu_is_calibrated_for_all_of_its_name(store: Store) -> None:
    """Beside a short budget: the others begin their units at once, and go by it from their next unit on."""
    events = calibrate(store, gpu("1"), processes=8)
    next(events)
    (said,) = trust.prepare(store, gpu("2"), 145.0)
    assert "that of a GPU of its name is taken once it is measured" in said
    assert isinstance(events, Generator)
    events.close()  # told to end
    (said,) = trust.prepare(store, gpu("1"), 145.0)
    assert "calibrated with 8 processes instead of 20" in said
    (said,) = trust.prepare(store, gpu("2"), 145.0)
    assert "not calibrated, the calibration of GPUs of its name is taken" in said
    known = known_of(gpu("2").device, store.calibrations())
    assert known.values["process_sd"] == store.calibration(gpu("1").device)["process_sd"]
    assert trust.prepare(store, gpu("2")) == ()  # without a budget its own


def test_a_calibration_whose_worker_was_killed_keeps_others_from_theirs_for_two_minutes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.begin_sweep("calibrate", gpu("1").device, command="", commit="", timer="", seed=0)
    (said,) = trust.prepare(store, gpu("2"), 145.0)
    assert "once it is measured" in said
    begun = time.time()
    monkeypatch.setattr(time, "time", lambda: begun + trust.AT_WORK_S + 1)
    (said,) = trust.prepare(store, gpu("2"), 145.0)
    assert "calibrated with 8 processes" in said


@pytest.mark.parametrize(
    ("quick", "expected_s", "is_calibrated"), [(False, 90.0, True), (False, 80.0, False), (True, 90.0, None)]
)
def test_a_worker_goes_by_the_finals_that_wait(
    tmp_path: Path, quick: bool, expected_s: float, is_calibrated: bool | None
) -> None:
    """With a budget of a day it would have taken 44 s for any unit."""
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
    says = {True: "calibrated with 8", False: "not calibrated, the defaults are taken", None: ""}[is_calibrated]
    assert [text[: len(says)] for text in said] == [says] * bool(says)


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


def test_a_shortened_calibration_asks_for_nearly_the_same_finals() -> None:
    """Processes of the finals, over 3 simulated GPUs: a shortened calibration is off by no more than a few."""
    off = []
    for seed in range(3):
        found = []
        for processes in (calibration.FEWEST, calibration.FULL):
            with Store.open("sqlite://", create=True) as memory:
                list(calibrate(memory, gpu("1", seed), processes=processes))
                found.append(calibration.measuring_plan_of(memory.calibration(gpu("1", seed).device)).processes)
        off.append(abs(found[0] - found[1]))
    assert sorted(off)[len(off) // 2] <= 2
    assert max(off) <= 6


# Mates that differ


def test_a_slower_gpu_is_found_and_named_with_an_interval_and_doctor_says_so(mates: Store, tmp_path: Path) -> None:
    trust.prepare(mates, gpu("7,slower=0.031"))
    (level,) = trust.differing(mates)
    assert level.device == gpu("7,slower=0.031").device
    assert level.mates == MATES
    low, high = level.slower.interval
    assert low < 1.031 < high < 1.04
    assert level.sources == "copy ceiling, calibration"
    line = level_line(level, "host-a")
    assert line.startswith(f"GPU {level.device.uuid_hash[:4]}... (simulated:1) on host-a is 3.")
    assert line.endswith("slower than the 5 others of its name (copy ceiling, calibration)")
    mates.exclude(gpu("8").device, "host:1", "it is being slowed down: power brake")
    db = str(tmp_path / "mates.db")
    for findings in (check_database(db), check_own(db)):
        found = [finding for finding in findings if finding.level is Level.WARNING and "GPU " in finding.what]
        assert "slower than the 5 others of its name" in found[0].what
        assert "takes no units, as host:1 found: it is being slowed down" in found[1].what
        assert len(found) == 2


def test_gpus_that_are_alike_are_not_named(mates: Store) -> None:
    for number in range(7, 10):
        trust.prepare(mates, gpu(f"{number},slower=0.004"))
    assert trust.differing(mates) == []


def shared(problems: int, ratios: dict[Device, float], kind: Kind = Kind.MEASURED) -> list[Evidence]:
    version = KernelVersion("colwise", "f00d")
    return [
        Evidence(
            Problem("colwise", NamedInts(M=1024 * (number + 1)), "balanced"),
            NamedInts(BLOCK_SIZE=64 * size), device, kind, Status.OK, (100.0 * ratio * (1 + 0.002 * (number % 3)),),
            version, stage="final",
        )
        for number in range(problems)
        for size in (1, 2)
        for device, ratio in ratios.items()
    ]  # fmt: skip


def test_problems_that_several_timed_show_who_is_slower_and_the_others_are_left_alone() -> None:
    (level,) = levels(shared(40, {H200: 1.031, MATE: 1.0, OTHER: 1.0}), {})
    assert level.device == H200
    assert level.sources == "40 problems"
    assert level_line(level).endswith("is 3.1 % (3.1 to 3.1 %) slower than the 2 others of its name (40 problems)")


def test_of_two_that_differ_the_slower_one_is_named() -> None:
    (level,) = levels(shared(40, {H200: 1.0, MATE: 1.05}), {})
    assert level.device == MATE
    assert "slower than the other of its name" in level_line(level)


def test_a_faster_one_of_many_is_named_as_faster() -> None:
    (level,) = levels(shared(40, {H200: 0.95, MATE: 1.0, OTHER: 1.0}), {})
    assert "faster than the 2 others" in level_line(level)


@pytest.mark.parametrize(
    ("problems", "devices"),
    [(4, {H200: 1.05, MATE: 1.0}), (40, {H200: 1.005, MATE: 1.0}), (40, {H200: 1.05, replace(MATE, driver="9"): 1.0})],
)
def test_few_problems_small_differences_and_other_drivers_name_nobody(
    problems: int, devices: dict[Device, float]
) -> None:
    assert levels(shared(problems, devices), {}) == []


def test_a_copy_alone_names_a_gpu_only_far_beyond_its_noise() -> None:
    copies = {MATE: {COPY: 4160.0}, OTHER: {COPY: 4150.0}}
    assert levels([], {**copies, H200: {COPY: 4120.0}}) == []
    (level,) = levels([], {**copies, H200: {COPY: 4020.0}})
    assert level.sources == "copy ceiling"


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


def test_wrong_on_one_gpu_and_right_on_its_mate_is_the_gpus_fault_if_it_is_no_single_config() -> None:
    right = shared(2, {MATE: 1.0})
    wrong = [replace(entry, device=H200, status=Status.WRONG, times_us=()) for entry in right]
    assert "4 configs are wrong here" in reliance.check_fault(H200, [*right, *wrong])
    assert reliance.check_fault(MATE, [*right, *wrong]) == ""
    assert reliance.check_fault(H200, [*right, *wrong[:2]]) == ""
    assert reliance.check_fault(H200, wrong) == ""
    everywhere = [replace(entry, device=OTHER) for entry in wrong]
    assert reliance.check_fault(H200, [*wrong, *everywhere]) == ""


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
