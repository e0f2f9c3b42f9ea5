"""Tables of a results database, the same on SQLite and PostgreSQL.

A *study* is one problem, kernel version and device. It has one *result* per config, and a result has one *trial* per
timed block. Constraints reject what a reader could not use. The checksum of a row covers its columns, the ids of other
rows among them, and that of a result also its blocks. So a result is checked with all the names that it belongs to::

    problems, versions, devices --< studies --< results --< trials --- trial_details
                                      |           |           |
                    sweeps --< study_runs      configs     processes >-- sweeps >-- devices
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    insert,
    select,
)
from sqlalchemy.sql.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from fp8tune.records import Kind, Status

VERSION = 23
METADATA = MetaData()
COARSE, FINAL, CONTROL = range(3)
"""Stages of a trial. As integers: SQLite stores 0 and 1 in no byte at all, and there are many trials."""

# STRICT tables of SQLite know five type names only.
_INTEGER: TypeEngine[Any] = BigInteger().with_variant(Integer, "sqlite")
_REAL: TypeEngine[Any] = Double().with_variant(REAL(), "sqlite")

_NAME = "A-Za-z0-9_.:+-"
_INTS = "A-Za-z0-9_= "
_TRIAL_KEY = ("result_id", "stage", "process_id", "round")


class UnitState(StrEnum):
    """State of a unit in the work queue."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def _table(name: str, about: str, *parts: SchemaItem, rowid: bool = True) -> Table:
    # Checks that differ by dialect must belong to the table: SQLAlchemy ignores ddl_if in columns.
    checks = [check for part in parts for check in part.info.get("checks", ())]
    return Table(name, METADATA, *parts, *checks, sqlite_strict=True, sqlite_with_rowid=rowid, info={"about": about})


def _id() -> Column[Any]:
    return Column("id", Integer, primary_key=True)


def _crc() -> Column[Any]:
    return Column("crc", _INTEGER, nullable=False)


def _integer(name: str, *, null: bool = False, **options: Any) -> Column[Any]:
    return Column(name, _INTEGER, CheckConstraint(f"{name} >= 0"), nullable=null, **options)


def _real(name: str, *, null: bool = True, default: int | None = None) -> Column[Any]:
    # Rejects infinities, and NaN, which PostgreSQL sorts above every number.
    text = None if default is None else str(default)
    return Column(name, _REAL, CheckConstraint(f"abs({name}) <= 1e18"), nullable=null, server_default=text)


def _duration(name: str, *, null: bool = True) -> Column[Any]:
    return Column(name, _REAL, CheckConstraint(f"{name} > 0 AND {name} <= 1e12"), nullable=null)


def _text(name: str, characters: str | None = None, *, longest: int = 500, **options: Any) -> Any:
    options.setdefault("server_default", "")
    checks = [CheckConstraint(f"length({name}) <= {longest}")]
    if characters:
        sqlite, postgresql = f"NOT GLOB '*[^{characters}]*'", f"!~ '[^{characters}]'"
    else:  # one line without control characters
        sqlite, postgresql = "NOT GLOB ('*[' || char(1) || '-' || char(31) || char(127) || ']*')", "!~ '[[:cntrl:]]'"
    checks.append(CheckConstraint(f'"{name}" {sqlite}').ddl_if(dialect="sqlite"))
    checks.append(CheckConstraint(f'"{name}" {postgresql}').ddl_if(dialect="postgresql"))
    return Column(name, Text, nullable=False, info={"checks": checks}, **options)


def _document(name: str) -> Column[Any]:
    return Column(name, Text, CheckConstraint(f"length({name}) <= 1048576"), nullable=False)


def _choice(name: str, choices: Iterable[str], **options: Any) -> Column[Any]:
    names = ", ".join(f"'{choice}'" for choice in choices)
    return Column(name, Text, CheckConstraint(f"{name} IN ({names})"), nullable=False, **options)


def _refers(name: str, table: str, *, null: bool = False, **options: Any) -> Column[Any]:
    return Column(name, Integer, ForeignKey(f"{table}.id", ondelete="CASCADE"), nullable=null, **options)


