"""``fp8tune.export``: what a table or another tool's files would say, as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from fp8tune.api.results import Names, Results, open, several
from fp8tune.errors import UsageError
from fp8tune.recording import Kernel, Launch
from fp8tune.records import Status, Subject
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Study, Verdict
from fp8tune.store import names
from fp8tune.store.layers import Reader
from fp8tune.studies import read_studies, select_rows
from fp8tune.tables import files
from fp8tune.tables.current import recorded_launch
from fp8tune.tables.formats import DIFF, Options, check_options, diff, load
from fp8tune.tables.formats.by_size import parse_sizes
from fp8tune.tables.merge import merge_file
from fp8tune.tables.picks import KernelPicks
from fp8tune.tables.picks import Pick as TablePick
from fp8tune.text import visible


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


def read_picks(store: Reader, arch: str, kernel: str, device: str | None = None) -> KernelPicks:
    """Read the picks of a kernel on one device: the one named, else the one with the most problems.

    Raises:
        UsageError: Nothing was swept to the end, there is no such device, or several have as many problems.
    """
    studies = _named_studies(store, arch, kernel)
    name, notices = _chosen_device(group_by(studies, lambda study: study.device.name), device)
    here = [study for study in studies if study.device.name == name]
    usable = [study for study in here if study.is_usable]
    left_out = "left out, not swept to the end: run fp8tune sweep again"
    notices += [f"{study.problem.shape} {left_out}" for study in here if not study.is_usable]
    if not usable:
        raise UsageError(f"no problem of {kernel} was swept to the end on {name or arch}: run fp8tune sweep again")
    launches = {problem: recorded_launch(text) for problem, text in store.recorded_launches(kernel).items()}
    newest = max(usable, key=lambda study: study.newest)
    recorded = launches[newest.problem][0] if newest.problem in launches else None
    alike = [study for study in usable if _is_of(recorded, launches.get(study.problem))]
    other = "left out, recorded of a kernel with other configs or another key: record and sweep it again"
    notices += [f"{study.problem.shape} {other}" for study in usable if recorded and study not in alike]
    places = {problem: place for place, problem in enumerate(launches)}
    alike.sort(key=lambda study: places.get(study.problem, len(places)))
    picks = []
    for study in alike:
        wrong = sum(status is Status.WRONG for status in study.failures.values())
        if wrong > len(study.times_us):
            count = f"{wrong} of {wrong + len(study.times_us)} configs are wrong"
            advice = "see that what they were compared with is right, or sweep with --reference"
            notices.append(f"{study.problem.shape}: {count}: {advice}")
        launch = launches[study.problem][1] if study.problem in launches else None
        picks.append(TablePick(study, _evidence_line(store, study), launch))
    return KernelPicks(kernel, newest.device, tuple(picks), recorded, tuple(dict.fromkeys(notices)))


def read_picks_of_devices(store: Reader, arch: str, kernel: str) -> list[KernelPicks]:
    """Read the picks of a kernel on each device of an arch; a device without complete sweeps becomes a notice.

    Raises:
        UsageError: No device has a complete sweep.
    """
    picks, refused = [], []
    for name in sorted({study.device.name for study in _named_studies(store, arch, kernel)}):
        try:
            picks.append(read_picks(store, arch, kernel, name))
        except UsageError as error:
            refused.append(str(error))
    if not picks:
        raise UsageError(refused[0])
    return [replace(picks[0], notices=(*picks[0].notices, *refused)), *picks[1:]]


def read_for_format(
    store: Reader, arch: str, kernels: Sequence[str], device: str | None, name: str
) -> list[KernelPicks]:
    """Read the picks of one kernel, for each device that one file of a format holds."""
    names.check_arch(arch, store)
    (kernel,) = names.stored_kernels(kernels, store)
    if load(name).has_all_devices and device is None:
        return read_picks_of_devices(store, arch, kernel)
    return [read_picks(store, arch, kernel, device)]


def format_files(kernels: Sequence[KernelPicks], name: str, options: Options) -> list[files.File]:
    """Return the files of a format.

    Raises:
        UsageError: The format cannot hold these picks.
    """
    written = load(name).write(kernels, options)
    if not written:
        raise UsageError(f"{kernels[0].kernel} has no pick that --for {name} can hold: run fp8tune sweep")
    return list(written)


def _named_studies(store: Reader, arch: str, kernel: str) -> list[Study]:
    studies = [study for study in read_studies(store, kernel, arch) if any(r.config is not None for r in study.results)]
    if not studies:
        raise UsageError(
            f"{kernel} has no timed rows for {arch}: run fp8tune sweep, or name another database with --db"
        )
    return studies


def _is_of(recorded: Kernel | None, launch: tuple[Kernel, Launch] | None) -> bool:
    """Return True for a launch of the same kernel: configs of another declaration have other numbers."""
    if recorded is None or launch is None:
        return recorded is None and launch is None
    return (launch[0].configs, launch[0].key) == (recorded.configs, recorded.key)


def _chosen_device(by_name: Mapping[str, Sequence[Study]], device: str | None) -> tuple[str, list[str]]:
    """Return the name of the device to export, and a notice where there are others."""
    counts = ", ".join(f"{name or 'not named'} ({len(studies)})" for name, studies in sorted(by_name.items()))
    if device is not None:
        if device not in by_name:
            raise UsageError(f"no rows of a device {device!r}: name one of these, with their problems: {counts}")
        return device, []
    most = max(map(len, by_name.values()))
    first, *others = (name for name, studies in by_name.items() if len(studies) == most)
    if others:
        raise UsageError(f"as many problems were swept on several devices: name one with --device: {counts}")
    return first, [f"{first or 'not named'}, which has the most problems of {counts}"] if len(by_name) > 1 else []


def _evidence_line(store: Reader, study: Study) -> str:
    """``certified, 12.34 us, 6 processes, NVIDIA H200, driver 580.1, triton 3.6.0, commit c0ffee, code 0123abcd``."""
    decision, device, version = study.choice, study.device, study.version
    is_published, count = decision.verdict is Verdict.PUBLISHED, decision.processes
    commit = store.commit(Subject(version, device, study.kind, study.problem)) if version else ""
    parts = [
        f"published by {study.pick.source}" if is_published else decision.verdict,
        f"{decision.time_us:.2f} us",
        "" if is_published else f"{count} process{'' if count == 1 else 'es'}",
        device.name or device.arch,
        f"driver {device.driver}" if device.driver else "",
        f"triton {device.triton}" if device.triton else "",
        f"commit {commit}" if commit else "",
        f"code {version.source_hash}" if version else "",
    ]
    return visible(", ".join(filter(None, parts)))
