"""Sweeps end to end on fakes: every failure is a row, nothing is lost or doubled, the simulated clock runs it all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from places import PLANTED
from servers import on_both

from fp8tune.errors import MachineError
from fp8tune.measure.backends import ProcessBackend
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.options import SweepOptions
from fp8tune.plan import grids
from fp8tune.records import ClockLimits, Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.study import Verdict
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune.sweeping.events import Event, Started, TrialDone
from fp8tune.sweeping.planning import Plan

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
SIMULATED = "simulated:7"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kernel runs on the CPU, also where there is a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with Store.open(database, create=True) as opened:
        yield opened


@pytest.fixture
def shapes(tmp_path: Path) -> tuple[str, ...]:
    return (sizes(tmp_path, "M = 40\nK = 24\nN = 8\nE = 2"),)


def sizes(folder: Path, dims: str) -> str:
    path = folder / "sizes.toml"
    path.write_text(f"[[rows]]\n{dims}\n")
    return str(path)


def planned(**options: object) -> Plan:
    return planning.expanded(planning.planned(SweepOptions(**{"kernel": (FAULTS,), **options})))  # type: ignore[arg-type]


def simulated_at(power_limit_w: float, **options: object) -> Plan:
    plan = planned(timer=SIMULATED, **options)
    assert isinstance(plan.backend, SimulatedBackend)
    plan.backend.limits = ClockLimits(power_limit_w=power_limit_w)
    return plan


def rows_of(done: Iterable[Event]) -> list[Row]:
    return [event.row for event in done if isinstance(event, TrialDone)]


def run(store: Store, plan: Plan) -> tuple[list[Row], list[Row]]:
    """(rows of new trials, rows answered from the database)"""
    done = [event for event in session.run(store, plan) if isinstance(event, TrialDone)]
    return [e.row for e in done if not e.from_database], [e.row for e in done if e.from_database]


EXPECTED = {
    0: (Status.OK, ""),
    1: (Status.COMPILE_ERROR, "no such operation"),
    2: (Status.OUT_OF_RESOURCES, "shared memory"),
    3: (Status.OUT_OF_MEMORY, "1 TiB"),
    4: (Status.CRASHED, "illegal memory access"),
    5: (Status.TIMEOUT, "no answer in 5 s"),
    6: (Status.CRASHED, "SIGABRT"),
    7: (Status.WRONG, "one-giant"),
    8: (Status.WRONG, "elements differ"),
}


@pytest.mark.slow
def test_every_planted_fault_is_a_row_and_the_others_are_untouched(
    store: Store, shapes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessBackend, "trial_timeout_s", 5.0)
    rows, _ = run(store, planned(shapes=shapes))
    assert {row.config["FAULT"]: row.outcome.status for row in rows if row.config} == {
        fault: status for fault, (status, _) in EXPECTED.items()
    }
    for row in rows:
        assert row.config is not None
        assert EXPECTED[row.config["FAULT"]][1] in row.outcome.reason
        assert "\n" not in row.outcome.reason
        assert (row.kind, row.outcome.time_us) == (Kind.INTERPRETER, None)
    again, old = run(store, planned(shapes=shapes))
    assert (again, len(old)) == ([], len(rows))
    retried, _ = run(store, planned(shapes=shapes, grid=("FAULT=0,1",), again=True))
    assert {row.config["FAULT"] for row in retried if row.config} == {0, 1}


@pytest.mark.parametrize("quick", [True, False])
def test_results_at_another_power_limit_are_not_mixed(store: Store, shapes: tuple[str, ...], quick: bool) -> None:
    """A sweep that had ended lent its times to the next one, whose GPU was set to another power limit."""
    counts, figures = [], []
    for power_limit_w in (700.0, 700.0, 500.0, 500.0):
        plan = simulated_at(power_limit_w, shapes=shapes, quick=quick)
        counts.append(len(run(store, plan)[0]))
        figures.append([[result.figures for result in study.results] for study in session.studies(store, plan)])
    assert counts[0] > 0
    assert counts == [counts[0], 0, counts[0], 0]
    assert figures[0] == figures[2]


def test_a_quick_sweep_at_another_power_limit_replaces_a_confirmation(store: Store, tmp_path: Path) -> None:
    """Its pick stayed proven by times at the old limit."""
    shapes, verdicts = (sizes(tmp_path, "M = 16384\nK = 2048\nN = 8\nE = 2"),), []
    for power_limit_w, quick in ((700.0, False), (700.0, True), (500.0, True), (500.0, False)):
        plan = simulated_at(power_limit_w, shapes=shapes, quick=quick, grid=("num_warps=4,8",))
        run(store, plan)
        verdicts += [study.choice.verdict for study in session.studies(store, plan)]
    assert verdicts == [Verdict.PROVEN, Verdict.PROVEN, Verdict.QUICK, Verdict.PROVEN]


def test_simulated_clock_runs_the_whole_program(store: Store, shapes: tuple[str, ...]) -> None:
    plan = planned(shapes=shapes, timer=SIMULATED)
    rows, _ = run(store, plan)
    assert {(row.outcome.status, row.device.arch) for row in rows} == {(Status.OK, "simulated")}
    assert all(row.outcome.time_us and len(row.outcome.samples_us) >= 10 for row in rows)
    (best,), (size,) = session.studies(store, plan), plan.problems
    clock = SimulatedBackend(SIMULATED).clock
    true_us = {config: clock.true_time_us(size.arm(config).work) for config in size.configs}
    assert true_us[best.choice.pick] <= 1.02 * min(true_us.values())
    repeated = {row.config for row in rows if row.round == 2 and row.config}
    assert best.pick.config in repeated
    assert all(true_us[config] <= 1.35 * min(true_us.values()) for config in repeated)


def publish(store: Store, size: Problem, *configs: NamedInts, arch: str = "simulated") -> None:
    sweep_id = store.begin_sweep("published", Device("published"), command="", commit="", timer="", seed=0)
    for config in configs:
        somebody = Device(arch, "somebody's")
        store.add(sweep_id, Row(size, config, somebody, Kind.PUBLISHED, Outcome(Status.OK), source="somebody"))


def test_what_others_published_for_a_problem_is_timed_with_the_grid(
    store: Store, shapes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(shapes=shapes, timer=SIMULATED)
    (size,) = plan.problems
    known = next(iter(size.configs))
    name = next(iter(known))
    elsewhere = NamedInts({**known, name: 2 * max(config[name] for config in size.configs)})
    assert {row.config for row in run(store, plan)[0]} == set(size.configs)
    publish(store, size.problem, known, NamedInts(OTHER=1), elsewhere)
    rows, old = run(store, planned(shapes=shapes, timer=SIMULATED))
    assert {row.config for row in rows if row.stage == "screen"} == {elsewhere}
    assert {row.config for row in old} >= set(size.configs)
    assert "OTHER=1" in caplog.text


def test_published_configs_of_an_arch_are_compiled_where_they_can_be(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    plan = planning.planned(SweepOptions(kernel=("rowwise-2d",), arch="gfx942", shapes=("tiny",)))
    configs = [NamedInts(BLOCK_SIZE=2, BLOCK_SIZE_ITER=size, num_warps=4, num_stages=1) for size in (1024, 2048)]
    for shape, config in ((NamedInts(M=512, K=1024), configs[0]), (NamedInts(M=256, K=1024), configs[1])):
        publish(store, Problem("rowwise-2d", shape), config, arch="gfx942")
    publish(store, Problem("rowwise-2d", NamedInts(M=3)), configs[0], arch="gfx942")
    publish(store, Problem("rowwise-2d", NamedInts(M=1, K=8)), configs[0], arch="sm_100")
    sizes = session.published_sizes(store, plan)
    assert {(size.problem.shape["K"], size.problem.routing) for size in sizes} == {(1024, "none")}
    assert {config for size in sizes for config in size.configs} == {*configs}
    assert "needs K" in caplog.text


def test_stopped_sweep_continues_where_it_was(store: Store, shapes: tuple[str, ...]) -> None:
    plan, done = planned(shapes=shapes, timer=SIMULATED), 0
    running = session.run(store, plan)
    while done < 4:
        done += isinstance(next(running), TrialDone)
    running.close()  # type: ignore[attr-defined]
    new, old = run(store, plan)
    assert len(old) == 4
    assert {row.config for row in new + old if row.round == 0} == {row.config for row in new + old}
    assert run(store, plan)[0] == []
    stored = [(row.config, row.stage, row.process if row.stage != "screen" else "", row.round) for row in store.rows()]
    assert len(stored) == len(set(stored)) == len(new) + len(old)
    anew, old = run(store, planned(shapes=shapes, timer=SIMULATED, again=True))
    assert (len(anew), len(old)) == (len(stored), 0)


@on_both
def test_config_that_is_no_longer_pruned_is_tried(store: Store, shapes: tuple[str, ...]) -> None:
    """A kernel that drops a pruning reason gets the trial, though a row says ``pruned``."""
    plan = planned(shapes=shapes, timer=SIMULATED)
    (size,) = plan.problems
    pruned = replace(size, configs={config: "planted" if config["FAULT"] == 3 else "" for config in size.configs})
    first, _ = run(store, replace(plan, problems=(pruned,)))
    assert [row.outcome.reason for row in first if row.outcome.status is Status.PRUNED] == ["planted"]
    new, old = run(store, plan)
    assert {row.config["FAULT"] for row in new if row.round == 0 and row.config} == {3}
    assert old


def test_a_full_disk_ends_the_sweep_and_is_no_row(store: Store, shapes: tuple[str, ...]) -> None:
    with pytest.raises(MachineError, match=r"No space left on device /planted: no config is to blame"):
        run(store, planned(kernel=(f"{PLANTED / 'hostile.py'}:FULL_DISK",), shapes=shapes))
    assert {row.outcome.status for row in store.rows()} <= {Status.WRONG}


def test_a_grid_with_conditions_is_built_when_its_problem_size_is_swept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning asked for every config of every problem size: seconds, where few fit into the time budget."""
    plan = planned(shapes=(sizes(tmp_path, "M = [40, 41, 42]\nK = 24\nN = 8\nE = 2"),), timer=SIMULATED, quick=True)
    calls: list[int] = []
    monkeypatch.setattr(session, "COMPILE_AHEAD", 1)

    def excluded(config: Mapping[str, int], shape: Mapping[str, int]) -> str | None:
        calls.append(shape["M"])
        return "planted" if config["FAULT"] > config["num_warps"] else None

    spec = replace(load_spec(FAULTS), excluded=excluded)
    lazy = [replace(size, configs=grids.configs(spec, size.problem, spec.axes, None)) for size in plan.problems]
    running = session.sweep(store, replace(plan, problems=tuple(lazy)))
    started = next(running)
    assert isinstance(started, Started)
    assert (started.problems, started.configs, calls) == (3, 27, [])
    assert any(isinstance(event, TrialDone) for event in running)
    assert set(calls) == {40, 41}  # the next is compiled ahead
    rows = rows_of(running)
    assert {(row.problem.shape["M"], row.outcome.status) for row in rows} >= {(42, Status.OK), (42, Status.PRUNED)}


