"""The tables of a results database.

One row of ``trials`` is one trial. What trials share is stored once: a *candidate* is one config of one kernel version
on one problem and device, and says so through ids. What each column may hold: :mod:`fp8tune.store.columns`.

    meta          schema_version
    devices       GPU and software      kernel_versions  source hash, declared default, axes, key
    problems      what was run          configs, lookup_keys   named integers
    candidates    problem x config x kernel version x device x kind x source, with the compiler's facts
    codes         what the machine code of a candidate does, where it was only compiled
    sweeps        one request           workers    one process, the unit of replication, and the commit it ran
    trials        candidate x sweep x stage x round x worker: status, time, samples, telemetry
    completions   this problem was swept to the end with this kernel version on this device
    finals        its finals were, too; which earlier finals they replace, and the numbers they were judged by
    calibrations  named values of a device in a sweep, such as copy_ceiling_gb_per_s
    published_operations  what others printed of a whole operation, such as a grouped GEMM
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from sqlalchemy import ForeignKey, Index, Integer, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedColumn, mapped_column

from fp8tune.records import Kind, NamedInts, Status
from fp8tune.store.columns import (
    ARCH,
    KERNEL,
    LINE,
    NAME,
    WORD,
    AxesJson,
    Duration,
    Finite,
    KeyNames,
    NamedIntsText,
    Text,
    Whole,
)

SCHEMA_VERSION = 1
"""Rises with every change that an older fp8tune would misread."""

_KINDS = re.compile("|".join(Kind))
_STATUSES = re.compile("|".join(Status))
_STAGES = re.compile("screen|final|twin")
_UIDS = re.compile(r"([A-Za-z0-9_.:+\-]{1,64}( |$))*")

Id = Annotated[int, mapped_column(Integer, primary_key=True)]


def _refers_to(table: str) -> MappedColumn[int]:
    return mapped_column(Integer, ForeignKey(f"{table}.id"))


class Base(DeclarativeBase):
    """All tables of this schema."""

    type_annotation_map: ClassVar = {int: Whole, float: Finite}


class Meta(Base):
    """One named fact about the file."""

    __tablename__ = "meta"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))


class Devices(Base):
    """:class:`fp8tune.records.Device`: rows may be compared only where all columns agree."""

    __tablename__ = "devices"
    id: Mapped[Id]
    arch: Mapped[str] = mapped_column(Text("arch", ARCH, 32))
    name: Mapped[str] = mapped_column(Text("device name", LINE, 100))
    uuid_hash: Mapped[str] = mapped_column(Text("UUID hash", WORD, 64))
    multiprocessors: Mapped[int]
    driver: Mapped[str] = mapped_column(Text("driver version", LINE, 64))
    runtime: Mapped[str] = mapped_column(Text("runtime version", LINE, 64))
    torch: Mapped[str] = mapped_column(Text("torch version", LINE, 64))
    triton: Mapped[str] = mapped_column(Text("triton version", LINE, 64))
    __table_args__ = (
        UniqueConstraint("arch", "name", "uuid_hash", "multiprocessors", "driver", "runtime", "torch", "triton"),
    )


class KernelVersions(Base):
    """:class:`fp8tune.records.KernelVersion`. An empty source hash: another implementation (published rows)."""

    __tablename__ = "kernel_versions"
    id: Mapped[Id]
    kernel: Mapped[str] = mapped_column(Text("kernel name", KERNEL, 64))
    source_hash: Mapped[str] = mapped_column(Text("source hash", WORD, 64))
    default: Mapped[NamedInts] = mapped_column(NamedIntsText(500))
    axes: Mapped[tuple[tuple[str, tuple[int, ...]], ...]] = mapped_column(AxesJson(2000))
    key: Mapped[tuple[str, ...]] = mapped_column(KeyNames(500))
    __table_args__ = (UniqueConstraint("kernel", "source_hash"),)


class Problems(Base):
    """:class:`fp8tune.records.Problem`. ``shape`` keeps its names' order, ``canonical`` makes it unique."""

    __tablename__ = "problems"
    id: Mapped[Id]
    kernel: Mapped[str] = mapped_column(Text("kernel name", KERNEL, 64))
    canonical: Mapped[str] = mapped_column(String(300))
    shape: Mapped[NamedInts] = mapped_column(NamedIntsText(300))
    routing: Mapped[str] = mapped_column(Text("routing", WORD, 32))
    input_layout: Mapped[str] = mapped_column(Text("input layout", WORD, 32))
    in_dtype: Mapped[str] = mapped_column(Text("dtype", WORD, 32))
    fp8_dtype: Mapped[str] = mapped_column(Text("dtype", WORD, 32))
    scale_mode: Mapped[str] = mapped_column(Text("scale mode", WORD, 32))
    seed: Mapped[int]
    __table_args__ = (
        UniqueConstraint(
            "kernel", "canonical", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed"
        ),
    )


