"""What doctor looks at: the chores of a user, or all that a database says of the tables where one is named.

Without a name nothing reads the rows that come with fp8tune, but for the versions that timed them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8tune.check import machine, stored
from fp8tune.check.finding import Finding, Level
from fp8tune.check.machine import Machine
from fp8tune.errors import DatabaseError, Fp8tuneError
from fp8tune.records import Kind
from fp8tune.revisions import source
from fp8tune.stats.study import Study
from fp8tune.store import database, location
from fp8tune.store.database import EmptyDatabaseError, ForeignLogError
from fp8tune.store.results import Store
from fp8tune_kernels.catalog import KERNELS


@dataclass(frozen=True, order=True)
class Versions:
    """The torch and Triton that rows were timed with."""

    torch: str
    triton: str

    def __str__(self) -> str:
        return f"torch {self.torch or '(none)'} and triton {self.triton or '(none)'}"

    def is_like(self, other: Versions) -> bool:
        """Return True for the same releases, whatever CUDA their wheels were built for."""
        return self.triton == other.triton and self.torch.partition("+")[0] == other.torch.partition("+")[0]


def diagnose(db: str | None = None) -> list[Finding]:
    """All findings on this machine, and on a database (a path or URL); None for the user's own.

    Raises UsageError where a variable names what cannot be one's own database.
    """
    here = machine.probe()
    findings = machine.check(here)
    if db is not None:
        return [*findings, *check_database(db)]
    return [*findings, *check_base(location.base(), here), *check_own(location.own())]


def check_base(base: str | None, here: Machine) -> Iterator[Finding]:
    """Which torch and Triton timed the rows that come with fp8tune, and what that means for a sweep here."""
    if base is None:
        what = "no rows came with this fp8tune: show has your own rows alone"
        yield Finding(Level.WARNING, what, "install a wheel of a release, or run in a checkout that has results.db")
        return
    try:
        with Store.open(base, writable=False) as store:
            devices = [study.device for study in store.pools(kinds=[Kind.MEASURED])]
            timed = sorted({Versions(device.torch, device.triton) for device in devices})
    except DatabaseError as error:
        yield Finding.of(error)
        return
    yield from check_versions(timed, here)


def check_versions(timed: Collection[Versions], here: Machine) -> Iterator[Finding]:
    """The versions of the rows that come with fp8tune, beside those that are installed."""
    installed = Versions(here.software.torch, here.software.triton)
    if not timed:
        return
    what = f"the rows that come with fp8tune were timed with {', and with '.join(map(str, timed))}"
    if any(map(installed.is_like, timed)):
        yield Finding(Level.OK, f"{what}: as installed here")
        return
    what = f"{what}; you have {installed}: a config may be compiled to other code here"
    if here.device is None:
        yield Finding(Level.OK, f"{what}, which matters once there is a GPU")
        return
    fix = "fp8tune sweep --kernel NAME times the kernels that you use with your versions; where it did, its rows count"
    yield Finding(Level.WARNING, what, fix)


def check_own(own: str) -> list[Finding]:
    """The user's own database: its file, its rows, and kernels whose code has changed since they were swept."""
    try:
        if not database.exists(own):
            return [_not_there(own)]
        with Store.open(own, writable=False) as store:
            findings = stored.check(own, store)
            timed = timed_sources(store.pools(kinds=[Kind.MEASURED]))
    except DatabaseError as error:
        return [_failed(own, error)]
    return [*findings, *check_changed(timed)]


def timed_sources(studies: Iterable[Study]) -> dict[str, set[str]]:
    """Return the source hashes of each kernel among some studies."""
    sources: dict[str, set[str]] = {}
    for study in studies:
        if study.version is not None:
            sources.setdefault(study.version.kernel, set()).add(study.version.source_hash)
    return sources


def check_changed(timed: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Which of our kernels have rows of an older code alone. ``timed``: kernel -> source hashes that have rows."""
    for kernel in (name for name in KERNELS if name in timed):
        if source.source_hash(kernel, source.installed(kernel)) not in timed[kernel]:
            what = f"{kernel}: its code has changed since you timed it"
            yield Finding(Level.WARNING, what, f"fp8tune sweep --kernel {kernel}")


def check_database(db: str) -> list[Finding]:
    """The file's health, then what its rows say about tables and kernels."""
    from fp8tune.check import tables  # what export reads, and with it most of fp8tune

    try:
        if not database.exists(db):
            return [Finding(Level.WARNING, f"{db} does not exist yet", "run fp8tune sweep or fp8tune db import")]
        with Store.open(db, writable=False) as store:
            findings = stored.check(db, store)
            if any(finding.level is Level.ERROR for finding in findings):
                return findings
            findings += tables.check_tables(store)
            timed = timed_sources(store.pools(kinds=[Kind.MEASURED]))
    except DatabaseError as error:
        return [_failed(db, error)]
    return [*findings, *tables.check_sources(timed, tables.current_hashes())]


def _not_there(own: str) -> Finding:
    path = database.path_of(own)
    assert path is not None  # a server's is taken for there
    what = f"your own database, {path}, is not there yet: your first sweep makes it"
    folder = next((each for each in path.absolute().parents if each.exists()), Path("/"))
    if os.access(folder, os.W_OK) and folder.is_dir():
        return Finding(Level.OK, what)
    fix = f"make {folder} writable, or name another database with {location.VARIABLE}"
    return Finding(Level.WARNING, f"your own database, {path}, cannot be made", fix)


def _failed(db: str, error: Fp8tuneError) -> Finding:
    if isinstance(error, EmptyDatabaseError):
        return Finding(Level.WARNING, *str(error).split(": ", 1))
    is_damaged = not isinstance(error, ForeignLogError) and stored.is_damaged(db)
    return Finding.of(error, stored.way_back(db) if is_damaged else "")
