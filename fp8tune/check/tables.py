"""Chores of whoever keeps the tables: what a database says that the tables do not, kernels that changed since."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from fp8tune.check.finding import Finding, Level
from fp8tune.errors import Fp8tuneError
from fp8tune.exporting import select_rows
from fp8tune.records import Kind
from fp8tune.revisions import source
from fp8tune.store.results import Store
from fp8tune.tables.current import INSTALLED, SHIPPED
from fp8tune.tables.launch_table import default_path, shipped_path
from fp8tune.tables.merge import merge_file
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS


def check_tables(store: Store, table_path: Callable[[str], Path] = default_path) -> Iterator[Finding]:
    """Is each arch's generated table what the database would give today."""
    stored = {arch for arch, kind in store.counts() if kind in (Kind.MEASURED, Kind.PUBLISHED)}
    for arch in (name for name in ARCHES if name in stored):
        try:
            path = table_path(arch)
            tables = SHIPPED if path == shipped_path(arch) else INSTALLED
            selection = select_rows(store, arch, tables=tables)
            if not selection.table.entries:
                continue
            _, is_stale = merge_file(path, selection, prune=True, is_dry=True)
        except Fp8tuneError as error:
            yield Finding.of(error)
            continue
        if is_stale:
            what = f"{path.name}: the kernels' table is not what the database says"
            yield Finding(Level.WARNING, what, f"fp8tune export --arch {arch}")
        else:
            yield Finding(Level.OK, f"{path.name}: the kernels' table is up to date")


def check_sources(timed: Mapping[str, Collection[str]], hashes: Mapping[str, str]) -> Iterator[Finding]:
    """Has each kernel rows from a GPU. ``timed``: kernel -> source hashes that have some; ``hashes``: today's."""
    for kernel, current in hashes.items():
        stored = timed.get(kernel, ())
        if current in stored:
            yield Finding(Level.OK, f"{kernel}: timed as its code is now")
        else:
            what = "its code has changed since it was last timed" if stored else "never timed on a GPU"
            fix = f"fp8tune sweep --kernel {kernel} on a machine with a GPU"
            yield Finding(Level.WARNING, f"{kernel}: {what}", fix)


@functools.cache  # no code changes under a running process
def current_hashes() -> Mapping[str, str]:
    """Kernel -> the hash of its timed code as installed."""
    return {kernel: source.source_hash(kernel, source.installed(kernel)) for kernel in KERNELS}
