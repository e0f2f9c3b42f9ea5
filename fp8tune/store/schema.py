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
from typing import Any

import sqlalchemy as sa
from sqlalchemy import CheckConstraint, Column, Integer, Table, Text

from fp8tune.records import Kind, Status

VERSION = 23
METADATA = sa.MetaData()
COARSE, FINAL, CONTROL = range(3)
"""Stages of a trial. As integers: SQLite stores 0 and 1 in no byte at all, and there are many trials."""

# STRICT tables of SQLite know five type names only.
_INTEGER: sa.types.TypeEngine[Any] = sa.BigInteger().with_variant(Integer, "sqlite")
_REAL: sa.types.TypeEngine[Any] = sa.Double().with_variant(sa.REAL(), "sqlite")

_NAME = "A-Za-z0-9_.:+-"
_INTS = "A-Za-z0-9_= "


def _table(name: str, about: str, *parts: sa.schema.SchemaItem, rowid: bool = True, **info: Any) -> Table:
    # Checks that differ by dialect must belong to the table: SQLAlchemy ignores ddl_if in columns.
    checks = [check for part in parts for check in part.info.get("checks", ())]
    info |= {"about": about}
    return Table(name, METADATA, *parts, *checks, sqlite_strict=True, sqlite_with_rowid=rowid, info=info)


def _named(name: str, about: str, *columns: Column[Any], unique: Iterable[str]) -> Table:
    """Define a table whose rows have an id here, and unique columns that identify them in every copy of a database."""
    names = tuple(unique)
    id = Column("id", Integer, primary_key=True)
    return _table(name, about, id, *columns, _crc(), sa.UniqueConstraint(*names), unique=names)


def _crc() -> Column[Any]:
    return Column("crc", _INTEGER, nullable=False)


def _integer(name: str, *, null: bool = False, **options: Any) -> Column[Any]:
    return Column(name, _INTEGER, CheckConstraint(f"{name} >= 0"), nullable=null, **options)


def _real(name: str, *, null: bool = True, **options: Any) -> Column[Any]:
    # Rejects infinities, and NaN, which PostgreSQL sorts above every number.
    return Column(name, _REAL, CheckConstraint(f"abs({name}) <= 1e18"), nullable=null, **options)


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
    return Column(name, Integer, sa.ForeignKey(f"{table}.id", ondelete="CASCADE"), nullable=null, **options)


Meta = _table(
    "meta", "Facts about the database: its schema version.", _text("name", _NAME, primary_key=True), _text("value")
)

_SOFTWARE = ("driver", "runtime", "torch", "triton", "timing", "codegen")
Devices = _named(
    "devices",
    "GPUs with their software and the way they were timed. Rows compare only where all columns agree.",
    _text("arch", _NAME),
    _text("name"),
    _text("uuid_hash", _NAME),
    _integer("multiprocessors"),
    *map(_text, _SOFTWARE),
    unique=("arch", "name", "uuid_hash", "multiprocessors", *_SOFTWARE),
)

Configs = _named(
    "configs",
    "Launch configs in the order of their declaration; empty where a publication names none.",
    _text("text", _INTS, longest=4000),
    _text("canonical", _INTS, longest=4000),
    unique=["canonical"],
)

Versions = _named(
    "versions",
    "Kernels at one state of their source code; without a hash, implementations of others.",
    _text("kernel"),
    _text("source_hash", _NAME),
    _refers("default_id", "configs"),
    _text("axes", longest=100_000),
    _text("key", _INTS, longest=4000),
    unique=("kernel", "source_hash"),
)

MODES = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
Problems = _named(
    "problems",
    "Problem sizes with routing, layout and dtypes. The shape keeps its order, canonical makes it unique.",
    _text("kernel"),
    _text("shape", _INTS, longest=4000),
    _text("canonical", _INTS, longest=4000),
    *(_text(name, _NAME) for name in MODES),
    _integer("seed"),
    Column("flops", _INTEGER),
    unique=("kernel", "canonical", *MODES, "seed"),
)

RecordedLaunches = _table(
    "recorded_launches",
    "Recorded launch that a problem stands for, as JSON.",
    _refers("problem_id", "problems", primary_key=True),
    _document("document"),
)

LIMITS = ("sm_clock_limit_mhz", "memory_clock_mhz", "power_limit_w")
Sweeps = _named(
    "sweeps",
    "Sweeps. The uid is the same in every copy, so importing a database twice adds nothing.",
    _text("uid", _NAME),
    _refers("device_id", "devices"),
    _text("request"),
    _text("command", longest=10_000),
    _text("git_commit", _NAME),
    _text("timer"),
    Column("seed", _INTEGER, nullable=False, server_default="0"),
    _integer("again", server_default="0"),
    _text("ptxas"),
    *map(_real, LIMITS),
    _real("started_at", null=False),
    _real("finished_at"),
    unique=["uid"],
)

