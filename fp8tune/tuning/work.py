"""Which launches of a recording to sweep, in which order, with how much time each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fp8tune.records import RECORDED
from fp8tune.replay import summary
from fp8tune.replay.recording import Launch, Recording
from fp8tune.sweeping.planning import Plan

FIRST_SHARE = 0.8
"""Share of a kernel's GPU time that its first sweep covers: the rest has its turn after all kernels had theirs."""
LEAST_WEIGHT = 0.05
"""Share of the budget of a kernel whose GPU time is small or unknown."""


def weights(recording: Recording) -> dict[str, float]:
    """Return the kernels that have a choice of configs, those with most GPU time first, and their weights."""
    rows = (row for row in summary.rows(recording) if row.is_sweepable and row.configs > 1)
    return {row.kernel: max(row.gpu_share or 0.0, LEAST_WEIGHT) for row in rows}


def skipped(recording: Recording) -> dict[str, str]:
    """Return the other kernels with the reason why they are not tuned."""
    return {
        row.kernel: row.refusal or ("has one config" if row.configs < 2 else "none of its launches can be repeated")
        for row in summary.rows(recording)
        if not row.is_sweepable or row.configs < 2
    }


def shares(plan: Plan, launches: Sequence[Launch]) -> list[Plan]:
    """Divide the sweep of a kernel: first the few launches that take most of its GPU time, then the others."""
    time_us = {RECORDED + launch.id: launch.count * (launch.gpu_us or 1.0) for launch in launches}
    sizes = sorted(plan.problems, key=lambda size: -time_us.get(size.problem.input_layout, 0.0))
    total, first, covered = sum(time_us.values()), 0, 0.0
    while first < len(sizes) and covered < FIRST_SHARE * total:
        covered += time_us.get(sizes[first].problem.input_layout, 0.0)
        first += 1
    parts = [part for part in (sizes[: max(first, 1)], sizes[max(first, 1) :]) if part]
    return [replace(plan, problems=tuple(part)) for part in parts]
