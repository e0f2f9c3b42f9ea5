"""What may be wrong with this machine, the database or the tables, and what to do about each."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from fp8tune.choose import incumbents
from fp8tune.errors import DatabaseError, Fp8tuneError
from fp8tune.export import merging, selecting
from fp8tune.export import table as export
from fp8tune.measure import device
from fp8tune.measure.device import Software
from fp8tune.records import Device, Kind, Telemetry
from fp8tune.redaction import redacted
from fp8tune.revisions import source
from fp8tune.store import database, logs
from fp8tune.store.database import ForeignLogError
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import NAMES

TORCH_SINCE = (2, 11)
TRITON_SINCE, TRITON_BEFORE = (3, 6), (3, 10)
"""What pyproject.toml asks for; an environment may have been changed by hand since."""

ROWS_NAMED = 10
"""Rows that cannot be read are named one by one up to here."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """Works, and could be better."""
    ERROR = "error"
    """Something that fp8tune needs is broken: exit code 1."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``fix`` says what to do, empty where nothing is to be done."""

    level: Level
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """What was read of the machine. Versions are empty where a package is missing."""

    device: Device | None
    software: Software
    numpy: str
    triton_wanted: str = ""
    """The Triton that the installed torch pins; empty where it pins none."""
    telemetry: Telemetry = Telemetry()
    other_processes: int | None = None


def diagnose(db: str) -> list[Finding]:
    """All findings on this machine and a results database (a path or URL)."""
    return [*check_machine(probe_machine()), *check_database(db)]


def probe_machine() -> Machine:
    """Read this machine, without a GPU context."""
    return Machine(
        device=device.probe(),
        software=device.software(),
        numpy=_version("numpy"),
        triton_wanted=_triton_wanted(importlib.metadata.requires("torch") or () if _version("torch") else ()),
        telemetry=device.telemetry(),
        other_processes=device.other_processes(),
    )


def check_machine(machine: Machine) -> list[Finding]:
    """GPU, versions, clocks."""
    findings = [*check_gpu(machine.device), *check_software(machine)]
    if machine.device is not None:
        findings += check_clocks(machine.device, machine.telemetry, machine.other_processes)
    return findings


def check_gpu(gpu: Device | None) -> Iterator[Finding]:
    """Is there one, is its arch known, can torch use it."""
    if gpu is None:
        fix = "show, export and compare work here; sweep checks on Triton's interpreter"
        yield Finding(Level.WARNING, "no GPU is visible", f"{fix}; to time, use a machine with one")
        return
    what = f"{gpu.name or 'GPU'} ({gpu.arch}), {gpu.multiprocessors} multiprocessors, driver {gpu.driver}"
    yield Finding(Level.OK, f"{what}, {gpu.runtime or 'no GPU runtime'}")
    if gpu.arch not in ARCHES:
        fix = f"add {gpu.arch} to fp8tune_kernels/arches.py; known: {', '.join(ARCHES)}"
        yield Finding(Level.ERROR, f"the limits of {gpu.arch} are not known", fix)
    if gpu.torch and not gpu.runtime:
        fix = "install a torch that is built for this GPU (CUDA or ROCm)"
        yield Finding(Level.ERROR, f"torch {gpu.torch} is built without GPU support", fix)


def check_software(machine: Machine) -> Iterator[Finding]:
    """Versions that are missing, too old, too new, or do not go together."""
    torch, triton, numpy = machine.software.torch, machine.software.triton, machine.numpy
    for name, version in (("torch", torch), ("triton", triton), ("numpy", numpy)):
        if not version:
            yield Finding(Level.ERROR, f"{name} is not installed", f"pip install {name}")
    if torch and _release(torch) < TORCH_SINCE:
        yield Finding(Level.ERROR, f"torch {torch} is older than 2.11", "pip install 'torch>=2.11'")
    if triton and not TRITON_SINCE <= _release(triton) < TRITON_BEFORE:
        fix = "pip install 'triton>=3.6,<3.10', the one that your torch pins if it pins one"
        yield Finding(Level.ERROR, f"triton {triton} is not supported (3.6 to 3.9 are)", fix)
    if triton and machine.triton_wanted and _release(triton) != _release(machine.triton_wanted):
        fix = f"pip install triton=={machine.triton_wanted}"
        yield Finding(Level.WARNING, f"torch {torch} was built for triton {machine.triton_wanted}, not {triton}", fix)
    if numpy and _release(triton)[:2] == (3, 6) and _release(numpy) >= (2, 4):
        what = f"the interpreter of triton {triton} does not work with numpy {numpy}"
        yield Finding(Level.ERROR, what, "pip install 'numpy<2.4'")
    if torch and triton and numpy:
        yield Finding(Level.OK, f"torch {torch}, triton {triton}, numpy {numpy}")


def check_clocks(gpu: Device, state: Telemetry, other_processes: int | None) -> Iterator[Finding]:
    """Can clocks be read, is the GPU slowed down, does somebody else use it."""
    if state.sm_clock_mhz is None or state.power_w is None or state.temperature_c is None:
        fix = "rows will lack them; install nvidia-ml-py (AMD: amdsmi) and let this user read the device"
        yield Finding(Level.WARNING, "clocks, power or temperature cannot be read", fix)
    else:
        yield Finding(Level.OK, f"{state.sm_clock_mhz} MHz, {state.power_w:.0f} W, {state.temperature_c} degrees C")
    if slowed := device.slowdowns(gpu.arch, state):
        fix = "let it cool down or mend its power supply before timing anything"
        yield Finding(Level.WARNING, f"the GPU is being slowed down: {', '.join(slowed)}", fix)
    if other_processes:
        fix = "see nvidia-smi; end them, or choose another GPU with CUDA_VISIBLE_DEVICES: they disturb every timing"
        yield Finding(Level.WARNING, f"processes beside this one that use the GPU: {other_processes}", fix)


