"""A simulated GPU for tests and demonstrations: true times that look like real ones, and a GPU's noise on top.

A block's log time is the sum of

- the config's true log time: the time of moving the bytes times a slowdown from :func:`log_slowdown`;
- process x config: heavy-tailed, and for some configs a second mode that a process is in or not; optionally a level of
  the process, the same for all configs;
- drift and throttle episodes along the process's wall clock, and what the block before left behind;
- the block's own noise. Samples scatter around that, some far above, and are whole ticks.

Everything is a function of the seeds and the arguments, in any order: no state, no process id, no time of day. One seed
makes the GPU, its true times and what a config leaves behind; another the noise, as on another day.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from fp8tune.errors import UsageError
from fp8tune.measure import device
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.engine import Screened
from fp8tune.measure.trees import Tree
from fp8tune.records import ClockLimits, Device, Kind, NamedInts, Outcome, Problem, Status
from fp8tune.stats.means import trimmed_mean

Floats = NDArray[np.float64]

NUMBER = "[0-9]{1,18}"
TIMER = re.compile(
    rf"simulated:(?P<seed>{NUMBER})(?:\.(?P<noise>{NUMBER}))?(?:,gpu=(?P<gpu>{NUMBER}))?"
    r"(?:,wrong=(?P<wrong>[0-9]{1,3}(?:\.[0-9]{1,9})?))?(?:,host=(?P<host>[0-9]{1,9}(?:\.[0-9]{1,9})?))?"
    rf"(?:,triton=(?P<triton>{NUMBER}))?(?:,block=(?P<block>[0-9]{{1,3}}(?:\.[0-9]{{1,9}})?))?"
)

BYTES_PER_US = 3e6
LAUNCH_US = 5.0  # the true time without slowdown: 5 us and the bytes at 3 TB/s

KINSHIP = 0.7  # correlation of a config's rank on two keys: what is good on one shape is mostly good on the next

ROUND_S = 4.0  # wall time from one round of a process to its next


@dataclass(frozen=True)
class Noise:
    """Scatter of a device's times. Shares and standard deviations of log times: 0.01 is one percent.

    The defaults are guesses on the heavy side; :data:`MEASURED` holds measured values.
    """

    process_sd: float = 0.003  # process x config: a draw a process and config, constant while the process lives
    process_degrees: float = 4.0  # degrees of freedom of its Student t: few, so that now and then a process is far off
    worker_sd: float = 0.0  # a draw a process that all its configs share: for instance where its memory lies
    bimodal_share: float = 0.05  # share of configs that have a second, slower mode
    mode_probability: float = 0.3
    mode_slowdown: float = 0.015
    drift_sd: float = 0.012
    drift_tau_s: float = 20.0
    block_sd: float = 0.0035
    carry_over_sd: float = 0.001  # effect of a config on the block after its own
    throttle_share: float = 0.005  # share of the time spent in throttle episodes, which last about ``throttle_tau_s``
    throttle_tau_s: float = 3.0
    throttle_slowdown: float = 0.06
    sample_sd: float = 0.01
    outlier_share: float = 0.02  # share of samples that are 5-50 % high
    tick_us: float = 0.032
    block_s: float = 0.03  # wall time of one block
    samples: int = 30

    def process_effect(self, random: Generator, count: int) -> Floats:
        """Draw the effect of one process on each of ``count`` configs."""
        scale = self.process_sd * math.sqrt((self.process_degrees - 2) / self.process_degrees)
        return scale * random.standard_t(self.process_degrees, count)

    def mode_effect(self, random: Generator, bimodal: NDArray[np.bool_]) -> Floats:
        """Draw the effect of one process on configs with a second mode."""
        slow = bimodal & (random.random(len(bimodal)) < self.mode_probability)
        return np.where(slow, math.log1p(self.mode_slowdown), 0.0)

    def mean_mode(self, bimodal: NDArray[np.bool_]) -> Floats:
        """Return the mean effect of the second mode: a part of the true time."""
        return np.where(bimodal, self.mode_probability * math.log1p(self.mode_slowdown), 0.0)

    def wall(self, random: Generator) -> Callable[[Floats], Floats]:
        """Return one process's drift and throttle episodes, as a function of its wall time in seconds."""
        drift, heat = _wander(random, self.drift_tau_s), _wander(random, self.throttle_tau_s)
        limit = math.inf if self.throttle_share <= 0 else NormalDist().inv_cdf(1 - self.throttle_share)
        slow = math.log1p(self.throttle_slowdown)
        return lambda times_s: self.drift_sd * drift(times_s) + slow * (heat(times_s) > limit)

    def samples_us(self, random: Generator, block_us: float, tick_us: float) -> tuple[float, ...]:
        """Draw one block's samples in microseconds, whole ticks."""
        samples = block_us * (1 + self.sample_sd * random.standard_normal(self.samples))
        outlier = random.random(self.samples) < self.outlier_share
        samples = np.where(outlier, samples * random.uniform(1.05, 1.5, self.samples), samples)
        return tuple((np.maximum(1, np.round(samples / tick_us)) * tick_us).tolist())


