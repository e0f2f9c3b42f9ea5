"""Records as pandas DataFrames: which columns a table has, of what type and unit.

Texts are ``string``, whole numbers ``Int64`` and truths ``boolean``, which know ``<NA>``. Other numbers are
``float64``, where NaN is what was not measured. Moments are ``datetime64`` in UTC. A unit ends a column's name:
``_us`` microseconds, ``gb_per_s`` 10^9 bytes a second, ``_share`` a part of one, ``_ratio`` one time over another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fp8tune.ceiling import gb_per_s
from fp8tune.records import Device, Finalist, NamedInts, Outcome, Pick, Problem, Row, Status
from fp8tune.store.results import COPY_CEILING, Tally
from fp8tune.store.texts import parse_named_ints

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

TEXT, WHOLE, REAL, FLAG, MOMENT = "string", "Int64", "float64", "boolean", "datetime64[us, UTC]"


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column."""

    name: str
    dtype: str
    says: str
    """What it holds, for the reference."""
    value: Callable[[T], object] = lambda item: None
    """Makes it from a record; not where the store makes the whole table."""


def table(
    columns: Sequence[Column[T]], items: Iterable[T], *, expand: Callable[[T], Mapping[str, int]] | None = None
) -> pandas.DataFrame:
    """A row an item. ``expand``: what further columns it has, whole numbers."""
    import pandas

    found = list(items)
    data = {column.name: _series(column, [column.value(item) for item in found]) for column in columns}
    if expand is not None:
        sizes = [expand(item) for item in found]
        names = dict.fromkeys(name for each in sizes for name in each)
        data |= {name: pandas.Series([each.get(name) for each in sizes], dtype=WHOLE) for name in names}
    return pandas.DataFrame(data)


def _series(column: Column[T], values: Iterable[Any]) -> Any:
    import pandas

    found = list(values)
    if column.dtype == MOMENT:
        found = [value and datetime.fromtimestamp(value, UTC) for value in found]
    if column.dtype == REAL:
        found = [math.nan if value is None else value for value in found]
    return pandas.Series(found, dtype=column.dtype)


def text(named: NamedInts | None) -> str | None:
    """``BLOCK_SIZE=32 num_warps=4``; None for what is not named."""
    return None if named is None else str(named)