Meta = _table(
    "meta", "Facts about the database: its schema version.", _text("name", _NAME, primary_key=True), _text("value")
)

_DEVICE = ("arch", "name", "uuid_hash", "multiprocessors", "driver", "runtime", "torch", "triton", "timing", "codegen")
Devices = _table(
    "devices",
    "GPUs with their software and the way they were timed. Rows compare only where all columns agree.",
    _id(),
    _text("arch", _NAME),
    _text("name"),
    _text("uuid_hash", _NAME),
    _integer("multiprocessors"),
    *(_text(name) for name in _DEVICE[4:]),
    _crc(),
    UniqueConstraint(*_DEVICE),
)

Configs = _table(
    "configs",
    "Launch configs in the order of their declaration; empty where a publication names none.",
    _id(),
    _text("text", _INTS, longest=4000),
    _text("canonical", _INTS, longest=4000, unique=True),
    _crc(),
)

Versions = _table(
    "versions",
    "Kernels at one state of their source code; without a hash, implementations of others.",
    _id(),
    _text("kernel"),
    _text("source_hash", _NAME),
    _refers("default_id", "configs"),
    _text("axes", longest=100_000),
    _text("key", _INTS, longest=4000),
    _crc(),
    UniqueConstraint("kernel", "source_hash"),
)

_MODES = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
Problems = _table(
    "problems",
    "Problem sizes with routing, layout and dtypes. The shape keeps its order, canonical makes it unique.",
    _id(),
    _text("kernel"),
    _text("shape", _INTS, longest=4000),
    _text("canonical", _INTS, longest=4000),
    *(_text(name, _NAME) for name in _MODES),
    _integer("seed"),
    Column("flops", _INTEGER),
    _crc(),
    UniqueConstraint("kernel", "canonical", *_MODES, "seed"),
)

RecordedLaunches = _table(
    "recorded_launches",
    "Recorded launch that a problem stands for, as JSON.",
    _refers("problem_id", "problems", primary_key=True),
    _document("document"),
)

Sweeps = _table(
    "sweeps",
    "Sweeps. The uid is the same in every copy, so importing a database twice adds nothing.",
    _id(),
    _text("uid", _NAME, unique=True),
    _refers("device_id", "devices"),
    _text("request"),
    _text("command", longest=10_000),
    _text("git_commit", _NAME),
    _text("timer"),
    Column("seed", _INTEGER, nullable=False, server_default="0"),
    _integer("again", server_default="0"),
    _text("ptxas"),
    *(_real(name) for name in ("sm_clock_limit_mhz", "memory_clock_mhz", "power_limit_w")),
    _real("started_at", null=False),
    _real("finished_at"),
    _crc(),
)

Processes = _table(
    "processes",
    "Worker processes: the unit of replication. Trials reach their sweep, and their time, through it.",
    _id(),
    _refers("sweep_id", "sweeps"),
    _text("name"),
    _text("git_commit", _NAME),
    _real("started_at", null=False),
    _crc(),
    UniqueConstraint("sweep_id", "name", "git_commit"),
)

Studies = _table(
    "studies",
    "One problem, kernel version and device: everything comparable; with the number of its results and runs.",
    _id(),
    _refers("problem_id", "problems"),
    _refers("version_id", "versions"),
    _refers("device_id", "devices"),
    _choice("kind", Kind),
    Column("lookup_key", Text),
    _integer("bytes_moved", null=True),
    _real("timed_at", null=False, default=0),
    _integer("results", server_default="0"),
    _integer("runs", server_default="0"),
    _crc(),
    UniqueConstraint("problem_id", "version_id", "device_id", "kind"),
)

StudyRuns = _table(
    "study_runs",
    "Progress of a sweep in one study: planned is set when all configs have a result, the bands once finals end.",
    _refers("study_id", "studies", primary_key=True),
    _refers("sweep_id", "sweeps", primary_key=True),
    _integer("planned", null=True),
    _text("reference", _NAME),
    _text("check_used", server_default="exact"),
    *(_real(name) for name in ("tie_band", "keep_band", "floor_us")),
    _crc(),
    CheckConstraint("(tie_band IS NULL) = (keep_band IS NULL)"),
    rowid=False,
)

