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

from fp8tune.errors import MachineError
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.backends.interpreter import InterpreterBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.simulated import Noise, SimulatedClock
from fp8tune.measure.timing import tick
from fp8tune.records import Device, NamedInts, Outcome, Status
from fp8tune.stats.calibration import COPY, COUNTED, calibration_of, floor_us, is_calibrated, plan_for, spreads
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.stats.pairs import Block
from fp8tune.store.results import Store
from fp8tune.sweeping import calibrate

sds = st.floats(0.0, 0.05)


def measured(process: float, block: float) -> dict[str, float]:
    return {"process_sd": process, "block_sd": block}


def test_without_a_calibration_the_protocol_is_the_standard_one() -> None:
    assert plan_for({}) == plan_for({"copy_ceiling_gb_per_s": 3000.0}) == MeasuringPlan()
    assert not is_calibrated({"copy_ceiling_gb_per_s": 3000.0})


def test_the_guessed_noise_asks_for_the_standard_protocol() -> None:
    assert plan_for(measured(0.003, 0.0035)) == MeasuringPlan()


def test_a_quiet_device_needs_less_and_a_noisy_one_more() -> None:
    quiet, noisy = plan_for(measured(0.0005, 0.0002)), plan_for(measured(0.006, 0.004))
    assert (quiet.processes, quiet.rounds, quiet.more_processes) == (4, 4, (8, 16, 32))
    assert noisy.processes > MeasuringPlan().processes
    assert noisy.keep_band == MeasuringPlan().keep_band
    far_off = plan_for(measured(0.03, 0.03))
    assert far_off.keep_band > MeasuringPlan().keep_band
    assert far_off.tie_band / far_off.keep_band == pytest.approx(2 / 3)
    assert far_off.screen_band > MeasuringPlan().screen_band


@given(sds, sds)
def test_enough_is_measured_to_tell_that_two_equal_configs_are_a_near_tie(process: float, block: float) -> None:
    protocol = plan_for(measured(process, block))
    assert 4 <= protocol.rounds <= 6
    assert 4 <= protocol.processes <= 12
    last = protocol.more_processes[-1]
    sd = math.sqrt(2 * (process**2 + block**2 / protocol.rounds))
    bound = t.isf(protocol.alpha / (7 * protocol.decisions), last - 1) * sd / math.sqrt(last)
    assert bound <= protocol.keep_band


@given(sds, sds, sds)
def test_more_noise_never_asks_for_less(process: float, block: float, more: float) -> None:
    one, other = plan_for(measured(process, block)), plan_for(measured(process + more, block))
    assert other.keep_band >= one.keep_band
    assert other.screen_band >= one.screen_band


def test_the_floor_follows_the_finest_tick() -> None:
    assert floor_us({}, None) == 0.0
    assert floor_us({}, 0.032) == pytest.approx(12.8)
    assert floor_us({"timer_tick_us": 0.01}, 0.032) == pytest.approx(4.0)  # samples show an upper bound only


def test_a_coarse_tick_raises_the_floor() -> None:
    """1.024 us, as seen on some devices, is 0.25 % of 410 us."""
    coarse, fine = (
        SimulatedClock(1, Noise(tick_us=tick_us)).block(Work("x", 300_000_000), Place()).samples_us
        for tick_us in (1.024, 0.032)
    )
    assert floor_us({}, tick(coarse)) == pytest.approx(410, rel=0.01)
    assert floor_us({}, tick(fine)) == pytest.approx(12.8, rel=0.01)


# Whose calibration a device uses

H200 = Device("sm_90", "NVIDIA H200", "aaaa", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
PEER, OTHER = replace(H200, uuid_hash="bbbb"), replace(H200, uuid_hash="cccc")
WHOLE = {"process_sd": 0.001, "block_sd": 0.002, "timer_tick_us": 0.032, "empty_kernel_us": 9.0, COPY: 4160.0}


def test_a_gpu_is_known_by_its_id_and_driver_whatever_torch_there_is() -> None:
    measured = {H200: WHOLE}
    assert calibration_of(H200, measured) == (WHOLE, True)
    assert calibration_of(replace(H200, torch="2.13.0", triton="3.7.1"), measured) == (WHOLE, True)
    assert calibration_of(replace(H200, driver="590.0"), measured) == ({}, False)
    nameless = replace(H200, uuid_hash="")
    assert calibration_of(nameless, {replace(nameless, torch="2.13.0"): WHOLE})[1] is False
    old, new = replace(H200, torch="2.9.0"), replace(H200, torch="2.10.0")
    assert calibration_of(H200, {old: WHOLE, new: {**WHOLE, "process_sd": 0.002}})[0]["process_sd"] == 0.002


def test_a_gpu_without_a_calibration_uses_the_noise_of_its_peers_and_never_their_speed() -> None:
    noisier = {**WHOLE, "process_sd": 0.003, COUNTED: 20.0}
    values, is_own = calibration_of(H200, {PEER: WHOLE, OTHER: noisier, H200: {COPY: 4000.0}})
    assert not is_own
    assert values == {"process_sd": 0.003, "block_sd": 0.002, "timer_tick_us": 0.032, COPY: 4000.0}


@pytest.mark.parametrize("field", ["arch", "name", "driver", "runtime", "torch", "triton"])
def test_a_device_that_differs_in_more_than_the_id_is_no_peer(field: str) -> None:
    assert calibration_of(H200, {replace(PEER, **{field: "other"}): WHOLE})[1] is False


# Calibrating

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
    assert result.protocol == plan_for(result.values)


def test_one_stalled_block_is_not_taken_for_noise() -> None:
    """Without the median it is 7.3 % from block to block."""
    random, blocks = np.random.default_rng(4), []
    configs = [NamedInts(BLOCK_SIZE=size) for size in (32, 64, 128)]
    for process, round, config in itertools.product(range(calibrate.PROCESSES), range(calibrate.ROUNDS), configs):
        stall = 4 if (process, round) == (3, 2) and config == configs[1] else 1
        time_us = 100 * stall * math.exp(0.005 * random.standard_normal())
        blocks.append(Block(f"{process:02d}", round, config, time_us))
    values = spreads(blocks)
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
