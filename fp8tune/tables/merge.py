"""Merging of new rows into a table that was written before, so that no other row is lost.

A row stays if the database cannot give it: of a kernel or device without results always, of others until it is pruned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.tables.files import read, update
from fp8tune.tables.launch_table import Entry, LaunchTable, Place, parse
from fp8tune.tables.select import Selection

Known = Mapping[str, frozenset[str]]
"""Kernel -> devices that the database has results of."""


@dataclass(frozen=True)
class Merged:
    """The table to write, and its differences from the table before."""

    table: LaunchTable
    added: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    """New rows in place of others."""
    unchanged: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    prunable: tuple[Entry, ...]
    """Rows of ``unchanged`` that the database could give and does not."""


def merge(old: LaunchTable, new: LaunchTable, known: Known, *, prune: bool = False) -> Merged:
    """Put the rows of ``new`` over those of ``old``.

    Args:
        old: The table before.
        new: Rows selected from the database.
        known: Kernels and devices that the database has results of.
        prune: Remove rows that the database could give and does not.
    """
    before = {entry.place: entry for entry in old.entries}
    placed = [_placed(entry, before, known) for entry in new.entries]
    selected = {entry.place: entry for entry in placed}
    rest = {place: entry for place, entry in before.items() if place not in selected}
    prunable = {place: entry for place, entry in rest.items() if _is_known(entry, known)}
    if prune:
        rest = {place: entry for place, entry in rest.items() if place not in prunable}
    after = {**rest, **selected}
    kept = {place for place, entry in after.items() if entry is before.get(place)}
    same = {place for place in after.keys() & before.keys() if after[place].config == before[place].config}
    comments = dict(new.comments)
    for kernel in {kernel for kernel, _, _ in kept}:
        comments[kernel] = tuple(dict.fromkeys((*old.comments.get(kernel, ()), *new.comments.get(kernel, ()))))
    return Merged(
        table=LaunchTable(new.arch, tuple(after.values()), _nearest(old, new, after, kept), comments),
        added=tuple(entry for place, entry in after.items() if place not in before),
        changed=tuple(entry for place, entry in after.items() if place in before and place not in same),
        unchanged=tuple(entry for place, entry in after.items() if place in same),
        removed=tuple(entry for place, entry in before.items() if place not in after),
        prunable=() if prune else tuple(prunable.values()),
    )


def _placed(entry: Entry, before: Mapping[Place, Entry], known: Known) -> Entry:
    """Return a new row, or the same config as a row of its own device.

    A row for all devices that was chosen on a device without results here is not overwritten by another device's.
    """
    shared = before.get((entry.kernel, "", entry.key))
    if entry.device or shared is None or set(shared.devices) <= known.get(entry.kernel, frozenset()):
        return entry
    own = entry.devices[0] if len(entry.devices) == 1 else ""
    has_own = (entry.kernel, own, entry.key) in before
    if not own or (shared.config == entry.config and not has_own):
        return shared
    return replace(entry, device=own)


def _is_known(entry: Entry, known: Known) -> bool:
    devices = {entry.device} if entry.device else set(entry.devices)
    return bool(devices) and entry.kernel in known and devices <= known[entry.kernel]


def _nearest(old: LaunchTable, new: LaunchTable, after: Mapping[Place, Entry], kept: set[Place]) -> frozenset[str]:
    """Return the kernels that take the nearest key's row: the table that has a kernel's row without a key decides."""
    decided = {kernel for kernel, device, key in after.keys() - kept if not device and key is None}
    before = {entry.kernel for entry in old.entries}
    kernels = {kernel for kernel, _, _ in after}
    return frozenset(
        {kernel for kernel in new.nearest if kernel in decided or kernel not in before}
        | {kernel for kernel in old.nearest & kernels if kernel not in decided}
    )


def merge_file(path: Path, selection: Selection, *, prune: bool = False, is_dry: bool = False) -> tuple[Merged, bool]:
    """Merge selected rows into the module at a path, in one step that excludes other writers.

    Args:
        path: The module. None need be there.
        selection: Rows selected from the database.
        prune: Remove rows that the database could give and does not.
        is_dry: Write nothing.

    Returns:
        The merged table, and True if the text of the module changes.

    Raises:
        UsageError: The file is no whole module, or cannot be written.
    """
    results = []

    def change(text: str | None) -> str:
        before = LaunchTable(selection.table.arch)
        if text is not None:
            try:
                before = parse(text, before.arch)
            except ValueError as error:
                raise UsageError(f"{path} is no table, {error}: restore or remove it, or give --output") from None
        results.append(merge(before, selection.table, selection.known, prune=prune))
        return results[-1].table.render()

    if is_dry:
        text = read(path)
        is_changed = change(text) != text
    else:
        is_changed = update(path, change)
    return results[-1], is_changed
