"""The race without a GPU: its command line, the order of its steps, what it leaves out, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import ROOT

from benchmarks.contestants import CONTESTANTS
from benchmarks.course import Course
from benchmarks.race import Options, Race, as_json, cache_owner, parse, schedule
from benchmarks.standings import Oracle, Run, standings, table
from benchmarks.step import MACHINE, ORACLE, Step, run_step
from fp8tune.errors import UsageError
from fp8tune.records import NamedInts
from fp8tune_kernels.quantize import colwise

FAST, SLOW, BROKEN = (NamedInts(BLOCK_SIZE=size, num_warps=4) for size in (16, 32, 64))


def options(**changes: object) -> Options:
    return replace(parse([]), **changes)


@pytest.fixture
def course() -> Course:
    return replace(Course.here(4), torch_device="meta")


def race(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.race", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


# The command line


def test_defaults_are_every_contestant_five_times() -> None:
    given = parse([])
    assert given.contestants == tuple(CONTESTANTS)
    assert (given.reruns, given.configs, given.deadline_s, given.json_path) == (5, None, None, None)


def test_an_unknown_contestant_is_named_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean libtuner"):
        parse(["--contestants", "fp8tune,libtunr"])


@pytest.mark.parametrize(
    "arguments", [["--reruns", "0"], ["--rounds", "1"], ["--configs", "-1"], ["--time-budget", "x"]]
)
def test_numbers_that_make_no_race_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2


def test_a_dry_run_builds_a_contestant_and_searches_nothing() -> None:
    done = race("--dry-run", "--contestants", "thread-pool", "--configs", "3")
    assert done.returncode == 0, done.stderr
    assert "3 configs" in done.stdout
    assert "thread-pool" in done.stdout
    assert done.stdout.strip().endswith("ready")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = race("--contestants", "fp8tune")
    assert done.returncode == 2
    assert done.stderr == "error: there is no GPU here: use --dry-run to see which contestants can be used\n"


# What is raced over


def test_all_contestants_get_at_least_130_configs_and_the_default() -> None:
    course = Course.here()
    assert len(set(course.configs)) >= 130
    assert course.spec.default in course.configs


def test_tuners_launch_what_a_sweep_launches(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *arguments, **config: launched.append((grid, arguments, config))

    monkeypatch.setattr(colwise, "colwise_kernel", Recorder())
    for config in course.configs:
        course.launch(config)
        grid, arguments, settings = launched.pop()
        assert grid == course.grid(config)
        assert settings == course.settings(config)
        assert all(one is other or one == other for one, other in zip(arguments, course.arguments, strict=True))


def test_a_tuners_settings_are_the_config_again(course: Course) -> None:
    for config in course.configs:
        assert course.as_config(course.settings(config)) == config
        assert course.as_config({axis: config[axis] for axis in course.tunables}) == config


def test_fp8tune_sweeps_the_course_and_no_other_config(course: Course) -> None:
    simulated = replace(course, configs=course.configs[:3], timer="simulated:1")
    found = CONTESTANTS["fp8tune"](simulated)()
    assert found.pick in simulated.configs
    assert found.timed == 3


# Steps


def test_the_verdict_comes_first_and_the_reruns_in_turns() -> None:
    steps = schedule(options(contestants=("a", "b", "c"), reruns=3))
    assert [(step.name, step.number) for step in steps] == [
        ("a", 0), ("b", 0), (ORACLE, 0), ("c", 0),
        ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2),
    ]  # fmt: skip


def test_a_warm_race_fills_one_cache_before_anyone_searches() -> None:
    chosen = replace(parse(["--warm", "--reruns", "2"]), contestants=("a", "b", "c"))
    steps = schedule(chosen)
    assert [(step.name, step.number) for step in steps] == [
        (ORACLE, 0), ("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1),
    ]  # fmt: skip
    assert {cache_owner(step, chosen) for step in steps} == {"a"}


def test_contestants_of_a_cold_race_compile_for_themselves() -> None:
    chosen = options(contestants=("a", "b", "c"), reruns=2)
    owners = [cache_owner(step, chosen) for step in schedule(chosen)]
    assert owners == ["a", "b", "a", "c", "a", "b", "c"]


def test_a_contestant_that_cannot_run_is_a_line_and_is_not_tried_again(tmp_path: Path) -> None:
    tried = []

    def perform(step: Step) -> tuple[dict[str, object], float]:
        tried.append(step.name)
        if step.name == ORACLE:
            return {"rounds_us": [[dict(FAST), [10.0, 10.0]], [dict(SLOW), [11.0, 11.0]]]}, 1.0
        if step.name == "libtuner":
            return {"failure": "cannot be used here: ModuleNotFoundError: no flag_gems"}, 1.0
        return {"search_s": 2.0, "pick": dict(FAST), "timed": 2}, 3.0

    path = tmp_path / "race.json"
    held = Race(options(contestants=("fp8tune", "libtuner"), reruns=3, json_path=path), perform)
    held.hold()
    assert tried == ["fp8tune", "libtuner", ORACLE, "fp8tune", "fp8tune"]
    assert "libtuner: cannot be used here: ModuleNotFoundError: no flag_gems" in held.table()
    saved = json.loads(path.read_text())
    assert [line["regrets"] for line in saved["standings"]] == [[0.0, 0.0, 0.0], []]
    assert saved["oracle"]["best"] == dict(FAST)


def test_nothing_starts_that_would_end_after_the_deadline() -> None:
    held = Race(options(deadline_s=100.0), lambda step: ({}, 0.0))
    held.runs.append(Run("fp8tune", 0, process_s=30.0, search_s=20.0, pick=FAST))
    assert held.skipped(Step("fp8tune", 1), 60.0) is None
    assert "deadline" in (held.skipped(Step("fp8tune", 1), 80.0) or "")
    assert held.skipped(Step("libtuner"), 99.0) is None
    assert "deadline" in (held.skipped(Step("libtuner"), 101.0) or "")


def test_a_step_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    answer, seconds = run_step(Step(MACHINE), tmp_path / "cache", tmp_path / "scratch", timeout_s=0.05)
    assert answer == {"failure": "stopped after 0.05 s"}
    assert seconds < 30


def test_a_step_that_dies_leaves_its_last_line(tmp_path: Path) -> None:
    answer, _ = run_step(Step("nobody"), tmp_path / "cache", tmp_path / "scratch", timeout_s=100)
    assert answer == {"failure": "cannot be used here: KeyError: 'nobody'"}


# Arithmetic


def test_regret_is_measured_from_the_fastest_config() -> None:
    oracle = Oracle.of_rounds({FAST: [10.0] * 8, SLOW: [10.5] * 8})
    assert oracle.best == FAST
    assert oracle.regret(FAST) == 0
    assert oracle.regret(SLOW) == pytest.approx(0.05)
    assert oracle.regret(BROKEN) is None
    assert oracle.regret(None) is None


def test_an_outlier_round_moves_no_time_and_halves_show_the_noise() -> None:
    oracle = Oracle.of_rounds({FAST: [10.0] * 15 + [900.0], SLOW: [11.0, 11.11] * 8})
    assert oracle.times_us[FAST] == 10
    assert oracle.noise == pytest.approx((0 + 0.11 / 11.11) / 2)


def test_standings_count_picks_and_compare_cold_runs_only() -> None:
    oracle = Oracle({FAST: 10.0, SLOW: 10.2}, noise=0.001)
    runs = [
        Run("triton.autotune", 0, 80.0, 72.0, FAST, 135),
        Run("fp8tune", 0, 12.0, 8.0, FAST, 135),
        Run("libtuner", 0, 3.0, failure="cannot be used here"),
        Run("fp8tune", 1, 9.0, 5.0, SLOW, 135),
        Run("fp8tune", 2, 9.0, 5.0, SLOW, 135),
    ]
    yardstick, ours, absent = standings(runs, oracle)
    assert yardstick.search_ratio == 1
    assert ours.search_ratio == 9
    assert ours.process_ratio == pytest.approx(80 / 12)
    assert ours.picks == ((SLOW, 2), (FAST, 1))
    assert ours.regrets == pytest.approx((0, 0.02, 0.02))
    assert (absent.search_ratio, absent.process_ratio, absent.regrets) == (None, None, ())
    text = table([yardstick, ours, absent], oracle)
    assert all(part in text for part in ("fp8tune", "9.0x", "16/4", "libtuner: cannot be used here"))
    assert json.dumps(as_json(runs, oracle))


def test_without_the_yardstick_or_the_oracle_the_rest_stands() -> None:
    (line,) = standings([Run("fp8tune", 0, 12.0, 8.0, FAST, 135)], None)
    assert (line.search_ratio, line.process_ratio, line.regrets) == (None, None, ())
    assert "8.0" in table([line], None)
