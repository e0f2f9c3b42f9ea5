"""Choose kernels and launches of a recording to tune, order them, and name those whose outputs are disputed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from fp8tune.records import RECORDED, Status
from fp8tune.replay.recording import Kernel, Launch, Recording
from fp8tune.store.read import Tally
from fp8tune.sweeping.planning import Plan, ProblemPlan

FIRST_SHARE = 0.8
"""Share of the GPU time that is confirmed first: the rest has its turn in what is left of the budget."""


def tunable(recording: Recording) -> list[str]:
    """Return the kernels that have a choice of configs and can be swept, those with most GPU time first."""
    kernels = [kernel for kernel in recording.kernels if not why_not(kernel)]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: -sum(map(gpu_us, kernel.launches)))]


def why_not(kernel: Kernel) -> str:
    """Return the reason why a kernel is not tuned; empty if it can be."""
    if kernel.refusal:
        return kernel.refusal
    if not kernel.launches:
        return "none of its launches can be repeated"
    return "it has one config" if len(kernel.configs) < 2 else ""


def gpu_us(launch: Launch) -> float:
    """Return the GPU time of all launches like one; their number where nothing was timed."""
    return launch.count * (launch.gpu_us or 1.0)


def ordered(plan: Plan, recording: Recording) -> tuple[Plan, int]:
    """Sort the launches of a sweep, those with most GPU time first, and count those that take :data:`FIRST_SHARE`."""
    time_us = {
        (kernel.name, RECORDED + launch.id): gpu_us(launch)
        for kernel in recording.kernels
        for launch in kernel.launches
    }

    def time_of(size: ProblemPlan) -> float:
        return time_us.get((size.problem.kernel, size.problem.input_layout), 0.0)

    sizes = sorted(plan.problems, key=time_of, reverse=True)
    total_us = sum(map(time_of, sizes))
    covered = accumulate(map(time_of, sizes))
    first = next((count for count, time in enumerate(covered, 1) if time >= FIRST_SHARE * total_us), len(sizes))
    return replace(plan, problems=tuple(sizes)), first


def disputed(plan: Plan, tallies: Iterable[Tally]) -> dict[str, str]:
    """Return the kernels whose config in use gives another output than the first one: which is right is not known.

    Such outputs may depend on the config by design, as partial sums do.
    """
    today = {size.problem: size.today.config for size in plan.problems if size.today}
    return {
        problem.kernel: "its config in use gives another output than its first: see fp8tune show "
        f"{shlex.quote(problem.kernel)} --failed"
        for tally in tallies
        if (problem := tally.subject.problem) in today
        and (outcome := tally.outcomes.get(today[problem])) is not None
        and outcome.status is Status.WRONG
    }
