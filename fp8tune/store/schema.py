"""The tables of a results database, made from the records of :mod:`fp8tune.records` that their rows hold.

One row of ``trials`` is one trial. What trials share is stored once: a *candidate* is one config of one kernel version
on one problem and device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
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

from fp8tune.records import (
    Code,
    Device,
    Facts,
    Finalist,
    FinalsRun,
    KernelVersion,
    Kind,
    Pick,
    Problem,
    Published,
    Status,
    Telemetry,
)
from fp8tune.store.columns import (
    ARCH,
    KERNEL,
    LINE,
    NAME,
    WORD,
    AxesJson,
    CommandLine,
    Count,
    DocumentText,
    Duration,
    Finite,
    KeyNames,
    NamedIntsText,
    ShapeText,
    Share,
    Text,
    Whole,
)

FACTS = tuple(name for name in Facts.__dataclass_fields__ if name != "code")
"""Columns of candidates that say what the compiler says."""

STAGES = ("screen", "final", "duplicate")
"""The stages of a trial."""

METADATA = MetaData()
"""All tables of this schema."""

_Type = TypeEngine[Any] | type[TypeEngine[Any]]


def _table(name: str, *parts: SchemaItem, keeps_ids: bool = False) -> Table:
    """``keeps_ids``: the id of a row that is gone, or packed, is not given to another."""
    return Table(name, METADATA, Column("id", Integer, primary_key=True), *parts, sqlite_autoincrement=keeps_ids)


def _column(name: str, kind: _Type) -> Column[Any]:
    kind = kind() if isinstance(kind, type) else kind
    kind.required = True  # type: ignore[attr-defined]  # of a type that checks what it reads
    return Column(name, kind, nullable=False)


def _line(what: str) -> Text:
    return Text(what, LINE)


def _refer_to(*tables: str) -> list[Column[Any]]:
    """``problems`` -> ``problem_id`` and so on; ``kernel_versions`` -> ``version_id``."""
    names = [table.rpartition("kernel_")[2].removesuffix("s") + "_id" for table in tables]
    return [
        Column(name, Integer, ForeignKey(f"{table}.id"), nullable=False)
        for name, table in zip(names, tables, strict=True)
    ]


def _fields(
    record: type[Any], without: Collection[str] = (), whole: _Type = Whole, **kinds: _Type
) -> list[Column[Any]]:
    """A column for each field of a record, of the type given for its name or annotated; ``whole`` for an integer."""
    by_annotation: dict[str, _Type] = {"int": whole, "float": Finite, "bool": Boolean}
    columns = []
    for field in dataclasses.fields(record):
        annotation, _, none = str(field.type).partition(" | ")
        if field.name not in without:
            named = Text(field.name.replace("_", " "), WORD) if annotation == "str" else None
            kind = kinds.get(field.name) or named or by_annotation[annotation]
            columns.append(Column(field.name, kind) if none else _column(field.name, kind))
    return columns


def _names(columns: Collection[Column[Any]]) -> list[str]:
    return [column.name for column in columns]


Meta = Table("meta", METADATA, Column("name", String, primary_key=True), _column("value", String))
"""One named fact about the file: its ``schema_version``."""

Migrations = Table("migrations", METADATA, Column("name", String, primary_key=True), _column("applied_at", Finite))
"""What was done to a database of an older fp8tune, and when, in seconds since the epoch."""

_device = _fields(
    Device,
    arch=Text("arch", ARCH),
    name=_line("device name"),
    uuid_hash=Text("UUID hash", WORD),
    **{name: _line(f"{name} version") for name in ("driver", "runtime", "torch", "triton")},
    **{name: _line(name) for name in ("timing", "codegen")},
)
Devices = _table("devices", *_device, UniqueConstraint(*_names(_device)))
""":class:`fp8tune.records.Device`: rows may be compared only where all columns agree."""

KernelVersions = _table(
    "kernel_versions",
    *_fields(KernelVersion, kernel=Text("kernel name", KERNEL), default=NamedIntsText, axes=AxesJson, key=KeyNames),
    UniqueConstraint("kernel", "source_hash"),
)
""":class:`fp8tune.records.KernelVersion`. An empty source hash: another implementation (published rows)."""

_dtype = Text("dtype", WORD)
_problem = _fields(
    Problem, kernel=Text("kernel name", KERNEL), shape=ShapeText, in_dtype=_dtype, fp8_dtype=_dtype, seed=Whole
)
Problems = _table(
    "problems",
    *_problem,
    _column("canonical", String),
    UniqueConstraint("kernel", "canonical", *[name for name in _names(_problem) if name not in ("kernel", "shape")]),
)
""":class:`fp8tune.records.Problem`. ``shape`` keeps its names' order, ``canonical`` makes it unique."""


