"""What the finals of one problem say: the pick with its verdict, from the sessions that count. Pure functions.

One sweep's finals are one session. Where an import brought two together that were made apart, all their processes are
judged at once, and the row stays ambiguous until a later sweep's finals replace both, unless each alone says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8tune.choose.decision import Axes, Block, Decision, MeasuringPlan, PickVerdict, decide, process_values
from fp8tune.records import FinalsRun, NamedInts, ProcessTimes

Visits = Mapping[NamedInts, Sequence[ProcessTimes]]
"""What the finals timed of each finalist."""

_TWIN = "twin"


@dataclass(frozen=True)
class FinalsResult:
    """The outcome of a problem's finals."""

    decision: Decision
    times_us: Mapping[NamedInts, float]
    """Geometric mean over processes of each finalist."""
    is_disputed: bool
    """Whether two sessions, made apart, come to different picks."""


def judge(visits: Visits, *, incumbent: NamedInts | None, default: NamedInts | None, axes: Axes) -> FinalsResult:
    """The pick of all sessions in ``visits``. Raises ValueError where they hold none."""
    sessions = {visit.session.sweep: visit.session for of_config in visits.values() for visit in of_config}
    protocol = _protocol(sessions.values())

    def decided(chosen: Visits) -> tuple[Decision, dict[NamedInts, dict[str, float]]]:
        values = process_values(_blocks(chosen))
        return decide(values, incumbent=incumbent, default=default, axes=axes, protocol=protocol), values

    decision, values = decided(visits)
    times_us = {config: math.exp(_mean(of_config.values())) for config, of_config in values.items()}
    floor_us = max(session.floor_us for session in sessions.values())
    disputed = len(sessions) > 1 and any(
        decided(_of(visits, name))[0].config != decision.config for name in sorted(sessions)
    )
    if decision.time_us < floor_us:
        decision = _unresolvable(decision, next((c for c in (incumbent, default) if c in times_us), None), times_us)
    elif disputed:
        decision = replace(decision, verdict=PickVerdict.AMBIGUOUS)
    return FinalsResult(decision, times_us, disputed)


def noise_floor(default: Sequence[ProcessTimes], duplicate: Sequence[ProcessTimes]) -> float | None:
    """How far the default is from itself under its second name, as a share; None where it has none.

    Measured like any two finalists: no difference smaller than this means anything in this row.
    """
    twin_name = NamedInts({_TWIN: 1})
    values = process_values(_blocks({NamedInts(): default, twin_name: duplicate}))
    first, second = values.get(NamedInts(), {}), values.get(twin_name, {})
    differences = [second[process] - first[process] for process in sorted(first) if process in second]
    return abs(math.expm1(_mean(differences))) if differences else None


def _protocol(sessions: Iterable[FinalsRun]) -> MeasuringPlan:
    """The bands the sweep went by; of two, the wider."""
    known = list(sessions)
    if not known:
        raise ValueError("no finals")
    tie_band, keep_band = (max(getattr(session, band) for session in known) for band in ("tie_band", "keep_band"))
    return MeasuringPlan(tie_band=tie_band, keep_band=keep_band)


def _blocks(visits: Visits) -> list[Block]:
    return [
        Block(process, round, config, time_us)
        for config, of_config in visits.items()
        for visit in of_config
        for process in [f"{visit.session.sweep} {visit.process}"]
        for round, time_us in visit.blocks
    ]


def _of(visits: Visits, sweep: str) -> Visits:
    return {
        config: [visit for visit in of_config if visit.session.sweep == sweep] for config, of_config in visits.items()
    }


def _unresolvable(decision: Decision, keeper: NamedInts | None, times_us: Mapping[NamedInts, float]) -> Decision:
    """Nothing is ranked: whatever was there stays."""
    pick = keeper or decision.config
    rivals = [config for config in times_us if config != pick]
    runner_up = min(rivals, key=lambda config: (times_us[config], config.canonical), default=None)
    return Decision(
        config=pick,
        verdict=PickVerdict.UNRESOLVABLE,
        time_us=times_us[pick],
        runner_up=runner_up,
        ratio=None if runner_up is None else times_us[runner_up] / times_us[pick],
        processes=decision.processes,
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)
