"""What an export makes of a table that is there: the database's rows go in, and no other row is lost.

A row stays if the database does not give it: of a kernel or a device that the database does not know always, else until
it is pruned. A row for all devices that rests on devices which the database does not know stays as well; what the
database has instead becomes a row of its own device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.export.table import Entry, Table, evidence_path, made_of, read
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
    comments: Mapping[str, tuple[str, ...]] | None = None


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
    found = _evidence(evidence_path(path))
    entries = {_place(row): Entry(row, found.get(_place(row)) or _unknown(row)) for row in table.rows}
    comments: dict[str, tuple[str, ...]] = {}
    for line in (text or "").splitlines():
        if comment := _COMMENT.fullmatch(line):
            comments[comment[1]] = (*comments.get(comment[1], ()), comment[2])
    return Existing(entries, table.nearest, comments)


def merge(old: Existing, new: Table, prune: bool = False) -> Merged:
    """The rows of ``new`` over those of ``old``. ``prune`` removes what ``new`` could have given and does not."""
    given: dict[Place, Entry] = {}
    for entry in new.entries:
        placed = _placed(entry, old, new.known.get(entry.row[0], frozenset()))
        given[_place(placed.row)] = placed
    stays = {place: entry for place, entry in old.entries.items() if place not in given}
    left = [entry.row for place, entry in stays.items() if _is_known(entry, new)]
    if prune:
        stays = {place: entry for place, entry in stays.items() if entry.row not in left}
    entries = {**stays, **given}
    made = made_of(new.arch, entries.values(), _nearest(old, new, entries), _comments(old, new, entries))
    rows = {place: entry.row for place, entry in entries.items()}
    before = {place: entry.row for place, entry in old.entries.items()}
    return Merged(
        table=replace(made, notices=new.notices, robust=new.robust, known=new.known),
        added=tuple(row for place, row in rows.items() if place not in before),
        changed=tuple(row for place, row in rows.items() if place in before and not _same(row, before[place])),
        kept=tuple(row for place, row in rows.items() if place in before and _same(row, before[place])),
        removed=tuple(row for place, row in before.items() if place not in rows),
        left=() if prune else tuple(left),
    )


def _nearest(old: Existing, new: Table, entries: Mapping[Place, Entry]) -> set[str]:
    """Kernels that go by the nearest key: as the table says that has the row for any other shape."""
    decided = {kernel for kernel, device, key in entries if not device and key is None}
    decided -= {entry.row[0] for entry in _of_old(old, entries) if not entry.row[1] and entry.row[2] is None}
    held = {kernel for kernel, _, _ in old.entries}
    ours = {kernel for kernel in new.nearest if kernel in decided or kernel not in held}
    return ours | {kernel for kernel, _, _ in entries if kernel in old.nearest and kernel not in decided}


def _comments(old: Existing, new: Table, entries: Mapping[Place, Entry]) -> Mapping[str, tuple[str, ...]]:
    comments = dict(new.comments)
    for kernel in {entry.row[0] for entry in _of_old(old, entries)}:
        lines = (*(old.comments or {}).get(kernel, ()), *new.comments.get(kernel, ()))
        comments[kernel] = tuple(dict.fromkeys(lines))
    return comments


def _of_old(old: Existing, entries: Mapping[Place, Entry]) -> list[Entry]:
    """What stays of the table that was there."""
    return [entry for place, entry in entries.items() if entry is old.entries.get(place)]


def described(row: tables.Row) -> str:
    """For a message: ``colwise, G=4 K=2048 on NVIDIA H200: BLOCK_SIZE=64 num_warps=4``."""
    kernel, device, key, config = row
    where = "any other shape" if key is None else _pairs(key)
    return f"{kernel}, {where}{f' on {device}' if device else ''}: {_pairs(config)}"


def _pairs(items: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name}={value}" for name, value in items)


def _placed(entry: Entry, old: Existing, known: frozenset[str]) -> Entry:
    """Where a row goes: what rests on devices that the database does not know is not overwritten by one that does."""
    kernel, device, key, config = entry.row
    held = old.entries.get((kernel, "", key))
    if device or held is None or _devices(held) <= known:
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
    found = (
        [problem.get("device") for problem in problems if isinstance(problem, dict)]
        if isinstance(problems, list)
        else []
    )
    return {device for device in found if isinstance(device, str)}


def _same(one: tables.Row, other: tables.Row) -> bool:
    return dict(one[3]) == dict(other[3])


def _place(row: tables.Row) -> Place:
    return row[0], row[1], row[2]


def _evidence(path: Path) -> Mapping[Place, Mapping[str, object]]:
    """What the rows of a table rest on; nothing for a file that was removed or damaged."""
    try:
        rows = json.loads(read(path) or "{}").get("rows", [])
        return {(row["kernel"], row["device"], _key(row["key"])): row for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _key(items: Mapping[str, int] | None) -> tables.Key | None:
    return None if items is None else tuple(sorted(items.items()))


def _unknown(row: tables.Row) -> Mapping[str, object]:
    kernel, device, key, config = row
    named = {"kernel": kernel, "device": device, "key": None if key is None else dict(key), "config": dict(config)}
    return {**named, "evidence": "unknown", "other_implementation": False, "worst_slowdown": None, "problems": []}