def check_database(db: str) -> list[Finding]:
    """The file's health, then what its rows say about tables and kernels."""
    if "://" not in db and not Path(db).exists():
        return [Finding(Level.WARNING, f"{db} does not exist yet", "run fp8tune sweep or fp8tune import")]
    try:
        with Store.open(db, writable=False) as store:
            findings = check_store(db, store)
            if any(finding.level is Level.ERROR for finding in findings):
                return findings
            findings += check_rows(store.unreadable())
            findings += check_tables(store)
            timed = store.timed_sources()
    except ForeignLogError as error:
        return [_failed(error)]
    except DatabaseError as error:
        return [_failed(error, way_back(db) if is_damaged(db) else "")]
    return [*findings, *check_sources(timed, current_hashes())]


def check_rows(unreadable: Mapping[tuple[str, int], str]) -> Iterator[Finding]:
    """Which rows cannot be read: the others are, so this is nothing but a warning."""
    for (table, id), reason in itertools.islice(unreadable.items(), ROWS_NAMED):
        what = f"{table}:{id} cannot be read and is left out: {reason}"
        yield Finding(Level.WARNING, what, f"fp8tune forget {table}:{id} removes it and what refers to it")
    if len(unreadable) > ROWS_NAMED:
        what = f"{len(unreadable) - ROWS_NAMED:,} more rows cannot be read and are left out"
        yield Finding(Level.WARNING, what, "fp8tune forget --unreadable removes all of them")


def check_store(db: str, store: Store) -> list[Finding]:
    """Integrity, contents, sweeps that were broken off."""
    damage = store.integrity()
    if damage:
        return [Finding(Level.ERROR, f"{db} is damaged: {damage[0]}", way_back(db))]
    rows = [f"{arch} {count:,} {kind}" for (arch, kind), count in store.counts().items()]
    if published := store.published():
        impossible = sum(bool(row.impossible) for row in published)
        flagged = f" ({impossible} impossible as printed)" if impossible else ""
        rows.append(f"{len(published)} published of operations{flagged}")
    what = f"{redacted(db)}: schema {store.schema_version}, sound; rows: {', '.join(rows) or 'none'}"
    findings = [Finding(Level.OK, what)]
    if "://" not in db and not os.access(db, os.W_OK):
        fix = f"make it writable (chmod u+w {db}), or give sweep another file with --db"
        findings.append(Finding(Level.WARNING, f"{db} cannot be written", fix))
    if (path := database.path_of(db)) is not None and (log := logs.unmerged(path)) is not None:
        what = f"{log} holds rows that are not in {db} itself yet"
        fix = f"let the sweep that writes it end, or run fp8tune doctor --repair --db {db}"
        findings.append(Finding(Level.WARNING, what, f"{fix}, before you copy or commit it"))
    for command in dict.fromkeys(store.unfinished_sweeps()):
        what = f"a sweep was not finished: {command or 'its command is not known'}"
        findings.append(Finding(Level.WARNING, what, "run the same command again: it continues where it stopped"))
    return findings


def way_back(db: str) -> str:
    """What to do with a database that cannot be read any more."""
    if "://" in db:
        return "restore it from the server's backup"
    away = [f"mv {db} {db}.damaged"]
    away += [f"mv {log} {db}.damaged{log.name.removeprefix(Path(db).name)}" for log in logs.beside(Path(db))]
    return (
        f"{'; '.join(away)}; then git checkout -- {db} for the rows committed last; fp8tune import COPY adds those "
        "of any other copy, and the same sweep command again measures only what is still missing"
    )


def is_damaged(db: str) -> bool:
    """Whether an SQLite file is cut off or overwritten, as opposed to locked, foreign or of another version."""
    if "://" in db:
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(db)}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    except UnicodeDecodeError:  # of SQLite's own words on a schema that is no text any more
        return True
    except sqlite3.DatabaseError as error:
        return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def check_tables(store: Store, table_path: Callable[[str], Path] = export.destination) -> Iterator[Finding]:
    """Is each arch's generated table what the database would give today."""
    stored = {arch for arch, kind in store.counts() if kind in (Kind.MEASURED, Kind.PUBLISHED, Kind.STATIC)}
    for arch in (name for name in ARCHES if name in stored):
        try:
            path = table_path(arch)
            held = incumbents.COMMITTED if path == export.table_path(arch) else incumbents.INSTALLED
            table = export.render(selecting.evidence_for(store, arch), arch, incumbents=held)
            if not table.entries:
                continue
            stale = export.stale(merging.merge(merging.existing(path), table, prune=True).table, path)
        except Fp8tuneError as error:
            yield _failed(error)
            continue
        if stale:
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
    return {kernel: source.source_hash(kernel, source.installed(kernel)) for kernel in NAMES}


def _failed(error: Fp8tuneError, fix: str = "") -> Finding:
    """An error's line says what happened and, after its last colon, what to do."""
    what, colon, advice = str(error).rpartition(": ")
    return Finding(Level.ERROR, what if colon else advice, fix or (advice if colon else ""))


def _triton_wanted(requirements: Iterable[str]) -> str:
    pins = (re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*==\s*([0-9.]+)", requirement) for requirement in requirements)
    return next((pin[1] for pin in pins if pin), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` -> (2, 11, 0)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])