def expanded(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The trials with a column for each size and each axis of a config: ``shape.K`` and ``config.num_warps``."""
    import pandas

    for name in ("shape", "config"):
        texts = frame[name].dropna().unique()
        values = pandas.DataFrame([parse_named_ints(text) for text in texts], index=texts, dtype=WHOLE)
        columns = values.add_prefix(f"{name}.").reindex(frame[name]).reset_index(drop=True)
        frame = pandas.concat([frame, columns], axis="columns")
    return frame


def sizes(problem: Problem, config: NamedInts | None) -> dict[str, int]:
    """The further columns of ``expand``: ``shape.K`` and ``config.num_warps``."""
    found = {f"shape.{name}": size for name, size in problem.shape.items()}
    return found | {f"config.{name}": value for name, value in (config or {}).items()}


def _rate(bytes_moved: int | None, time_us: float | None) -> float | None:
    return gb_per_s(bytes_moved, time_us) if bytes_moved and time_us else None


def _about(problem: Callable[[T], Problem], device: Callable[[T], Device]) -> tuple[Column[T], ...]:
    """What every table begins with."""
    said = {
        "shape": "the sizes, as NAME=SIZE",
        "routing": "how rows spread over groups; none for a kernel without groups",
        "input_layout": "contiguous or transposed; recorded-ID for a recorded launch",
        "in_dtype": "of the input",
        "fp8_dtype": "of the output; empty where there is none",
        "scale_mode": "how scales are rounded; empty where there are none",
    }
    return (
        Column("kernel", TEXT, "as commands name it", lambda item: problem(item).kernel),
        Column("arch", TEXT, "such as sm_90", lambda item: device(item).arch),
        Column("device", TEXT, "the GPU's name", lambda item: device(item).name),
        Column("shape", TEXT, said["shape"], lambda item: str(problem(item).shape)),
        Column("routing", TEXT, said["routing"], lambda item: problem(item).routing),
        Column("input_layout", TEXT, said["input_layout"], lambda item: problem(item).input_layout),
        Column("in_dtype", TEXT, said["in_dtype"], lambda item: problem(item).in_dtype),
        Column("fp8_dtype", TEXT, said["fp8_dtype"], lambda item: problem(item).fp8_dtype),
        Column("scale_mode", TEXT, said["scale_mode"], lambda item: problem(item).scale_mode),
        Column("seed", WHOLE, "of values and group layout", lambda item: problem(item).seed),
    )


TRIALS: tuple[Column[Row], ...] = (
    *_about(lambda row: row.problem, lambda row: row.device),
    Column("config", TEXT, "the launch config, as NAME=VALUE", lambda row: text(row.config)),
    Column("kind", TEXT, "measured, published, static, interpreter or simulated", lambda row: str(row.kind)),
    Column("stage", TEXT, "screen, final, or duplicate: the default's second name in finals", lambda row: row.stage),
    Column("round", WHOLE, "counted from 0", lambda row: row.round),
    Column("process", TEXT, "the worker process, the unit of replication", lambda row: row.process),
    Column("position", WHOLE, "place in the order of the round"),
    Column("status", TEXT, "ok, wrong, compile_error, pruned, ..."),
    Column("reason", TEXT, "why it is not ok"),
    Column("time_us", REAL, "the block's value: the mean of the middle half of its samples"),
    Column("median_us", REAL, "of its samples"),
    Column("min_us", REAL, "the least sample"),
    Column("max_us", REAL, "the largest sample"),
    Column("samples", WHOLE, "how many samples are kept"),
    Column("tick_us", REAL, "the smallest step between two samples"),
    Column("gb_per_s", REAL, "bytes moved over time_us"),
    Column("bytes_moved", WHOLE, "the least that an implementation moves"),
    Column("registers", WHOLE, "a thread"),
    Column("spill_bytes", WHOLE, "a thread"),
    Column("shared_bytes", WHOLE, "a block"),
    Column("compile_s", REAL, "seconds to compile"),
    Column("sm_clock_mhz", WHOLE, "around the block"),
    Column("memory_clock_mhz", WHOLE, "around the block"),
    Column("temperature_c", WHOLE, "around the block"),
    Column("power_w", REAL, "around the block"),
    Column("source", TEXT, "the publication; empty for own rows"),
    Column("note", TEXT, "what the publication says besides"),
    Column("git_commit", TEXT, "of the working tree; + where it had changes"),
    Column("source_hash", TEXT, "of the kernel's code"),
)
"""A row a trial: one timed block, one check or one compilation."""


SAMPLES: tuple[Column[Row], ...] = (
    *_about(lambda row: row.problem, lambda row: row.device),
    *(column for column in TRIALS if column.name in ("config", "kind", "stage", "round", "process")),
    Column("sample", WHOLE, "its number in the block, from 0", lambda row: range(len(row.outcome.samples_us))),
    Column("sample_us", REAL, "the sample", lambda row: row.outcome.samples_us),
)
"""A row a sample of a timed block. Texts are categories: they repeat with every sample."""


def samples(rows: Iterable[Row]) -> pandas.DataFrame:
    """The table of :data:`SAMPLES`; the values of its last two columns are all of a block."""
    import numpy
    import pandas

    of_block, of_sample = SAMPLES[:-2], SAMPLES[-2:]
    found = [row for row in rows if row.outcome.samples_us]
    blocks = table(of_block, found)
    texts = {column.name: "category" for column in of_block if column.dtype == TEXT}
    counts = [len(row.outcome.samples_us) for row in found]
    frame = blocks.astype(texts).loc[blocks.index.repeat(counts)].reset_index(drop=True)
    for column in of_sample:
        values = [numpy.asarray(column.value(row), dtype=column.dtype.lower()) for row in found]
        frame[column.name] = pandas.Series(numpy.concatenate([[], *values]), dtype=column.dtype)
    return frame


def _of_pick(name: str, dtype: str, says: str) -> Column[Pick]:
    return Column(name, dtype, says, attrgetter(name))


PICKS: tuple[Column[Pick], ...] = (
    *_about(lambda pick: pick.problem, lambda pick: pick.device),
    Column("config", TEXT, "the pick; <NA> where a publication names none", lambda pick: text(pick.config)),
    _of_pick("verdict", TEXT, "proven, open, quick or published"),
    _of_pick("stage", TEXT, "what decided: final, or screen"),
    _of_pick("time_us", REAL, "of finals the geometric mean over processes, of a screen the median"),
    Column("gb_per_s", REAL, "bytes moved over time_us", lambda pick: _rate(pick.bytes_moved, pick.time_us)),
    _of_pick("ceiling_share", REAL, "of what memory or the tensor cores give"),
    _of_pick("bound", TEXT, "memory or compute: what the share is of"),
    Column("runner_up", TEXT, "the next best config that was timed", lambda pick: text(pick.runner_up)),
    _of_pick("runner_up_stage", TEXT, "what timed it beside the pick: final, or screen"),
    _of_pick("runner_up_us", REAL, "its time"),
    _of_pick("runner_up_ratio", REAL, "its time over the pick's"),
    _of_pick("slowdown_lower_share", REAL, "at least so much slower than the runner-up; 0.01 is one percent"),
    _of_pick("slowdown_upper_share", REAL, "at most so much slower than any finalist"),
    _of_pick("noise_floor_share", REAL, "how far the default was from itself"),
    _of_pick("processes", WHOLE, "that the time rests on; printed figures of a publication"),
    Column("today", TEXT, "the config that a launch used without the pick", lambda pick: text(pick.today)),
    _of_pick("today_origin", TEXT, "where that comes from: own table, shipped table, recording or default"),
    _of_pick("today_us", REAL, "its time"),
    _of_pick("speedup_ratio", REAL, "its time over the pick's; 1 if the pick is in use"),
    _of_pick("default_ratio", REAL, "the declared default's time over the pick's"),
    _of_pick("is_default", FLAG, "whether it is the declared default"),
    _of_pick("is_incumbent", FLAG, "whether the shipped table holds it"),
    _of_pick("is_complete", FLAG, "whether the sweep ran to its end"),
    _of_pick("checked_by", TEXT, "the check by which its outputs were right"),
    Column("lookup_key", TEXT, "the key of the exported table", lambda pick: text(pick.lookup_key)),
    Column("kind", TEXT, "measured, published or simulated", lambda pick: str(pick.kind)),
    _of_pick("source", TEXT, "the publication; empty for own rows"),
    Column("measured_at", MOMENT, "when its last row was stored", lambda pick: pick.newest or None),
)
"""A row a problem and device: the best config."""


def _of_finalist(name: str, dtype: str, says: str) -> Column[Finalist]:
    return Column(name, dtype, says, attrgetter(name))


FINALS: tuple[Column[Finalist], ...] = (
    *_about(lambda one: one.problem, lambda one: one.device),
    Column("config", TEXT, "the finalist", lambda one: text(one.config)),
    _of_finalist("time_us", REAL, "geometric mean over processes"),
    _of_finalist("slowdown_ratio", REAL, "its time over the fastest finalist's"),
    _of_finalist("processes", WHOLE, "fresh processes that timed it"),
    _of_finalist("blocks", WHOLE, "timed blocks, all processes"),
    _of_finalist("fastest_process_us", REAL, "in its fastest process"),
    _of_finalist("slowest_process_us", REAL, "in its slowest process"),
    _of_finalist("screen_us", REAL, "what the screen said"),
    _of_finalist("is_pick", FLAG, "whether it is the pick"),
    _of_finalist("is_default", FLAG, "whether it is the declared default"),
    _of_finalist("is_incumbent", FLAG, "whether the shipped table holds it"),
    Column("measured_at", MOMENT, "when its last row was stored", lambda one: one.newest or None),
)
"""A row a config that reached the finals of a problem on a device, the fastest first."""


def _first_failure(tally: Tally) -> Outcome | None:
    return next(iter(tally.failures.values()), None)


def _count(status: Status) -> Callable[[Tally], int]:
    return lambda tally: tally.counts[status]


TALLIES: tuple[Column[Tally], ...] = (
    *_about(lambda tally: tally.subject.problem, lambda tally: tally.subject.device),
    Column("configs", WHOLE, "that were tried", lambda tally: len(tally.outcomes)),
    Column("ok", WHOLE, "right, and timed where there is a GPU", _count(Status.OK)),
    Column("wrong", WHOLE, "with wrong output", _count(Status.WRONG)),
    Column("pruned", WHOLE, "not tried, for a reason of the hardware", _count(Status.PRUNED)),
    Column(
        "failed",
        WHOLE,
        "for other reasons",
        lambda tally: len(tally.failures) - tally.counts[Status.WRONG],
    ),
    Column("reason", TEXT, "of the first that failed", lambda tally: (found := _first_failure(tally)) and found.reason),
    Column("has_right", FLAG, "whether a config is right", lambda tally: tally.has_right),
)
"""A row a problem: what became of its configs."""


@dataclass(frozen=True)
class DeviceRows:
    """A device with what is stored of it."""

    device: Device
    kernels: int
    problems: int
    calibration: Mapping[str, float]


def _of_device(name: str, dtype: str, says: str) -> Column[DeviceRows]:
    return Column(name, dtype, says, lambda one: getattr(one.device, name))


DEVICES: tuple[Column[DeviceRows], ...] = (
    _of_device("arch", TEXT, "such as sm_90"),
    Column("device", TEXT, "the GPU's name", lambda one: one.device.name),
    Column("multiprocessors", WHOLE, "SMs or CUs", lambda one: one.device.multiprocessors or None),
    _of_device("driver", TEXT, "its version"),
    _of_device("runtime", TEXT, "cuda or rocm, with its version"),
    _of_device("torch", TEXT, "its version"),
    _of_device("triton", TEXT, "its version"),
    _of_device("timing", TEXT, "how launches are timed: gated, or events in old rows"),
    _of_device("codegen", TEXT, "settings that change machine code"),
    _of_device("uuid_hash", TEXT, "tells devices of one name apart"),
    Column("kernels", WHOLE, "that were tried on it", lambda one: one.kernels),
    Column("problems", WHOLE, "that were tried on it", lambda one: one.problems),
    Column(
        "copy_gb_per_s",
        REAL,
        "a device-to-device copy, read plus written",
        lambda one: one.calibration.get(COPY_CEILING),
    ),
    Column("timer_tick_us", REAL, "the timer's step", lambda one: one.calibration.get("timer_tick_us")),
    Column("process_sd_share", REAL, "spread from process to process", lambda one: one.calibration.get("process_sd")),
)
"""A row a device with the software that drove it: rows of two are never compared."""
