"""Reading of what an export writes: the rows of a launch table, or the picks of a kernel for a format of others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8tune import names
from fp8tune.errors import UsageError
from fp8tune.records import GRAPH, Device, Kind, NamedInts, Status, Subject
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.stats.means import geomean, group_by
from fp8tune.stats.rank import competing
from fp8tune.stats.study import Study, Verdict
from fp8tune.store import database, location
from fp8tune.store.layers import Layers, Reader
from fp8tune.studies import constrained, decided, is_stale, known_programs, read_studies
from fp8tune.tables.current import SHIPPED, CurrentTables, recorded_launch
from fp8tune.tables.files import File
from fp8tune.tables.formats import Options, load
from fp8tune.tables.launch_table import Entry, LaunchTable, shipped_path
from fp8tune.tables.merge import stored_table
from fp8tune.tables.picks import KernelPicks
from fp8tune.tables.picks import Pick as TablePick
from fp8tune.tables.select import Selection, select
from fp8tune.text import visible
from fp8tune_kernels.tables import Table, numbers, overlay

# verdicts of picks that are not exported unless they are asked for, or already in the table
UNCONFIRMED = (Verdict.QUICK, Verdict.STALE)


def select_rows(
    store: Reader,
    arch: str,
    kernels: Collection[str] = (),
    tables: CurrentTables = SHIPPED,
    *,
    allow_quick: bool = True,
    here: Device | None = None,
    same_bits: str | None = None,
    triton: str | None = None,
) -> Selection:
    """Select the rows of an arch's table.

    Args:
        store: The results.
        arch: The arch.
        kernels: Kernels to select; empty for all.
        tables: Tables whose configs stay until beaten.
        allow_quick: Also select picks that were not confirmed. Otherwise they keep the rows that they have, and neither
            add nor change one.
        here: GPU of this machine, whose picks by other code, Triton or driver are not confirmed any more.
        same_bits: Name of a size: only picks whose outputs have the same bits at all of its values.
        triton: Newest version of Triton whose results count, such as ``3.6``; None: the newest results count.
    """
    keep = competing if triton is None else lambda pools: competing(_as_of(triton, pools))
    studies = store.studies(arch=arch, keep=keep)
    studies = [study for study in studies if not kernels or study.problem.kernel in kernels]
    compiled = [study for study in studies if study.kind is Kind.STATIC]
    picked, lines = _with_same_bits(store, decided(studies, tables), same_bits)
    picked = _with_stale(store, picked, here)
    if allow_quick:
        selection = select(picked, compiled, arch, tables)
        return replace(selection, notices=(*lines, *alone_notices(picked), *selection.notices))
    quick = [study for study in picked if _is_unconfirmed(study)]

    new = [study for study in quick if tables.config(study.problem.kernel, study.device, study.lookup_key) is None]
    selection = select([study for study in picked if study not in new], compiled, arch, tables)
    keys = {(study.problem.kernel, study.lookup_key) for study in quick}

    def is_kept(entry: Entry) -> bool:
        key = None if entry.key is None else NamedInts(entry.key)
        in_use = tables.config(entry.kernel, Device(arch, entry.device), key)
        return (entry.kernel, key) not in keys or in_use == NamedInts(entry.config)

    entries = tuple(entry for entry in selection.table.entries if is_kept(entry))
    left_out = len(new) + len(selection.table.entries) - len(entries)
    lines += [*alone_notices(picked), *([left_out_notice(left_out, quick)] if left_out else [])]
    notices = (*lines, *selection.notices)
    return replace(selection, table=replace(selection.table, entries=entries), notices=notices)


def _as_of(triton: str, pools: Iterable[Study]) -> list[Study]:
    """Leave out what newer versions of Triton measured, and results of older ones where a size has newer ones."""
    known = [pool for pool in pools if pool.kind is not Kind.MEASURED or _version(pool) <= numbers(triton)]
    groups = group_by(known, lambda pool: (pool.problem, pool.device.name, pool.kind))
    newest = {place: max((pool.has_finals, _version(pool)) for pool in group)[1] for place, group in groups.items()}
    return [pool for place, group in groups.items() for pool in group if _version(pool) == newest[place]]


def _version(pool: Study) -> tuple[int, ...]:
    return numbers(pool.device.triton) if pool.kind is Kind.MEASURED else ()


def shipped_tables(
    store: Reader, arch: str, kernels: Collection[str] = (), *, allow_quick: bool = True, same_bits: str | None = None
) -> Iterator[tuple[Path, Selection]]:
    """Yield each version of Triton that has results with its shipped file and rows.

    The oldest version comes first. Files of others have the keys on which they differ from older ones: write each file
    before asking for the next.
    """
    measured = {_version(pool) for pool in store.pools(arch=arch) if pool.kind is Kind.MEASURED}
    older, printed = Table(), set[str]()
    for place, version in enumerate(sorted(measured) or [()]):
        triton = ".".join(map(str, version))
        path = shipped_path(arch, triton if place else "")
        now = overlay(stored_table(path, arch).lookups, older)
        tables = CurrentTables(lambda *_, now=now: now)
        selection = select_rows(
            store, arch, kernels, tables, allow_quick=allow_quick, same_bits=same_bits, triton=triton
        )
        if place:
            selection = _changed(selection, older, now, triton)
            selection = replace(selection, notices=tuple(line for line in selection.notices if line not in printed))
        printed |= {*selection.notices}
        if selection.table.entries or not place:
            yield path, selection
        older = overlay(stored_table(path, arch).lookups, older)


def _changed(selection: Selection, older: Table, now: Table, triton: str) -> Selection:
    """Return the rows of each key that has another row than with older versions of Triton, or had one.

    The row for all other keys comes with them: unseen keys may take the nearest row of either table.
    """
    before = {row[:3]: dict(row[3]) for row in older.rows}
    differing = {row[0::2] for row in now.rows if before.get(row[:3]) != dict(row[3])}
    entries = selection.table.entries
    differing |= {entry[0:3:2] for entry in entries if before.get(entry[:3]) != dict(entry.config)}
    changed = {kernel for kernel, _ in differing}
    differing |= {(kernel, None) for kernel in changed}
    entries = tuple(entry for entry in entries if entry[0:3:2] in differing)
    return replace(
        selection, table=LaunchTable(selection.table.arch, entries, selection.table.nearest & changed, triton)
    )


def left_out_notice(count: int, studies: Iterable[Study]) -> str:
    """Return the warning that so many unconfirmed picks were left out."""
    verdicts = sorted({str(study.choice.verdict) for study in studies})
    return f"{count} {' and '.join(verdicts)} picks left out: confirm them with fp8tune sweep, or add --allow-quick"


def alone_notices(studies: Iterable[Study]) -> Iterator[str]:
    """Yield a line about exported picks without a config beside them."""
    alone = [study for study in studies if study.choice.verdict is Verdict.ALONE and not _is_unconfirmed(study)]
    for kernel, group in group_by(alone, lambda study: study.problem.kernel).items():
        sizes = "1 size has" if len(group) == 1 else f"{len(group)} sizes have"
        yield f"{kernel}: {sizes} one config that was timed, and nothing to compare it with"


def own_kernels(reader: Reader, arch: str) -> list[str]:
    """Return the kernels with rows of the user's for an arch; none where only the shipped results are read."""
    own, base = reader.own if isinstance(reader, Layers) else reader, location.base()
    is_shipped = base is not None and own.label == database.label(base)
    return [] if is_shipped else sorted({study.problem.kernel for study in own.pools(None, arch)})