class Configs(Base):
    """A launch config; ``items`` is ``unstated`` for published rows that name none."""

    __tablename__ = "configs"
    id: Mapped[Id]
    canonical: Mapped[str] = mapped_column(String(500), unique=True)
    items: Mapped[NamedInts | None] = mapped_column(NamedIntsText(500))


class LookupKeys(Base):
    """The key under which an exported table holds a problem; ``unstated`` where there is none."""

    __tablename__ = "lookup_keys"
    id: Mapped[Id]
    canonical: Mapped[str] = mapped_column(String(500), unique=True)
    items: Mapped[NamedInts | None] = mapped_column(NamedIntsText(500))


class Sweeps(Base):
    """One request. ``uid`` names it in every copy of the database, so that merging twice doubles nothing."""

    __tablename__ = "sweeps"
    id: Mapped[Id]
    uid: Mapped[str] = mapped_column(Text("sweep uid", WORD, 64), unique=True)
    request: Mapped[str] = mapped_column(String)
    device_id: Mapped[int] = _refers_to("devices")
    command: Mapped[str] = mapped_column(String)
    commit: Mapped[str] = mapped_column(Text("commit", WORD, 64))
    timer: Mapped[str] = mapped_column(Text("timer", LINE, 100))
    seed: Mapped[int]
    again: Mapped[bool]
    started_at: Mapped[float]
    finished_at: Mapped[float | None]


class Workers(Base):
    """One worker process, the unit of replication, and the commit its code was at."""

    __tablename__ = "workers"
    id: Mapped[Id]
    process: Mapped[str] = mapped_column(Text("process", LINE, 100))
    commit: Mapped[str] = mapped_column(Text("commit", WORD, 64))
    __table_args__ = (UniqueConstraint("process", "commit"),)


class Candidates(Base):
    """One config of one kernel version on one problem and device: what trials repeat and ranking compares.

    The compiler's facts belong here, for they are the same in every trial (compile seconds: those of the first). Sizes
    in bytes, registers per thread.
    """

    __tablename__ = "candidates"
    id: Mapped[Id]
    problem_id: Mapped[int] = _refers_to("problems")
    config_id: Mapped[int] = _refers_to("configs")
    version_id: Mapped[int] = _refers_to("kernel_versions")
    device_id: Mapped[int] = _refers_to("devices")
    kind: Mapped[str] = mapped_column(Text("kind", _KINDS, 16))
    source: Mapped[str] = mapped_column(Text("source", LINE, 200))
    note: Mapped[str] = mapped_column(Text("note", LINE, 500))
    lookup_key_id: Mapped[int] = _refers_to("lookup_keys")
    bytes_moved: Mapped[int | None]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    compile_s: Mapped[float | None]
    __table_args__ = (UniqueConstraint("problem_id", "config_id", "version_id", "device_id", "kind", "source", "note"),)


class Codes(Base):
    """:class:`fp8tune.records.Code` of a candidate.

    A database from before static facts has no such table: it is read as an empty one, and made when the database is
    next written to.
    """

    __tablename__ = "codes"
    id: Mapped[Id]
    candidate_id: Mapped[int] = _refers_to("candidates")
    agprs: Mapped[int]
    sgprs: Mapped[int]
    scratch_bytes: Mapped[int]
    resident_warps: Mapped[int]
    programs: Mapped[int]
    load_bytes: Mapped[int]
    store_bytes: Mapped[int]
    load_run_bytes: Mapped[int]
    store_run_bytes: Mapped[int]
    passes: Mapped[int]
    tile_bytes: Mapped[int]
    instructions_per_kib: Mapped[int]
    shared_per_kib: Mapped[int]
    fp8_conversions: Mapped[int]
    __table_args__ = (UniqueConstraint("candidate_id"),)


