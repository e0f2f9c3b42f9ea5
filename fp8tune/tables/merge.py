"""Merging of new rows into a table that was written before, so that no other row is lost.

A row stays if the database cannot give it: of a kernel or device without results always, of others until it is pruned.
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
    """The table to write, and its differences from the table before."""

    table: LaunchTable
    added: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    unchanged: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    prunable: tuple[Entry, ...]  # rows of ``unchanged`` that the database could give and does not


def merge(old: LaunchTable, selection: Selection, *, prune: bool = False) -> Merged:
    """Put selected rows over those of a table. ``prune`` removes rows that the database could give and does not."""
    before = {entry[:3]: entry for entry in old.entries}  # a table has one row of each kernel, device and key
    placed = [_placed(entry, before, selection) for entry in selection.table.entries]
    selected = {entry[:3]: entry for entry in placed}
    rest = {place: entry for place, entry in before.items() if place not in selected}
    prunable = {place: entry for place, entry in rest.items() if _is_known(entry, selection)}
    after = {**{place: entry for place, entry in rest.items() if not (prune and place in prunable)}, **selected}
    own = {place for place, entry in after.items() if entry is not before.get(place)}
    decided = {kernel for kernel, device, key in own if not device and key is None}
    others = {kernel for kernel, _, _ in after} - decided
    # The table that has a kernel's row without a key also has its rule for near keys.
    new = {kernel for kernel in others if all(entry.kernel != kernel for entry in old.entries)}
    nearest = (selection.table.nearest & (decided | new)) | (old.nearest & (others - new))
    same = {place for place in after.keys() & before.keys() if _is_same(after[place], before[place])}
    return Merged(
        table=LaunchTable(selection.table.arch, tuple(after.values()), nearest),
        added=tuple(entry for place, entry in after.items() if place not in before),
        changed=tuple(entry for place, entry in after.items() if place in before and place not in same),
        unchanged=tuple(entry for place, entry in after.items() if place in same),
        removed=tuple(entry for place, entry in before.items() if place not in after),
        prunable=() if prune else tuple(prunable.values()),
    )


def merge_file(path: Path, selection: Selection, *, prune: bool = False, is_dry: bool = False) -> tuple[Merged, bool]:
    """Merge selected rows into a module, in one step that excludes other writers. Return True if its text changes."""
    results = []

    def change(text: str | None) -> str:
        before = LaunchTable(selection.table.arch)
        if text is not None or path.exists():
            try:
                before = parse(text or "", before.arch)
            except ValueError as error:
                raise UsageError(f"{path} is no table, {error}: restore or remove it, or give --output") from None
        results.append(merge(before, selection, prune=prune))
        return results[-1].table.render()

    is_changed = change(text := read(path)) != text if is_dry else update(path, change)
    return results[-1], is_changed


def _placed(entry: Entry, before: Mapping[tuple[str, str, Key | None], Entry], selection: Selection) -> Entry:
    """Return a new row, or the same config as a row of its own device.

    A row for all devices that was chosen on a device without results here is not overwritten by another device's.
    """
    shared = before.get((entry.kernel, "", entry.key))
    if entry.device or shared is None or set(shared.origins) <= selection.known[entry.kernel]:
        return entry
    own = entry.origins[0] if len(entry.origins) == 1 else ""
    has_own = (entry.kernel, own, entry.key) in before
    if not own or (_is_same(shared, entry) and not has_own):
        return shared
    return entry._replace(device=own)


def _is_same(entry: Entry, other: Entry) -> bool:
    return dict(entry.config) == dict(other.config)


def _is_known(entry: Entry, selection: Selection) -> bool:
    origins = {entry.device} if entry.device else set(entry.origins)
    return bool(origins) and origins <= selection.known.get(entry.kernel, frozenset())
