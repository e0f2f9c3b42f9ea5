"""The race without a GPU: its command line, the order of its processes, what it leaves out, and its arithmetic."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import race
from benchmarks.contestants import CONTESTANTS, Course, fp8tune_quick
from benchmarks.race import ORACLE, Oracle, Run, as_json, in_process, parse, schedule, table
from fp8tune.errors import UsageError
from fp8tune.records import NamedInts
from fp8tune_kernels.quantize import colwise

FAST, SLOW, BROKEN = (NamedInts(BLOCK_SIZE=size, num_warps=4) for size in (16, 32, 64))


@pytest.fixture(scope="module")
def course() -> Course:
    return replace(Course.here(), torch_device="meta")


def test_an_unknown_contestant_is_named_with_a_suggestion() -> None:
    assert parse([]).contestants == list(CONTESTANTS)
    with pytest.raises(UsageError, match="did you mean thread-pool"):
        parse(["--contestants", "fp8tune,thread-pol"])


@pytest.mark.parametrize("arguments", [["--reruns", "0"], ["--rounds", "1"], ["--time-budget", "x"]])
def test_numbers_that_make_no_race_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2


def command(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["race", *arguments])
    race.main()


def test_a_dry_run_builds_a_contestant_and_searches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(["--dry-run", "--contestants", "thread-pool"], monkeypatch)
    said = capsys.readouterr().out
    assert "135 configs" in said
    assert said.strip().endswith("thread-pool: ready")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--contestants", "fp8tune"], monkeypatch)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: there is no GPU here: use --dry-run to see which contestants can be used\n"


# What is raced over


def test_all_contestants_get_at_least_130_configs_and_none_of_panels(course: Course) -> None:
    """Also where the declared default is one of panels."""
    assert len(set(course.configs)) >= 130
    assert {config["LEAD"] for config in course.configs} == {0}


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


def test_fp8tune_sweeps_the_grid_of_the_course(course: Course) -> None:
    """Whole: the simulated GPU has no limits that configs are pruned by. The default, of panels, is left out."""
    found = fp8tune_quick(course, timer="simulated:1")()
    assert found.timed == math.prod(len(values) for values in course.tunables.values()) == 225
    assert all(found.pick[axis] in values for axis, values in course.tunables.items())


# Processes


def test_the_oracle_comes_after_two_and_the_reruns_in_turns() -> None:
    given = parse(["--reruns", "2"])
    names = list(CONTESTANTS)
    assert schedule(given) == [*names[:2], ORACLE, *names[2:], *names]


def test_a_contestant_that_cannot_run_is_a_line_and_is_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def answer(name: str, given: object, folder: Path, cache: Path) -> tuple[race.Answer, float]:
        tried.append((name, cache.name))
        if name == ORACLE:
            return {"rounds_us": [[dict(FAST), [10.0, 10.0]], [dict(SLOW), [11.0, 11.0]]]}, 1.0
        if name == "thread-pool":
            return {"failure": "cannot be used here: ImportError: no AsyncCompileMode"}, 1.0
        return {"search_s": 2.0, "pick": dict(FAST), "timed": 2}, 3.0

    path = tmp_path / "race.json"
    given = parse(["--contestants", "fp8tune,thread-pool", "--reruns", "3", "--json", str(path)])
    race.hold(given, tmp_path, answer)
    caches = {"fp8tune": "cache-fp8tune", "thread-pool": "cache-thread-pool", ORACLE: "cache-fp8tune"}
    assert tried == [(name, caches[name]) for name in ("fp8tune", "thread-pool", ORACLE, "fp8tune", "fp8tune")]
    assert "\nthread-pool: cannot be used here: ImportError: no AsyncCompileMode" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert [run["pick"] for run in saved["runs"]] == [dict(FAST), None, dict(FAST), dict(FAST)]
    assert saved["oracle"]["best"] == dict(FAST)


def test_a_process_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    answer, seconds = in_process("fp8tune", parse(["--time-budget", "0.05"]), tmp_path / "own", tmp_path / "cache")
    assert answer == {"failure": "stopped after 0.05 s"}
    assert seconds < 30


def test_a_process_that_dies_leaves_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "none")  # Python ends over it, before the seconds that imports take
    answer, _ = in_process(ORACLE, parse([]), tmp_path / "own", tmp_path / "cache")
    assert answer["failure"].startswith("exited with code 1: Python ")


def test_what_a_tuner_lacks_is_its_reason() -> None:
    assert race.answer_of("nobody", 0, dry=True) == {"failure": "cannot be used here: KeyError: 'nobody'"}


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


def test_the_table_counts_picks_and_compares_cold_runs_only() -> None:
    oracle = Oracle({FAST: 10.0, SLOW: 10.2}, noise=0.001)
    runs = [
        Run("triton.autotune", 80.0, 72.0, FAST, 135),
        Run("fp8tune", 12.0, 8.0, FAST, 135),
        Run("thread-pool", 3.0, failure="cannot be used here"),
        Run("fp8tune", 9.0, 5.0, SLOW, 135),
        Run("fp8tune", 9.0, 5.0, SLOW, 135),
    ]
    _, others, ours, absent, best = table(runs, oracle).splitlines()
    assert others.split()[:5] == ["triton.autotune", "72.0", "1.0x", "80.0", "1.0x"]
    assert ours.split() == ["fp8tune", "8.0", "9.0x", "12.0", "6.7x", "135", "16/4", "0.00", "3", "2", "1.33", "2.00"]
    assert absent == "thread-pool: cannot be used here"
    assert best.startswith("best of the oracle: 16/4 at 10.00 us")
    assert json.dumps(as_json(runs, oracle))


def test_without_others_or_the_oracle_the_rest_stands() -> None:
    _, line = table([Run("fp8tune", 12.0, 8.0, FAST, 135)], None).splitlines()
    assert line.split() == ["fp8tune", "8.0", "-", "12.0", "-", "135", "16/4", "-", "1", "1", "-", "-"]
