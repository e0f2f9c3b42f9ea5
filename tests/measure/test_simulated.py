"""The simulated GPU: the same answer for the same question, and noise of the sizes that its parameters state."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm, Place, Work
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.simulated import Noise, SimulatedClock, log_slowdown, near_share
from fp8tune.records import NamedInts, Problem, Status
from fp8tune.stats.means import trimmed_mean

STILL = Noise(
    process_sd=0, bimodal_share=0, drift_sd=0, block_sd=0, carry_over_sd=0, throttle_share=0, sample_sd=0,
    outlier_share=0, tick_us=1e-6,
)  # fmt: skip
CONFIGS = [f"colwise BLOCK_SIZE={number}" for number in range(400)]


Asked = tuple[Work, Place]
KEY = "colwise K=5120"


def work(config: str = CONFIGS[0], key: str = KEY, **others) -> Work:
    return Work(**{"identity": f"{key} M=16640 {config}", "bytes_moved": 300_000_000, "config": config, "key": key,
                   **others})  # fmt: skip


def asked(config: str = CONFIGS[0], key: str = KEY, **place) -> Asked:
    return work(config, key), Place(**place)


def clock(name: str) -> SimulatedClock:
    return SimulatedBackend(f"simulated:{name}").clock


def block_us(timer: SimulatedClock, of: Asked) -> float:
    return trimmed_mean(timer.block(*of).samples_us)


def spread(noise: Noise, trials: list[Asked]) -> float:
    """Standard deviation of log block values around the true times."""
    timer = SimulatedClock(1, noise)
    return float(np.std([math.log(block_us(timer, of) / timer.true_time_us(of[0])) for of in trials]))


def test_the_same_question_has_the_same_answer_whatever_was_asked_before():
    of = asked(process=3, round=2, position=5, after="something")
    first = clock("7").block(*of)
    used = clock("7")
    for round in range(3):
        used.block(*asked(round=round))
    assert used.block(*of) == first
    assert clock("8").block(*of) != first


def test_another_noise_is_the_same_gpu_on_another_day():
    one, other, of = clock("7"), clock("7.1"), asked()
    assert one.true_time_us(of[0]) == other.true_time_us(of[0])
    assert one.block(*of) != other.block(*of)
    assert one.block(*of) == clock("7.0").block(*of)
    days = [block_us(clock(f"7.{day}"), of) / one.true_time_us(of[0]) for day in range(200)]
    assert np.mean(np.log(days)) == pytest.approx(0.0, abs=0.005)
    names = {SimulatedBackend(f"simulated:7{day}").device.name for day in ("", ".1", ".2")}
    assert names == {"simulated:7"}


def test_a_number_tells_gpus_of_one_seed_apart():
    gpus = [SimulatedBackend(f"simulated:7{rest}") for rest in ("", ",gpu=1", ",gpu=2")]
    assert len({gpu.device.uuid_hash for gpu in gpus}) == 3
    assert {gpu.device.name for gpu in gpus} == {"simulated:7"}
    assert len({gpu.clock.block(*asked()) for gpu in gpus}) == 1


def test_a_gpu_may_be_wrong_in_a_share_of_the_configs():
    problem = Problem("colwise", NamedInts(M=1024, K=512), "balanced")
    arms = [KernelArm("colwise", problem, NamedInts(BLOCK_SIZE=size)) for size in range(400)]
    wrong = SimulatedBackend("simulated:7,gpu=1,wrong=0.25")
    statuses = [wrong.block(arm, Place()).status for arm in arms]
    assert statuses == [wrong.block(arm, Place()).status for arm in arms]
    assert 0.15 < statuses.count(Status.WRONG) / len(arms) < 0.35
    assert {SimulatedBackend("simulated:7,gpu=1").block(arm, Place()).status for arm in arms[:50]} == {Status.OK}


@pytest.mark.parametrize(
    "text",
    [
        *("simulated:", "simulated:x", "simulated:1.", "simulated:1.2.3", "simulated:.1"),
        *("simulated:1,", "simulated:1,gpu=", "simulated:1,gpu=a", "simulated:1,wrong=x", "simulated:1,wrong=-1"),
    ],
)
def test_a_clock_nobody_knows_is_refused(text):
    with pytest.raises(UsageError, match="unknown timer"):
        SimulatedBackend(text)


@pytest.mark.parametrize(
    "other", [{"process": 1}, {"round": 1}, {"position": 40}, {"after": "another"}, {"duplicate": True}], ids=str
)
def test_each_block_is_drawn_anew(other):
    timer = SimulatedClock(1)
    assert timer.block(*asked()) != timer.block(*asked(**other))


def test_without_noise_a_block_is_the_true_time():
    timer = SimulatedClock(1, STILL)
    assert block_us(timer, asked()) == pytest.approx(timer.true_time_us(work()), rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "trials", "sd"),
    [
        ({"block_sd": 0.0035}, [asked(round=number) for number in range(400)], 0.0035),
        ({"process_sd": 0.003, "process_degrees": 30}, [asked(process=number) for number in range(400)], 0.003),
        ({"drift_sd": 0.012}, [asked(process=number) for number in range(400)], 0.012),
        ({"carry_over_sd": 0.001}, [asked(after=config) for config in CONFIGS], 0.001),
        ({"sample_sd": 0.01}, [asked(round=number) for number in range(400)], 0.01 * 1.1 / math.sqrt(30)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_noise_has_the_size_it_states(changed, trials, sd):
    """Of 400 draws a standard deviation is known to 3.5 %; the drift is a sum of waves, and near normal only."""
    assert spread(replace(STILL, **changed), trials) == pytest.approx(sd, rel=0.2)


def test_a_process_effect_lasts_as_long_as_the_process():
    noise = replace(STILL, process_sd=0.003)
    assert spread(noise, [asked(round=number) for number in range(20)]) < 1e-6


def test_drift_is_slow():
    """Correlation exp(-t / tau): a block apart almost 1, five rounds of 4 s apart about 1/e."""
    noise = replace(STILL, drift_sd=0.012)
    timer = SimulatedClock(1, noise)

    def logs(**place: int) -> list[float]:
        return [math.log(block_us(timer, asked(process=number, **place))) for number in range(300)]

    start = logs()
    assert np.corrcoef(start, logs(position=1))[0, 1] > 0.95
    assert np.corrcoef(start, logs(round=5))[0, 1] == pytest.approx(math.exp(-1), abs=0.2)


def test_a_second_mode_is_a_process_matter_and_averages_out():
    noise = replace(STILL, bimodal_share=1.0)
    timer = SimulatedClock(1, noise)
    logs = [math.log(block_us(timer, asked(process=number)) / timer.true_time_us(work())) for number in range(400)]
    assert len({round(log, 6) for log in logs}) == 2
    assert max(logs) - min(logs) == pytest.approx(math.log1p(noise.mode_slowdown), rel=1e-3)
    assert np.mean(logs) == pytest.approx(0.0, abs=0.001)


def test_throttle_episodes_take_their_share_and_come_in_runs():
    noise = replace(STILL, throttle_share=0.1)
    timer = SimulatedClock(1, noise)
    limit_us = 1.05 * timer.true_time_us(work())
    grid = [[asked(process=number, position=place) for place in range(20)] for number in range(80)]
    slow = np.array([[block_us(timer, one) > limit_us for one in of_process] for of_process in grid])
    assert slow.mean() == pytest.approx(0.1, abs=0.06)
    assert (slow[:, 1:] & slow[:, :-1]).sum() > 0.8 * slow[:, :-1].sum()


def test_outliers_reach_half_again_and_do_not_move_the_block():
    timer = SimulatedClock(1, replace(STILL, outlier_share=0.02))
    blocks = [timer.block(*asked(round=number)).samples_us for number in range(200)]
    ratios = np.array(blocks) / timer.true_time_us(work())
    assert (ratios > 1.04).mean() == pytest.approx(0.02, abs=0.008)
    assert 1.3 < ratios.max() <= 1.5 + 1e-6
    assert all(trimmed_mean(samples) == pytest.approx(timer.true_time_us(work()), rel=1e-6) for samples in blocks)


def test_samples_are_whole_ticks():
    block = SimulatedClock(1, Noise(tick_us=1.024)).block(*asked())
    assert all(sample / 1.024 == pytest.approx(round(sample / 1.024)) for sample in block.samples_us)
    assert block.tick_us == 1.024


# True times


def test_what_a_config_loses_depends_on_kernel_key_and_config_alone():
    timer = SimulatedClock(1, STILL)
    few, many = (work(identity=f"M={M}", bytes_moved=M * 10_000) for M in (16_640, 131_072))
    slowdown = timer.true_time_us(few) / (5 + 16_640 / 300)
    assert slowdown == pytest.approx(timer.true_time_us(many) / (5 + 131_072 / 300))


def test_what_is_good_on_one_key_is_mostly_good_on_the_next():
    timer = SimulatedClock(1, STILL)
    first, second = (
        [timer.true_time_us(work(config, key)) for config in CONFIGS] for key in ("colwise K=5120", "colwise K=2048")
    )
    assert 0.4 < np.corrcoef(np.argsort(np.argsort(first)), np.argsort(np.argsort(second)))[0, 1] < 0.9


def test_landscapes_have_many_near_ties_and_a_few_slow_configs():
    quantiles = (np.arange(128) + 0.5) / 128
    counts = []
    for uniform in (0.0, 0.5, 1.0):
        slowdowns = np.exp(log_slowdown(quantiles, near_share(uniform)))
        counts.append(int((slowdowns <= 1.02).sum()))
        assert slowdowns[0] < 1.01
        assert 4 < slowdowns[-1] < 10
        assert list(slowdowns) == sorted(slowdowns)
    assert counts == [2, 8, 28]
