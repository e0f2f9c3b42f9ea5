"""The pick of one problem from its finals. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from fp8tune.choose.decision import (
    Axes,
    Block,
    Decision,
    MeasuringPlan,
    PickVerdict,
    decide,
    process_values,
    unproven,
)
from fp8tune.records import NamedInts, ProcessTimes

FinalsTimes = Mapping[NamedInts, Sequence[ProcessTimes]]
"""What the finals timed of each finalist."""


def decide_finals(
    times: FinalsTimes, *, incumbent: NamedInts | None, default: NamedInts | None, axes: Axes
) -> Decision:
    """The pick, by the bands that the sweep went by. Raises ValueError for no finals.

    Where times are too short to tell configs apart here, whatever was there stays: the incumbent, else the default.
    """
    runs = [one.run for of_config in times.values() for one in of_config]
    if not runs:
        raise ValueError("no finals")
    plan = MeasuringPlan(tie_band=max(run.tie_band for run in runs), keep_band=max(run.keep_band for run in runs))
    values = process_values(_blocks(times))
    decision = decide(values, incumbent=incumbent, default=default, axes=axes, plan=plan)
    times_us = {config: math.exp(fmean(logs.values())) for config, logs in values.items()}
    if decision.time_us >= max(run.floor_us for run in runs):
        return replace(decision, times_us=times_us)
    kept = next((config for config in (incumbent, default) if config in times_us), None)
    return unproven(kept or decision.config, PickVerdict.UNRESOLVABLE, times_us, decision.processes)


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
