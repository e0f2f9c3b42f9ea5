"""Reading of what an export writes: the rows of a launch table, or the picks of a kernel for a format of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fp8tune import names
from fp8tune.errors import UsageError
from fp8tune.records import Kind, Status, Subject
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.stats.means import group_by
from fp8tune.stats.rank import competing
from fp8tune.stats.study import Study, Verdict
from fp8tune.store.layers import Reader
from fp8tune.studies import decided, read_studies
from fp8tune.tables.current import SHIPPED, CurrentTables, recorded_launch
from fp8tune.tables.files import File
from fp8tune.tables.formats import Options, load
from fp8tune.tables.picks import KernelPicks
from fp8tune.tables.picks import Pick as TablePick
from fp8tune.tables.select import Selection, select
from fp8tune.text import visible


def select_rows(store: Reader, arch: str, kernels: Collection[str] = (), tables: CurrentTables = SHIPPED) -> Selection:
    """Select the rows of an arch's table.

    Args:
        store: The results.
        arch: The arch.
        kernels: Kernels to select; empty for all.
        tables: Tables whose configs stay until beaten.
    """
    studies = store.studies(arch=arch, keep=competing)
    studies = [study for study in studies if not kernels or study.problem.kernel in kernels]
    compiled = [study for study in studies if study.kind is Kind.STATIC]
    return select(decided(studies, tables), compiled, arch, tables.current(arch))


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
        picks += TablePick(study, _evidence_line(store, study), launch).by_launch()
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


def format_files(kernels: Sequence[KernelPicks], name: str, options: Options) -> list[File]:
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
