"""``fp8tune.export``: what a table or another tool's files would say, as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fp8tune import names
from fp8tune.api.results import Names, Results, open, several
from fp8tune.errors import UsageError
from fp8tune.exporting import format_files, read_for_format, select_rows
from fp8tune.tables import files
from fp8tune.tables.formats import DIFF, Options, check_options, diff
from fp8tune.tables.formats.by_size import parse_sizes
from fp8tune.tables.merge import merge_file


@dataclass(frozen=True)
class Exported:
    """The files of an export, as text. ``str()`` is the first one's: the module, or a format's first file."""

    files: Mapping[str, str]
    """Path below a folder -> text."""
    notices: tuple[str, ...] = ()
    """One line each: what was left out and why."""

    def __str__(self) -> str:
        return next(iter(self.files.values()))

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the files below a folder, and return their paths. Each appears whole. Raises UsageError."""
        exported = [files.File(PurePosixPath(path), text) for path, text in self.files.items()]
        return list(files.write(exported, Path(folder)))


def export(
    *,
    arch: str,
    kernel: Names = None,
    format: str | None = None,
    db: str | os.PathLike[str] | Results | None = None,
    into: str | os.PathLike[str] | None = None,
    prune: bool = False,
    device: str | None = None,
    sizes: Mapping[str, str | int] | None = None,
    dtype: str | None = None,
    within: float | None = None,
) -> Exported:
    """The best configs of an arch as text: the module that our kernels read, or a format of others. Writes nothing.

    ``kernel`` None is all. ``into`` names a module that is there: rows that the database does not give stay, as with
    ``fp8tune export``; ``prune`` removes those of kernels and devices that the database knows.

    ``format`` is one of ``fp8tune export --for``, of one ``kernel``. Its options: ``device`` where an arch has several;
    ``sizes``, what a size of file names is (``{"M": "num_tokens", "E": 8}``); ``dtype``, what they call the dtype;
    ``within``, the share of time that fewer configs may lose (0.02).

    Raises UsageError for names that nobody knows and where there is nothing to export.
    """
    results = db if isinstance(db, Results) else open(db)
    of_formats = {"device": device, "sizes": sizes, "dtype": dtype, "within": within}
    if format is None:
        for name in (name for name, value in of_formats.items() if value is not None):
            raise UsageError(f"{name} goes with a format: name one, or leave it out")
        return _module(results, arch, several(kernel), None if into is None else Path(into), prune)
    if into is not None or prune:
        raise UsageError("into and prune are for the table: leave them out with a format")
    texts = [f"{name}={value}" for name, value in (sizes or {}).items()]
    return _formatted(results, arch, several(kernel), format, device, texts, dtype, within)


def _module(results: Results, arch: str, kernels: Sequence[str], into: Path | None, prune: bool) -> Exported:
    with results.reading() as reader:
        names.check_arch(arch, reader)
        selection = select_rows(reader, arch, names.stored_kernels(kernels, reader) if kernels else ())
    if not selection.table.entries:
        why = selection.notices[0] if selection.notices else "run a sweep, or open another database"
        raise UsageError(f"the database has nothing to export for {arch}: {why}")
    table = selection.table
    if into is not None:
        table = merge_file(into, selection, prune=prune, is_dry=True)[0].table
    return Exported({f"{arch}.py": table.render()}, selection.notices)


def _formatted(
    results: Results,
    arch: str,
    kernels: Sequence[str],
    format: str,
    device: str | None,
    sizes: Sequence[str],
    dtype: str | None,
    within: float | None,
) -> Exported:
    requested = {"sizes": sizes, "dtype": dtype, "within": within}
    check_options(format, [name for name, value in requested.items() if value not in (None, [])], kernels)
    with results.reading() as reader:
        picks = read_for_format(reader, arch, kernels, device, format)
    notices = [line for kernel in picks for line in kernel.notices]
    within = Options.within if within is None else within
    if format == DIFF:
        shrunk = diff.shrink(picks[0], within)
        return Exported({"configs.diff": shrunk.diff}, (*notices, *shrunk.notes, shrunk.headline))
    written = format_files(picks, format, Options(parse_sizes(sizes), dtype, within, notices.append))
    return Exported({str(file.path): file.text for file in written}, tuple(notices))