@dataclass(frozen=True)
class Upgrade:
    """Changes of true times from one pretended Triton version to another.

    By default a tenth of the rankings change, and half of the new winners were no rivals before.
    """

    number: int = 1
    share: float = 0.025  # share of a kernel's configs whose machine code becomes faster or slower
    sd: float = 0.13  # standard deviation of their log times' changes
    kinship: float = KINSHIP  # correlation of a config's change on two keys, which run the same program


# The largest of several devices over 20 fresh processes each: five H100s 0.09 to 0.13 % from process to process and
# 0.27 to 0.29 % from block to block, four H200s at once 0.04 to 0.11 % and 0.15 to 0.16 %.
MEASURED: Mapping[str, Noise] = {
    "NVIDIA H100 80GB HBM3": Noise(process_sd=0.0013, block_sd=0.0029, tick_us=0.032),
    "NVIDIA H200": Noise(process_sd=0.0011, block_sd=0.0016, tick_us=0.032),
}
"""Device name -> noise that was measured there; the rest are the guesses above."""


def log_slowdown(quantile: Floats | float, near: float) -> Floats:
    """Return the log ratio to its problem's best of the config at this quantile of all configs.

    ``near`` is the share within 2 % of the best. The other steps are the medians of 131 problems of 62-135 configs
    swept on an H100 and an H200: 7 % within 1.1x, 31 % within 1.3x, three quarters within 2x, the last at 4-10x.
    """
    quantiles = [0.0, near, near + 0.05, near + 0.29, near + 0.75, 1.0]
    slowdowns: Floats = np.interp(quantile, quantiles, np.log([1.0, 1.02, 1.1, 1.3, 2.0, 8.0]))
    return slowdowns


def near_share(uniform: float) -> float:
    """Return the share of configs within 2 % of the best from a uniform draw: log-uniform over 1.6-22 %.

    Harder than measured sweeps, whose median was 3 of 128, and of which a tenth had more than 14.
    """
    return 0.016 * math.exp(uniform * math.log(0.22 / 0.016))