def test_a_mended_reference_judges_anew_at_once(store: Store, tmp_path: Path, shapes: tuple[str, ...]) -> None:
    """A comment in the reference starts nothing anew."""
    spec, text = tmp_path / "mine.py", (PLANTED / "foreign.py").read_text()
    wrong = text.replace("(x.float().clamp", "(x.float().mul(2).clamp")
    commented = text.replace("def reference(x: Any) -> tuple[Any, ...]:", 'def reference(x):\n    """Right."""  # now')
    results = []
    for version in (wrong, commented, text):
        spec.write_text(version)
        results.append(run(store, planned(kernel=(f"{spec}:SPEC",), shapes=shapes)))
    (first, _), (mended, _), (again, old) = results
    assert {row.outcome.status for row in first} == {Status.WRONG}
    assert "elements differ, first at (0, 0): expected" in first[0].outcome.reason
    assert {row.config for row in mended} == {row.config for row in first}
    assert {row.outcome.status for row in mended} == {Status.OK}
    assert {result.status for study in store.studies() for result in study.results} == {Status.OK}
    assert (again, len(old)) == ([], len(first))


def test_another_bound_judges_anew(store: Store, tmp_path: Path, shapes: tuple[str, ...]) -> None:
    """The code is the same, and what is right is not."""
    text = (PLANTED / "foreign.py").read_text()
    text = text.replace("(x.float().clamp(-448, 448).to(torch.float8_e4m3fn)", "(x.double()")
    text = text.replace("import KernelSpec,", "import KernelSpec, Tolerance,")
    statuses = []
    for name, bound in (("loose", 0.5), ("strict", 0.001)):
        spec = tmp_path / f"{name}.py"
        declared = f'SPEC = KernelSpec(check="tolerance", tolerance=Tolerance({bound}, {bound}),'
        spec.write_text(text.replace("SPEC = KernelSpec(", declared))
        rows, _ = run(store, planned(kernel=(f"{spec}:SPEC",), shapes=shapes))
        statuses.append({row.outcome.status for row in rows})
    assert statuses == [{Status.OK}, {Status.WRONG}]