def _named_integers(table: str) -> Table:
    columns = _column("canonical", String), Column("items", NamedIntsText)
    return _table(table, *columns, UniqueConstraint("canonical"))


Configs = _named_integers("configs")
"""A launch config; ``items`` is ``unstated`` for published rows that name none."""

LookupKeys = _named_integers("lookup_keys")
"""The key under which an exported table holds a problem; ``unstated`` where there is none."""

Sweeps = _table(
    "sweeps",
    _column("uid", Text("sweep uid", WORD)),
    _column("request", String),
    *_refer_to("devices"),
    _column("command", CommandLine),
    _column("commit", Text("commit", WORD)),
    _column("timer", _line("timer")),
    _column("seed", Whole),
    _column("again", Boolean),
    _column("started_at", Finite),
    Column("finished_at", Finite),
    UniqueConstraint("uid"),
)
"""One request. ``uid`` names it in every copy of the database, so that merging twice doubles nothing."""

Workers = _table(
    "workers",
    _column("process", _line("process")),
    _column("commit", Text("commit", WORD)),
    UniqueConstraint("process", "commit"),
)
"""One worker process, the unit of replication, and the commit its code was at."""

Candidates = _table(
    "candidates",
    *_refer_to("problems", "configs", "kernel_versions", "devices"),
    _column("kind", Text("kind", re.compile("|".join(Kind)))),
    _column("source", _line("source")),
    _column("note", _line("note")),
    *_refer_to("lookup_keys"),
    Column("bytes_moved", Count),
    *_fields(Facts, without=["code"], whole=Count),
    UniqueConstraint("problem_id", "config_id", "version_id", "device_id", "kind", "source", "note"),
    keeps_ids=True,
)
"""One config of one kernel version on one problem and device, with the compiler's facts of its first trial."""

Codes = _table(
    "codes",
    *_refer_to("candidates"),
    *_fields(Code, whole=Count),
    UniqueConstraint("candidate_id"),
)
""":class:`fp8tune.records.Code` of a candidate, where it was only compiled."""

Trials = _table(
    "trials",
    *_refer_to("candidates", "sweeps"),
    _column("stage", Text("stage", re.compile("|".join(STAGES)))),
    _column("round", Whole),
    *_refer_to("workers"),
    _column("position", Whole),
    _column("status", Text("status", re.compile("|".join(Status)))),
    _column("reason", String),
    Column("time_us", Duration),
    Column("tick_us", Finite),
    *_fields(Telemetry),
    _column("created_at", Finite),
    _column("samples", LargeBinary),
    UniqueConstraint("candidate_id", "sweep_id", "stage", "round", "worker_id"),
    Index("summary", "candidate_id", "stage", "worker_id", "status", "time_us", "created_at", "sweep_id", "round"),
    keeps_ids=True,
)
"""One trial. ``created_at``: seconds since the epoch; samples: see :func:`fp8tune.store.columns.pack_samples`.

``summary`` covers what ranking aggregates: a million trials are read without touching one blob.
"""

_SUBJECT = ("kernel_versions", "devices", "problems")

