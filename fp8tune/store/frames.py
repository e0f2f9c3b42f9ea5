"""Trials as a tidy pandas DataFrame: one row per timed block or failed attempt. The unit ends a column's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from fp8tune.records import Kind
from fp8tune.stats.study import Study
from fp8tune.store import schema as db
from fp8tune.store.database import reads
from fp8tune.store.read import FEW, Reading
from fp8tune.store.rows import Names
from fp8tune.store.trials import STAGES

if TYPE_CHECKING:
    from pandas import DataFrame

_MODES = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
_COUNTS = ("seed", "round", "position", "samples", "bytes_moved", *db.FACTS[:3])
_TYPES = dict.fromkeys((*_COUNTS, "sm_clock_mhz", "memory_clock_mhz", "temperature_c"), "Int64")
_TYPES |= dict.fromkeys(("time_us", "tick_us", "gb_per_s", "compile_s", "power_w"), "float64")
_COLUMNS = (
    *("kernel", "arch", "device", "shape", *_MODES, "seed", "config", "kind", "stage", "round", "process", "position"),
    *("status", "reason", "time_us", "median_us", "min_us", "max_us", "samples", "tick_us", "gb_per_s", "bytes_moved"),
    *(*db.FACTS, "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "source", "note"),
    *("git_commit", "source_hash"),
)
_TEXTS = set(_COLUMNS) - set(_TYPES) - {"median_us", "min_us", "max_us"}


class Framing(Reading):
    """Method that returns a DataFrame."""

    @reads
    def trials_frame(self, keep: Callable[[Study], bool] = lambda study: True) -> DataFrame:
        """Return the trials of the studies that ``keep`` keeps; missing values are ``<NA>`` or NaN."""
        import pandas

        ids = [id for id, study in Names(self._connection).studies.items() if keep(study)]
        c, details = db.Results.c, (column for column in db.TrialDetails.c if column.name not in db.Trials.c)
        query = (
            select(c.study_id, c.source, c.note, *(c[name] for name in db.FACTS), *db.Trials.c[1:], *details)
            .add_columns(*(db.Problems.c[name] for name in ("kernel", "shape", *_MODES, "seed")))
            .add_columns(db.Devices.c.arch, db.Devices.c.name.label("device"), db.Configs.c.text.label("config"))
            .add_columns(db.Studies.c.kind, db.Studies.c.bytes_moved, db.Versions.c.source_hash)
            .add_columns(db.Processes.c.name.label("process"), db.Processes.c.git_commit)
            .join_from(db.Trials, db.Results)
            .join(db.Studies, db.Studies.c.id == c.study_id)
            .join(db.Problems)
            .join(db.Versions, db.Versions.c.id == db.Studies.c.version_id)
            .join(db.Devices, db.Devices.c.id == db.Studies.c.device_id)
            .join(db.Configs, db.Configs.c.id == c.config_id)
            .join(db.Processes, db.Processes.c.id == db.Trials.c.process_id)
            .outerjoin(db.TrialDetails)
        )
        result = self._connection.execute(query.where(c.study_id.in_(ids)) if len(ids) <= FEW else query)
        columns, values = list(result.keys()), list(zip(*result.all(), strict=True))
        # pandas takes columns ten times as fast as SQLAlchemy's rows, which it looks into one by one.
        rows = pandas.DataFrame(dict(zip(columns, values or [()] * len(columns), strict=True)))
        rows = rows[rows["study_id"].isin(ids)].reset_index(drop=True)
        rows = rows.assign(
            config=rows["config"].where((rows["config"] != "") | (rows["kind"] != Kind.PUBLISHED)),
            source_hash=rows["source_hash"].where(rows["source_hash"] != ""),
            stage=rows["stage"].map({number: stage for stage, number in STAGES.items()}),
            gb_per_s=rows["bytes_moved"].astype("float64") / rows["time_us"].astype("float64") / 1e3,
            **_of_samples(rows["samples"]),
        )
        return rows[list(_COLUMNS)].astype({**_TYPES, **dict.fromkeys(_TEXTS, "string")})


def _of_samples(blobs: Iterable[object]) -> dict[str, Any]:
    """Return the median, extremes and number of each block's samples."""
    import numpy

    parts = [blob if isinstance(blob, bytes) else b"" for blob in blobs]
    counts = numpy.array([len(part) // 4 for part in parts], dtype="int64")
    values = numpy.frombuffer(b"".join(parts), "<f4").astype(float).round(3)
    starts = counts.cumsum() - counts
    columns = {name: numpy.full(len(parts), numpy.nan) for name in ("median_us", "min_us", "max_us")}
    for count in set(counts.tolist()) - {0}:  # blocks of a sweep have nearly all as many
        (places,) = (counts == count).nonzero()
        samples = values[starts[places][:, None] + numpy.arange(count)]
        columns["median_us"][places] = numpy.median(samples, axis=1)
        columns["min_us"][places] = samples.min(axis=1)
        columns["max_us"][places] = samples.max(axis=1)
    return {**columns, "samples": counts}
