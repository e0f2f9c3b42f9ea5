"""``fp8tune.open``: a results database as DataFrames."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fp8tune import names
from fp8tune.api import frames
from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, Finalist, NamedInts, Pick, Problem, Row, Subject
from fp8tune.stats.study import Study
from fp8tune.store import layers, location
from fp8tune.store.layers import Reader
from fp8tune.store.read import subjects_of
from fp8tune.store.texts import parse_named_ints
from fp8tune.store.trials import STAGES
from fp8tune.sweeping import picks

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("fp8tune")

T = TypeVar("T")

Names = str | Sequence[str] | None
"""A name, several, or None for all."""

Shape = str | Mapping[str, int] | None
"""Sizes that a problem must have, as ``"K=5120 G=64"`` or a mapping; None for any."""


def open(url: str | os.PathLike[str] | None = None) -> Results:
    """The rows of a database: the path of an SQLite file, or ``postgresql://USER@HOST/NAME``.

    Without ``url`` they are your own rows over those that come with fp8tune, as commands read them without ``--db``.
    Raises DatabaseError for one that cannot be read, UsageError for one in memory.
    """
    found = Results(location.to_read(None if url is None else os.fspath(url), logger.info))
    with found.reading():
        return found


class Results:
    """The rows of a results database as pandas DataFrames; :func:`open` makes it.

    Every method reads anew, so that rows of a sweep which still runs are there. No connection stays open.

    All methods take the same filters. ``kernel`` and ``arch`` are names, one or several; ``shape`` the sizes that a
    problem must have; ``device`` a part of the GPU's name. None means any. A name that nobody knows raises UsageError.
    ``expand=True`` adds a column a size and axis: ``shape.K``, ``config.num_warps``.
    """

    def __init__(self, databases: location.Databases) -> None:
        self._databases = databases

    def __repr__(self) -> str:
        return f"<fp8tune.Results of {self._databases.label}>"

    def trials(
        self,
        *,
        kernel: Names = None,
        arch: Names = None,
        shape: Shape = None,
        device: str | None = None,
        expand: bool = False,
    ) -> DataFrame:
        """A row a trial, those of the screen and those of the finals: :data:`fp8tune.api.frames.TRIALS`."""
        wanted = _Wanted.of(shape, device)
        with self.reading() as reader:
            kernels, arches = _checked(reader, kernel, arch)

            def keep(study: Study) -> bool:
                is_named = kernels is None or study.problem.kernel in kernels
                return is_named and (arches is None or study.device.arch in arches) and wanted.has(study)

            frame = reader.trials_frame(keep)
        return frames.expanded(frame) if expand else frame

    def samples(
        self,
        kernel: Names,
        *,
        arch: Names = None,
        shape: Shape = None,
        config: Shape = None,
        device: str | None = None,
        stage: str | None = "final",
    ) -> DataFrame:
        """A row a sample of a timed block, in microseconds: :data:`fp8tune.api.frames.SAMPLES`.

        ``config`` has the values that a config must have. ``stage`` is ``final``, ``screen`` or None for both. A
        compacted database has no samples. A large kernel has millions: name a shape, too.
        """
        wanted, values = _Wanted.of(shape, device), sizes_of(config).items()
        if stage not in (None, *STAGES):
            raise unknown("stage", stage or "", STAGES)
        with self.reading() as reader:
            found = [
                row
                for at in _places(reader, kernel, arch)
                for row in reader.rows(*at)
                if wanted.has(row) and stage in (None, row.stage) and values <= (row.config or NamedInts()).items()
            ]
        return frames.samples(found)

    def picks(
        self,
        *,
        kernel: Names = None,
        arch: Names = None,
        shape: Shape = None,
        device: str | None = None,
        expand: bool = False,
    ) -> DataFrame:
        """A row a problem and device, its best config, as ``fp8tune show``: :data:`fp8tune.api.frames.PICKS`."""
        wanted = _Wanted.of(shape, device)
        found = [pick for pick in self._read(picks.read, kernel, arch) if wanted.has(pick)]
        return frames.table(frames.PICKS, found, expand=_sizes if expand else None)

    def finals(
        self,
        *,
        kernel: Names = None,
        arch: Names = None,
        shape: Shape = None,
        device: str | None = None,
        expand: bool = False,
    ) -> DataFrame:
        """A row a config that reached the finals of a problem: :data:`fp8tune.api.frames.FINALS`.

        The blocks behind it are the trials whose stage is ``final``.
        """
        wanted = _Wanted.of(shape, device)
        found = [one for one in self._read(picks.finalists, kernel, arch) if wanted.has(one)]
        return frames.table(frames.FINALS, found, expand=_sizes if expand else None)

    def devices(self, *, kernel: Names = None, arch: Names = None, device: str | None = None) -> DataFrame:
        """A row a device with its software, where something was tried: :data:`fp8tune.api.frames.DEVICES`."""
        wanted = _Wanted.of(None, device)
        with self.reading() as reader:
            tried: dict[Device, set[Problem]] = {}
            for name, of_arch in _places(reader, kernel, arch):
                for subject in subjects_of(reader.pools(name, of_arch)):
                    if wanted.has(subject):
                        tried.setdefault(subject.device, set()).add(subject.problem)
            found = [
                frames.DeviceRows(one, len({of.kernel for of in problems}), len(problems), reader.calibration(one))
                for one, problems in sorted(tried.items(), key=lambda item: item[0].fingerprint)
            ]
        return frames.table(frames.DEVICES, found)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """The rows as records, for what no table has. Raises DatabaseError for a database that cannot be read."""
        with layers.opened_databases(self._databases, logger.warning) as reader:
            yield reader

    def _read(self, read: Callable[..., list[T]], kernel: Names, arch: Names) -> list[T]:
        with self.reading() as reader:
            return read(reader, *_checked(reader, kernel, arch))


class _Wanted:
    """Which problems and devices a filter lets through."""

    def __init__(self, sizes: NamedInts, device: str) -> None:
        self._sizes, self._device = sizes, device

    @classmethod
    def of(cls, shape: Shape, device: str | None) -> _Wanted:
        return cls(sizes_of(shape), (device or "").casefold())

    def has(self, of: Study | Row | Pick | Finalist | Subject) -> bool:
        return self._device in of.device.name.casefold() and self._sizes.items() <= of.problem.shape.items()


def sizes_of(shape: Shape) -> NamedInts:
    """The sizes that a text or a mapping names. Raises UsageError for another text or value."""
    try:
        return parse_named_ints(
            " ".join((shape or "").split()) if isinstance(shape, str | None) else str(NamedInts(shape))
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{shape!r:.80} is no shape, {error}: write it as 'K=5120 G=64' or {{'K': 5120}}") from None


def _checked(reader: Reader, kernel: Names, arch: Names) -> tuple[Collection[str] | None, Collection[str] | None]:
    """The kernels and arches to read, None for all. Raises UsageError for a name that nobody knows."""
    kernels = names.stored_kernels(several(kernel), reader) if several(kernel) else None if kernel is None else ()
    for each in several(arch):
        names.check_arch(each, reader)
    return kernels, None if arch is None else tuple(dict.fromkeys(several(arch)))


def _places(reader: Reader, kernel: Names, arch: Names) -> Iterator[tuple[str | None, str | None]]:
    """The kernels and arches to read one by one, None for any."""
    return picks.places(*_checked(reader, kernel, arch))


def _sizes(of: Row | Pick | Finalist) -> Mapping[str, int]:
    return frames.sizes(of.problem, of.config)


def several(given: Names) -> tuple[str, ...]:
    """One name as a tuple; none for None."""
    return (given,) if isinstance(given, str) else tuple(given or ())
