"""How a sweep ends: what it found, where that is, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum

from fp8tune.records import Device, Kind, NamedInts
from fp8tune.render.terminal import kernel_name, microseconds, share, slower
from fp8tune.stats.study import Origin, Study, Verdict
from fp8tune_kernels.catalog import KERNELS

ORIGINS = {
    Origin.OWN_TABLE: "your table's config",
    Origin.SHIPPED_TABLE: "the shipped table's",
    Origin.RECORDING: "the recorded run's",
    Origin.DEFAULT: "the kernel's default",
}

LISTED = 4
"""Problems of a kind that are named; the table above has all."""


class Change(StrEnum):
    """Fate of today's config, which a launch uses without the pick."""

    CHANGED = "changed"
    KEPT = "kept"
    OPEN = "open"
    """Measured too little to say."""


def change(study: Study) -> Change:
    """Compare the pick of one study with today's config."""
    if study.choice.verdict in (Verdict.AMBIGUOUS, Verdict.QUICK) or not study.complete:
        return Change.OPEN
    return Change.KEPT if study.pick.config == _today(study) else Change.CHANGED


def found_lines(found: Sequence[Study]) -> Iterator[str]:
    """How many picks changed, were kept and are open; then which, and by how much."""
    by_change = {kind: [each for each in found if change(each) is kind] for kind in Change}
    picks = "1 pick" if len(found) == 1 else f"{len(found)} picks"
    counts = ", ".join(f"{len(mine)} {kind}" for kind, mine in by_change.items() if mine)
    origins = dict.fromkeys(study.today.origin for study in found if study.today)
    yield (
        f"{picks}: {counts} (today: {', '.join(map(ORIGINS.__getitem__, origins))})"
        if origins
        else f"{picks}: {counts}"
    )
    for kind, mine in by_change.items():
        for each in mine[:LISTED]:
            named = f"{kernel_name(each.problem.kernel)} {each.problem.shape}"
            yield f"  {kind}: {named}: {microseconds(each.choice.time_us)} us{_said(kind, each)}"
        if len(mine) > LISTED:
            yield f"  {kind}: {len(mine) - LISTED} more"


def _today(study: Study) -> NamedInts:
    return study.today.config if study.today else study.default


def _said(kind: Change, study: Study) -> str:
    """Say by how much."""
    verdict, today = study.choice.verdict, _today(study)
    config = study.pick.config or NamedInts()
    match kind:
        case Change.CHANGED:
            gain = f", {slower(1 / study.speedup)}" if study.speedup else ", today's was not timed"
            axes = [name for name in config if config[name] != today.get(name)]
            return f"{gain}: " + ", ".join(f"{name} {today.get(name, '-')} -> {config[name]}" for name in axes)
        case Change.OPEN if verdict is Verdict.AMBIGUOUS:
            return f", perhaps {share(study.choice.upper, 1)} slower than another: {study.choice.runner_up}"
        case Change.OPEN:
            return ", screened only" if verdict is Verdict.QUICK else ", not finished"
    if verdict is Verdict.UNRESOLVABLE:
        return ", too short to tell configs apart"
    if verdict is Verdict.ONLY:
        return ", the only config in the finals"
    rival = study.next_best
    return "" if rival is None else f", next best {slower(rival.ratio)} {study.precedence}".rstrip()


def next_lines(found: Sequence[Study], kind: Kind, device: Device, command: str, db: str | None) -> Iterator[str]:
    """The commands that come next. ``db``: what ``--db`` named; ``command``: that of the sweep."""
    of_db = f" --db {shlex.quote(db)}" if db is not None else ""
    kernels = list(dict.fromkeys(each.problem.kernel for each in found))
    if kind is Kind.INTERPRETER:
        yield "next: the same command on a machine with a GPU, which times what is right"
    elif kind is Kind.STATIC:
        yield f"next: fp8tune show --failed --arch {device.arch}{of_db}"
    elif kind is Kind.SIMULATED:
        named = "".join(f" --kernel {shlex.quote(kernel)}" for kernel in kernels)
        yield f"next: fp8tune show{named}{of_db} (simulated times are not for export)"
    elif any(change(each) is not Change.OPEN for each in found):
        own = [kernel for kernel in kernels if kernel not in KERNELS]
        given = f" --for diff --kernel {shlex.quote(own[0])}" if own else ""
        yield f"next: fp8tune export --arch {device.arch}{given}{of_db}"
    if is_open := [each for each in found if change(each) is Change.OPEN]:
        yield f"the open ones: {_again(command, is_open)}"


def _again(command: str, is_open: Sequence[Study]) -> str:
    """The sweep's command as it measures what is open: with finals, and anew where there were some."""
    command = re.sub(r" --quick\b", "", command)
    is_measured = all(each.choice.verdict is Verdict.AMBIGUOUS for each in is_open)
    return f"{command} --again" if is_measured and "--again" not in command.split() else command


def stopped_line(stored: int, phase: str, db: str, command: str) -> str:
    """What to say of a sweep that is told to end."""
    trials = f"{stored:,} trials of this run are" if stored != 1 else "1 trial of this run is"
    return f"{trials} stored in {db}, the last while {phase or 'planning'}; go on with: {command}"
