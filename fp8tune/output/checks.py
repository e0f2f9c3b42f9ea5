"""Documents and screens of configs that were checked or compiled: ``show --failed``, and sweeps without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from fp8tune.output.documents import Document, Gpu, Size, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, duration, layout, pairs
from fp8tune.records import AGREES, TO_FIRST, Kind, Status, shortfall
from fp8tune.stats.means import group_by
from fp8tune.store.results import Tally

UNCHECKED = (Kind.SIMULATED, Kind.STATIC)
"""Kinds of results of which no output was compared with anything."""

DISAGREES = "disagrees with the first config: "
"""Part of the reason of outputs that may be right, where the first config's are expected without a reference."""


class CheckedConfig(Document):
    """One config that was checked or compiled, or that failed."""

    config: dict[str, int] = value("Launch config.")
    status: str = value("Outcome: ok, wrong, out_of_resources and so on. Without a reference, wrong ones may be right.")
    reason: str = value("Reason why it is not ok, or what the first config leaves unwritten.")
    registers: int | None = value("Registers of a thread; null if it was not compiled here.", "", "facts.registers")
    spill_bytes: int | None = value("Bytes of a thread that do not fit into registers.", "bytes", "facts.spill_bytes")


class CheckedSize(Document):
    """All configs of one size that were tried."""

    kernel: str = value("Name of the kernel.", source="subject.problem.kernel")
    size: Size = value("Problem size by dimension.", source="subject.problem.shape")
    layout: str = value("Layout of the input, or recorded- and a launch's id.", source="subject.problem.input_layout")
    gpu: Gpu = value("Name of the GPU or of its stand-in.", source="subject.device")
    kind: str = value("How it was tried: measured, simulated, interpreter or static.", source="subject.kind")
    check: str = value("By what outputs are right, such as exact; empty if none was compared.")
    statuses: dict[str, int] = value("Number of configs by outcome.", source="counts")
    configs: list[CheckedConfig] = value("Every config, failed ones first.")

    @property
    def failures(self) -> list[CheckedConfig]:
        """Configs that failed."""
        return [row for row in self.configs if row.status not in (Status.OK, Status.UNTIMED, Status.PRUNED)]


class CheckList(Document, printed_by="show --failed"):
    """Sizes with the outcomes of their configs; a sweep without a GPU ends with it, too."""

    document: Literal["checks"] = value("Distinguishes documents.", default="checks")
    sizes: list[CheckedSize] = value("Sizes, in the order of the database.")


def make_check_list(tallies: Iterable[Tally]) -> CheckList:
    """Return stored outcomes as a document."""
    sizes = []
    for tally in tallies:
        outcomes = {**tally.failures, **tally.outcomes}.items()
        configs = [CheckedConfig.from_records(outcome, config=config) for config, outcome in outcomes]
        sizes.append(CheckedSize.from_records(tally, configs=configs))
    return CheckList(sizes=sizes)


def checked_kernels(document: CheckList) -> Screen:
    """Return the screen of what was checked or compiled: one row per kernel and place."""
    groups = list(group_by(document.sizes, lambda size: (size.kernel, size.gpu)).values())
    is_one_gpu = len({size.gpu for size in document.sizes}) == 1

    def count(sizes: Sequence[CheckedSize], *left_out: Status) -> str:
        return f"{sum(n for size in sizes for status, n in size.statuses.items() if status not in left_out):,}"

    def span(sizes: Sequence[CheckedSize], field: str) -> str:
        values = [getattr(config, field) for size in sizes for config in size.configs]
        known = sorted({value for value in values if value is not None})
        return " to ".join(map(str, known[:1] + known[1:][-1:])) or "-"

    def failure(sizes: Sequence[CheckedSize]) -> str:
        return next((f"{pairs(row.config)}: {row.reason}" for size in sizes for row in size.failures), "")

    wrong = [status for status in Status if status not in (Status.OK, Status.UNTIMED)]
    words = list(dict.fromkeys(passed(size.kind, size.check) for size in document.sizes))
    columns = [
        Column("kernel", lambda sizes: sizes[0].kernel, loses="start"),
        Column("device", lambda sizes: "" if is_one_gpu else sizes[0].gpu, loses="end"),
        number("sizes", lambda sizes: str(len(sizes))),
        number("configs", count),
        number("tried", lambda sizes: count(sizes, Status.PRUNED)),
        number(" or ".join(words), lambda sizes: count(sizes, *wrong)),
        Column("first failure", failure, loses="end"),
        number("registers", lambda sizes: span(sizes, "registers"), wide=True),
        number("spilled bytes", lambda sizes: span(sizes, "spill_bytes"), wide=True),
    ]
    return Screen([], columns, [], groups)