def _with_same_bits(store: Reader, studies: list[Study], axis: str | None) -> tuple[list[Study], list[str]]:
    """Return the studies as ``--same-bits`` decides them, and what that costs. Raises UsageError if none is left."""
    if axis is None:
        return studies, []
    chosen, notices = constrained(store, studies, axis)
    if not chosen:
        raise UsageError(notices[0] if notices else f"no size is called {axis}: name one that varies, such as M")
    slowdowns = {item.study.problem: item.slowdown for item in chosen if item.slowdown is not None}
    if slowdowns:
        worst = max(slowdowns, key=lambda problem: slowdowns[problem])
        mean, most = (f"{100 * (ratio - 1):.1f} %" for ratio in (geomean(slowdowns.values()), slowdowns[worst]))
        notices.append(f"the same bits at every {axis} cost {mean} of speed (geometric mean), {most} at {worst.shape}")
    return [item.study for item in chosen], notices


def _with_stale(store: Reader, studies: Iterable[Study], here: Device | None) -> list[Study]:
    programs = known_programs(store)
    return [
        replace(study, decision=replace(study.choice, verdict=Verdict.STALE))
        if is_stale(study, here, programs)
        else study
        for study in studies
    ]


def _is_unconfirmed(study: Study) -> bool:
    is_measured = study.kind in (Kind.MEASURED, Kind.SIMULATED) and study.is_usable
    verdict = study.choice.verdict
    # a search that ended after its first config leaves one alone, and no fresh process has timed that
    return is_measured and (verdict in UNCONFIRMED or (verdict is Verdict.ALONE and not study.finals))