FACTS = ("registers", "spill_bytes", "shared_bytes", "compile_s")
Results = _table(
    "results",
    "One config in one study. Status, coarse_us and final_us summarize its trials and outlive them.",
    _id(),
    _refers("study_id", "studies"),
    _refers("config_id", "configs"),
    _text("source"),
    _text("note"),
    _choice("status", Status, server_default=Status.OK),
    _duration("coarse_us"),
    _integer("coarse_processes", server_default="0"),
    _duration("final_us"),
    *(_integer(name, null=True) for name in FACTS[:3]),
    _real("compile_s"),
    _crc(),
    UniqueConstraint("study_id", "config_id", "source", "note"),
)

CODE = ("agprs", "sgprs", "scratch_bytes", "resident_warps", "fp8_conversions")
Codes = _table(
    "codes",
    "Facts of the machine code of a result that was compiled only.",
    _refers("result_id", "results", primary_key=True),
    *(_integer(name, null=True) for name in CODE),
)

_COMPILER = ("arch", "triton", "codegen", "ptxas")
Compilers = _table(
    "compilers",
    "Compilers: the version of Triton, the settings that change machine code, and the version of NVIDIA's assembler.",
    _id(),
    _text("arch", _NAME),
    *(_text(name) for name in _COMPILER[1:]),
    _crc(),
    UniqueConstraint(*_COMPILER),
)

Programs = _table(
    "programs",
    "Hash of the machine code of a launch by one compiler. Launches with the same hash run the same code.",
    _refers("problem_id", "problems", primary_key=True),
    _refers("version_id", "versions", primary_key=True),
    _refers("config_id", "configs", primary_key=True),
    _refers("compiler_id", "compilers", primary_key=True),
    _text("code_hash", _NAME),
    _crc(),
    rowid=False,
)

OutputBits = _table(
    "output_bits",
    "Hash of a config's output up to a size, on a batch that its family of problems shares: see sweep --same-bits.",
    _refers("result_id", "results", primary_key=True),
    _text("axis", _NAME, primary_key=True),
    _integer("size", primary_key=True),
    _text("bits", _NAME),
    _crc(),
    rowid=False,
)

Trials = _table(
    "trials",
    "One timed block or failed attempt; stage 0 is the coarse pass, 1 the finals, 2 their A/A control.",
    _refers("result_id", "results", primary_key=True),
    Column("stage", _INTEGER, CheckConstraint("stage IN (0, 1, 2)"), primary_key=True, autoincrement=False),
    _refers("process_id", "processes", primary_key=True),
    _integer("round", primary_key=True),
    _integer("position"),
    _choice("status", Status),
    _text("reason", longest=2_000),
    _duration("time_us"),
    CheckConstraint("time_us IS NULL OR status = 'ok'"),
    CheckConstraint("reason <> '' OR status = 'ok'"),
    rowid=False,
)