def failed_configs(document: CheckList) -> Screen:
    """Return the screen of ``show --failed``: one row per size and kind of failure, wrong outputs first."""
    kernels = list(dict.fromkeys(size.kernel for size in document.sizes if size.failures))
    is_one_kernel, rows = len(kernels) == 1, []
    for size in document.sizes:
        # Reasons differ in the numbers that they name.
        kinds = group_by(size.failures, lambda row: (row.status, re.sub(r"\d+", "0", row.reason)))
        name = f"{pairs(size.size)} {layout(size.layout)}".removesuffix(" contiguous")
        rows += [(size, name, failures) for failures in kinds.values()]
    columns = [
        Column("kernel", lambda row: "" if is_one_kernel else row[0].kernel, loses="start"),
        Column("size", lambda row: row[1], loses="end"),
        number("failed", lambda row: f"{len(row[2])} of {len(row[0].configs)}"),
        Column("why", lambda row: _why(row[2][0]), loses="end"),
        Column("first config", lambda row: pairs(row[2][0].config), wide=True),
    ]
    title = f"{kernels[0]}: configs that failed" if is_one_kernel else "configs that failed"
    return Screen([title], columns, ["All configs and reasons: --format json"], rows)


def _why(config: CheckedConfig) -> str:
    state = "" if DISAGREES in config.reason else f"{config.status.replace('_', ' ')}: "
    return state + config.reason


def failure_lines(tallies: Iterable[Tally]) -> Iterator[str]:
    """Yield a line for each kernel of a sweep that has no right config."""
    for kernel, group in group_by(tallies, lambda tally: tally.subject.problem.kernel).items():
        without = [tally for tally in group if not tally.has_right]
        if without:
            problem = without[0].subject.problem
            config, first = next(iter((without[0].failures or without[0].outcomes).items()))
            lacking = f"{shortfall(first.status)} on {len(without)} of {len(group)} sizes"
            yield f"{kernel}: {lacking}; {pairs(config)} at {pairs(problem.shape)}: {first.reason or first.status}"


def agreement_lines(tallies: Iterable[Tally]) -> Iterator[str]:
    """Yield what is known of each kernel without a reference, if configs disagree or the first leaves something out.

    ``ops:add: 1 of 2 configs disagrees with the first, which leaves 2,048 of 4,096 elements unwritten: pass ...``
    """
    for kernel, group in group_by(tallies, lambda tally: tally.subject.problem.kernel).items():
        known = [(tally, line) for tally in group if (line := _agreement(tally))]
        for tally, line in known[:1]:
            place = f" {pairs(tally.subject.problem.shape)}" if len(group) > 1 else ""
            more = f" (so on {len(known)} of {counted(len(group), 'size')})" if len(group) > 1 else ""
            yield f"{kernel}{place}: {line}{more}"


def _agreement(tally: Tally) -> str:
    tried = {config: outcome for config, outcome in tally.outcomes.items() if outcome.status is not Status.PRUNED}
    differ = [config for config, outcome in tried.items() if DISAGREES in outcome.reason]
    remark = next((outcome.reason for outcome in tried.values() if outcome.reason.startswith(AGREES)), "")
    unwritten = remark.removeprefix(AGREES).partition(";")[0]
    which = f", which leaves{unwritten}" if unwritten else ""
    if differ:
        named = "; ".join(map(pairs, differ[:2])) + ("; ..." if differ[2:] else "")
        verb = "disagrees" if len(differ) == 1 else "disagree"
        advice = "which are right is not known, pass --reference module:function"
        return f"{len(differ)} of {counted(len(tried), 'config')} {verb} with the first{which}: {advice} ({named})"
    if unwritten and len(tried) == 1:
        return f"the config agrees with itself{which.replace(', which', ' and')}"
    return f"{counted(len(tried), 'config')} agree with the first{which}" if unwritten else ""


def states(tallies: Iterable[Tally]) -> Counter[str]:
    """Count configs by what is known of them: not all that are ``ok`` were checked, or against a reference."""
    result = Counter[str]()
    for tally in tallies:
        known = {Status.OK: passed(tally.subject.kind, tally.check)}
        for outcome in tally.outcomes.values():
            word = known.get(outcome.status, outcome.status.replace("_", " "))
            result["disagree" if DISAGREES in outcome.reason else word] += 1
    return result


def passed(kind: str, check: str) -> str:
    """Return the word for configs without a fault."""
    words = {Kind.STATIC: "compiled", Kind.SIMULATED: "timed"}
    return words.get(Kind(kind), "agree" if check.endswith(TO_FIRST) else "right")


def counts_line(tallies: Sequence[Tally], kind: Kind, seconds: float) -> str:
    """Return the configs of a sweep by outcome: ``8,640 configs: 8,592 right, 48 pruned, 0 wrong; 3 min 32 s``."""
    counts = states(tallies)
    words = list(dict.fromkeys(passed(tally.subject.kind, tally.check) for tally in tallies)) or [passed(kind, "")]
    faults = [] if kind in UNCHECKED else [{"agree": "disagree"}.get(word, "wrong") for word in words]
    others = [word for word in counts if word not in (*words, *faults)]
    order = dict.fromkeys([*words, *others, *faults])
    parts = [f"{counts[word]:,} {word}" for word in order]
    unchecked = "; outputs not checked" if kind in UNCHECKED else ""
    return f"{counted(counts.total(), 'config')}: {', '.join(parts)}{unchecked}; {duration(seconds)}"
