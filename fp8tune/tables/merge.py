"""Merging of selected rows into an existing launch table without losing its other rows.

A row that was not selected again stays, unless ``prune`` is set and the database has results of its kernel and devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.tables.files import read, update
from fp8tune.tables.launch_table import Entry, LaunchTable, parse
from fp8tune.tables.select import Selection
from fp8tune_kernels.tables import Key


@dataclass(frozen=True)
class Merged:
    """Result of a merge, with the table to write and its differences from the old table."""

    table: LaunchTable
    added: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    unchanged: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    prunable: tuple[Entry, ...]  # rows of ``unchanged`` that ``prune`` would remove


def merge(old: LaunchTable, selection: Selection, *, prune: bool = False) -> Merged:
    """Merge selected rows into a table. ``prune`` removes old rows that the database's results no longer select."""
    before = {entry[:3]: entry for entry in old.entries}  # a table has one row of each kernel, device and key
    assigned = [_assign_device(entry, before, selection) for entry in selection.table.entries]
    selected = {entry[:3]: entry for entry in assigned}
    rest = {slot: entry for slot, entry in before.items() if slot not in selected}
    prunable = {slot: entry for slot, entry in rest.items() if _has_results(entry, selection)}
    after = {**{slot: entry for slot, entry in rest.items() if not (prune and slot in prunable)}, **selected}
    own = {slot for slot, entry in after.items() if entry is not before.get(slot)}
    decided = {kernel for kernel, device, key in own if not device and key is None}
    others = {kernel for kernel, _, _ in after} - decided
    # A kernel's rule for near keys comes from the same table as its row without a key.
    new = {kernel for kernel in others if all(entry.kernel != kernel for entry in old.entries)}
    nearest = (selection.table.nearest & (decided | new)) | (old.nearest & (others - new))
    same = {slot for slot in after.keys() & before.keys() if _has_same_config(after[slot], before[slot])}
    return Merged(
        table=LaunchTable(selection.table.arch, tuple(after.values()), nearest),
        added=tuple(entry for slot, entry in after.items() if slot not in before),
        changed=tuple(entry for slot, entry in after.items() if slot in before and slot not in same),
        unchanged=tuple(entry for slot, entry in after.items() if slot in same),
        removed=tuple(entry for slot, entry in before.items() if slot not in after),
        prunable=() if prune else tuple(prunable.values()),
    )


def merge_file(path: Path, selection: Selection, *, prune: bool = False, is_dry: bool = False) -> tuple[Merged, bool]:
    """Merge rows into a module, and write it unless ``is_dry``. Return the result, and True if the text changes."""
    results = []

    def change(text: str | None) -> str:
        before = LaunchTable(selection.table.arch)
        if text is not None or path.exists():
            try:
                before = parse(text or "", before.arch)
            except ValueError as error:
                raise UsageError(f"{path} is no table, {error}: restore or remove it, or give -o PATH") from None
        results.append(merge(before, selection, prune=prune))
        return results[-1].table.render()

    is_changed = change(text := read(path)) != text if is_dry else update(path, change)
    return results[-1], is_changed


def _assign_device(entry: Entry, before: Mapping[tuple[str, str, Key | None], Entry], selection: Selection) -> Entry:
    """Return the row to store for a selected one: itself, a copy for its own device, or the old row for all devices.

    An old row for all devices is not overwritten if it was chosen on a device without results in the database.
    """
    shared = before.get((entry.kernel, "", entry.key))
    if entry.device or shared is None or set(shared.origins) <= selection.known[entry.kernel]:
        return entry
    own = entry.origins[0] if len(entry.origins) == 1 else ""
    has_own = (entry.kernel, own, entry.key) in before
    if not own or (_has_same_config(shared, entry) and not has_own):
        return shared
    return entry._replace(device=own)


def _has_same_config(entry: Entry, rival: Entry) -> bool:
    return dict(entry.config) == dict(rival.config)


def _has_results(entry: Entry, selection: Selection) -> bool:
    origins = {entry.device} if entry.device else set(entry.origins)
    return bool(origins) and origins <= selection.known.get(entry.kernel, frozenset())
