"""Views with readable columns, for whoever opens a database with another program; fp8tune itself reads tables.

Their columns are named as those of the DataFrames of :mod:`fp8tune.api`. Moments are texts in UTC.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, Table, insert, inspect, select, text

from fp8tune.store.columns import UNSTATED
from fp8tune.store.schema import (
    METADATA,
    Codes,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    Meta,
    Problems,
    PublishedOperations,
    RecordedLaunches,
    Sweeps,
    Workers,
)

DECIDED_FROM = "picks decided from"
"""The fact of ``meta`` that says which rows the picks were decided from: :data:`ROWS` of then."""

_MOMENT = {
    "sqlite": "datetime(CAST({} AS INTEGER), 'unixepoch')",
    "postgresql": "to_char(to_timestamp(trunc({})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')",
}
"""Dialect -> seconds since the epoch as a text. Cut to whole seconds first: SQLite rounds to ms, a server to us."""

_DECIDES_NOTHING = (
    Codes,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    Problems,
    PublishedOperations,
    RecordedLaunches,
    Sweeps,
    Workers,
)
"""Tables whose rows alone change no pick."""


def _counts(table: Table) -> str:
    moments = [column.name for column in table.c if column.name in ("created_at", "newest")]
    whole_s = "".join(f" || '@' || CAST(coalesce(max({table.name}.{name}), 0) AS BIGINT)" for name in moments)
    return f"(SELECT count(*){whole_s} FROM {table.name})"


ROWS = " || ' ' || ".join(
    _counts(table) for table in METADATA.sorted_tables if "id" in table.c and table not in _DECIDES_NOTHING
)
"""An SQL expression whose text changes with the rows that picks are decided from."""

_PROBLEM = """\
  problems.kernel AS kernel,
  devices.arch AS arch,
  devices.name AS device,
  problems.shape AS shape,
  problems.routing AS routing,
  problems.input_layout AS input_layout,
  problems.in_dtype AS in_dtype,
  problems.fp8_dtype AS fp8_dtype,
  problems.scale_mode AS scale_mode,
  problems.seed AS seed"""

_ABOUT = f"{_PROBLEM},\n  nullif(configs.items, '{UNSTATED}') AS config"

_JOINED = """\
  JOIN problems ON problems.id = {table}.problem_id
  JOIN devices ON devices.id = {table}.device_id
  JOIN configs ON configs.id = {table}.config_id
  JOIN kernel_versions ON kernel_versions.id = {table}.version_id"""

_WHEN = f"""\
  {{measured_at}} AS measured_at,
  {{decided_at}} AS decided_at,
  CASE WHEN (SELECT value FROM meta WHERE name = '{DECIDED_FROM}') = ({ROWS}) THEN 1 ELSE 0 END AS is_current"""

_RATE = "{moved}.bytes_moved / {timed}.time_us / 1000.0 AS gb_per_s"

_SELECTS = {
    "v_trials": f"""\
SELECT
  trials.id AS trial_id,
{_ABOUT},
  candidates.kind AS kind,
  trials.stage AS stage,
  trials.round AS round,
  workers.process AS process,
  trials.position AS position,
  trials.status AS status,
  trials.reason AS reason,
  trials.time_us AS time_us,
  trials.tick_us AS tick_us,
  {_RATE.format(moved="candidates", timed="trials")},
  candidates.bytes_moved AS bytes_moved,
  candidates.registers AS registers,
  candidates.spill_bytes AS spill_bytes,
  candidates.shared_bytes AS shared_bytes,
  candidates.compile_s AS compile_s,
  trials.sm_clock_mhz AS sm_clock_mhz,
  trials.memory_clock_mhz AS memory_clock_mhz,
  trials.temperature_c AS temperature_c,
  trials.power_w AS power_w,
  candidates.source AS source,
  candidates.note AS note,
  workers."commit" AS git_commit,
  kernel_versions.source_hash AS source_hash,
  {{measured_at}} AS measured_at
FROM trials
  JOIN candidates ON candidates.id = trials.candidate_id
{_JOINED.format(table="candidates")}
  JOIN workers ON workers.id = trials.worker_id""",
    "v_packed": f"""\
SELECT
{_PROBLEM},
  packed_trials.kind AS kind,
  packed_trials.candidates AS configs,
  packed_trials.trials AS trials,
  kernel_versions.source_hash AS source_hash,
  {{measured_at}} AS measured_at