class SimulatedClock:
    """Draws the blocks of a simulated GPU."""

    def __init__(self, seed: int, noise: Noise = Noise(), noise_seed: int = 0, upgrade: Upgrade = Upgrade()) -> None:
        self.seed, self.noise, self.upgrade = seed, noise, upgrade
        self._gpu_seed = str(seed)
        self._noise_seed = f"{seed}.{noise_seed}" if noise_seed else str(seed)
        self._process_us = cache(self._true_us_in_process)  # making a generator takes longer than a draw

    def true_time_us(self, work: Work) -> float:
        """Return the time of a launch in microseconds without noise: the same in every process and round."""
        key, config = work.key or work.identity, work.config or work.identity
        quantile = 0.5 * math.erfc(-self._mixed("rank", key, config, KINSHIP) / math.sqrt(2))
        slowdown = log_slowdown(quantile, near_share(_uniform(self._gpu_seed, "near", key)))
        mode = self.noise.mean_mode(self._bimodal(work))[0]
        change, version = 0.0, f"triton {self.upgrade.number}"
        if self.upgrade.number > 1 and _uniform(self._gpu_seed, version, config) < self.upgrade.share:
            change = self.upgrade.sd * self._mixed(version, key, config, self.upgrade.kinship)
        return float((LAUNCH_US + work.bytes_moved / BYTES_PER_US) * np.exp(slowdown + mode + change))

    def _mixed(self, name: str, key: str, config: str, kinship: float) -> float:
        """Draw a normal number of a config on a key, with this correlation to that on any other key."""
        shared, own = _normal(self._gpu_seed, name, config), _normal(self._gpu_seed, name, key, config)
        return math.sqrt(kinship) * shared + math.sqrt(1 - kinship) * own

    def block(self, work: Work, place: Place, host_us: float = 0.0, launches: int = 1) -> Outcome:
        """Draw one block: the same for the same seed, work and place.

        ``host_us``: time of a launch on the host, which a sample takes at least; ``launches`` of a graph share a tick.
        """
        names = [str(place.process), str(place.round), work.identity + " twin" * place.duplicate]
        if place.clock is not None:  # processes that take turns: each comes more than once in a round
            names.append(str(place.position))
        clock = place.process if place.clock is None else place.clock
        wall_s = np.array([ROUND_S * place.round + self.noise.block_s * place.position])
        drift = _wall(self._noise_seed, self.noise, clock)(wall_s)[0]
        carry = self.noise.carry_over_sd * _normal(self._gpu_seed, "after", place.after) if place.after else 0.0
        own = self.noise.block_sd * self._random("block", *names).standard_normal()
        true_us, in_process = self._process_us(work, place.process)
        block_us = max(host_us, true_us * math.exp(in_process + float(drift + carry + own)))
        tick_us = self.noise.tick_us / launches
        samples_us = self.noise.samples_us(self._random("samples", *names), block_us, tick_us)
        return Outcome(Status.OK, trimmed_mean(samples_us), "", samples_us, tick_us)

    def is_wrong(self, work: Work, gpu: str, share: float) -> bool:
        """Return True if a GPU that is wrong in a share of the configs is wrong in this one."""
        return share > 0 and _uniform(self._gpu_seed, "wrong", gpu, work.identity) < share

    def _true_us_in_process(self, work: Work, process: int) -> tuple[float, float]:
        """Return the true time and the log effect of a process, the same in every block; 0 on average."""
        bimodal, random = self._bimodal(work), self._random("process", str(process), work.identity)
        effect = self.noise.process_effect(random, 1) + self.noise.mode_effect(random, bimodal)
        in_process = float((effect - self.noise.mean_mode(bimodal))[0])
        if self.noise.worker_sd:
            in_process += self.noise.worker_sd * float(self._random("worker", str(process)).standard_normal())
        return self.true_time_us(work), in_process

    def _bimodal(self, work: Work) -> NDArray[np.bool_]:
        return np.array([_uniform(self._gpu_seed, "bimodal", work.identity) < self.noise.bimodal_share])

    def _random(self, *names: str) -> Generator:
        return _generator(self._noise_seed, *names)


@lru_cache(maxsize=64)
def _wall(seed: str, noise: Noise, process: int) -> Callable[[Floats], Floats]:
    return noise.wall(_generator(seed, "wall", str(process)))


@lru_cache(maxsize=1 << 16)  # the same work is drawn in every block
def _normal(seed: str, *names: str) -> float:
    return float(_generator(seed, *names).standard_normal())


@lru_cache(maxsize=1 << 16)
def _uniform(seed: str, *names: str) -> float:
    return float(_generator(seed, *names).random())


def _generator(seed: str, *names: str) -> Generator:
    """Return the generator of ``default_rng`` for the digest's bytes, in a quarter of its time: 30 us for 115."""
    digest = hashlib.sha256("\n".join((seed, *names)).encode()).digest()
    return Generator(PCG64(SeedSequence(np.frombuffer(digest, np.uint8).astype(np.uint32))))


def _wander(random: Generator, tau_s: float, waves: int = 32) -> Callable[[Floats], Floats]:
    """Return a random function of time with unit variance and correlation ``exp(-|t| / tau)``.

    A sum of waves with Cauchy-distributed frequencies: the spectrum of an Ornstein-Uhlenbeck process is a Lorentzian.
    """
    frequencies = random.standard_cauchy(waves) / tau_s
    phases = random.uniform(0, 2 * math.pi, waves)
    return lambda times_s: math.sqrt(2 / waves) * np.cos(np.multiply.outer(times_s, frequencies) + phases).sum(axis=-1)