Processes = _named(
    "processes",
    "Worker processes: the unit of replication. Trials reach their sweep, and their time, through it.",
    _refers("sweep_id", "sweeps"),
    _text("name"),
    _text("git_commit", _NAME),
    _real("started_at", null=False),
    unique=("sweep_id", "name", "git_commit"),
)

Studies = _named(
    "studies",
    "One problem, kernel version and device: everything comparable; with the number of its results and runs.",
    _refers("problem_id", "problems"),
    _refers("version_id", "versions"),
    _refers("device_id", "devices"),
    _choice("kind", Kind),
    Column("lookup_key", Text),
    _integer("bytes_moved", null=True),
    _real("timed_at", null=False, server_default="0"),
    _integer("results", server_default="0"),
    _integer("runs", server_default="0"),
    unique=("problem_id", "version_id", "device_id", "kind"),
)

StudyRuns = _table(
    "study_runs",
    "Progress of a sweep in one study: planned is set when all configs have a result, the bands once finals end.",
    _refers("study_id", "studies", primary_key=True),
    _refers("sweep_id", "sweeps", primary_key=True),
    _integer("planned", null=True),
    _text("reference", _NAME),
    _text("check_used", server_default="exact"),
    *map(_real, ("tie_band", "keep_band", "floor_us")),
    _crc(),
    CheckConstraint("(tie_band IS NULL) = (keep_band IS NULL)"),
    rowid=False,
)

FACTS = ("registers", "spill_bytes", "shared_bytes", "compile_s")
Results = _named(
    "results",
    "One config in one study. Status, coarse_us and final_us summarize its trials and outlive them.",
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
    unique=("study_id", "config_id", "source", "note"),
)

Compilers = _named(
    "compilers",
    "Compilers: the version of Triton, the settings that change machine code, and the version of NVIDIA's assembler.",
    _text("arch", _NAME),
    *map(_text, ("triton", "codegen", "ptxas")),
    unique=("arch", "triton", "codegen", "ptxas"),
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

TRIAL_KEY = ("result_id", "stage", "process_id", "round")
TELEMETRY = ("tick_us", "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "temperature_c", "power_w")
TrialDetails = _table(
    "trial_details",
    "Samples (little-endian float32, microseconds) and telemetry of a block, which decisions never read.",
    *(Column(name, Trials.c[name].type, primary_key=True) for name in TRIAL_KEY),
    *map(_real, TELEMETRY),
    Column("samples", sa.LargeBinary),
    sa.ForeignKeyConstraint(TRIAL_KEY, [f"trials.{name}" for name in TRIAL_KEY], ondelete="CASCADE"),
    rowid=False,
)
DETAILS = ("samples", *TELEMETRY)

Decisions = _table(
    "decisions",
    "Pick of each study as it was decided last, beside the config that launches used until then and its origin.",
    _refers("study_id", "studies", primary_key=True),
    *(_refers(name, "configs", null=True) for name in ("config_id", "runner_up_id", "today_id")),
    *map(_text, ("source", "note", "stage", "checked_by")),
    *(Column(name, Text) for name in ("verdict", "runner_up_stage", "bound", "today_origin")),
    *map(_duration, ("time_us", "runner_up_us", "today_us")),
    *map(_real, ("ceiling_share", "runner_up_ratio", "slowdown_lower_share", "slowdown_upper_share")),
    *map(_real, ("noise_floor_share", "speedup_ratio", "default_ratio")),
    *map(_integer, ("processes", "is_default", "is_incumbent")),
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


def _with_programs(connection: sa.Connection) -> None:
    """Bring a database of schema 22 to 23: tables of machine code, and no columns and tables that nothing used."""
    for name in ("shared_launches", "published_operations", "removed_trials", "codes", "units", "queued_sweeps"):
        connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")
    METADATA.create_all(connection, tables=[Compilers, Programs])


MIGRATIONS: Mapping[int, Callable[[sa.Connection], None]] = {22: _with_programs}
"""Schema version -> the step to the next one."""


def unique_names(table: Table) -> list[str]:
    """Return the columns that identify a row in every copy of a database."""
    return list(table.info.get("unique") or table.primary_key.columns.keys())


@functools.cache
def defaults(table: Table) -> dict[str, Any]:
    """Return the value of each column that a row may leave out."""
    texts: dict[str, Any] = {c.name: getattr(c.server_default, "arg", None) for c in table.c}
    types = {c.name: c.type.python_type for c in table.c if c.name not in ("id", "crc")}
    return {name: None if texts[name] is None else plain(str(texts[name])) for name, plain in types.items()}


@functools.cache
def checked_columns(table: Table) -> Mapping[str, type]:
    """Return the columns that a row's checksum covers, with their types."""
    return {c.name: c.type.python_type for c in table.c if c.name not in ("id", "crc", "finished_at")}


def row_checksum(table: Table, row: Mapping[str, Any], *more: object) -> int:
    """Return the CRC-32 of a checked table's row: of all columns but its id here, and of ``more``."""
    values = [None if row[name] is None else plain(row[name]) for name, plain in checked_columns(table).items()]
    return zlib.crc32(repr((*values, *more)).encode())
