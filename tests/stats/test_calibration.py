from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from fp8tune.measure.arms import Place, Work
from fp8tune.measure.simulated import Noise, SimulatedClock
from fp8tune.measure.timing import tick
from fp8tune.records import Device
from fp8tune.stats.calibration import calibration_of, floor_us, is_calibrated, plan_for
from fp8tune.stats.decide import MeasuringPlan

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
    single, second = plan_for(measured(process, block)), plan_for(measured(process + more, block))
    assert second.keep_band >= single.keep_band
    assert second.screen_band >= single.screen_band


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
WHOLE = {"process_sd": 0.001, "block_sd": 0.002, "timer_tick_us": 0.032, "copy_ceiling_gb_per_s": 4160.0}


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
    noisier = {**WHOLE, "process_sd": 0.003, "calibration_processes": 20.0}
    values, is_own = calibration_of(H200, {PEER: WHOLE, OTHER: noisier, H200: {"copy_ceiling_gb_per_s": 4000.0}})
    assert not is_own
    assert values == {"process_sd": 0.003, "block_sd": 0.002, "timer_tick_us": 0.032, "copy_ceiling_gb_per_s": 4000.0}


@pytest.mark.parametrize("field", ["arch", "name", "driver", "runtime", "torch", "triton"])
def test_a_device_that_differs_in_more_than_the_id_is_no_peer(field: str) -> None:
    assert calibration_of(H200, {replace(PEER, **{field: "other"}): WHOLE})[1] is False
