"""Trials as a tidy pandas DataFrame: one row per timed block or failed attempt. The unit ends a column's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, select

from fp8tune.records import Kind
from fp8tune.stats.study import Study
from fp8tune.store import schema as db
from fp8tune.store.database import reads
from fp8tune.store.read import FEW, Names, Reading, checked_rows
from fp8tune.store.trials import STAGES

if TYPE_CHECKING:
    from pandas import DataFrame

_MODES = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
_TEXTS = ("kernel", "arch", "device", "shape", *_MODES, "config", "kind", "stage", "process", "status", "reason")
_TYPES = {
    **dict.fromkeys((*_TEXTS, "source", "note", "git_commit", "source_hash"), "string"),
    **dict.fromkeys(("seed", "round", "position", "samples", "bytes_moved", *db.FACTS[:3]), "Int64"),
    **dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz", "temperature_c"), "Int64"),
    **dict.fromkeys(("time_us", "tick_us", "gb_per_s", "compile_s", "power_w"), "float64"),
}
_COLUMNS = (
    *("kernel", "arch", "device", "shape", *_MODES, "seed", "config", "kind", "stage", "round", "process", "position"),
    *("status", "reason", "time_us", "median_us", "min_us", "max_us", "samples", "tick_us", "gb_per_s", "bytes_moved"),
    *(*db.FACTS, "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "source", "note"),
    *("git_commit", "source_hash"),
)


class Framing(Reading):
    """Method that returns a DataFrame."""

    @reads
    def trials_frame(self, keep: Callable[[Study], bool] = lambda study: True) -> DataFrame:
        """Return the trials of the studies that ``keep`` keeps; missing values are ``<NA>`` or NaN."""
        import pandas

        names = Names(self._connection)
        studies = {id: study for id, study in names.studies.items() if keep(study)}
        ids = select(db.Results.c.id).where(db.Results.c.study_id.in_(studies))
        is_few = len(studies) <= FEW

        def frame(query: Select[Any], id: Any) -> DataFrame:
            result = self._connection.execute(query.where(id.in_(ids)) if is_few else query)
            columns, values = list(result.keys()), list(zip(*result.all(), strict=True))
            # pandas takes columns ten times as fast as SQLAlchemy's rows, which it looks into one by one.
            return pandas.DataFrame(dict(zip(columns, values or [()] * len(columns), strict=True)))

        of = db.Results.c
        results = select(*(of[name] for name in ("id", "study_id", "config_id", "source", "note", *db.FACTS)))
        trials = frame(select(db.Trials), db.Trials.c.result_id)
        details = frame(select(db.TrialDetails), db.TrialDetails.c.result_id)
        rows = trials.merge(details, "left").merge(frame(results, of.id), left_on="result_id", right_on="id")
        rows = rows[rows["study_id"].isin(list(studies))].reset_index(drop=True)
        return _with_names(rows, studies, names)[list(_COLUMNS)].astype(_TYPES)


def _with_names(rows: DataFrame, studies: Mapping[int, Study], names: Names) -> DataFrame:
    """Add what ids stand for. Joined here, because SQL would repeat fifteen texts in every row."""
    import pandas

    processes = {row.id: row for row in checked_rows(names.connection, db.Processes)}
    about = pandas.DataFrame({id: _about(study) for id, study in studies.items()}, index=_ABOUT, dtype=object).T
    rows = rows.join(about, "study_id")
    configs = rows["config_id"].map({id: str(config) for id, config in names.configs.items()})
    return rows.assign(
        config=configs.where((configs != "") | (rows["kind"] != Kind.PUBLISHED)),
        stage=rows["stage"].map({number: stage for stage, number in STAGES.items()}),
        process=rows["process_id"].map({id: row.name for id, row in processes.items()}),
        git_commit=rows["process_id"].map({id: row.git_commit for id, row in processes.items()}),
        gb_per_s=rows["bytes_moved"].astype("float64") / rows["time_us"].astype("float64") / 1e3,
        **_of_samples(rows["samples"]),
    )


_ABOUT = ["kernel", "arch", "device", "shape", *_MODES, "seed", "kind", "bytes_moved", "source_hash"]


def _about(study: Study) -> list[object]:
    problem, device = study.problem, study.device
    modes = (getattr(problem, name) for name in _MODES)
    source_hash = None if study.version is None else study.version.source_hash
    identity = (problem.kernel, device.arch, device.name, str(problem.shape), *modes, problem.seed)
    return [*identity, str(study.kind), study.bytes_moved, source_hash]


def _of_samples(blobs: Iterable[object]) -> dict[str, Any]:
    """Return the median, the extremes and the number of the samples of each block."""
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