PackedTrials = _table(
    "packed_trials",
    *_refer_to(*_SUBJECT),
    _column("kind", Text("kind", re.compile("|".join(Kind)))),
    _column("candidates", Count),
    _column("trials", Count),
    _column("last_candidate", Count),
    Column("newest", Finite),
    Column("fastest_mb_per_s", Finite),
    _column("columns", LargeBinary),
    _column("samples", LargeBinary),
    UniqueConstraint("problem_id", "version_id", "device_id", "kind"),
)
"""All that ``candidates``, ``codes`` and ``trials`` held of one finished problem, kernel version, device and kind.

``fp8tune compact`` packs them; whatever adds a trial unpacks them first, with the ids that they had. ``columns`` holds
what each row said, see :mod:`fp8tune.store.packed`; ``samples`` those of finals alone, see
:func:`fp8tune.store.packing.pack_blocks`. ``candidates`` and ``trials`` say how many there are, ``last_candidate`` the
largest id, ``newest`` when the last time was stored, in seconds since the epoch, ``fastest_mb_per_s`` the highest rate
of a candidate: bytes moved over the mean of its blocks.
"""

Completions = _table(
    "completions",
    *_refer_to("sweeps", *_SUBJECT),
    _column("planned", Whole),
    UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),
)
"""A problem that was swept to the end: its best is a pick, not just the best so far."""

ReferencesChecked = _table(
    "references_checked",
    *_refer_to("sweeps", "kernel_versions"),
    _column("reference", Text("reference hash", WORD)),
    UniqueConstraint("sweep_id", "version_id"),
)
"""The hash of the reference, inputs and edges that a sweep compared outputs with; unknown without a row."""

Finals = _table(
    "finals",
    *_refer_to("sweeps", *_SUBJECT),
    *_fields(FinalsRun, without=["sweep"], tie_band=Share, keep_band=Share),
    UniqueConstraint("sweep_id", "version_id", "device_id", "problem_id"),
)
"""A problem whose finals ended in a sweep: :class:`fp8tune.records.FinalsRun`."""

Calibrations = _table(
    "calibrations",
    *_refer_to("sweeps", "devices"),
    _column("name", Text("calibration name", NAME)),
    _column("value", Finite),
    _column("created_at", Finite),
    UniqueConstraint("sweep_id", "device_id", "name"),
)
"""A named value measured of a device in a sweep; its unit is in its name."""

_published = _fields(
    Published,
    without=["operation", "shape", "device"],
    source=_line("source"),
    note=_line("note"),
    **{name: Duration for name in Published.__dataclass_fields__ if name.endswith("_us")},
)
PublishedOperations = _table(
    "published_operations",
    *_refer_to("problems", "devices"),
    *_published,
    UniqueConstraint("problem_id", "device_id", *_names(_published)),
)
""":class:`fp8tune.records.Published`. All that is printed is its identity: rows that contradict each other stay."""

RecordedLaunches = _table(
    "recorded_launches", *_refer_to("problems"), _column("document", DocumentText), UniqueConstraint("problem_id")
)
"""The recorded launch that a problem stands for, with its kernel: JSON of :mod:`fp8tune.replay.recording`."""

ProblemFlops = _table("problem_flops", *_refer_to("problems"), _column("flops", Count), UniqueConstraint("problem_id"))
"""Floating-point operations of a problem, where its kernel declares them."""

ChecksUsed = _table(
    "checks_used",
    *_refer_to("sweeps", "kernel_versions"),
    _column("check", _line("check")),
    UniqueConstraint("sweep_id", "version_id"),
)
"""By which check outputs were right in a sweep; ``exact`` without a row."""