class Trials(Base):
    """One trial. Times in microseconds, ``created_at`` in seconds since the epoch, samples from :func:`pack_samples`.

    ``summary`` covers what ranking aggregates, so that a million trials are read without touching one blob.
    """

    __tablename__ = "trials"
    id: Mapped[Id]
    candidate_id: Mapped[int] = _refers_to("candidates")
    sweep_id: Mapped[int] = _refers_to("sweeps")
    stage: Mapped[str] = mapped_column(Text("stage", _STAGES, 16))
    round: Mapped[int]
    worker_id: Mapped[int] = _refers_to("workers")
    position: Mapped[int]
    status: Mapped[str] = mapped_column(Text("status", _STATUSES, 32))
    reason: Mapped[str] = mapped_column(String)
    time_us: Mapped[float | None]
    tick_us: Mapped[float | None]
    sm_clock_mhz: Mapped[int | None]
    memory_clock_mhz: Mapped[int | None]
    temperature_c: Mapped[int | None]
    power_w: Mapped[float | None]
    throttle_reasons: Mapped[int | None]
    created_at: Mapped[float]
    samples: Mapped[bytes] = mapped_column(LargeBinary)
    __table_args__ = (
        UniqueConstraint("candidate_id", "sweep_id", "stage", "round", "worker_id"),
        Index("summary", "candidate_id", "stage", "worker_id", "status", "time_us", "created_at", "sweep_id", "round"),
    )


class Completions(Base):
    """A problem that was swept to the end: its best is a pick, not just the best so far."""

    __tablename__ = "completions"
    id: Mapped[Id]
    sweep_id: Mapped[int] = _refers_to("sweeps")
    version_id: Mapped[int] = _refers_to("kernel_versions")
    device_id: Mapped[int] = _refers_to("devices")
    problem_id: Mapped[int] = _refers_to("problems")
    planned: Mapped[int]
    __table_args__ = (UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),)


class Finals(Base):
    """A problem whose finals ran to their end in a sweep: :class:`fp8tune.records.Session`.

    ``replaces`` holds the uids of the sweeps whose finals of this problem were judged until then, one blank between:
    what no other finals replace is judged, and an import may bring two such together. A database from before finals
    has no such table: it is read as an empty one, and made when the database is next written to.
    """

    __tablename__ = "finals"
    id: Mapped[Id]
    sweep_id: Mapped[int] = _refers_to("sweeps")
    version_id: Mapped[int] = _refers_to("kernel_versions")
    device_id: Mapped[int] = _refers_to("devices")
    problem_id: Mapped[int] = _refers_to("problems")
    replaces: Mapped[str] = mapped_column(Text("list of sweep uids", _UIDS, 2000))
    tie_band: Mapped[float]
    keep_band: Mapped[float]
    floor_us: Mapped[float]
    __table_args__ = (UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),)


class Calibrations(Base):
    """A named value measured of a device in a sweep; its unit is in its name."""

    __tablename__ = "calibrations"
    id: Mapped[Id]
    sweep_id: Mapped[int] = _refers_to("sweeps")
    device_id: Mapped[int] = _refers_to("devices")
    name: Mapped[str] = mapped_column(Text("calibration name", NAME, 64))
    value: Mapped[float]
    created_at: Mapped[float]
    __table_args__ = (UniqueConstraint("sweep_id", "device_id", "name"),)


class PublishedOperations(Base):
    """:class:`fp8tune.records.Published`. All that is printed is its identity: rows that contradict each other stay.

    A database from before these rows has no such table: it is read as an empty one, and made when the database is next
    written to.
    """

    __tablename__ = "published_operations"
    id: Mapped[Id]
    problem_id: Mapped[int] = _refers_to("problems")
    device_id: Mapped[int] = _refers_to("devices")
    recipe: Mapped[str] = mapped_column(Text("recipe", WORD, 32))
    source: Mapped[str] = mapped_column(Text("source", LINE, 200))
    note: Mapped[str] = mapped_column(Text("note", LINE, 500))
    bf16_fwd_us: Mapped[float] = mapped_column(Duration)
    scaled_fwd_us: Mapped[float] = mapped_column(Duration)
    bf16_fwd_bwd_us: Mapped[float] = mapped_column(Duration)
    scaled_fwd_bwd_us: Mapped[float] = mapped_column(Duration)
    __table_args__ = (
        UniqueConstraint(
            "problem_id",
            "device_id",
            "recipe",
            "source",
            "note",
            "bf16_fwd_us",
            "scaled_fwd_us",
            "bf16_fwd_bwd_us",
            "scaled_fwd_bwd_us",
        ),
    )
