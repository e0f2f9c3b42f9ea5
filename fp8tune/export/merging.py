"""What an export makes of a table that is there: the database's rows go in, and no other row is lost.

A row stays if the database does not give it: of a kernel or a device that the database does not know always, else until
it is pruned. A row for all devices that rests on devices which the database does not know stays as well; what the
database has instead becomes a row of its own device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.export.table import Entry, Table, evidence_path, made_of, read
from fp8tune.records import NamedInts
from fp8tune.stats.means import grouped
from fp8tune_kernels import tables
from fp8tune_kernels.runtime import user_tables

Place = tuple[str, str, tables.Key | None]
"""Kernel, device, key: a table has one row of each."""

_COMMENT = re.compile(r"    # ([^ :]+): (.*)")


@dataclass(frozen=True)
class Existing:
    """A table that was written before."""

    entries: Mapping[Place, Entry]
    nearest: tuple[str, ...] = ()
    comments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Merged:
    """What is written, and what that does to the table that was there."""

    table: Table
    added: tuple[tables.Row, ...]
    changed: tuple[tables.Row, ...]
    """As they become."""
    kept: tuple[tables.Row, ...]
    """Rows whose config stays as it is."""
    removed: tuple[tables.Row, ...]
    left: tuple[tables.Row, ...]
    """Those of ``kept`` that a database which knows their kernel and device does not give: ``--prune`` removes them."""


def existing(path: Path) -> Existing:
    """The table that was written to a path; empty if there is none. Raises UsageError for a file that is no table."""
    text = read(path)
    if text is None and not path.exists():
        return Existing({})
    try:
        table = user_tables.parsed(text or "")
    except ValueError as error:
        raise UsageError(f"{path} is no table, {error}: restore or remove it, or give --output") from None
    evidence = _evidence(evidence_path(path))
    entries = {row[:3]: Entry(row, evidence.get(row[:3]) or _unknown(row)) for row in table.rows}
    comments = grouped(filter(None, map(_COMMENT.fullmatch, (text or "").splitlines())), lambda found: found[1])
    lines = {kernel: tuple(found[2] for found in of_kernel) for kernel, of_kernel in comments.items()}
    return Existing(entries, table.nearest, lines)


def merge(old: Existing, new: Table, prune: bool = False) -> Merged:
    """The rows of ``new`` over those of ``old``. ``prune`` removes what ``new`` could have given and does not."""
    placed = [_placed(entry, old, new) for entry in new.entries]
    given = {entry.row[:3]: entry for entry in placed}
    stays = {place: entry for place, entry in old.entries.items() if place not in given}
    left = {place: entry for place, entry in stays.items() if _is_known(entry, new)}
    if prune:
        stays = {place: entry for place, entry in stays.items() if place not in left}
    entries = {**stays, **given}
    kept = {place: entry for place, entry in entries.items() if entry is old.entries.get(place)}
    made = made_of(new.arch, entries.values(), _nearest(old, new, entries, kept), _comments(old, new, kept))
    both = [(entry.row, old.entries[place].row) for place, entry in entries.items() if place in old.entries]
    return Merged(
        table=replace(made, notices=new.notices, robust=new.robust, known=new.known),
        added=tuple(entry.row for place, entry in entries.items() if place not in old.entries),
        changed=tuple(row for row, before in both if not _same(row, before)),
        kept=tuple(row for row, before in both if _same(row, before)),
        removed=tuple(entry.row for place, entry in old.entries.items() if place not in entries),
        left=() if prune else tuple(entry.row for entry in left.values()),
    )


def _nearest(old: Existing, new: Table, entries: Collection[Place], kept: Collection[Place]) -> set[str]:
    """Kernels that go by the nearest key: as the table says that has the row for any other shape."""
    decided = {kernel for kernel, device, key in entries if not device and key is None}
    decided -= {kernel for kernel, device, key in kept if not device and key is None}
    held = {kernel for kernel, _, _ in old.entries}
    ours = {kernel for kernel in new.nearest if kernel in decided or kernel not in held}
    return ours | {kernel for kernel, _, _ in entries if kernel in old.nearest and kernel not in decided}


def _comments(old: Existing, new: Table, kept: Collection[Place]) -> Mapping[str, tuple[str, ...]]:
    comments = dict(new.comments)
    for kernel in {kernel for kernel, _, _ in kept}:
        comments[kernel] = tuple(dict.fromkeys((*old.comments.get(kernel, ()), *new.comments.get(kernel, ()))))
    return comments


def described(row: tables.Row) -> str:
    """For a message: ``colwise, G=4 K=2048 on NVIDIA H200: BLOCK_SIZE=64 num_warps=4``."""
    kernel, device, key, config = row
    where = "any other shape" if key is None else NamedInts(key)
    return f"{kernel}, {where}{f' on {device}' if device else ''}: {NamedInts(config)}"


def _placed(entry: Entry, old: Existing, new: Table) -> Entry:
    """Where a row goes: what rests on devices that the database does not know is not overwritten by one that does."""
    kernel, device, key, config = entry.row
    held = old.entries.get((kernel, "", key))
    if device or held is None or _devices(held) <= new.known.get(kernel, frozenset()):
        return entry
    (own, *others) = sorted(_devices(entry)) or [""]
    has_own = (kernel, own, key) in old.entries
    if not own or others or (_same(held.row, entry.row) and not has_own):
        return held
    return Entry((kernel, own, key, config), {**entry.evidence, "device": own})


def _is_known(entry: Entry, new: Table) -> bool:
    """Whether the database has what a row would be made of."""
    kernel, device, _, _ = entry.row
    known = new.known.get(kernel)
    return known is not None and (device in known if device else _devices(entry) <= known)


def _devices(entry: Entry) -> set[str]:
    problems = entry.evidence.get("problems")
    listed = problems if isinstance(problems, list) else []
    found = [problem.get("device") for problem in listed if isinstance(problem, dict)]
    return {device for device in found if isinstance(device, str)}


def _same(one: tables.Row, other: tables.Row) -> bool:
    return dict(one[3]) == dict(other[3])


def _evidence(path: Path) -> Mapping[Place, Mapping[str, object]]:
    """What the rows of a table rest on; nothing for a file that was removed or damaged."""
    try:
        rows = json.loads(read(path) or "{}").get("rows", [])
        keys = [None if row["key"] is None else tuple(sorted(row["key"].items())) for row in rows]
        return {(row["kernel"], row["device"], key): row for row, key in zip(rows, keys, strict=True)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _unknown(row: tables.Row) -> Mapping[str, object]:
    kernel, device, key, config = row
    named = {"kernel": kernel, "device": device, "key": None if key is None else dict(key), "config": dict(config)}
    return {**named, "evidence": "unknown", "other_implementation": False, "worst_slowdown": None, "problems": []}
