"""``recheck`` on simulated upgrades: what it finds, keeps and leaves alone."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import fp8tune
from places import PLANTED

from fp8tune.api import running
from fp8tune.measure import codegen
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.device import software
from fp8tune.measure.programs import Compiled, Wanted
from fp8tune.measure.simulated import SimulatedBackend, SimulatedClock
from fp8tune.options import RecheckOptions, SweepOptions
from fp8tune.output.progress import SweepProgress
from fp8tune.output.recheck import make_report, report
from fp8tune.rechecking import targets
from fp8tune.rechecking.run import Recheck, Rechecked, State
from fp8tune.records import Compiler, Device, NamedInts, Outcome, Status
from fp8tune.stats.study import Result
from fp8tune.store.layers import Layers
from fp8tune.store.results import Store
from fp8tune.sweeping import picks, planning, session
from fp8tune.sweeping.events import Finished, TrialDone
from fp8tune.tables.launch_table import Entry, LaunchTable

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
OPTIONS = RecheckOptions(kernel=(FAULTS,))
OK = Outcome(Status.OK)
Change = Callable[[NamedInts, NamedInts], float]  # key and config -> change of the log time


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of six sizes that were swept with version 1."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "sizes.toml").write_text(
        "[[rows]]\nM = 16384\nK = [1024, 2048, 4096, 8192, 12288, 16384]\nN = 8\nE = 2\n"
    )
    options = SweepOptions(kernel=(FAULTS,), shapes=(str(folder / "sizes.toml"),), timer="simulated:7,triton=1")
    with Store.open(str(folder / "swept.db"), create=True) as store:
        list(session.run(store, planning.expanded(planning.planned(options))))
    return folder / "swept.db"


@pytest.fixture
def store(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,triton=2")
    (tmp_path / "own.db").write_bytes(swept.read_bytes())
    with Store.open(str(tmp_path / "own.db")) as opened:
        yield opened


class ChangedClock(SimulatedClock):
    """Version 2 of the simulated GPU, with changes that a test chose."""

    def __init__(self, change: Change) -> None:
        super().__init__(7, noise_seed=1)
        self.change = change

    def true_time_us(self, work) -> float:  # type: ignore[no-untyped-def]
        config = NamedInts({name: int(value) for name, value in (p.split("=") for p in work.config.split()[1:])})
        return super().true_time_us(work) * math.exp(self.change(work.key, config))


def begun(store: Store, change: Change = lambda key, config: 0.0, options: RecheckOptions = OPTIONS) -> Recheck:
    plan, chosen = targets.planned(options, store)
    plan.backend.clock = ChangedClock(change)  # type: ignore[union-attr]
    return Recheck(store, plan, chosen, store.programs())


def timed(work: Recheck) -> int:
    """Run a recheck; return the number of new blocks."""
    return sum(isinstance(event, TrialDone) and not event.from_database for event in work.run())


def states(work: Recheck) -> list[State]:
    return [item.state for item in work.results]


def test_an_upgrade_that_changes_nothing_changes_no_config(store: Store) -> None:
    work = begun(store)
    assert timed(work) > 0
    assert states(work) == [State.STILL_BEST] * 6
    assert make_report(work.plan, work.results).exit_code == 0
    assert all(0.9 < item.upgrade < 1.1 for item in work.results if item.upgrade)


def test_without_an_upgrade_there_is_nothing_to_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,triton=1")
    work = begun(store)
    assert timed(work) == 0
    assert set(states(work)) <= {State.STILL_BEST}


def test_a_config_that_became_slower_is_beaten_by_a_known_one(store: Store) -> None:
    """Run again, the command times nothing and has equal results."""
    current = begun(store).targets[2].current
    slower: Change = lambda key, config: 0.1 if config == current else 0.0  # noqa: E731
    work = begun(store, slower)
    timed(work)
    uses = [item for item in work.results if item.target.current == current]
    assert {item.state for item in uses} == {State.BEATEN}
    assert {item.state for item in work.results} - {State.STILL_BEST} == {State.BEATEN}
    for item in uses:
        assert item.is_confirmed
        assert item.best != current
        assert 1.015 < (item.speedup or 0) < 1.12
        assert item.upgrade == pytest.approx(math.exp(-0.1), rel=0.05)
    document = make_report(work.plan, work.results)
    assert document.exit_code == 1
    again = begun(store, slower)
    assert timed(again) == 0
    assert make_report(again.plan, again.results) == document


def test_a_config_that_races_is_not_taken(
    store: Store, swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its size, races of known rivals are looked for once they are finalists, those of the config in use always."""
    current = begun(store).targets[2].current
    slower: Change = lambda key, config: 0.1 if config == current else 0.0  # noqa: E731
    work = begun(store, slower)
    timed(work)
    racing = {item.best for item in work.results if item.state is State.BEATEN}

    def check(self: SimulatedBackend, arm: KernelArm) -> Outcome:
        return Outcome(Status.WRONG, reason="a race") if arm.config in racing and not arm.races_once else OK

    def block(self: SimulatedBackend, arm: KernelArm, place: Place) -> Outcome:
        checked = OK if place.process else check(self, arm)
        return self.clock.block(arm.work, place) if checked is OK else checked

    monkeypatch.setattr(SimulatedBackend, "block", block)
    monkeypatch.setattr(SimulatedBackend, "checked_block", block)
    monkeypatch.setattr(SimulatedBackend, "check", check)
    (tmp_path / "again.db").write_bytes(swept.read_bytes())
    with Store.open(str(tmp_path / "again.db")) as opened:
        again = begun(opened, slower)
        timed(again)
    assert not racing & {item.best for item in again.results}
    assert all(item.fails == (item.target.current in racing) for item in again.results)
    refused = [racing & {*item.new.failures} for item in again.results if item.new and item.target.current == current]
    assert any(refused)