FROM packed_trials
  JOIN problems ON problems.id = packed_trials.problem_id
  JOIN devices ON devices.id = packed_trials.device_id
  JOIN kernel_versions ON kernel_versions.id = packed_trials.version_id
ORDER BY 1, 2, 3, 4, 5""",
    "v_picks": f"""\
SELECT
{_ABOUT},
  picks.verdict AS verdict,
  picks.stage AS stage,
  picks.time_us AS time_us,
  {_RATE.format(moved="picks", timed="picks")},
  picks.ceiling_share AS ceiling_share,
  picks.bound AS bound,
  nullif(runner_up.items, '{UNSTATED}') AS runner_up,
  picks.runner_up_stage AS runner_up_stage,
  picks.runner_up_us AS runner_up_us,
  picks.runner_up_ratio AS runner_up_ratio,
  picks.slowdown_lower_share AS slowdown_lower_share,
  picks.slowdown_upper_share AS slowdown_upper_share,
  picks.noise_floor_share AS noise_floor_share,
  picks.processes AS processes,
  nullif(today.items, '{UNSTATED}') AS today,
  picks.today_origin AS today_origin,
  picks.today_us AS today_us,
  picks.speedup_ratio AS speedup_ratio,
  picks.is_default AS is_default,
  picks.is_incumbent AS is_incumbent,
  picks.is_complete AS is_complete,
  picks.checked_by AS checked_by,
  nullif(lookup_keys.items, '{UNSTATED}') AS lookup_key,
  picks.kind AS kind,
  picks.source AS source,
{_WHEN}
FROM picks
{_JOINED.format(table="picks")}
  JOIN lookup_keys ON lookup_keys.id = picks.lookup_key_id
  LEFT JOIN configs AS runner_up ON runner_up.id = picks.runner_up_id
  LEFT JOIN configs AS today ON today.id = picks.today_id
ORDER BY 1, 2, 3, 4, 5""",
    "v_finals": f"""\
SELECT
{_ABOUT},
  finalists.time_us AS time_us,
  finalists.slowdown_ratio AS slowdown_ratio,
  finalists.processes AS processes,
  finalists.blocks AS blocks,
  finalists.fastest_process_us AS fastest_process_us,
  finalists.slowest_process_us AS slowest_process_us,
  finalists.screen_us AS screen_us,
  finalists.is_pick AS is_pick,
  finalists.is_default AS is_default,
  finalists.is_incumbent AS is_incumbent,
  finalists.kind AS kind,
{_WHEN}
FROM finalists
{_JOINED.format(table="finalists")}
ORDER BY 1, 2, 3, 4, 5, finalists.time_us""",
}

_MOMENTS = {
    "v_trials": {"measured_at": "trials.created_at"},
    "v_packed": {"measured_at": "packed_trials.newest"},
    "v_picks": {"measured_at": "picks.newest", "decided_at": "picks.decided_at"},
    "v_finals": {"measured_at": "finalists.newest", "decided_at": "finalists.decided_at"},
}
"""View -> its column of a moment -> the column of a table that it shows."""

_FACT = "views"


def statements(dialect: str) -> dict[str, str]:
    """View -> the statement that makes it. Tables that are lacking are named too: make them first."""
    made = {}
    for name, query in _SELECTS.items():
        moments = {column: _MOMENT[dialect].format(of) for column, of in _MOMENTS[name].items()}
        made[name] = f"CREATE VIEW {name} AS\n{query.format(**moments)}"
    return made


def _identity(connection: Connection) -> str:
    """Of all statements: one that changes makes the views of a database old."""
    return hashlib.sha256(repr(statements(connection.dialect.name)).encode()).hexdigest()[:16]


def are_there(connection: Connection) -> bool:
    """Whether a database has today's views."""
    same = select(Meta.c.name).where(Meta.c.name == _FACT, Meta.c.value == _identity(connection))
    return connection.scalar(same) is not None and {*_SELECTS} <= {*inspect(connection).get_view_names()}


def create(connection: Connection) -> None:
    """Make them anew, within the caller's transaction."""
    drop(connection)
    for statement in statements(connection.dialect.name).values():
        connection.exec_driver_sql(statement)
    state(connection, _FACT, _identity(connection))


def drop(connection: Connection) -> None:
    """Remove those that are there."""
    for name in _SELECTS:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def state(connection: Connection, name: str, value: str) -> None:
    """Put a fact into ``meta``."""
    connection.execute(text("DELETE FROM meta WHERE name = :name"), {"name": name})
    connection.execute(insert(Meta).values(name=name, value=value))
