"""From finals to a pick: when enough is measured, and what the numbers then allow to say.

The process is the unit of replication: a config's times agree far better within a process than between processes.
So nothing here computes a confidence from the blocks or samples of one process. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8tune.choose.pairs import Axes, Pairs, largest_block
from fp8tune.choose.verdict import Kept as Kept
from fp8tune.choose.verdict import PickVerdict as PickVerdict
from fp8tune.records import FinalsRun, NamedInts, ProcessTimes
from fp8tune.stats.means import TRIMMED_SHARE

TICK_SHARE = 0.0025
"""Largest share of a time that a tick of the timer may be before it counts: a quarter of the tie band."""

FinalsTimes = Mapping[NamedInts, Sequence[ProcessTimes]]
"""What the finals timed of each finalist."""


@dataclass(frozen=True)
class MeasuringPlan:
    """How much is measured and how sure a pick must be; a device's calibration may say otherwise."""

    screen_rounds: int = 3
    screen_band: float = 0.04
    """Finalists lie within this share of the apparent best, or within ``screen_sigmas``, whichever is more."""
    screen_sigmas: float = 4.0
    finalists: int = 8
    processes: int = 6
    rounds: int = 6
    more_processes: tuple[int, ...] = (12, 24, 48)
    """How many processes a row gets in all while it is ambiguous or contested. Simulated, two sweeps from scratch agree
    on 89 % of rows with at most 24 and on 91.5 % with 48; a row takes 12.7 and 16.3 on average."""
    tie_band: float = 0.01
    keep_band: float = 0.015
    """The incumbent keeps its place until it is proven to be slower than another by more than this."""
    alpha: float = 0.025
    fastest: int = 2
    """Finalists that are in for their times alone; the others are the likeliest to be the pick."""
    screen_error: float = 0.006
    """Standard deviation of a screened log time: of one process, with what drifts within a round."""
    edge_sigmas: float = 1.5
    """So many standard errors from the edge of the tie band, the next sweep might find a config on its other side."""

    @property
    def decisions(self) -> int:
        """How often a row may be decided. Each time is a chance to be wrong, so ``alpha`` is shared out."""
        return 1 + len(self.more_processes)


class Block(NamedTuple):
    """One timed block of the finals; a tuple, for there are many."""

    process: str
    round: int
    config: NamedInts
    time_us: float


@dataclass(frozen=True)
class Decision:
    """The pick of one problem, with its bounds. Slowdowns are shares: 0.01 is one percent slower."""

    config: NamedInts
    """Empty where the pick is a published row whose source names none."""
    verdict: PickVerdict | None
    """None for published rows: their sources say too little."""
    time_us: float
    """Of finals the geometric mean over processes, of a screen the median."""
    runner_up: NamedInts | None = None
    """The fastest other finalist; it may be faster than the pick."""
    ratio: float | None = None
    """runner-up / pick: below 1 where the pick is tied with a faster one."""
    lower: float = -math.inf
    """Lower bound of the pick's slowdown against the runner-up."""
    upper: float = math.inf
    """Upper bound of the pick's slowdown against every other finalist."""
    processes: int = 0
    """The unit of replication; of a published row, printed figures."""
    contested: bool = False
    """Whether the pick, or a config preferred to it, may be on the other side of the edge of the tie band."""
    times_us: Mapping[NamedInts, float] = field(default_factory=dict, compare=False)
    """Of each finalist; empty where there were no finals."""
    kept: Kept = Kept.NOTHING
    """Why the runner-up is not the pick where it is faster."""

    def kept_as(self, kept: Kept) -> Decision:
        """The same with why its pick stays, if the runner-up is faster."""
        return replace(self, kept=kept) if self.ratio is not None and self.ratio < 1 else self


