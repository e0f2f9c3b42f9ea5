"""How a sweep ends: what it found, where that is, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum

from fp8tune.choose.candidates import Candidates
from fp8tune.choose.decision import PickVerdict
from fp8tune.records import Device, Kind, NamedInts
from fp8tune.render.terminal import kernel_name, microseconds, share, slower
from fp8tune_kernels.catalog import KERNELS

LISTED = 4
"""Problems of a kind that are named; the table above has all."""


class Change(StrEnum):
    """What became of a pick. Before a sweep it is the committed table's, or else the declared default."""

    CHANGED = "changed"
    KEPT = "kept"
    OPEN = "open"
    """Measured too little to say."""


def change(candidates: Candidates) -> Change:
    """Of one problem."""
    winner = candidates.winner
    if winner.verdict in (PickVerdict.AMBIGUOUS, PickVerdict.QUICK) or not winner.evidence.complete:
        return Change.OPEN
    return Change.KEPT if winner.config == _before(candidates) else Change.CHANGED


def found_lines(found: Sequence[Candidates]) -> Iterator[str]:
    """How many picks changed, were kept and are open; then which, and by how much."""
    by_change = {kind: [each for each in found if change(each) is kind] for kind in Change}
    picks = "1 pick" if len(found) == 1 else f"{len(found)} picks"
    counts = ", ".join(f"{len(mine)} {kind}" for kind, mine in by_change.items() if mine)
    yield f"{picks}: {counts} (before: the shipped table's, else the kernel's default)"
    for kind, mine in by_change.items():
        for each in mine[:LISTED]:
            named = f"{kernel_name(each.problem.kernel)} {each.problem.shape}"
            yield f"  {kind}: {named}: {microseconds(each.winner.time_us)} us{_said(kind, each)}"
        if len(mine) > LISTED:
            yield f"  {kind}: {len(mine) - LISTED} more"


def _before(candidates: Candidates) -> NamedInts:
    return candidates.incumbent or candidates.default


def _said(kind: Change, candidates: Candidates) -> str:
    """By how much."""
    winner, before = candidates.winner, _before(candidates)
    config = winner.config or NamedInts()
    match kind:
        case Change.CHANGED:
            before_us = candidates.times_us.get(before)
            less = f", {slower(winner.time_us / before_us)}" if before_us else ""
            axes = [name for name in config if config[name] != before.get(name)]
            return f"{less}: " + ", ".join(f"{name} {before.get(name, '-')} -> {config[name]}" for name in axes)
        case Change.OPEN if winner.verdict is PickVerdict.AMBIGUOUS:
            return f", perhaps {share(winner.decision.upper, 1)} slower than another: {winner.runner_up}"
        case Change.OPEN:
            return ", screened only" if winner.verdict is PickVerdict.QUICK else ", not finished"
    if winner.verdict is PickVerdict.UNRESOLVABLE:
        return ", too short to tell configs apart"
    if winner.verdict is PickVerdict.ONLY:
        return ", the only config in the finals"
    return f", next best {slower(winner.decision.ratio)}" if winner.decision.ratio else ""


def next_lines(found: Sequence[Candidates], kind: Kind, device: Device, command: str, db: str | None) -> Iterator[str]:
    """The commands that come next. ``db``: what ``--db`` named; ``command``: that of the sweep."""
    of_db = f" --db {shlex.quote(db)}" if db is not None else ""
    kernels = list(dict.fromkeys(each.problem.kernel for each in found))
    if kind is Kind.INTERPRETER:
        yield "next: the same command on a machine with a GPU, which times what is right"
    elif kind is Kind.STATIC:
        yield f"next: fp8tune static-report --arch {device.arch}{of_db}"
    elif kind is Kind.SIMULATED:
        named = "".join(f" --kernel {shlex.quote(kernel)}" for kernel in kernels)
        yield f"next: fp8tune show{named}{of_db} (simulated times are not for export)"
    elif any(change(each) is not Change.OPEN for each in found):
        own = [kernel for kernel in kernels if kernel not in KERNELS]
        given = f" --for diff --kernel {shlex.quote(own[0])}" if own else ""
        yield f"next: fp8tune export --arch {device.arch}{given}{of_db}"
    if is_open := [each for each in found if change(each) is Change.OPEN]:
        yield f"the open ones: {_again(command, is_open)}"


def _again(command: str, is_open: Sequence[Candidates]) -> str:
    """The sweep's command as it measures what is open: with finals, and anew where there were some."""
    command = re.sub(r" --quick\b", "", command)
    is_measured = all(each.winner.verdict is PickVerdict.AMBIGUOUS for each in is_open)
    return f"{command} --again" if is_measured and "--again" not in command.split() else command


def stopped_line(stored: int, phase: str, db: str, command: str) -> str:
    """What to say of a sweep that is told to end."""
    trials = f"{stored:,} trials of this run are" if stored != 1 else "1 trial of this run is"
    return f"{trials} stored in {db}, the last while {phase or 'planning'}; go on with: {command}"
