"""Documents and screens of configs that were checked or compiled: ``show --failed``, and sweeps without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from fp8tune.output.documents import Document, Gpu, Size, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, duration, layout, pairs
from fp8tune.records import Kind, Status, shortfall
from fp8tune.stats.means import group_by
from fp8tune.store.results import Tally


class CheckedConfig(Document):
    """One config that was checked or compiled, or that failed."""

    config: dict[str, int] = value("Launch config.")
    status: str = value("Outcome: ok, wrong, out_of_resources and so on.")
    reason: str = value("Reason why it is not ok; empty otherwise.")
    registers: int | None = value("Registers of a thread; null if it was not compiled here.", "", "facts.registers")
    spill_bytes: int | None = value("Bytes of a thread that do not fit into registers.", "bytes", "facts.spill_bytes")


class CheckedSize(Document):
    """All configs of one size that were tried."""

    kernel: str = value("Name of the kernel.", source="subject.problem.kernel")
    size: Size = value("Problem size by dimension.", source="subject.problem.shape")
    layout: str = value("Layout of the input, or recorded- and a launch's id.", source="subject.problem.input_layout")
    gpu: Gpu = value("Name of the GPU or of its stand-in.", source="subject.device")
    kind: str = value("How it was tried: measured, simulated, interpreter or static.", source="subject.kind")
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
    columns = [
        Column("kernel", lambda sizes: sizes[0].kernel, loses="start"),
        Column("device", lambda sizes: "" if is_one_gpu else sizes[0].gpu, loses="end"),
        number("sizes", lambda sizes: str(len(sizes))),
        number("configs", count),
        number("checked", lambda sizes: count(sizes, Status.PRUNED)),
        number("right", lambda sizes: count(sizes, *wrong)),
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
        Column("why", lambda row: f"{row[2][0].status.replace('_', ' ')}: {row[2][0].reason}", loses="end"),
        Column("first config", lambda row: pairs(row[2][0].config), wide=True),
    ]
    title = f"{kernels[0]}: configs that failed" if is_one_kernel else "configs that failed"
    return Screen([title], columns, ["All configs and reasons: --format json"], rows)


def failure_lines(tallies: Iterable[Tally]) -> Iterator[str]:
    """Yield a line for each kernel of a sweep that has no right config, or whose reference is doubtful."""
    for kernel, group in group_by(tallies, lambda tally: tally.subject.problem.kernel).items():
        without = [tally for tally in group if not tally.has_right]
        if doubt := next(filter(None, map(_doubt, group)), ""):
            yield f"{kernel}: {doubt}"
        if without:
            problem = without[0].subject.problem
            config, first = next(iter((without[0].failures or without[0].outcomes).items()))
            lacking = f"{shortfall(first.status)} on {len(without)} of {len(group)} sizes"
            yield f"{kernel}: {lacking}; {pairs(config)} at {pairs(problem.shape)}: {first.reason or first.status}"


def _doubt(tally: Tally) -> str:
    """Say what to do if no reference was named and most configs of a size disagree with the first."""
    tried = [outcome for outcome in tally.outcomes.values() if outcome.status is not Status.PRUNED]
    count = sum("disagrees with the first config: " in outcome.reason for outcome in tried)
    if 2 * count <= len(tried):
        return ""
    differ = f"{count} of {len(tried)} configs differ from the first, which may be the wrong one"
    return f"{differ}: add --reference module:function"


def counts_line(counts: Mapping[Status, int], kind: Kind, seconds: float) -> str:
    """Return the configs of a sweep by outcome: ``8,640 configs: 8,592 right, 48 pruned, 0 wrong; 3 min 32 s``."""
    words = {Status.OK: "compiled" if kind is Kind.STATIC else "right"}
    counts = {Status.OK: 0, **counts, Status.WRONG: counts.get(Status.WRONG, 0)}
    parts = [f"{count:,} {words.get(status, status.replace('_', ' '))}" for status, count in counts.items()]
    return f"{counted(sum(counts.values()), 'config')}: {', '.join(parts)}; {duration(seconds)}"
