"""What a sweep says of configs that failed, and what ``show`` prints of configs that were checked and not timed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8tune.records import Outcome, Problem, Status, shortfall
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import kernel_name, layout_name
from fp8tune.store.results import Tally


def failure_lines(tallies: Iterable[Tally], db: str | None = None) -> Iterator[str]:
    """For each kernel that has failures: where no config can be picked, or else what share failed; the commonest
    reason; and how to see more in the database ``db`` that has the rows."""
    by_kernel: dict[str, list[Tally]] = {}
    for tally in tallies:
        by_kernel.setdefault(tally.subject.problem.kernel, []).append(tally)
    for kernel, mine in by_kernel.items():
        without = [tally for tally in mine if not tally.has_right]
        failures = [outcome for tally in mine for outcome in tally.failures.values()]
        failures = failures or [outcome for tally in without for outcome in tally.outcomes.values()]
        if failures:
            said = f"{len(failures)} of {sum(len(tally.outcomes) for tally in mine)} configs failed"
            if without:
                first = without[0]
                lacking = shortfall(next(iter((first.failures or first.outcomes).values())).status)
                said = f"{lacking} on {len(without)} of {len(mine)} problems, first {_named(first.subject.problem)}"
            arch = mine[0].subject.device.arch
            if doubt := next(filter(None, map(_first_in_doubt, mine)), ""):
                yield f"{kernel}: {doubt}"
            more = "" if db is None else f"; see fp8tune show --failed --kernel {kernel} --arch {arch} --db {db}"
            yield f"{kernel}: {said}, {_commonest(failures)}{more}"


def _first_in_doubt(tally: Tally) -> str:
    """What to do where no reference is named and more than half of the configs of a problem disagree with the first."""
    found = [
        re.search(r"disagrees with the first config: .*; fingerprint (\d+)", each.reason) for each in _tried(tally)
    ]
    alike = Counter(match[1] for match in found if match)
    if 2 * alike.total() <= len(found):
        return ""
    most = max(alike.values())
    agree = f", and {most} of them agree with each other" if most > 1 else ""
    return (
        f"{alike.total()} of {len(found)} configs disagree with the first{agree} on {_named(tally.subject.problem)}: "
        "name a --reference"
    )


def _tried(tally: Tally) -> list[Outcome]:
    return [outcome for outcome in tally.outcomes.values() if outcome.status is not Status.PRUNED]


def _commonest(failures: Sequence[Outcome]) -> str:
    """The reason most have, whatever numbers it names."""
    kinds = [(outcome.status, re.sub(r"\d+", "0", outcome.reason)) for outcome in failures]
    kind, count = Counter(kinds).most_common(1)[0]
    example = failures[kinds.index(kind)]
    return f"{count} of {len(failures)} failures: {example.status}: {example.reason}"


def print_tallies(tallies: Sequence[Tally], output_format: str) -> None:
    """How many configs of each problem are right, and why the first of the others is not."""

    def count(name: str) -> Column[Tally]:
        return right(name, lambda tally: str(contracts.tally(tally)[name]))

    columns: list[Column[Tally]] = [
        left("kernel", lambda tally: kernel_name(tally.subject.problem.kernel)),
        left("arch", lambda tally: tally.subject.device.arch),
        left("kind", lambda tally: str(tally.subject.kind)),
        left("problem", lambda tally: _named(tally.subject.problem)),
        left("layout", lambda tally: layout_name(tally.subject.problem.input_layout)),
        *map(count, ("ok", "wrong", "other", "pruned")),
        left("first", _first),
    ]
    report = Report("configs that were tried", columns, tallies, names=4)
    print_report(tallies, contracts.tally, [report], output_format)


def _named(problem: Problem) -> str:
    named = f"{problem.shape} {problem.routing}".removesuffix(" none")
    return f"{named} {problem.in_dtype}".removesuffix(" bfloat16")


def _first(tally: Tally) -> str:
    return next((f"{failed.status}: {config}: {failed.reason}" for config, failed in tally.failures.items()), "")