def test_a_recheck_whose_configs_all_fail_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,wrong=1,triton=2")
    work = begun(store)
    timed(work)
    assert all(item.fails for item in work.results)
    assert store.unfinished_sweeps() == []


def test_a_config_that_was_no_rival_is_found_on_all_sizes(store: Store) -> None:
    """It became faster on every size, and is sampled on few."""
    work = begun(store)
    old, configs = [target.old.slowdowns for target in work.targets if target.old], work.targets[0].size.configs
    slowdowns = {config: [slow.get(config, math.inf) for slow in old] for config in configs}
    known = {config for target in work.targets for config in target.known}
    hidden = min((config for config in slowdowns if config not in known), key=lambda c: max(slowdowns[c]))
    gain = math.log(max(slowdowns[hidden])) + 0.06
    work = begun(store, lambda key, config: -gain if config == hidden else 0.0)
    timed(work)
    assert states(work) == [State.BEATEN] * 6
    assert {item.best for item in work.results} == {hidden}


def test_another_gpu_of_the_name_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster each command may get another GPU. It times what the one before did not reach, and no more."""
    first = begun(store)
    first.targets = first.targets[:4]
    timed(first)
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=1,triton=2")
    second = begun(store)
    assert {target.size.problem for target in second.targets if not (target.peers or target.fresh)} == {
        target.size.problem for target in second.targets[4:]
    }
    assert timed(second) > 0
    assert states(second) == [State.STILL_BEST] * 6
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=2,triton=2")
    third = begun(store)
    assert timed(third) == 0
    assert states(third) == [State.STILL_BEST] * 6


def test_a_stopped_recheck_takes_what_another_gpu_finished(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The few times of the stopped one do not stand for those of the other: the config in use may not be among them."""
    first = begun(store)
    in_use = {target.current for target in first.targets}
    events = first.run()
    while not (isinstance(event := next(events), TrialDone) and event.row.config not in in_use):
        pass
    events.close()
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=1,triton=2")
    timed(begun(store))
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,triton=2")
    resumed = begun(store)
    timed(resumed)
    assert states(resumed) == [State.STILL_BEST] * 6


