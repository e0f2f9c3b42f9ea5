"""Documents and screens of configs that were checked or compiled: ``show --failed``, and sweeps without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from fp8tune.output.documents import Document, value
from fp8tune.output.show import size_of
from fp8tune.output.tables import Column, Screen, number, wide_number
from fp8tune.output.text import counted, duration, layout, pairs
from fp8tune.records import Kind, Status, shortfall
from fp8tune.store.results import Tally


class CheckedConfig(Document):
    """One config that was checked or compiled, or that failed."""

    config: dict[str, int] = value("Launch config.")
    status: str = value("Outcome: ok, wrong, out_of_resources and so on.")
    reason: str = value("Reason why it is not ok; empty otherwise.")
    registers: int | None = value("Registers of a thread; null if it was not compiled here.")
    spill_bytes: int | None = value("Bytes of a thread that do not fit into registers.", "bytes")
    warps: int | None = value("Warps that a multiprocessor can hold, of configs that were only compiled.")


class CheckedSize(Document):
    """All configs of one size that were tried."""

    kernel: str = value("Name of the kernel.")
    size: dict[str, int | str] = value("Problem size by dimension.")
    layout: str = value("Layout of the input: contiguous, transposed, or recorded- and the id of a launch.")
    gpu: str = value("Name of the GPU or of its stand-in.")
    kind: str = value("How it was tried: measured, simulated, interpreter or static.")
    statuses: dict[str, int] = value("Number of configs by outcome.")
    configs: list[CheckedConfig] = value("Every config, failed ones first.")


class CheckList(Document, printed_by="show --failed"):
    """Sizes with the outcomes of their configs; a sweep without a GPU ends with it, too."""

    document: Literal["checks"] = value("Distinguishes documents.", default="checks")
    sizes: list[CheckedSize] = value("Sizes, in the order of the database.")


def make_check_list(tallies: Iterable[Tally]) -> CheckList:
    """Return stored outcomes as a document."""
    return CheckList(sizes=list(map(_size, tallies)))


def _size(tally: Tally) -> CheckedSize:
    problem, device = tally.subject.problem, tally.subject.device
    configs = []
    for config, outcome in {**tally.failures, **tally.outcomes}.items():
        warps = outcome.facts.code.resident_warps if outcome.facts.code else None
        configs.append(CheckedConfig.from_records(outcome, outcome.facts, config=config, warps=warps))
    return CheckedSize(
        kernel=problem.kernel,
        size=size_of(problem),
        layout=problem.input_layout,
        gpu=device.name or device.arch,
        kind=str(tally.subject.kind),
        statuses={str(status): count for status, count in tally.counts.items()},
        configs=configs,
    )


def checked_kernels(document: CheckList) -> Screen:
    """Return the screen of what was checked or compiled: one row per kernel and place."""
    groups: dict[tuple[str, str], list[CheckedSize]] = {}
    for size in document.sizes:
        groups.setdefault((size.kernel, size.gpu), []).append(size)
    places = dict.fromkeys(gpu for _, gpu in groups)
    counts = [sum((Counter(size.statuses) for size in sizes), Counter()) for sizes in groups.values()]
    right = [count[Status.OK] + count[Status.UNTIMED] for count in counts]
    configs = [[config for size in sizes for config in size.configs] for sizes in groups.values()]
    columns = [
        Column("kernel", [kernel for kernel, _ in groups], cut="start"),
        Column("device", [gpu for _, gpu in groups] if len(places) > 1 else [], cut="end"),
        number("sizes", [str(len(sizes)) for sizes in groups.values()]),
        number("configs", [f"{count.total():,}" for count in counts]),
        number("checked", [f"{count.total() - count[Status.PRUNED]:,}" for count in counts]),
        number("right", [f"{count:,}" for count in right]),
        Column("first failure", [_first_failure(sizes) for sizes in groups.values()], cut="end"),
        wide_number("registers", [_range(config.registers for config in group) for group in configs]),
        wide_number("spilled bytes", [_range(config.spill_bytes for config in group) for group in configs]),
        wide_number("warps", [_range(config.warps for config in group) for group in configs]),
    ]
    return Screen([], columns, [], document.sizes)


def _range(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return "-" if not known else str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"


def _first_failure(sizes: Sequence[CheckedSize]) -> str:
    return next((f"{pairs(row.config)}: {row.reason}" for size in sizes for row in _failures(size)), "")


def _failures(size: CheckedSize) -> list[CheckedConfig]:
    return [row for row in size.configs if row.status not in (Status.OK, Status.UNTIMED, Status.PRUNED)]


def failed_configs(document: CheckList) -> Screen:
    """Return the screen of ``show --failed``: one row per size and kind of failure, wrong outputs first."""
    groups: dict[tuple[str, str, str, str], list[CheckedConfig]] = {}
    tried: Counter[tuple[str, str]] = Counter()
    for size in document.sizes:
        name = f"{pairs(size.size)} {layout(size.layout)}".removesuffix(" contiguous")
        tried[size.kernel, name] += len(size.configs)
        for row in _failures(size):
            kind = re.sub(r"\d+", "0", row.reason)  # reasons differ in the numbers that they name
            groups.setdefault((size.kernel, name, row.status, kind), []).append(row)
    kernels = dict.fromkeys(kernel for kernel, *_ in groups)
    columns = [
        Column("kernel", [kernel for kernel, *_ in groups] if len(kernels) > 1 else [], cut="start"),
        Column("size", [name for _, name, *_ in groups], cut="end"),
        number("failed", [f"{len(rows)} of {tried[place[:2]]}" for place, rows in groups.items()]),
        Column("why", [f"{place[2].replace('_', ' ')}: {rows[0].reason}" for place, rows in groups.items()], cut="end"),
        Column("first config", [pairs(rows[0].config) for rows in groups.values()], wide=True),
    ]
    title = f"{next(iter(kernels))}: configs that failed" if len(kernels) == 1 else "configs that failed"
    return Screen([title], columns, ["All configs and reasons: --format json"], document.sizes)


def failure_lines(tallies: Iterable[Tally]) -> Iterator[str]:
    """Yield a line for each kernel of a sweep that has no right config, or whose reference is doubtful."""
    by_kernel: dict[str, list[Tally]] = {}
    for tally in tallies:
        by_kernel.setdefault(tally.subject.problem.kernel, []).append(tally)
    for kernel, group in by_kernel.items():
        without = [tally for tally in group if not tally.has_right]
        if doubt := next(filter(None, map(_doubt, group)), ""):
            yield f"{kernel}: {doubt}"
        if without:
            problem = without[0].subject.problem
            outcomes = without[0].failures or without[0].outcomes
            config, first = next(iter(outcomes.items()))
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
