"""The simulated GPU: the same answer for the same question, and noise of the sizes that its parameters state."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm, Place, Work
from fp8tune.measure.simulated import Noise, SimulatedBackend, SimulatedClock
from fp8tune.records import NamedInts, Problem, Status

STILL = Noise(
    process_sd=0, bimodal_share=0, drift_sd=0, block_sd=0, carry_over_sd=0, throttle_share=0, sample_sd=0,
    outlier_share=0, tick_us=1e-6,
)  # fmt: skip
CONFIGS = [f"colwise BLOCK_SIZE={number}" for number in range(400)]
KEY = "colwise K=5120"


def work(config: str = CONFIGS[0], key: str = KEY, M: int = 16640, bytes_moved: int = 300_000_000) -> Work:
    return Work(f"{key} M={M} {config}", bytes_moved, config, key)


def clock(name: str) -> SimulatedClock:
    return SimulatedBackend(f"simulated:{name}").clock


def log_ratio(timer: SimulatedClock, **place) -> float:
    """The log of a block over the true time."""
    return math.log((timer.block(work(), Place(**place)).time_us or 0) / timer.true_time_us(work()))


def test_the_same_question_has_the_same_answer_whatever_was_asked_before():
    place, used = Place(process=3, round=2, position=5, after="something"), clock("7")
    for round in range(3):
        used.block(work(), Place(round=round))
    assert used.block(work(), place) == clock("7").block(work(), place) == clock("7.0").block(work(), place)
    assert clock("8").block(work(), place) != used.block(work(), place)


def test_another_noise_is_the_same_gpu_on_another_day():
    days = [clock(f"7.{day}") for day in range(200)]
    assert len({day.true_time_us(work()) for day in days}) == 1
    assert len({day.block(work(), Place()) for day in days[:5]}) == 5
    assert np.mean([log_ratio(day) for day in days]) == pytest.approx(0.0, abs=0.005)


def test_a_number_tells_gpus_of_one_seed_apart():
    gpus = [SimulatedBackend(f"simulated:7{rest}") for rest in ("", ".1", ",gpu=1", ",gpu=2")]
    assert [len({gpu.device.uuid_hash for gpu in some}) for some in (gpus[:2], gpus)] == [1, 3]
    assert {gpu.device.name for gpu in gpus} == {"simulated:7"}
    assert len({gpus[index].clock.block(work(), Place()) for index in (0, 2, 3)}) == 1


def test_a_gpu_may_be_wrong_in_a_share_of_the_configs():
    problem = Problem("colwise", NamedInts(M=1024, K=512), "balanced")
    arms = [KernelArm("colwise", problem, NamedInts(BLOCK_SIZE=size)) for size in range(400)]
    wrong, right = SimulatedBackend("simulated:7,gpu=1,wrong=0.25"), SimulatedBackend("simulated:7,gpu=1")
    statuses = [wrong.block(arm, Place()).status for arm in arms]
    assert statuses == [wrong.check(arm).status for arm in arms]
    assert 0.15 < statuses.count(Status.WRONG) / len(arms) < 0.35
    assert {right.block(arm, Place()).status for arm in arms[:50]} == {Status.OK}


@pytest.mark.parametrize("text", ["", "x", "1.", "1.2.3", ".1", "1,", "1,gpu=", "1,gpu=a", "1,wrong=x", "1,wrong=-1"])
def test_a_clock_nobody_knows_is_refused(text):
    with pytest.raises(UsageError, match="unknown timer"):
        SimulatedBackend(f"simulated:{text}")


def test_each_block_is_drawn_anew():
    places = [{}, {"process": 1}, {"round": 1}, {"position": 40}, {"after": "another"}, {"duplicate": True}]
    assert len({SimulatedClock(1).block(work(), Place(**place)) for place in places}) == len(places)


ROUNDS, PROCESSES = ([{name: number} for number in range(400)] for name in ("round", "process"))


@pytest.mark.parametrize(
    ("changed", "calls", "sd"),
    [
        ({}, [{}], 0),
        ({"block_sd": 0.0035}, ROUNDS, 0.0035),
        ({"process_sd": 0.003, "process_degrees": 30}, PROCESSES, 0.003),
        ({"process_sd": 0.003}, ROUNDS[:20], 0),  # as long as the process
        ({"drift_sd": 0.012}, PROCESSES, 0.012),
        ({"carry_over_sd": 0.001}, [{"after": config} for config in CONFIGS], 0.001),
        ({"sample_sd": 0.01}, ROUNDS, 0.01 * 1.1 / math.sqrt(30)),
    ],
    ids=lambda value: next(iter(value), "still") if isinstance(value, dict) else "",
)
def test_noise_has_the_size_it_states(changed, calls, sd):
    """400 draws tell a standard deviation to 3.5 %; the drift is a sum of waves, and near normal only."""
    timer = SimulatedClock(1, replace(STILL, **changed))
    assert float(np.std([log_ratio(timer, **place) for place in calls])) == pytest.approx(sd, rel=0.2, abs=1e-6)


def test_drift_is_slow():
    """Correlation exp(-t / tau): a block apart almost 1, five rounds of 4 s apart about 1/e."""
    timer = SimulatedClock(1, replace(STILL, drift_sd=0.012))
    start, next_block, later = (
        [log_ratio(timer, process=number, **place) for number in range(300)]
        for place in ({}, {"position": 1}, {"round": 5})
    )
    assert np.corrcoef(start, next_block)[0, 1] > 0.95
    assert np.corrcoef(start, later)[0, 1] == pytest.approx(math.exp(-1), abs=0.2)


def test_a_second_mode_belongs_to_a_process_and_averages_out():
    noise = replace(STILL, bimodal_share=1.0)
    logs = [log_ratio(SimulatedClock(1, noise), process=number) for number in range(400)]
    assert len({round(log, 6) for log in logs}) == 2
    assert max(logs) - min(logs) == pytest.approx(math.log1p(noise.mode_slowdown), rel=1e-3)
    assert np.mean(logs) == pytest.approx(0.0, abs=0.001)


def test_outliers_reach_half_again_do_not_move_the_block_and_samples_are_whole_ticks():
    timer = SimulatedClock(1, replace(STILL, outlier_share=0.02))
    blocks = [timer.block(work(), Place(round=number)) for number in range(200)]
    ratios = np.array([block.samples_us for block in blocks]) / timer.true_time_us(work())
    assert (ratios > 1.04).mean() == pytest.approx(0.02, abs=0.008)
    assert 1.3 < ratios.max() <= 1.5 + 1e-6
    assert all(block.time_us == pytest.approx(timer.true_time_us(work()), rel=1e-6) for block in blocks)
    for launches, tick_us in ((1, 1.024), (4, 0.256)):  # launches of a graph share a tick
        block = SimulatedClock(1, Noise(tick_us=1.024)).block(work(), Place(), launches=launches)
        assert block.tick_us == tick_us
        assert all(sample / tick_us == pytest.approx(round(sample / tick_us)) for sample in block.samples_us)


def test_a_slowdown_depends_on_kernel_key_and_config_alone():
    timer = SimulatedClock(1, STILL)
    few, many = (timer.true_time_us(work(M=M, bytes_moved=M * 10_000)) for M in (16_640, 131_072))
    assert few / (5 + 16_640 / 300) == pytest.approx(many / (5 + 131_072 / 300))
    first, second = (
        np.argsort(np.argsort([timer.true_time_us(work(config, key)) for config in CONFIGS]))
        for key in (KEY, "colwise K=2048")
    )
    assert 0.4 < np.corrcoef(first, second)[0, 1] < 0.9  # a config that is good on one key is mostly good on the next