def test_another_gpu_does_not_go_on_with_other_settings(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(begun(store))
    made = functools.partial(Device, codegen="enable_fp_fusion=False")
    monkeypatch.setattr("fp8tune.measure.simulated.Device", made)
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=1,triton=2")
    assert not any(target.peers for target in begun(store).targets)


def test_a_config_that_fails_on_another_gpu_is_tried(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=1,wrong=0.5,triton=2")
    faulty = begun(store)
    timed(faulty)
    assert State.BEATEN in states(faulty)
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=2,triton=2")
    sound = begun(store)
    timed(sound)
    assert states(sound) == [State.STILL_BEST] * 6


def test_a_stopped_recheck_resumes(store: Store, swept: Path, tmp_path: Path) -> None:
    current = begun(store).targets[2].current
    slower: Change = lambda key, config: 0.1 if config == current else 0.0  # noqa: E731
    whole = begun(store, slower)
    events = len([*whole.run()])
    for stop in (1, events // 5, events - 5):
        path = tmp_path / f"{stop}.db"
        path.write_bytes(swept.read_bytes())
        with Store.open(str(path)) as stopped:
            running = begun(stopped, slower).run()
            for _ in range(stop):
                next(running)
            running.close()
            resumed = begun(stopped, slower)
            timed(resumed)
            assert states(resumed) == states(whole)
            assert [item.best for item in resumed.results] == [item.best for item in whole.results]


def test_progress_shows_no_more_time_than_the_budget_has(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Drawn(SweepProgress):
        def update(self, *shown: Any, **more: Any) -> None:
            super().update(*shown, **more)
            self._draw()

    monkeypatch.setattr(running, "SweepProgress", Drawn)
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:7.1,gpu=3,triton=2")
    db = shutil.copy(swept, tmp_path / "own.db")
    running.rechecked(RecheckOptions(kernel=(FAULTS,), db=str(db), budget_s=1e-6), "", print)
    assert set(re.findall(r"\S+ s left", capsys.readouterr().err)) == {"0 s left"}


def test_a_lost_size_is_swept_with_a_budget_only(store: Store) -> None:
    """Most of what was near the best changed on one size, so older times say nothing of the others there."""
    target = begun(store).targets[0]
    assert target.old is not None
    times_us, key = target.old.coarse_us, target.size.arm(target.current).work.key
    places = {config: place for place, config in enumerate(sorted(times_us, key=lambda config: times_us[config])[:40])}

    def changed(at: str, config: NamedInts) -> float:
        return 0.1 * (1 + places[config] % 5) if at == key and config in places else 0.0

    work = begun(store, changed)
    timed(work)
    lost = work.results[0]
    assert [item.needs_sweep for item in work.results] == [True] + [False] * 5
    assert "1 size needs a sweep" in " ".join(report(make_report(work.plan, work.results), OPTIONS).below)
    work = begun(store, changed, replace(OPTIONS, budget_s=1e6))
    timed(work)
    assert not any(item.needs_sweep for item in work.results)
    assert all(item.is_confirmed for item in work.results)
    clock = ChangedClock(changed)
    true_us = {config: clock.true_time_us(target.size.arm(config).work) for config in target.size.configs}
    assert true_us[work.results[0].best] < 1.02 * min(true_us.values())
    assert work.results[0].new is not None
    planned = work.results[0].new.planned
    assert lost.new is not None
    assert not replace(lost, new=replace(lost.new, planned=planned)).is_lost  # as in a pruned database


def test_the_same_machine_code_needs_no_timing(store: Store) -> None:
    work = begun(store)
    target = work.targets[0]
    assert target.old is not None
    assert target.old.next_best is not None
    configs = {target.current, target.old.choice.pick, target.old.next_best.config}
    hashes = {(target.size.version, target.size.problem, config): str(place) for place, config in enumerate(configs)}
    for version in ("1.0", "2.0"):
        store.keep_programs(Compiler("simulated", version), hashes)
    work = begun(store)
    events = [event for event in work.run() if isinstance(event, TrialDone)]
    assert states(work) == [State.SAME_CODE, *[State.STILL_BEST] * 5]
    assert target.size.problem not in {event.row.problem for event in events}
    store.keep_programs(Compiler("simulated", "2.0"), dict.fromkeys(hashes, "changed"))
    assert State.SAME_CODE not in states_after_code(begun(store))


def test_code_is_compiled_once_and_no_further_where_that_in_use_differs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new assembler changes most code, and then a fourth of the launches shows it."""
    work = begun(store)
    sizes = [target.size for target in work.targets]
    launches = [(size.version, size.problem, config) for size in sizes for config in size.configs]
    store.keep_programs(Compiler("simulated", "1.0"), dict.fromkeys(launches, "old"))
    same, requests = work.targets[0].size.problem, list[Wanted]()

    def compiled(batch: Iterable[Wanted], arch: str, **_: object) -> Compiled:
        requests.extend(batch := list(batch))
        compiler = Compiler(arch, software().triton, codegen.settings(), "13.4.59")
        return Compiled(compiler, {item: "old" if item.problem == same else "new" for item in batch}, {}, len(batch))

    monkeypatch.setattr("fp8tune.rechecking.run.ARCHES", ["simulated"])
    monkeypatch.setattr("fp8tune.rechecking.run.compile_programs", compiled)
    for _ in range(2):  # the second time, everything is known
        assert states_after_code(begun(store)) == [State.SAME_CODE, *[State.NOT_REACHED] * 5]
        others = [(item.problem, item.config) for item in requests if item.problem != same]
        assert others == [(target.size.problem, target.current) for target in work.targets[1:]]
        configs = [item.config for item in requests if item.problem == same]
        assert {*work.targets[0].known} <= {*configs}
        assert len(configs) == len({*configs})


def states_after_code(work: Recheck) -> list[State]:
    work.compare_code()
    return [Rechecked(target, None, target.size.problem in work.same_code).state for target in work.targets]


def test_one_process_hides_no_confirmed_result(store: Store, swept: Path, tmp_path: Path) -> None:
    """Own results of few configs are no reason to forget a shipped sweep."""
    with Store.open(str(swept), writable=False) as shipped, Store.open(str(tmp_path / "mine.db"), create=True) as own:
        before = picks.read(shipped)
        both = Layers(own, shipped)
        plan, chosen = targets.planned(OPTIONS, both)
        timed(Recheck(own, plan, chosen))
        assert [(pick.problem, pick.config, pick.verdict) for pick in picks.read(Layers(own, shipped))] == [
            (pick.problem, pick.config, pick.verdict) for pick in before
        ]


def test_an_ended_budget_leaves_sizes_out(store: Store) -> None:
    work = begun(store, options=replace(OPTIONS, budget_s=0.0))
    work.begun = work.clock() - 1
    assert not any(isinstance(event, Finished) and event.is_whole for event in work.run())
    assert states(work) == [State.NOT_REACHED] * 6
    screen = report(make_report(work.plan, work.results), replace(OPTIONS, budget_s=0.0))
    assert "6 sizes not timed" in " ".join(screen.below)
    assert "to gain" not in screen.above[0]


def test_a_budget_that_known_configs_exceed_searches_none_of_them(store: Store) -> None:
    work = begun(store, options=replace(OPTIONS, budget_s=1e-3))
    work.clock = lambda: 0.0
    sweeps = [event for event in work.run() if isinstance(event, Finished)]
    assert sweeps
    assert not any(sweep.seen for sweep in sweeps)


def test_a_table_says_which_config_is_in_use(store: Store, tmp_path: Path) -> None:
    probe = begun(store)
    size = probe.targets[0].size
    slow = next(config for config in size.configs if config not in probe.targets[0].known)
    key = tuple(sorted(size.lookup_key.items()))
    rows = LaunchTable("simulated", (Entry(size.version.kernel, "", key, tuple(slow.items())),))
    arguments = {"kwargs": {n: v for n, v in slow.items() if not n.startswith("num_")}}
    arguments |= {name: value for name, value in slow.items() if name.startswith("num_")}
    table = {"simulated:7": {tuple(size.lookup_key.values()): arguments}}
    by_key = f"import math\nTABLE = {table}\nKERNEL = {size.version.kernel!r}\nopen('canary', 'w')\n"
    for name, text in (("rows.py", rows.render()), ("keys.py", by_key)):
        (tmp_path / name).write_text(text)
        plan, chosen = targets.planned(replace(OPTIONS, table=str(tmp_path / name)), store)
        assert [(target.size.problem, target.current) for target in chosen] == [(size.problem, slow)]
        assert timed(Recheck(store, plan, chosen)) >= 0
        assert not any("other code" in notice for notice in plan.notices)
    row = Entry(size.version.kernel, "", key, tuple(slow.items()), code="0" * 16)
    (tmp_path / "old.py").write_text(LaunchTable("simulated", (row,)).render())
    plan, _ = targets.planned(replace(OPTIONS, table=str(tmp_path / "old.py")), store)
    assert any("was measured with other code" in notice for notice in plan.notices)
    assert not Path("canary").exists()


def test_a_failing_config_in_use_is_beaten_by_one_that_runs(store: Store) -> None:
    target = begun(store).targets[0]
    assert target.old is not None
    right = next(config for config in target.known if config != target.current)
    failures = {target.current: Status.COMPILE_ERROR}
    new = replace(target.old, results=(Result(right, coarse_us=10.0),), failures=failures)
    item = Rechecked(target, new)
    assert (item.state, item.best, item.speedup) == (State.BEATEN, right, None)


@pytest.mark.parametrize("form", ["table", "markdown", "json"])
def test_the_command_prints_what_to_do(form: str, store: Store, tmp_path: Path) -> None:
    done = fp8tune("recheck", "--kernel", FAULTS, "--db", str(tmp_path / "own.db"), "--format", form)
    assert done.returncode in (0, 1), done.stderr
    if form == "json":
        document = json.loads(done.stdout)
        assert len(document["rows"]) == sum(document["kernels"][0]["states"].values()) == 6
        assert document["exit_code"] == done.returncode
    else:
        assert "(Triton 1.0 -> 2.0)".replace(">", ">" if form == "table" else "&gt;") in done.stdout


@pytest.mark.parametrize(
    ("arch", "used", "then"),
    [
        ("sm_90", {}, "--arch sm_90"),
        ("simulated", {}, "--arch simulated -o FILE"),
        ("sm_90", {"table": "t.py"}, "--arch sm_90 -o t.py"),
        (
            "sm_90",
            {"table": "t.py", "recording": "run.json"},
            "--for python --kernel planted-faults --arch sm_90 -o t.py",
        ),
    ],
)
def test_the_next_command_writes_what_was_rechecked(store: Store, arch: str, used: dict[str, str], then: str) -> None:
    """It named no file, without which export refuses simulated picks."""
    recheck = begun(store)
    target = recheck.targets[0]
    assert target.old is not None
    right = next(config for config in target.known if config != target.current)
    new = replace(target.old, results=(Result(right, coarse_us=10.0),), failures={target.current: Status.WRONG})
    document = make_report(recheck.plan, [Rechecked(target, new)]).model_copy(update={"arch": arch, "before": []})
    screen = report(document, replace(OPTIONS, **used))
    assert screen.below[-1] == f"then: fp8tune export {then}"
    assert "(Triton 2.0)" in screen.above[0]  # nothing says which version chose the configs
