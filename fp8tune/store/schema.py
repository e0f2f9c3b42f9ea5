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
    judges        the reference that a sweep held a kernel version's outputs to
    finals        its finals were, too; which earlier finals they replace, and the numbers they were judged by
    calibrations  named values of a device in a sweep, such as copy_ceiling_gb_per_s
    published_operations  what others printed of a whole operation, such as a grouped GEMM
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)
from sqlalchemy.sql.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from fp8tune.records import Kind, Status
from fp8tune.store.columns import (
    ARCH,
    KERNEL,
    LINE,
    NAME,
    WORD,
    AxesJson,
    CommandLine,
    Count,
    Duration,
    Finite,
    KeyNames,
    NamedIntsText,
    ShapeText,
    Share,
    Text,
    Whole,
)

SCHEMA_VERSION = 1
"""Rises with every change that an older fp8tune would misread."""

_KINDS = re.compile("|".join(Kind))
_STATUSES = re.compile("|".join(Status))
STAGES = ("screen", "final", "twin")
"""The stages of a trial."""
_STAGES = re.compile("|".join(STAGES))
_UIDS = re.compile(r"([A-Za-z0-9_.:+\-]{1,64}( |$))*")

METADATA = MetaData()
"""All tables of this schema."""


def _table(name: str, *parts: SchemaItem) -> Table:
    return Table(name, METADATA, Column("id", Integer, primary_key=True), *parts)


def _column(name: str, kind: TypeEngine[Any] | type[TypeEngine[Any]]) -> Column[Any]:
    kind = kind() if isinstance(kind, type) else kind
    kind.required = True  # type: ignore[attr-defined]  # of a type that checks what it reads
    return Column(name, kind, nullable=False)


def _optional(name: str, kind: TypeEngine[Any] | type[TypeEngine[Any]]) -> Column[Any]:
    return Column(name, kind)


def _refers_to(name: str, table: str) -> Column[Any]:
    return Column(name, Integer, ForeignKey(f"{table}.id"), nullable=False)


Meta = Table(
    "meta",
    METADATA,
    Column("name", String, primary_key=True),
    _column("value", String),
)
"""One named fact about the file."""

Devices = _table(
    "devices",
    _column("arch", Text("arch", ARCH)),
    _column("name", Text("device name", LINE)),
    _column("uuid_hash", Text("UUID hash", WORD)),
    _column("multiprocessors", Whole),
    _column("driver", Text("driver version", LINE)),
    _column("runtime", Text("runtime version", LINE)),
    _column("torch", Text("torch version", LINE)),
    _column("triton", Text("triton version", LINE)),
    UniqueConstraint("arch", "name", "uuid_hash", "multiprocessors", "driver", "runtime", "torch", "triton"),
)
""":class:`fp8tune.records.Device`: rows may be compared only where all columns agree."""

KernelVersions = _table(
    "kernel_versions",
    _column("kernel", Text("kernel name", KERNEL)),
    _column("source_hash", Text("source hash", WORD)),
    _column("default", NamedIntsText),
    _column("axes", AxesJson),
    _column("key", KeyNames),
    UniqueConstraint("kernel", "source_hash"),
)
""":class:`fp8tune.records.KernelVersion`. An empty source hash: another implementation (published rows)."""

