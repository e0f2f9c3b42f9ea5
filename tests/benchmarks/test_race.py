"""The race without a GPU: its command line, the order of its processes, what it leaves out, and its arithmetic."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import race
from benchmarks.contestants import Course, fp8tune_quick
from benchmarks.race import Oracle, in_process, parse
from fp8tune.records import NamedInts
from fp8tune_kernels.quantize import colwise

FAST, SLOW, BROKEN = (NamedInts(BLOCK_SIZE=size, num_warps=4) for size in (16, 32, 64))


@pytest.fixture(scope="module")
def course() -> Course:
    return replace(Course.here(), torch_device="meta")


def command(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["race", *arguments])
    race.main()


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


def test_fp8tune_sweeps_the_grid_of_the_course(course: Course) -> None:
    """Whole: the simulated GPU has no limits that configs are pruned by. The default, of panels, is left out."""
    found = fp8tune_quick(course, timer="simulated:1")()
    assert found.timed == math.prod(len(values) for values in course.tunables.values()) == 225
    assert all(found.pick[axis] in values for axis, values in course.tunables.items())


# Processes


def test_a_process_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    answer, seconds = in_process("fp8tune", parse(["--time-budget", "0.05"]), tmp_path / "own", tmp_path / "cache")
    assert answer == {"failure": "stopped after 0.05 s"}
    assert seconds < 30


# Arithmetic


def test_regret_is_measured_from_the_fastest_config() -> None:
    oracle = Oracle.of_rounds({FAST: [10.0] * 8, SLOW: [10.5] * 8})
    assert oracle.best == FAST
    assert oracle.regret(FAST) == 0
    assert oracle.regret(SLOW) == pytest.approx(0.05)
    assert oracle.regret(BROKEN) is None
    assert oracle.regret(None) is None