def _device_picks(store: Reader, kernel: str, here: Sequence[Study], *, allow_quick: bool) -> KernelPicks:
    """Return the picks of a kernel on one device. Raises UsageError if there is none."""
    place, notices = here[0].device.name or here[0].device.arch, list[str]()
    usable = [study for study in here if study.is_usable]
    left_out = "left out, not swept to the end: run fp8tune sweep again"
    notices += [f"{study.problem.shape} {left_out}" for study in here if not study.is_usable]
    if not usable:
        raise UsageError(f"no problem of {kernel} was swept to the end on {place}: run fp8tune sweep again")
    if not allow_quick and (quick := [study for study in usable if _is_unconfirmed(study)]):
        usable = [study for study in usable if study not in quick]
        notices.append(left_out_notice(len(quick), quick))
        if not usable:
            raise UsageError(
                f"nothing to export of {kernel} for {place}: no pick is proven, open or published; sweep without "
                "--quick, or add --allow-quick"
            )
    notices += alone_notices(usable)
    launches = {problem: recorded_launch(text) for problem, text in store.recorded_launches(kernel).items()}
    newest = max(usable, key=lambda study: study.newest)
    recorded = launches[newest.problem][0] if newest.problem in launches else None
    alike = [study for study in usable if _is_of(recorded, launches.get(study.problem))]
    reason = "left out, recorded of a kernel with other configs or another key: record and sweep it again"
    notices += [f"{study.problem.shape} {reason}" for study in usable if recorded and study not in alike]
    code = newest.source_hash
    changed = [study for study in alike if code and study.source_hash not in ("", code)]
    reason = "left out, measured with older code of the kernel: sweep it again"
    notices += [f"{study.problem.shape} {reason}" for study in changed]
    alike = [study for study in alike if study not in changed]
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


def read_for_format(
    store: Reader,
    arch: str,
    kernels: Sequence[str],
    *,
    allow_quick: bool = True,
    here: Device | None = None,
    same_bits: str | None = None,
) -> list[KernelPicks]:
    """Read the picks of one kernel on each device of an arch, that with the most first; see :func:`select_rows`.

    Raises:
        UsageError: No device has a pick.
    """
    names.check_arch(arch, store)
    (kernel,) = names.stored_kernels(kernels, store)
    picks, refused = [], []
    studies, notices = _with_same_bits(store, _named_studies(store, arch, kernel), same_bits)
    studies = _with_stale(store, studies, here)
    for _, of_device in sorted(group_by(studies, lambda study: study.device.name).items()):
        try:
            picks.append(_device_picks(store, kernel, of_device, allow_quick=allow_quick))
        except UsageError as error:
            refused.append(str(error))
    if not picks:
        raise UsageError(refused[0])
    first, *others = sorted(picks, key=lambda device: -len(device.picks))
    return [replace(first, notices=(*notices, *first.notices, *refused)), *others]


def format_files(kernels: Sequence[KernelPicks], name: str, options: Options) -> tuple[list[File], list[str]]:
    """Return the files of a format, and notices. A format of one file holds the device with the most picks.

    Raises:
        UsageError: The format cannot hold these picks.
    """
    notices, form = [line for kernel in kernels for line in kernel.notices], load(name)
    groups = [kernels] if form.has_all_devices else [[kernel] for kernel in kernels]
    files = [file for group in groups for file in form.write(group, replace(options, notice=notices.append))]
    if not files:
        raise UsageError(f"{kernels[0].kernel} has no pick that --for {name} can hold: run fp8tune sweep")
    return files, [*dict.fromkeys(notices)]


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
        "in CUDA graphs" if device.timing == GRAPH else "",
        f"commit {commit}" if commit else "",
        f"code {version.source_hash}" if version else "",
    ]
    return visible(", ".join(filter(None, parts)))