TELEMETRY = ("tick_us", "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "temperature_c", "power_w")
TrialDetails = _table(
    "trial_details",
    "Samples (little-endian float32, microseconds) and telemetry of a block, which decisions never read.",
    *(Column(name, Trials.c[name].type, primary_key=True) for name in _TRIAL_KEY),
    *(_real(name) for name in TELEMETRY),
    Column("samples", LargeBinary),
    ForeignKeyConstraint(_TRIAL_KEY, [f"trials.{name}" for name in _TRIAL_KEY], ondelete="CASCADE"),
    rowid=False,
)

Decisions = _table(
    "decisions",
    "Pick of each study as it was decided last, beside the config that launches used until then and its origin.",
    _refers("study_id", "studies", primary_key=True),
    *(_refers(name, "configs", null=True) for name in ("config_id", "runner_up_id", "today_id")),
    *(_text(name) for name in ("source", "note", "stage", "checked_by")),
    *(Column(name, Text) for name in ("verdict", "runner_up_stage", "bound", "today_origin")),
    *(_duration(name) for name in ("time_us", "runner_up_us", "today_us")),
    *(_real(name) for name in ("ceiling_share", "runner_up_ratio", "slowdown_lower_share", "slowdown_upper_share")),
    *(_real(name) for name in ("noise_floor_share", "speedup_ratio", "default_ratio")),
    *(_integer(name) for name in ("processes", "is_default", "is_incumbent")),
    _real("decided_at", null=False),
    _crc(),
)

Calibrations = _table(
    "calibrations",
    "Named values measured of the sweep's device; the unit is in the name.",
    _refers("sweep_id", "sweeps", primary_key=True),
    _text("name", _NAME, primary_key=True),
    _real("value", null=False),
    _real("created_at", null=False),
    _crc(),
    rowid=False,
)

QueuedSweeps = _table(
    "queued_sweeps",
    "Options and shapes of a shared sweep, as JSON, and the device name that it is for.",
    _text("key", _NAME, primary_key=True),
    _text("device"),
    _document("document"),
    _text("command", longest=10_000),
    _real("created_at", null=False),
)

Units = _table(
    "units",
    "Parts of a queued sweep and the leases of the workers that do them.",
    _text("key", _NAME, primary_key=True),
    Column("sweep_key", Text, ForeignKey("queued_sweeps.key", ondelete="CASCADE"), nullable=False),
    _integer("position"),
    _text("kernel"),
    _text("source_hash", _NAME),
    _document("problems"),
    _real("expected_s", null=False),
    _choice("state", UnitState, server_default=UnitState.WAITING),
    _integer("attempts", server_default="0"),
    _text("worker"),
    _text("token", _NAME),
    *(_real(name) for name in ("taken_at", "expires_at", "ended_at")),
    _text("reason", longest=2_000),
    CheckConstraint("(state = 'running') = (expires_at IS NOT NULL)"),
    Index("units_by_state", "state", "sweep_key"),
)


def _with_programs(connection: Connection) -> None:
    """Bring a database of schema 22 to 23: tables of machine code, and no columns and tables that nothing used."""
    for name in ("shared_launches", "published_operations", "removed_trials"):
        connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")
    for table in (Codes, Units):
        rows = [dict(row) for row in connection.execute(select(table)).mappings()]
        table.drop(connection)
        table.create(connection)
        if rows:
            connection.execute(insert(table), rows)
    METADATA.create_all(connection, tables=[Compilers, Programs])


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {22: _with_programs}
"""Schema version -> the step to the next one."""


def row_checksum(table: Table, row: Mapping[str, Any], *more: object) -> int:
    """Return the CRC-32 of a row of a checked table: of all columns but its id here, and of ``more``."""
    values = [None if row[name] is None else plain(row[name]) for name, plain in _checked(table)]
    return zlib.crc32(repr((*values, *more)).encode())


def checked_columns(table: Table) -> list[str]:
    """Return the columns that a row's checksum covers."""
    return [name for name, _ in _checked(table)]


@functools.cache
def _checked(table: Table) -> list[tuple[str, type]]:
    return [(c.name, c.type.python_type) for c in table.c if c.name not in ("id", "crc", "finished_at")]


@functools.cache
def unique_names(table: Table) -> list[str]:
    """Return the columns that identify a row in every copy of a database."""
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            return [column.name for column in constraint.columns]
    return [column.name for column in table.primary_key]


@functools.cache
def defaults(table: Table) -> dict[str, Any]:
    """Return the value of each column that a row may leave out."""
    rows = {c.name: None if c.server_default is None else str(c.server_default.arg) for c in table.c}  # type: ignore[attr-defined]
    texts = {c.name for c in table.c if isinstance(c.type, Text)}
    numbers = {name: value if value is None else int(value) for name, value in rows.items() if name not in texts}
    return {name: numbers.get(name, value) for name, value in rows.items() if name not in ("id", "crc")}