def process_values(blocks: Iterable[Block]) -> dict[NamedInts, dict[str, float]]:
    """Config -> process -> log microseconds: the trimmed mean of the process' round-centred log times.

    A round's centre is its mean over configs, so drift from round to round cancels; a quarter of the rounds is cut at
    each end. The process' own level is added back. Of a process that was stopped half-way, only the largest set of
    configs times rounds without a gap counts.
    """
    processes: dict[str, dict[int, dict[NamedInts, float]]] = {}
    for block in blocks:
        processes.setdefault(block.process, {}).setdefault(block.round, {})[block.config] = math.log(block.time_us)
    alike: dict[tuple[tuple[NamedInts, ...], int], dict[str, list[list[float]]]] = {}
    for process in sorted(processes):
        rounds = processes[process]
        configs, numbers = largest_block(rounds)
        logs_of = alike.setdefault((tuple(configs), len(numbers)), {})
        logs_of[process] = [[rounds[number][config] for config in configs] for number in numbers]
    found: dict[str, dict[NamedInts, float]] = {}
    for (configs_of, _), logs_of in alike.items():  # processes with the same configs and as many rounds, all at once
        logs = np.array(list(logs_of.values()))
        centres = logs.mean(axis=2, keepdims=True)
        means = centres[..., 0].mean(axis=1, keepdims=True) + _trimmed_mean(logs - centres)
        for process, of_process in zip(logs_of, means.tolist(), strict=True):
            found[process] = dict(zip(configs_of, of_process, strict=True))
    values: dict[NamedInts, dict[str, float]] = {}
    for process in sorted(found):
        for config, value in found[process].items():
            values.setdefault(config, {})[process] = value
    return values


def decide(
    values: Mapping[NamedInts, Mapping[str, float]],
    *,
    incumbent: NamedInts | None,
    default: NamedInts | None,
    axes: Axes,
    plan: MeasuringPlan = MeasuringPlan(),
) -> Decision:
    """The pick from one value a process and config (:func:`process_values`), and how sure it is.

    The incumbent (the committed table's entry, or None) stays unless another config is proven to be faster by more than
    the keep band, at ``alpha / (challengers x decisions)``: the finals both choose the challenger and test it.
    Otherwise the pick is the first within the tie band of the fastest: the default, then the others in canonical order.
    Nothing replaces the default that is not proven faster. Of configs with gaps, the largest block of configs times
    processes counts.

    Raises ValueError for no values.
    """
    finals = Pairs.of(values, default, axes, plan.alpha / plan.decisions)
    place = {config: number for number, config in enumerate(finals.configs)}
    tie, keep = math.log1p(plan.tie_band), math.log1p(plan.keep_band)
    fresh = finals.first_tied(tie, None if default is None else place.get(default))
    if incumbent in place and finals.lower[place[incumbent]].max() <= keep:
        stays = _decision(finals, place[incumbent], keep, is_fresh=place[incumbent] == fresh)
        return stays.kept_as(Kept.COMMITTED)
    contested = finals.is_contested(fresh, tie, plan.edge_sigmas)
    is_tied = bool((finals.mean + finals.error)[fresh, finals.fastest] <= tie)
    found = _decision(finals, fresh, keep, is_fresh=True).kept_as(Kept.TIED if is_tied else Kept.DEFAULT)
    return replace(found, contested=contested)


def decide_finals(
    times: FinalsTimes, *, incumbent: NamedInts | None, default: NamedInts | None, axes: Axes
) -> Decision:
    """Return the pick, by the bands that the sweep went by. Raises ValueError for no finals.

    Below the floor a tick of the timer is over 0.25 % of a time, and widens every bound. Only what is proven by more
    than a tick then replaces the config that a launch uses today: the incumbent, else the default.
    """
    floor_us, plan = max(run.floor_us for run in _runs(times)), plan_of(times)
    values = process_values(_blocks(times))
    decision = decide(values, incumbent=incumbent, default=default, axes=axes, plan=plan)
    times_us = {config: math.exp(fmean(logs.values())) for config, logs in values.items()}
    decision = replace(decision, times_us=times_us)
    if decision.time_us >= floor_us:
        return decision
    pairs, tick = pairs_of(times, default=default, axes=axes), math.log1p(TICK_SHARE * floor_us / decision.time_us)
    place = {config: number for number, config in enumerate(pairs.configs)}
    pick = place[decision.config]
    today = next((config for config in (incumbent, default) if config in place), decision.config)
    if decision.config != today and pairs.lower[place[today], pick] <= tick:
        return unproven(today, PickVerdict.UNRESOLVABLE, times_us, decision.processes).kept_as(Kept.TOO_SHORT)
    loss = np.delete(pairs.upper[pick], pick).max(initial=-math.inf)
    if loss < -tick:
        return decision
    if loss + tick > math.log1p(plan.keep_band):
        return replace(decision, verdict=PickVerdict.UNRESOLVABLE, contested=False)  # more processes do not help
    is_certified = decision.verdict is PickVerdict.CERTIFIED  # by less than a tick
    return replace(decision, verdict=PickVerdict.NEAR_TIE) if is_certified else decision


def plan_of(times: FinalsTimes) -> MeasuringPlan:
    """The plan with the bands that a sweep's finals went by. Raises ValueError for no finals."""
    runs = _runs(times)
    return MeasuringPlan(tie_band=max(run.tie_band for run in runs), keep_band=max(run.keep_band for run in runs))


