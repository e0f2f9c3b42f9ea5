"""``fp8tune.open``: a results database as DataFrames."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8tune import names
from fp8tune.api import frames
from fp8tune.errors import UsageError
from fp8tune.filters import Filters, Size
from fp8tune.output.show import ListedPick
from fp8tune.records import Device, Pick, Problem
from fp8tune.redaction import redacted
from fp8tune.store import database, layers, location
from fp8tune.store.layers import Reader
from fp8tune.store.read import subjects_of
from fp8tune.store.results import COPY_CEILING
from fp8tune.sweeping import picks

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("fp8tune")

Names = str | Sequence[str] | None
"""A name, several, or None for all."""


def open(db: str | Path | None = None) -> Results:
    """Open a results database: a file, a URL, or None for what the commands read.

    Its methods picks, finals, trials, samples and devices return pandas DataFrames and all take
    the same filters: kernel=None, size=None, device=None, verdict=None.
    """
    url = None if db is None else os.fspath(db)
    if url is not None and database.is_in_memory(url):
        raise UsageError(f"{redacted(url)!r} is a database in memory: name a file")
    results = Results(location.to_read(url, logger.info))
    with results.reading():
        return results


class Results:
    """Results as DataFrames; :func:`open` makes it.

    Every method reads anew, so results of a running sweep are there. No connection stays open.

    All methods take the same filters; None is all. ``kernel`` is a name or several. ``size`` is ``"K=5120 G=64"`` or
    ``{"K": 5120, "layout": "transposed"}``, of which a problem size may have more. ``device`` is a part of the GPU's
    name, or an arch. ``verdict`` is a word or several, of the size's pick. A name that nobody knows raises UsageError.
    """

    def __init__(self, databases: location.Databases) -> None:
        self._databases = databases

    def __repr__(self) -> str:
        return f"<fp8tune.Results of {self._databases.label}>"

    def picks(
        self, kernel: Names = None, size: Size = None, device: str | None = None, verdict: Names = None
    ) -> DataFrame:
        """Return one row per problem size and GPU with its best config, as ``fp8tune show`` does."""
        with self._selected(kernel, size, device, verdict) as (_, _, chosen, _):
            return frames.table(ListedPick, map(ListedPick.from_pick, chosen))

    def finals(
        self, kernel: Names = None, size: Size = None, device: str | None = None, verdict: Names = None
    ) -> DataFrame:
        """Return one row per config of a confirmation, the fastest of each size first."""
        with self._selected(kernel, size, device, verdict) as (reader, _, chosen, keeps):
            rows = [
                frames.Final.from_records(item, slower_share=item.slowdown_ratio - 1, coarse_us=item.screen_us)
                for item in picks.finalists(reader, list({pick.problem.kernel for pick in chosen}))
                if keeps(item)
            ]
        return frames.table(frames.Final, rows)

    def trials(
        self, kernel: Names = None, size: Size = None, device: str | None = None, verdict: Names = None
    ) -> DataFrame:
        """Return one row per timed block, check or compilation."""
        with self._selected(kernel, size, device, verdict) as (reader, _, _, keeps):
            return reader.trials_frame(keeps).rename(columns=frames.RENAMED)

    def samples(
        self, kernel: Names = None, size: Size = None, device: str | None = None, verdict: Names = None
    ) -> DataFrame:
        """Return one row per sample of a timed block. There may be millions; a pruned database has none."""
        with self._selected(kernel, size, device, verdict) as (reader, kernels, _, keeps):
            rows = [
                frames.Sample.from_records(row, sample=number, sample_us=sample_us)
                for name in kernels
                for row in reader.rows(name)
                if row.outcome.samples_us and keeps(row)
                for number, sample_us in enumerate(row.outcome.samples_us)
            ]
        return frames.table(frames.Sample, rows)

    def devices(
        self, kernel: Names = None, size: Size = None, device: str | None = None, verdict: Names = None
    ) -> DataFrame:
        """Return one row per GPU with its software."""
        tried: dict[Device, set[Problem]] = {}
        with self._selected(kernel, size, device, verdict) as (reader, kernels, _, keeps):
            for subject in (subject for name in kernels for subject in subjects_of(reader.pools(name))):
                if keeps(subject):
                    tried.setdefault(subject.device, set()).add(subject.problem)
            documents = [
                frames.GpuInfo.from_records(
                    gpu,
                    gpu=gpu.name or gpu.arch,
                    kernels=len({problem.kernel for problem in problems}),
                    sizes=len(problems),
                    copy_gb_per_s=reader.calibration(gpu).get(COPY_CEILING),
                )
                for gpu, problems in sorted(tried.items(), key=lambda item: item[0].fingerprint)
            ]
        return frames.table(frames.GpuInfo, documents)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open the databases. Raises DatabaseError if they cannot be read."""
        with layers.opened_databases(self._databases, logger.warning) as reader:
            yield reader

    @contextlib.contextmanager
    def _selected(
        self, kernel: Names, size: Size, device: str | None, verdict: Names
    ) -> Iterator[tuple[Reader, Sequence[str | None], list[Pick], Callable[[Any], bool]]]:
        """Open the databases; yield the reader, kernels, picks that pass the filters, and the filter of records.

        The kernels are ``[None]`` for all: readers take them one by one.
        """
        filters = Filters.parse(size, device, verdict)
        with self.reading() as reader:
            kernels = None if kernel is None else names.stored_kernels(several(kernel), reader) if kernel else []
            chosen = [pick for pick in picks.read(reader, kernels) if filters.has(pick)]
            if filters.verdicts:
                chosen = [pick for pick in chosen if pick.verdict in filters.verdicts]
            places = {(pick.problem, pick.device.name) for pick in chosen}

            def keeps(record: Any) -> bool:
                is_named = kernels is None or record.problem.kernel in kernels
                is_chosen = not filters.verdicts or (record.problem, record.device.name) in places
                return is_named and is_chosen and filters.has(record)

            yield reader, [None] if kernels is None else kernels, chosen, keeps


def several(names: Names) -> tuple[str, ...]:
    """Return one name as a tuple; none for None."""
    return (names,) if isinstance(names, str) else tuple(names or ())
