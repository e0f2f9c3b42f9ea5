"""Decision of a study: which config to launch, and how strong the evidence for it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from fp8tune.records import Kind, NamedInts, ProcessTimes, is_recorded
from fp8tune.stats.pairs import Axes, Finals, Pairs, Values, blocks_of, canonical_order, process_values
from fp8tune.stats.study import CACHED_RATE, Decision, Precedence, Result, Study, Verdict

TICK_SHARE = 0.0025  # a timer tick above this share of a time widens the bounds: a quarter of the tie band


@dataclass(frozen=True)
class MeasuringPlan:
    """Sample counts, bands and error rates for measuring and deciding a study."""

    screen_rounds: int = 3
    """Rounds of the coarse pass."""
    screen_band: float = 0.04
    """Largest slowdown of a finalist in the coarse pass, or ``screen_sigmas`` if more."""
    screen_sigmas: float = 4.0
    """The same bound in standard errors."""
    finalists: int = 8
    """Configs in the confirmation at most."""
    processes: int = 6
    """Fresh processes before the first decision."""
    rounds: int = 6
    """Rounds in each process."""
    more_processes: tuple[int, ...] = (12, 24, 48)
    """Processes of later decisions: two sweeps agree on 89 % of rows with 24 processes, on 91.5 % with 48."""
    tie_band: float = 0.01
    """Configs this close to the fastest are ties: repeated sweeps reorder them at random."""
    keep_band: float = 0.015
    """The current config stays until another is proven faster by more than this."""
    alpha: float = 0.025
    """Chance of a false proof for one size."""
    fastest: int = 2
    """Finalists chosen by coarse time alone; the others are the likeliest picks."""
    screen_error: float = 0.006
    """Standard deviation of a coarse log time."""
    edge_sigmas: float = 1.5
    """A config this close to the edge of the tie band, in standard errors, may cross it in the next sweep."""

    @property
    def decisions(self) -> int:
        """Largest number of decisions of one study."""
        return 1 + len(self.more_processes)

    @property
    def alpha_per_look(self) -> float:
        """Error rate of one decision: an equal share of ``alpha``, as each decision is a chance to be wrong."""
        return self.alpha / self.decisions


PLAN = MeasuringPlan()


def decide(
    values: Values, current: NamedInts | None, default: NamedInts | None, axes: Axes, plan: MeasuringPlan = PLAN
) -> Decision:
    """Choose between finalists by one value for each config and process. Raises ValueError without values.

    The current config stays unless another is proven faster by more than the keep band. If it does not stay, the pick
    is a config within the tie band of the fastest: the default if it is one of them, else the first in canonical order
    that is proven faster than the default. If no config is, the pick is the default.
    """
    return _decide(Pairs.compare(values, default, axes, plan.alpha_per_look), current, default, plan)


def _decide(pairs: Pairs, current: NamedInts | None, default: NamedInts | None, plan: MeasuringPlan) -> Decision:
    tie, keep = math.log1p(plan.tie_band), math.log1p(plan.keep_band)
    preferred = pairs.first_tied(tie, pairs.position(default))
    index = pairs.position(current)
    if index is not None and pairs.lower[index].max() <= keep:
        return _with_precedence(_describe(pairs, index, keep), Precedence.CURRENT)
    is_tied = bool((pairs.mean + pairs.error)[preferred, pairs.fastest] <= tie)
    decision = _describe(pairs, preferred, keep)
    # Noise may move a config across the edge of the tie band, and so change the pick.
    if pairs.is_contested(preferred, tie, plan.edge_sigmas):
        decision = replace(decision, verdict=Verdict.OPEN)
    return _with_precedence(decision, Precedence.TIED if is_tied else Precedence.DEFAULT)


def floor_us(tick_us: float | None) -> float:
    """Return the time of which one timer tick is 0.25 %; 0 if no tick is known.

    For shorter times, a tick widens the bounds of a comparison. ``tick_us`` is the tick seen in the samples.
    """
    return (tick_us or 0.0) / TICK_SHARE


def decide_finals(finals: Finals, current: NamedInts | None, default: NamedInts | None, axes: Axes) -> Decision:
    """Choose between finalists with the bands of the sweeps that timed them. Raises ValueError without finals.

    If the pick's time is below the floor, a timer tick is over 0.25 % of it and widens every bound. The config in use,
    which is the current one or else the default, is then replaced only by a config proven faster by more than a tick.
    """
    shortest_us, plan = max(times.run.floor_us for times in _process_times(finals)), plan_of(finals)
    values = process_values(blocks_of(finals))
    pairs = Pairs.compare(values, default, axes, plan.alpha_per_look)
    times_us = {config: math.exp(fmean(log_times.values())) for config, log_times in values.items()}
    decision = replace(_decide(pairs, current, default, plan), times_us=times_us)
    if decision.time_us >= shortest_us:
        return decision
    tick = math.log1p(TICK_SHARE * shortest_us / decision.time_us)
    pick = pairs.configs.index(decision.pick)
    in_use = next((index for index in map(pairs.position, (current, default)) if index is not None), pick)
    if in_use != pick and pairs.lower[in_use, pick] <= tick:
        decision = _unproven(pairs.configs[in_use], Verdict.OPEN, times_us, decision.processes)
        return _with_precedence(replace(decision, is_unresolvable=True), Precedence.TOO_SHORT)
    slowdown = np.delete(pairs.upper[pick], pick).max(initial=-math.inf)
    if slowdown + tick > math.log1p(plan.keep_band):  # more processes cannot help
        return replace(decision, verdict=Verdict.OPEN, is_unresolvable=True)
    return decision


def decide_study(study: Study) -> Study:
    """Return the study with its decision, from its finals or else its coarse pass. Raises ValueError without times."""
    if not study.finals or study.version is None:
        return _without_rival(replace(study, decision=_reject_cached(study, _decide_coarse(study))))
    decision = decide_finals(study.finals, study.current, study.default, study.axes)
    control = next((result for result in study.results if result.control), None)
    noise = None if control is None else control_difference(control.finals, control.control)
    return _without_rival(replace(study, decision=_reject_cached(study, decision), noise=noise))


def _without_rival(study: Study) -> Study:
    """Return the study, whose decision is no verdict if only its pick was timed."""
    if study.next_best is not None or study.choice.verdict not in (Verdict.PROVEN, Verdict.QUICK):
        return study
    return replace(study, decision=replace(study.choice, verdict=Verdict.ALONE))


def _decide_coarse(study: Study) -> Decision:
    """Decide from the coarse pass. One process gives no error estimate, so the bands apply to the plain times."""
    candidates = [result for result in study.results if result.config is not None] or list(study.results)
    if not candidates:
        raise ValueError(f"no timed result of {study.problem}")
    best_us = min(result.value_us for result in candidates)
    is_published = study.kind is Kind.PUBLISHED
    order = canonical_order(study.axes)

    def rank(result: Result) -> tuple[object, ...]:
        config_key = () if result.config is None else order(result.config)
        return *config_key, result.value_us, result.source, result.note

    holders = [r for r in candidates if r.config == study.current and r.value_us <= best_us * (1 + PLAN.keep_band)]
    if holders and not is_published and study.current is not None:
        pick, precedence = holders[0], Precedence.CURRENT
    else:
        ties = [result for result in candidates if result.value_us <= best_us * (1 + PLAN.tie_band)]
        pick, precedence = min(ties, key=rank), Precedence.TIED
    verdict = Verdict.PUBLISHED if is_published else Verdict.QUICK
    times_us = study.coarse_us or {NamedInts(): pick.value_us}
    return _with_precedence(_unproven(pick.config or NamedInts(), verdict, times_us, pick.figures), precedence)


def _reject_cached(study: Study, decision: Decision) -> Decision:
    """Open a decision whose data rate exceeds memory bandwidth. Recorded launches may skip some data."""
    if study.kind is Kind.PUBLISHED or is_recorded(study.problem) or not study.bytes_moved:
        return decision
    pick = next((result for result in study.results if result.config == decision.pick), None)
    copy_gb_per_s = pick.copy_gb_per_s if pick else None
    if not copy_gb_per_s or study.bytes_moved / decision.time_us / 1e3 <= CACHED_RATE * copy_gb_per_s:
        return decision
    return replace(decision, verdict=Verdict.OPEN, is_unresolvable=True)


def plan_of(finals: Finals) -> MeasuringPlan:
    """Return a plan with the widest tie band and the widest keep band of all runs that timed the finals."""
    runs = [times.run for times in _process_times(finals)]
    return MeasuringPlan(tie_band=max(run.tie_band for run in runs), keep_band=max(run.keep_band for run in runs))


def pairs_of(finals: Finals, default: NamedInts | None, axes: Axes) -> Pairs:
    """Compare all pairs of finalists with the error rate that :func:`decide_finals` uses."""
    return Pairs.compare(process_values(blocks_of(finals)), default, axes, plan_of(finals).alpha_per_look)


def _process_times(finals: Finals) -> list[ProcessTimes]:
    times = [process for processes in finals.values() for process in processes]
    if not times:
        raise ValueError("no finals")
    return times


def control_difference(default: Sequence[ProcessTimes], control: Sequence[ProcessTimes]) -> float | None:
    """Return the relative difference between the default and its A/A control; None if no process timed both."""
    second_name = NamedInts(duplicate=1)
    values = process_values(blocks_of({NamedInts(): default, second_name: control}))
    first, second = values.get(NamedInts(), {}), values.get(second_name, {})
    differences = [second[process] - first[process] for process in sorted(first) if process in second]
    return abs(math.expm1(fmean(differences))) if differences else None


def _describe(pairs: Pairs, pick: int, keep: float) -> Decision:
    """Return the decision for a pick."""
    config, time_us = pairs.configs[pick], math.exp(pairs.logs[pick].mean())
    times_us = dict(zip(pairs.configs, np.exp(pairs.logs.mean(axis=1)).tolist(), strict=True))
    rivals = [index for index in range(len(pairs.configs)) if index != pick]
    processes = pairs.logs.shape[1]
    if not rivals:
        return Decision(config, Verdict.PROVEN, time_us, processes=processes, times_us=times_us, ratios={config: 1.0})
    runner_up = min(rivals, key=lambda rival: pairs.mean[rival, pick])
    upper = float(pairs.upper[pick, rivals].max())
    verdict = Verdict.PROVEN if upper <= keep else Verdict.OPEN
    lower, upper = math.expm1(pairs.lower[pick, runner_up]), math.expm1(upper)
    ratios = {rival: math.exp(pairs.mean[index, pick]) for index, rival in enumerate(pairs.configs)}
    return Decision(
        config, verdict, time_us, pairs.configs[runner_up], lower, upper, processes, times_us=times_us, ratios=ratios
    )


def _unproven(pick: NamedInts, verdict: Verdict, times_us: Mapping[NamedInts, float], processes: int) -> Decision:
    """Return a decision without proof, in which the runner-up is the fastest config other than the pick."""
    ratios = {config: time_us / times_us[pick] for config, time_us in times_us.items()}
    others = (config for config in times_us if config != pick)
    runner_up = min(others, key=lambda config: (times_us[config], config.canonical), default=None)
    return Decision(pick, verdict, times_us[pick], runner_up, processes=processes, times_us=times_us, ratios=ratios)


def _with_precedence(decision: Decision, precedence: Precedence) -> Decision:
    """Return the decision with the reason why its pick comes first, if the runner-up is faster than the pick."""
    is_faster = decision.ratio is not None and decision.ratio < 1
    return replace(decision, precedence=precedence) if is_faster else decision
