"""What a sweep says of configs that failed, and what ``show`` prints of configs that were checked and not timed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8tune.records import Outcome, Status
from fp8tune.render.terminal import print_csv, print_json
from fp8tune.render.wide import print_wide
from fp8tune.store.tallies import Tally

_NUMBER = re.compile(r"\d+")


def failure_lines(tallies: Iterable[Tally], db: str | None = None) -> Iterator[str]:
    """For each kernel that has failures: where no config is right, or else what share failed, the commonest reason,
    and how to see more in the database ``db`` that has the rows."""
    by_kernel: dict[str, list[Tally]] = {}
    for tally in tallies:
        by_kernel.setdefault(tally.subject.problem.kernel, []).append(tally)
    for kernel, mine in by_kernel.items():
        failures = [outcome for tally in mine for outcome in tally.failures.values()]
        if failures:
            without = [tally for tally in mine if not tally.has_right]
            arch = mine[0].subject.device.arch
            more = "" if db is None else f"; see fp8tune show --failed --kernel {kernel} --arch {arch} --db {db}"
            yield f"{kernel}: {_said(mine, without, len(failures))}, {_commonest(failures)}{more}"


def _said(tallies: Sequence[Tally], without: Sequence[Tally], failed: int) -> str:
    if without:
        first = without[0].subject.problem
        named = f"{first.shape} {first.routing}".removesuffix(" none")
        return f"no config is right on {len(without)} of {len(tallies)} problems, first {named}"
    return f"{failed} of {sum(len(tally.outcomes) for tally in tallies)} configs failed"


def _commonest(failures: Sequence[Outcome]) -> str:
    """The reason most have, whatever numbers it names."""
    kinds = Counter((outcome.status, _NUMBER.sub("0", outcome.reason)) for outcome in failures)
    kind, count = kinds.most_common(1)[0]
    example = next(o for o in failures if (o.status, _NUMBER.sub("0", o.reason)) == kind)
    return f"{count} of {len(failures)} failures: {example.status}: {example.reason}"


def print_tallies(tallies: Sequence[Tally], output_format: str) -> None:
    """How many configs of each problem are right, and why the first of the others is not."""
    if output_format == "json":
        print_json([tally_json(tally) for tally in tallies])
    elif output_format == "csv":
        print_csv([tally_json(tally) for tally in tallies])
    else:
        columns = [("kernel", "left"), ("arch", "left"), ("kind", "left"), ("problem", "left"), ("layout", "left")]
        columns += [("ok", "right"), ("wrong", "right"), ("other", "right"), ("pruned", "right"), ("first", "left")]
        print_wide("configs that were tried", columns, [_cells(tally) for tally in tallies], "table", names=4)


def tally_json(tally: Tally) -> Mapping[str, object]:
    """One problem; ``reason`` and ``config`` are of the first that failed, wrong bytes before all else."""
    subject, counts = tally.subject, tally.counts
    problem = subject.problem
    config, failure = next(iter(tally.failures.items()), (None, None))
    ok, wrong, pruned = (counts[status] for status in (Status.OK, Status.WRONG, Status.PRUNED))
    return {
        "kernel": problem.kernel,
        "arch": subject.device.arch,
        "device": subject.device.name,
        "kind": str(subject.kind),
        "shape": dict(problem.shape),
        "routing": problem.routing,
        "input_layout": problem.input_layout,
        "fp8_dtype": problem.fp8_dtype,
        "scale_mode": problem.scale_mode,
        "configs": len(tally.outcomes),
        "ok": ok,
        "wrong": wrong,
        "other": len(tally.outcomes) - ok - wrong - pruned,
        "pruned": pruned,
        "config": None if config is None else dict(config),
        "status": None if failure is None else str(failure.status),
        "reason": "" if failure is None else failure.reason,
    }


def _cells(tally: Tally) -> list[str]:
    told = tally_json(tally)
    problem = tally.subject.problem
    config, failure = next(iter(tally.failures.items()), (None, None))
    counts = [str(told[name]) for name in ("ok", "wrong", "other", "pruned")]
    named = [problem.kernel, tally.subject.device.arch, str(tally.subject.kind)]
    first = "" if failure is None else f"{failure.status}: {config}: {failure.reason}"
    return [*named, f"{problem.shape} {problem.routing}".removesuffix(" none"), problem.input_layout, *counts, first]
