"""Documents of a sweep's events, and the screens at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fp8tune import registry
from fp8tune.output.checks import UNCHECKED
from fp8tune.output.documents import Document, Gpu, Size, value
from fp8tune.output.show import ListedPick, change, pick_table
from fp8tune.output.tables import Screen, number
from fp8tune.output.text import command, counted, listed, mean, percent
from fp8tune.records import Kind, Status
from fp8tune.stats.same_bits import SameBits
from fp8tune.stats.search import REGRET, regret_at
from fp8tune.stats.study import Verdict
from fp8tune.studies import pick_of
from fp8tune.sweeping.events import Finished
from fp8tune.sweeping.planning import Plan

ROWS = 10  # sizes that the end of a sweep lists


class SweepStarted(Document, printed_by="sweep"):
    """First line of a sweep."""

    event: Literal["started"] = value("Distinguishes events.", default="started")
    gpu: Gpu = value("Name of the GPU or of its stand-in.", source="device")
    arch: str = value("Architecture of the GPU, such as sm_90.", source="device.arch")
    kind: str = value("How configs are tried: measured, simulated, interpreter or static.")
    sizes: int = value("Sizes of all kernels.", source="problems")
    configs: int = value("Configs of all sizes.")


class ConfigTimed(Document, printed_by="sweep"):
    """One config was checked, timed or compiled, or failed."""

    event: Literal["timed"] = value("Distinguishes events.", default="timed")
    kernel: str = value("Name of the kernel.", source="problem.kernel")
    size: Size = value("Problem size by dimension.", source="problem.shape")
    layout: str = value("Layout of the input, or recorded- and a launch's id.", source="problem.input_layout")
    config: dict[str, int] = value("Launch config.")
    status: str = value("Outcome: ok, wrong, out_of_resources and so on.", source="outcome.status")
    time_us: float | None = value("Time of the block; null if it failed or nothing is timed.", "us", "outcome.time_us")
    reason: str = value("Reason why it is not ok; empty otherwise.", source="outcome.reason")
    stage: str = value("Phase: screen (coarse pass), final (confirmation) or duplicate (default again).")
    round: int = value("Round of the phase, from 0.")


class SizeDecided(Document, printed_by="sweep"):
    """The pick of one size at the end of the sweep."""

    event: Literal["decided"] = value("Distinguishes events.", default="decided")
    pick: ListedPick = value("The pick.")


class SameBitsDecided(Document, printed_by="sweep"):
    """The pick of one size among configs with equal output bits at every size, with --same-bits."""

    event: Literal["same_bits"] = value("Distinguishes events.", default="same_bits")
    pick: ListedPick = value("The pick.")
    slower: float | None = value("Slowdown against the pick without the constraint; null if not compared.", "share")

    @classmethod
    def from_choice(cls, choice: SameBits) -> SameBitsDecided:
        """Return a choice as a document."""
        return cls(pick=ListedPick.from_pick(pick_of(choice.study)), slower=change(choice.slowdown))


class SweepFinished(Document, printed_by="sweep"):
    """Last line of a sweep. It comes after a budget has ended, too."""

    event: Literal["finished"] = value("Distinguishes events.", default="finished")
    seconds: float = value("Time that the sweep took.", "s")
    speedup: float | None = value("Geometric mean of the speedups over today's configs.", "x")
    sizes: int = value("Sizes that have a pick.")
    statuses: dict[str, int] = value("Number of configs by outcome.")
    checked: bool = value("False if no output was compared: simulated, or only compiled.")
    left_out: int = value("Blocks that the budget left out.")
    complete: bool = value("False if the budget ended before the work.", source="is_whole")
    seen: int = value("Configs that a search tried.")
    grid: int = value("Configs that it chose from, without pruned ones; 0 if every config was tried.")

    @classmethod
    def from_event(
        cls, event: Finished, picks: Sequence[ListedPick], statuses: Mapping[Status, int], kind: Kind
    ) -> SweepFinished:
        """Return the event as a document, with the picks and the outcomes of all configs."""
        values = {"speedup": mean(pick.speedup for pick in picks), "sizes": len(picks), "statuses": statuses}
        return cls.from_records(event, **values, checked=kind not in UNCHECKED)


def title(plan: Plan, configs: int, database: str) -> str:
    """Return the first line of a sweep: ``ops:softmax on NVIDIA H200: 3 sizes x 20 configs, results in fp8tune.db``."""
    kernels, sizes, device = kernels_of(plan), len(plan.problems), plan.backend.device
    names = listed(kernels) if len(kernels) < 4 else counted(len(kernels), "kernel")
    work = f", {configs:,} configs" if configs % sizes else f" x {counted(configs // sizes, 'config')}"
    gpus = f"{len(plan.gpus)} x " if len(plan.gpus) > 1 else ""
    return f"{names} on {gpus}{device.name or device.arch}: {counted(sizes, 'size')}{work}, results in {database}"


def kernels_of(plan: Plan) -> list[str]:
    """Return the kernels of a sweep."""
    return list(dict.fromkeys(size.problem.kernel for size in plan.problems))


def same_bits(choices: Sequence[SameBitsDecided], axis: str) -> Screen:
    """Return the table of picks with equal bits, and what each costs in speed."""
    rows = [choice.pick for choice in choices]
    table, shared = pick_table(rows, number("slower %", [percent(choice.slower, 1) for choice in choices]))
    costs = [1 + choice.slower for choice in choices if choice.slower is not None]
    cost = f"{percent(change(mean(costs)), 1)} % slower (geometric mean of {counted(len(costs), 'size')})"
    title = f"{rows[0].kernel}, same output bits at every {axis}: {cost}"
    return replace(table, above=[title, f"sizes with {shared}:" if shared else ""])


def search_line(seen: int, grid: int) -> str:
    """Return how much of the grids a search saw, and what that means."""
    share = seen / grid
    if seen >= grid:
        return f"the search saw all {grid:,} configs"
    shown = percent(share, 0 if share > 0.1 else 1)
    if share < REGRET[0][0]:
        meaning = f"no study says what less than {percent(REGRET[0][0])} % is worth"
    else:
        middle, high = (percent(regret, 1) for regret in regret_at(share))
        meaning = f"in a study the best of so many was {middle} % slower than the best of all, {high} % in 1 size of 20"
    return f"the search saw {seen:,} of {grid:,} configs ({shown} %): {meaning}; the same command sees more"


def next_lines(picks: Sequence[ListedPick], unsettled: int, plan: Plan) -> Iterator[str]:
    """Yield the commands that come next. More measurements could settle ``unsettled`` picks."""
    kernels, kind, device, db = kernels_of(plan), plan.backend.kind, plan.backend.device, plan.options.db
    if kind is Kind.INTERPRETER:
        yield "next: the same command on a machine with a GPU, which times configs without a fault"
    elif kind is Kind.STATIC:
        yield f"next: {command('show', *kernels[:1], '--device', device.arch, '--wide', db=db)}"
    elif kind is Kind.SIMULATED:
        beside = () if db else ("--device", "simulated")  # results that come with fp8tune may be of more sizes
        yield f"next: {command('show', *kernels[:1], *beside, db=db)} (export needs --arch simulated)"
    elif any(pick.verdict in (Verdict.PROVEN, Verdict.OPEN) for pick in picks):
        own = [kernel for kernel in kernels if kernel not in registry.kernels()]
        target = ("--for", "diff", "--kernel", own[0]) if own else ("--arch", device.arch)
        yield f"next: {command('export', *target, db=db)}"
    if quick := sum(pick.verdict is Verdict.QUICK for pick in picks):
        yield f"{counted(quick, 'quick pick')}: run the same command without --quick to confirm them"
    elif unsettled:
        yield f"{counted(unsettled, 'open pick')}: run the same command with --again, on a quiet GPU"