def _decided(name: str, record: type[Any], *columns: Column[Any], **kinds: _Type) -> Table:
    """What was decided of configs, from the rows of all other tables: an import does not bring it along."""
    names = {"problem": "problems", "config": "configs", "version": "kernel_versions", "device": "devices"}
    shared = [_decided_of(f"{field}_id", table, primary_key=True) for field, table in names.items()]
    kept: list[Column[Any]] = [
        Column("kind", Text("kind", re.compile("|".join(Kind))), primary_key=True),
        Column("source", _line("source"), primary_key=True),
        Column("note", _line("note"), primary_key=True),
    ]
    without = [*names, *(column.name for column in kept), "lookup_key", "runner_up", "today"]
    fields = _fields(record, without=without, whole=Count, **kinds)
    return Table(
        name, METADATA, *shared, *kept, *columns, *fields, _column("decided_at", Finite), sqlite_with_rowid=False
    )


def _decided_of(name: str, table: str, **given: Any) -> Column[Any]:
    """What it is about goes, and takes it along."""
    return Column(name, Integer, ForeignKey(f"{table}.id", ondelete="CASCADE"), **given)


Picks = _decided(
    "picks",
    Pick,
    _decided_of("lookup_key_id", "lookup_keys", nullable=False),
    _decided_of("runner_up_id", "configs"),
    _decided_of("today_id", "configs"),
    time_us=Duration,
    checked_by=_line("check"),
    today_origin=_line("origin"),
)
""":class:`fp8tune.records.Pick`, and since when it was decided so, in seconds since the epoch."""

Finalists = _decided("finalists", Finalist, time_us=Duration)
""":class:`fp8tune.records.Finalist`, likewise."""

QueuedSweeps = Table(
    "queued_sweeps",
    METADATA,
    Column("key", Text("sweep key", WORD), primary_key=True),
    _column("device", _line("device name")),
    _column("document", DocumentText),
    _column("command", CommandLine),
    _column("created_at", Finite),
)
"""A sweep whose work is shared out: its options and shapes as JSON, and the device name that it is for."""

UNIT_STATES = ("waiting", "running", "done", "failed")
"""The states of a unit."""

Units = Table(
    "units",
    METADATA,
    Column("key", Text("unit key", WORD), primary_key=True),
    Column("sweep_key", Text("sweep key", WORD), ForeignKey("queued_sweeps.key", ondelete="CASCADE"), nullable=False),
    _column("position", Count),
    _column("kernel", Text("kernel name", KERNEL)),
    _column("source_hash", Text("source hash", WORD)),
    _column("problems", DocumentText),
    _column("worth", Finite),
    _column("expected_s", Finite),
    _column("state", Text("state", re.compile("|".join(UNIT_STATES)))),
    _column("attempts", Count),
    _column("worker", _line("worker")),
    _column("token", Text("lease token", WORD)),
    Column("taken_at", Finite),
    Column("expires_at", Finite),
    Column("ended_at", Finite),
    _column("reason", String),
    Index("units_to_take", "state", "sweep_key"),
)
"""Problems of one kernel that one worker does, and the lease of who does them: see :mod:`fp8tune.store.units`.

Moments are seconds since the epoch by the server's clock; in a file, by the host's.
"""

Exclusions = Table(
    "exclusions",
    METADATA,
    Column("device", _line("device name"), primary_key=True),
    Column("uuid_hash", Text("UUID hash", WORD), primary_key=True),
    _column("worker", _line("worker")),
    _column("reason", _line("reason")),
    _column("excluded_at", Finite),
)
"""A GPU that takes no units and why, until it is found to be well: see :mod:`fp8tune.store.exclusions`."""

LastWrites = Table(
    "last_writes",
    METADATA,
    Column("writer", Text("writer", WORD), primary_key=True),
    _column("name", Text("name of a write", WORD)),
    _column("written_at", Finite),
)
"""Which write of a connection to a server was committed last: see :mod:`fp8tune.store.last_writes`."""

OPTIONAL = (RecordedLaunches, ProblemFlops, ChecksUsed, Picks, Finalists, QueuedSweeps, Units, Exclusions, LastWrites)
"""Tables that a database may lack: see :mod:`fp8tune.store.optional`."""