def pairs_of(times: FinalsTimes, *, default: NamedInts | None, axes: Axes) -> Pairs:
    """All pairs of finalists, as :func:`decide_finals` compares them. Raises ValueError for no finals."""
    plan = plan_of(times)
    return Pairs.of(process_values(_blocks(times)), default, axes, plan.alpha / plan.decisions)


def _runs(times: FinalsTimes) -> list[FinalsRun]:
    runs = [one.run for of_config in times.values() for one in of_config]
    if not runs:
        raise ValueError("no finals")
    return runs


def noise_floor(default: Sequence[ProcessTimes], duplicate: Sequence[ProcessTimes]) -> float | None:
    """How far the default is from itself under its second name, as a share; None where it has none."""
    second_name = NamedInts(duplicate=1)
    values = process_values(_blocks({NamedInts(): default, second_name: duplicate}))
    first, second = values.get(NamedInts(), {}), values.get(second_name, {})
    differences = [second[process] - first[process] for process in sorted(first) if process in second]
    return abs(math.expm1(fmean(differences))) if differences else None


def _blocks(times: FinalsTimes) -> list[Block]:
    return [
        Block(f"{one.run.sweep} {one.process}", round, config, time_us)
        for config, of_config in times.items()
        for one in of_config
        for round, time_us in one.blocks
    ]


def unproven(
    pick: NamedInts, verdict: PickVerdict | None, times_us: Mapping[NamedInts, float], processes: int
) -> Decision:
    """A pick from times that prove nothing; its runner-up is the fastest other."""
    rivals = [config for config in times_us if config != pick]
    runner_up = min(rivals, key=lambda config: (times_us[config], config.canonical), default=None)
    return Decision(
        config=pick,
        verdict=verdict,
        time_us=times_us[pick],
        runner_up=runner_up,
        ratio=None if runner_up is None else times_us[runner_up] / times_us[pick],
        processes=processes,
        times_us=times_us,
    )


def needs_more(decision: Decision) -> bool:
    """Whether more processes could settle the row: the caller knows how many it has had."""
    return decision.verdict is PickVerdict.AMBIGUOUS or decision.contested


def settled_after(
    times: FinalsTimes,
    judged_after: Sequence[int],
    *,
    incumbent: NamedInts | None,
    default: NamedInts | None,
    axes: Axes,
) -> int:
    """Processes after which the finals are settled if those to come turn out as those so far: the first number of
    ``judged_after`` at which nothing is open, else the last. Raises ValueError for no finals.
    """
    count = min(len(of_config) for of_config in times.values())
    for number in judged_after:
        repeated = {
            config: [replace(of_config[n % count], process=f"{n}") for n in range(number)]
            for config, of_config in times.items()
        }
        if not needs_more(decide_finals(repeated, incumbent=incumbent, default=default, axes=axes)):
            return number
    return max(judged_after)


def _decision(finals: Pairs, pick: int, keep_band: float, *, is_fresh: bool) -> Decision:
    """The pick beside its runner-up; ``is_fresh``: whether a new table would hold it, too."""
    time_us, count = math.exp(finals.logs[pick].mean()), finals.logs.shape[1]
    rivals = [number for number in range(len(finals.configs)) if number != pick]
    if not rivals:
        return Decision(finals.configs[pick], PickVerdict.ONLY, time_us, processes=count)
    runner_up = min(rivals, key=lambda rival: finals.mean[rival, pick])
    upper = float(finals.upper[pick, rivals].max())
    verdict = PickVerdict.NEAR_TIE if is_fresh else PickVerdict.KEPT_INCUMBENT
    if upper <= 0:
        verdict = PickVerdict.CERTIFIED
    elif upper > keep_band:
        verdict = PickVerdict.AMBIGUOUS
    return Decision(
        config=finals.configs[pick],
        verdict=verdict,
        time_us=time_us,
        runner_up=finals.configs[runner_up],
        ratio=math.exp(finals.mean[runner_up, pick]),
        lower=math.expm1(finals.lower[pick, runner_up]),
        upper=math.expm1(upper),
        processes=count,
    )


def _trimmed_mean(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the rounds of (process, round, config). As ``scipy.stats.trim_mean``, which takes a second to import."""
    rounds = logs.shape[1]
    cut = int(TRIMMED_SHARE * rounds)
    mean: NDArray[np.float64] = np.sort(logs, axis=1)[:, cut : rounds - cut].mean(axis=1)
    return mean
