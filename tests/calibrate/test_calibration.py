from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from fp8tune.calibrate import record as calibrate
from fp8tune.choose.calibration import floor_us, is_calibrated, measuring_plan_of
from fp8tune.choose.decision import Block, MeasuringPlan
from fp8tune.errors import MachineError
from fp8tune.measure.arms import Arm, KernelArm
from fp8tune.measure.backends.interpreter import InterpreterBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.simulated import Noise
from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.store.results import Store

spreads = st.floats(0.0, 0.05)


def measured(process: float, block: float) -> dict[str, float]:
    return {"process_sd": process, "block_sd": block}


def test_without_a_calibration_the_protocol_is_the_standard_one() -> None:
    assert measuring_plan_of({}) == measuring_plan_of({"copy_ceiling_gb_per_s": 3000.0}) == MeasuringPlan()
    assert not is_calibrated({"copy_ceiling_gb_per_s": 3000.0})


def test_the_guessed_noise_asks_for_the_standard_protocol() -> None:
    assert measuring_plan_of(measured(0.003, 0.0035)) == MeasuringPlan()


def test_a_quiet_device_needs_less_and_a_noisy_one_more() -> None:
    quiet, noisy = measuring_plan_of(measured(0.0005, 0.0002)), measuring_plan_of(measured(0.006, 0.004))
    assert (quiet.processes, quiet.rounds, quiet.more_processes) == (4, 4, (8, 16, 32))
    assert noisy.processes > MeasuringPlan().processes
    assert noisy.keep_band == MeasuringPlan().keep_band
    far_off = measuring_plan_of(measured(0.03, 0.03))
    assert far_off.keep_band > MeasuringPlan().keep_band
    assert far_off.tie_band / far_off.keep_band == pytest.approx(2 / 3)
    assert far_off.screen_band > MeasuringPlan().screen_band


@given(spreads, spreads)
def test_enough_is_measured_to_tell_that_two_equal_configs_are_a_near_tie(process: float, block: float) -> None:
    protocol = measuring_plan_of(measured(process, block))
    assert 4 <= protocol.rounds <= 6
    assert 4 <= protocol.processes <= 12
    last = protocol.more_processes[-1]
    sd = math.sqrt(2 * (process**2 + block**2 / protocol.rounds))
    bound = t.isf(protocol.alpha / (7 * protocol.decisions), last - 1) * sd / math.sqrt(last)
    assert bound <= protocol.keep_band


@given(spreads, spreads, spreads)
def test_more_noise_never_asks_for_less(process: float, block: float, more: float) -> None:
    one, other = measuring_plan_of(measured(process, block)), measuring_plan_of(measured(process + more, block))
    assert other.keep_band >= one.keep_band
    assert other.screen_band >= one.screen_band


def test_the_floor_follows_the_finest_tick() -> None:
    assert floor_us({}, None) == 0.0
    assert floor_us({}, 0.032) == pytest.approx(12.8)
    assert floor_us({"timer_tick_us": 0.01}, 0.032) == pytest.approx(4.0)  # samples show an upper bound only


SIMULATED = SimulatedBackend("simulated:3")


def test_calibrating_finds_the_simulated_noise_and_keeps_it(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "results.db"), create=True) as store:
        *progress, result = calibrate.calibrate(store, SIMULATED)
        assert len(progress) == calibrate.PROCESSES
        assert isinstance(result, calibrate.Calibration)
        assert store.calibration(SIMULATED.device) == result.values
        assert store.calibration(replace(SIMULATED.device, name="simulated:4")) == {}
        assert store.unfinished_sweeps() == []
    noise = Noise()
    assert result.values["timer_tick_us"] == pytest.approx(noise.tick_us)
    assert result.values["empty_kernel_us"] > 0
    assert 0.5 * noise.process_sd < result.values["process_sd"] < 2 * noise.process_sd
    assert 0.7 * noise.block_sd < result.values["block_sd"] < 2 * noise.block_sd
    assert result.protocol == measuring_plan_of(result.values)


def test_one_stalled_block_is_not_taken_for_noise() -> None:
    """Without the median it is 7.3 % from block to block."""
    random, blocks = np.random.default_rng(4), []
    configs = [NamedInts(BLOCK_SIZE=size) for size in (32, 64, 128)]
    for process, round, config in itertools.product(range(calibrate.PROCESSES), range(calibrate.ROUNDS), configs):
        stall = 4 if (process, round) == (3, 2) and config == configs[1] else 1
        time_us = 100 * stall * math.exp(0.005 * random.standard_normal())
        blocks.append(Block(f"{process:02d}", round, config, time_us))
    values = calibrate.spreads(blocks)
    assert 0.004 < values["block_sd"] < 0.006
    assert values["process_sd"] < 0.003


def test_nothing_to_time_on_is_one_line(tmp_path: Path) -> None:
    with (
        Store.open(str(tmp_path / "results.db"), create=True) as store,
        pytest.raises(MachineError, match="no GPU here to calibrate"),
    ):
        list(calibrate.calibrate(store, InterpreterBackend()))


def test_a_config_that_cannot_be_timed_is_one_line(tmp_path: Path) -> None:
    class Failing(SimulatedBackend):
        def launch(self, arm: Arm) -> Outcome:
            is_default = isinstance(arm, KernelArm) and arm.config == calibrate.arms_of(self)[0].config
            return Outcome(Status.COMPILE_ERROR, reason="planted") if is_default else super().launch(arm)

    with (
        Store.open(str(tmp_path / "results.db"), create=True) as store,
        pytest.raises(MachineError, match="cannot be timed: compile_error, planted"),
    ):
        list(calibrate.calibrate(store, Failing("simulated:3")))


def test_the_configs_calibrated_with_are_the_default_and_its_neighbours() -> None:
    default, *others = (arm.config for arm in calibrate.arms_of(SIMULATED))
    assert len(others) >= 2
    for config in others:
        assert sum(config[name] != default[name] for name in default) == 1
