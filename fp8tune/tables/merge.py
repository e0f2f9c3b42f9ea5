"""Merging of selected rows into an existing launch table. A row that was not selected again stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.tables.files import read, update
from fp8tune.tables.launch_table import Entry, LaunchTable, parse
from fp8tune.tables.select import Selection
from fp8tune_kernels.tables import Key

Slot = tuple[str, str, Key | None]
"""Kernel, device and key: a table has one row of each."""


@dataclass(frozen=True)
class Merged:
    """Result of a merge: the table to write, and its differences from the old table."""

    table: LaunchTable
    added: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    unchanged: tuple[Entry, ...]


def merge(old: LaunchTable, selection: Selection) -> Merged:
    """Merge selected rows into a table."""
    before: dict[Slot, Entry] = {entry[:3]: entry for entry in old.entries}
    selected = {entry[:3]: entry for entry in (_stored(row, before, selection) for row in selection.table.entries)}
    after = before | selected
    # A kernel's rule for near keys comes from the same table as its row without a key.
    fallbacks = {slot[0]: entry for slot, entry in after.items() if slot[1:] == ("", None)}
    decided = {kernel for kernel, entry in fallbacks.items() if entry is not before.get((kernel, "", None))}
    decided |= {slot[0] for slot in after} - {slot[0] for slot in before}
    nearest = (selection.table.nearest & decided) | (old.nearest & {slot[0] for slot in after} - decided)
    same = {slot for slot in after.keys() & before.keys() if dict(after[slot].config) == dict(before[slot].config)}
    return Merged(
        replace(selection.table, entries=tuple(after.values()), nearest=frozenset(nearest)),
        added=tuple(entry for slot, entry in after.items() if slot not in before),
        changed=tuple(entry for slot, entry in after.items() if slot in before and slot not in same),
        unchanged=tuple(entry for slot, entry in after.items() if slot in same),
    )


def merge_file(path: Path, selection: Selection, *, is_dry: bool = False) -> tuple[Merged, bool]:
    """Merge rows into a module, and write it unless ``is_dry``. Return the result, and True if the text changes."""
    results = []

    def change(text: str | None) -> str:
        results.append(merge(_parsed(path, text, selection.table.arch), selection))
        return results[-1].table.render()

    is_changed = change(text := read(path)) != text if is_dry else update(path, change)
    return results[-1], is_changed


def stored_table(path: Path, arch: str) -> LaunchTable:
    """Return the table in a file, empty if there is none. Raises UsageError if it holds something else."""
    return _parsed(path, read(path), arch)


def _parsed(path: Path, text: str | None, arch: str) -> LaunchTable:
    if text is None and not path.exists():
        return LaunchTable(arch)
    try:
        return parse(text or "", arch)
    except ValueError as error:
        raise UsageError(f"{path} is no table, {error}: restore or remove it, or give -o PATH") from None


def _stored(entry: Entry, before: Mapping[Slot, Entry], selection: Selection) -> Entry:
    """Return the row to store for a selected one: itself, a copy for its own device, or the old row for all devices.

    An old row for all devices is not overwritten if it was chosen on a device without results in the database.
    """
    shared = before.get((entry.kernel, "", entry.key))
    if entry.device or shared is None or set(shared.origins) <= selection.known[entry.kernel]:
        return entry
    own = entry.origins[0] if len(entry.origins) == 1 else ""
    has_own_row = (entry.kernel, own, entry.key) in before
    if not own or (dict(shared.config) == dict(entry.config) and not has_own_row):
        return shared
    return entry._replace(device=own)