Problems = _table(
    "problems",
    _column("kernel", Text("kernel name", KERNEL)),
    _column("canonical", String),
    _column("shape", ShapeText),
    _column("routing", Text("routing", WORD)),
    _column("input_layout", Text("input layout", WORD)),
    _column("in_dtype", Text("dtype", WORD)),
    _column("fp8_dtype", Text("dtype", WORD)),
    _column("scale_mode", Text("scale mode", WORD)),
    _column("seed", Whole),
    UniqueConstraint("kernel", "canonical", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed"),
)
""":class:`fp8tune.records.Problem`. ``shape`` keeps its names' order, ``canonical`` makes it unique."""

Configs = _table(
    "configs",
    _column("canonical", String),
    _optional("items", NamedIntsText),
    UniqueConstraint("canonical"),
)
"""A launch config; ``items`` is ``unstated`` for published rows that name none."""

LookupKeys = _table(
    "lookup_keys",
    _column("canonical", String),
    _optional("items", NamedIntsText),
    UniqueConstraint("canonical"),
)
"""The key under which an exported table holds a problem; ``unstated`` where there is none."""

Sweeps = _table(
    "sweeps",
    _column("uid", Text("sweep uid", WORD)),
    _column("request", String),
    _refers_to("device_id", "devices"),
    _column("command", CommandLine),
    _column("commit", Text("commit", WORD)),
    _column("timer", Text("timer", LINE)),
    _column("seed", Whole),
    _column("again", Boolean),
    _column("started_at", Finite),
    _optional("finished_at", Finite),
    UniqueConstraint("uid"),
)
"""One request. ``uid`` names it in every copy of the database, so that merging twice doubles nothing."""

Workers = _table(
    "workers",
    _column("process", Text("process", LINE)),
    _column("commit", Text("commit", WORD)),
    UniqueConstraint("process", "commit"),
)
"""One worker process, the unit of replication, and the commit its code was at."""

Candidates = _table(
    "candidates",
    _refers_to("problem_id", "problems"),
    _refers_to("config_id", "configs"),
    _refers_to("version_id", "kernel_versions"),
    _refers_to("device_id", "devices"),
    _column("kind", Text("kind", _KINDS)),
    _column("source", Text("source", LINE)),
    _column("note", Text("note", LINE)),
    _refers_to("lookup_key_id", "lookup_keys"),
    _optional("bytes_moved", Count),
    _optional("registers", Count),
    _optional("spill_bytes", Count),
    _optional("shared_bytes", Count),
    _optional("compile_s", Finite),
    UniqueConstraint("problem_id", "config_id", "version_id", "device_id", "kind", "source", "note"),
)
"""One config of one kernel version on one problem and device: what trials repeat and ranking compares.

The compiler's facts belong here, for they are the same in every trial (compile seconds: those of the first). Sizes
in bytes, registers per thread.
"""

Codes = _table(
    "codes",
    _refers_to("candidate_id", "candidates"),
    _column("agprs", Count),
    _column("sgprs", Count),
    _column("scratch_bytes", Count),
    _column("resident_warps", Count),
    Column("programs", Count(), nullable=False, default=0),
    Column("load_bytes", Count(), nullable=False, default=0),
    Column("store_bytes", Count(), nullable=False, default=0),
    Column("load_run_bytes", Count(), nullable=False, default=0),
    Column("store_run_bytes", Count(), nullable=False, default=0),
    Column("passes", Count(), nullable=False, default=0),
    Column("tile_bytes", Count(), nullable=False, default=0),
    Column("instructions_per_kib", Count(), nullable=False, default=0),
    Column("shared_per_kib", Count(), nullable=False, default=0),
    _column("fp8_conversions", Count),
    UniqueConstraint("candidate_id"),
)
""":class:`fp8tune.records.Code` of a candidate.

A database from before static facts has no such table: it is read as an empty one, and made when the database is
next written to.
"""

Trials = _table(
    "trials",
    _refers_to("candidate_id", "candidates"),
    _refers_to("sweep_id", "sweeps"),
    _column("stage", Text("stage", _STAGES)),
    _column("round", Whole),
    _refers_to("worker_id", "workers"),
    _column("position", Whole),
    _column("status", Text("status", _STATUSES)),
    _column("reason", String),
    _optional("time_us", Duration),
    _optional("tick_us", Finite),
    _optional("sm_clock_mhz", Whole),
    _optional("memory_clock_mhz", Whole),
    _optional("temperature_c", Whole),
    _optional("power_w", Finite),
    _optional("throttle_reasons", Whole),
    _column("created_at", Finite),
    _column("samples", LargeBinary),
    UniqueConstraint("candidate_id", "sweep_id", "stage", "round", "worker_id"),
    Index("summary", "candidate_id", "stage", "worker_id", "status", "time_us", "created_at", "sweep_id", "round"),
)
"""One trial. Times in microseconds, ``created_at`` in seconds since the epoch, samples from :func:`pack_samples`.

``summary`` covers what ranking aggregates, so that a million trials are read without touching one blob.
"""

Completions = _table(
    "completions",
    _refers_to("sweep_id", "sweeps"),
    _refers_to("version_id", "kernel_versions"),
    _refers_to("device_id", "devices"),
    _refers_to("problem_id", "problems"),
    _column("planned", Whole),
    UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),
)
"""A problem that was swept to the end: its best is a pick, not just the best so far."""

Judges = _table(
    "judges",
    _refers_to("sweep_id", "sweeps"),
    _refers_to("version_id", "kernel_versions"),
    _column("reference", Text("reference hash", WORD)),
    UniqueConstraint("sweep_id", "version_id"),
)
"""The hash of the reference, inputs and edges that the outputs of a kernel version were held to in a sweep.

A sweep without a row here was judged by a reference that nobody noted. A database from before references has no such
table: it is read as an empty one, and made when the database is next written to.
"""

Finals = _table(
    "finals",
    _refers_to("sweep_id", "sweeps"),
    _refers_to("version_id", "kernel_versions"),
    _refers_to("device_id", "devices"),
    _refers_to("problem_id", "problems"),
    _column("replaces", Text("list of sweep uids", _UIDS)),
    _column("tie_band", Share),
    _column("keep_band", Share),
    _column("floor_us", Finite),
    UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),
)
"""A problem whose finals ran to their end in a sweep, or until a time budget ended them after a judgement:
:class:`fp8tune.records.FinalsRun`.

``replaces`` holds the uids of the sweeps whose finals of this problem were judged until then, on this device and
others of its name, one blank between: what no other finals replace is judged, and an import may bring two such
together. A database from before finals has no such table: it is read as an empty one, and made when the database is
next written to.
"""

Calibrations = _table(
    "calibrations",
    _refers_to("sweep_id", "sweeps"),
    _refers_to("device_id", "devices"),
    _column("name", Text("calibration name", NAME)),
    _column("value", Finite),
    _column("created_at", Finite),
    UniqueConstraint("sweep_id", "device_id", "name"),
)
"""A named value measured of a device in a sweep; its unit is in its name."""

PublishedOperations = _table(
    "published_operations",
    _refers_to("problem_id", "problems"),
    _refers_to("device_id", "devices"),
    _column("recipe", Text("recipe", WORD)),
    _column("source", Text("source", LINE)),
    _column("note", Text("note", LINE)),
    _column("bf16_fwd_us", Duration),
    _column("scaled_fwd_us", Duration),
    _column("bf16_fwd_bwd_us", Duration),
    _column("scaled_fwd_bwd_us", Duration),
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
""":class:`fp8tune.records.Published`. All that is printed is its identity: rows that contradict each other stay.

A database from before these rows has no such table: it is read as an empty one, and made when the database is next
written to.
"""