class SimulatedBackend:
    """A GPU by its timer: ``simulated:SEED[.NOISE][,gpu=NUMBER][,wrong=SHARE][,host=US][,triton=NUMBER][,block=S]``.

    The seed makes the kind of GPU and its true times, the noise its day. Devices of one seed have one name; ``gpu``
    tells them apart. A device may be wrong in a share of the configs. Its host may need a time for a launch: it hides
    shorter ones from events and not from graphs. ``triton`` pretends a version, and each from 2 on changes some
    true times (:class:`Upgrade`). A block may take seconds, as on a GPU; else it takes none. It is its own worker: its
    methods are those of :class:`fp8tune.measure.backends.ProcessBackend` and
    :class:`~fp8tune.measure.backends.ProcessWorker`.
    """

    kind = Kind.SIMULATED
    times = True
    limits = ClockLimits()

    def __init__(self, timer: str) -> None:
        """Raises UsageError for a text of another form."""
        if (name := TIMER.fullmatch(timer)) is None:
            raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
        self.timer, self.seed, self.noise = timer, int(name["seed"]), int(name["noise"] or 0)
        self.wrong, self.host_us, self.block_s = (float(name[key] or 0) for key in ("wrong", "host", "block"))
        gpu = "" if name["gpu"] is None else device.hash_uuid(f"simulated:{self.seed} gpu {int(name['gpu'])}")
        self.triton = int(name["triton"] or 0)  # no kernel runs, so there is no version unless one is pretended
        version = f"{self.triton}.0" if self.triton else ""
        self.device = Device("simulated", f"simulated:{self.seed}", uuid_hash=gpu, triton=version)
        self._process = f"simulated-{os.urandom(6).hex()}"

    @cached_property
    def clock(self) -> SimulatedClock:
        """The clock that draws the times."""
        return SimulatedClock(self.seed, noise_seed=self.noise, upgrade=Upgrade(self.triton))

    def worker(self, tree: Tree | None = None) -> SimulatedBackend:
        """Return itself."""
        return self

    compilers = 0

    def compile(self, arms: Sequence[KernelArm]) -> None:
        """Compile nothing."""

    def is_compiled(self, arm: KernelArm) -> bool:
        """Return True."""
        return True

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Screened]:
        """Draw a block of each arm, with its number."""
        for number, (arm, place) in enumerate(zip(arms, places, strict=True)):
            if is_over():
                return
            yield number, self.block(arm, place)

    def build(self, arm: Arm) -> Outcome:
        """Build and launch nothing."""
        return Outcome(Status.OK)

    launch = build

    def check(self, arm: Arm) -> Outcome:
        """Draw whether the arm is wrong."""
        if self.wrong and self.clock.is_wrong(arm.work, self.device.uuid_hash, self.wrong):
            return Outcome(Status.WRONG, reason="a wrong byte of the simulated GPU", process=self._process)
        return Outcome(Status.OK)

    def block(self, arm: Arm, place: Place) -> Outcome:
        """Draw a block of an arm that is not wrong."""
        if (checked := self.check(arm)).status is not Status.OK:
            return checked
        time.sleep(self.block_s)
        launches = arm.in_graph if isinstance(arm, KernelArm) else 0
        outcome = self.clock.block(arm.work, place, 0.0 if launches else self.host_us, max(1, launches))
        return replace(outcome, process=self._process)

    checked_block = block

    def output_bits(
        self,
        reference: str,
        problem: Problem,
        largest: Problem,
        parts: Mapping[int, Problem],
        configs: Sequence[NamedInts],
    ) -> dict[NamedInts, dict[int, str]]:
        """Draw one of three orders of sums for each config, the same at every size."""
        orders = {config: int(3 * _uniform(str(self.seed), "order", config.canonical)) for config in configs}
        return {config: dict.fromkeys(parts, f"{order}") for config, order in orders.items()}

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Run nothing."""

    def close(self) -> None:
        """End nothing."""
