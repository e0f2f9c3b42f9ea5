"""Trials as a tidy pandas DataFrame: one row per timed block or failed attempt. The unit ends a column's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, select

from fp8tune.records import Kind
from fp8tune.stats.study import Study
from fp8tune.store import schema as db
from fp8tune.store.database import reads
from fp8tune.store.read import FEW, Names, Reading, checked_rows
from fp8tune.store.trials import STAGES

if TYPE_CHECKING:
    from pandas import DataFrame

_KEY = ["result_id", "stage", "process_id", "round"]
_MODES = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")


class Framing(Reading):
    """Method that returns a DataFrame."""

    @reads
    def trials_frame(self, keep: Callable[[Study], bool] = lambda study: True) -> DataFrame:
        """Return the trials of the studies that ``keep`` keeps; missing values are ``<NA>`` or NaN."""
        connection, names = self._connection, Names(self._connection)
        studies = {id: study for id, study in names.studies.items() if keep(study)}
        results = select(*(db.Results.c[name] for name in ("id", "study_id", "config_id", "source", "note", *db.FACTS)))
        trials, details = select(db.Trials), select(db.TrialDetails)
        if len(studies) <= FEW:
            of_studies = db.Results.c.study_id.in_(studies)
            ids = select(db.Results.c.id).where(of_studies)
            results, trials = results.where(of_studies), trials.where(db.Trials.c.result_id.in_(ids))
            details = details.where(db.TrialDetails.c.result_id.in_(ids))
        of_results = _frame(connection, results).set_index("id")
        frame = _frame(connection, trials).merge(_frame(connection, details), "left", on=_KEY)
        if len(studies) > FEW:
            kept = of_results.index[of_results["study_id"].isin(list(studies))]
            frame = frame[frame["result_id"].isin(kept)]
        of_results = of_results.loc[frame["result_id"]].reset_index(drop=True)
        return _tidy(frame.reset_index(drop=True), of_results, studies, names)


def _tidy(frame: DataFrame, results: DataFrame, studies: Mapping[int, Study], names: Names) -> DataFrame:
    """Put names in the place of ids. Joined here, because SQL would repeat fifteen texts in every row."""
    import pandas

    processes = {row.id: row for row in checked_rows(names.connection, db.Processes)}
    about = pandas.DataFrame([_about(study) for study in studies.values()], index=list(studies), columns=_ABOUT)
    about = about.astype({**dict.fromkeys(_ABOUT, "string"), "seed": "Int64", "bytes_moved": "Int64"})
    about = about.loc[results["study_id"]].reset_index(drop=True)

    def named(ids: Any, texts: Mapping[int, str]) -> Any:
        return pandas.Series(texts, dtype="string").reindex(ids).reset_index(drop=True)

    config = named(results["config_id"], {id: str(config) for id, config in names.configs.items()})
    stages = {number: stage for stage, number in STAGES.items()}
    columns = {
        **{name: about[name] for name in _ABOUT[:10]},
        "config": config.where((config != "") | (about["kind"] != Kind.PUBLISHED)),
        "kind": about["kind"],
        "stage": named(frame["stage"], stages),
        "round": frame["round"],
        "process": named(frame["process_id"], {id: row.name for id, row in processes.items()}),
        **{name: frame[name] for name in ("position", "status", "reason", "time_us")},
        **_of_samples(frame["samples"]),
        "tick_us": frame["tick_us"],
        "gb_per_s": about["bytes_moved"].astype("float64") / frame["time_us"].astype("float64") / 1e3,
        "bytes_moved": about["bytes_moved"],
        **{name: results[name] for name in db.FACTS},
        **{name: frame[name] for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")},
        **{name: results[name] for name in ("source", "note")},
        "git_commit": named(frame["process_id"], {id: row.git_commit for id, row in processes.items()}),
        "source_hash": about["source_hash"],
    }
    types = dict.fromkeys(("status", "reason", "source", "note"), "string")
    types |= dict.fromkeys(("round", "position", "samples", *db.FACTS[:3]), "Int64")
    types |= dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz", "temperature_c"), "Int64")
    types |= dict.fromkeys(("time_us", "tick_us", "gb_per_s", "compile_s", "power_w"), "float64")
    return pandas.DataFrame(columns).astype(types)


_ABOUT = ["kernel", "arch", "device", "shape", *_MODES, "seed", "kind", "bytes_moved", "source_hash"]


def _about(study: Study) -> tuple[object, ...]:
    problem, device = study.problem, study.device
    modes = (getattr(problem, name) for name in _MODES)
    source_hash = None if study.version is None else study.version.source_hash
    identity = (problem.kernel, device.arch, device.name, str(problem.shape), *modes, problem.seed)
    return (*identity, str(study.kind), study.bytes_moved, source_hash)


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


def _frame(connection: Connection, query: Select[Any]) -> DataFrame:
    import pandas

    result = connection.execute(query)
    names, columns = list(result.keys()), list(zip(*result.all(), strict=True))
    # pandas takes columns ten times as fast as SQLAlchemy's rows, which it looks into one by one.
    return pandas.DataFrame(dict(zip(names, columns or [()] * len(names), strict=True)))
