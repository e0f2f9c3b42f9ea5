"""``fp8tune show``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fp8tune import names
from fp8tune.cli import databases
from fp8tune.errors import UsageError
from fp8tune.filters import Filters
from fp8tune.measure.device import probe
from fp8tune.options import ShowOptions
from fp8tune.output import checks, record
from fp8tune.output import show as screens
from fp8tune.output.tables import notice, print_document
from fp8tune.records import TO_FIRST, Pick, Subject
from fp8tune.replay import recording
from fp8tune.stats.study import Verdict
from fp8tune.store.layers import Reader
from fp8tune.store.read import subjects_of
from fp8tune.studies import read_studies
from fp8tune.sweeping import picks


def show(options: ShowOptions) -> None:
    """Print picks, the configs of one size, configs without a time, or a recording."""
    if options.kernel is not None and options.kernel.endswith(".json"):
        if options != ShowOptions(kernel=options.kernel, format=options.format):
            raise UsageError(f"{options.kernel} is a recording: leave out all options but --format")
        summary = record.make_summary(recording.read(Path(options.kernel)), options.kernel)
        print_document(summary, [record.recording(summary)], options.format)
        return
    filters = Filters.parse(options.size, options.device, options.verdict)
    with databases.opened(options.db) as (store, db):
        kernels = names.stored_kernels([options.kernel], store) if options.kernel else None
        if options.failed or not _has_shown_picks(options, filters, kernels, store, db):
            _show_checks(options, filters, kernels, store, db)


def _has_shown_picks(
    options: ShowOptions, filters: Filters, kernels: Sequence[str] | None, store: Reader, db: str
) -> bool:
    """Show picks. Return False if there are only configs that were checked or compiled."""
    stored, subjects = picks.read(store, kernels), picks.wrong(store, kernels)
    known: list[Pick | Subject] = [*stored, *subjects]
    if not any(map(filters.has, known)):  # such a size or device may only be checked or compiled
        known += subjects_of(store.pools(kernels[0] if kernels else None))
    filters.check([result.problem for result in known], [result.device for result in known])
    chosen, here, programs = list(filter(filters.has, stored)), probe(), picks.known_programs(store)
    measured = [pick for pick in chosen if pick.verdict != Verdict.PUBLISHED] or chosen
    rows = [screens.ListedPick.from_pick(pick, is_stale=picks.is_stale(pick, here, programs)) for pick in chosen]
    wrong = [screens.Place.from_records(subject) for subject in subjects if filters.has(subject)]
    if options.size and kernels and len(measured) == 1 and not wrong:
        _show_detail(options, measured[0], rows[chosen.index(measured[0])], store)
        return True
    if filters.verdicts:
        rows = [row for row in rows if row.verdict in filters.verdicts]
        wrong = wrong if Verdict.WRONG in filters.verdicts else []
    if not rows and not wrong:
        if not filters.verdicts and store.pools(kernels[0] if kernels else None):
            return False
        notice(f"no picks of this in {db}: run fp8tune sweep, or fp8tune db import")
    elif kernels is None:
        triton = sorted({pick.device.triton for pick in measured} - {""})
        overview = screens.make_overview(rows, wrong, db, triton, options.sort, options.top)
        screen = overview.screen("next: fp8tune show KERNEL, fp8tune export")
        print_document(overview, [screen], options.format, wide=options.wide)
    else:
        gpus = Counter(row.gpu for row in rows if row.verdict != Verdict.PUBLISHED) or Counter(row.gpu for row in rows)
        gpus.update(place.gpu for place in wrong)
        gpu = here.name if here and here.name in gpus else gpus.most_common(1)[0][0]
        document = screens.make_pick_list(rows, wrong, gpu, options.sort, options.top)
        print_document(document, [document.screen(_agreement_lines(store, chosen))], options.format, wide=options.wide)
    return True


def _agreement_lines(store: Reader, chosen: Sequence[Pick]) -> list[str]:
    """Return what is known of picks without a reference."""
    subjects = [
        Subject(pick.version, pick.device, pick.kind, pick.problem)
        for pick in chosen
        if pick.version is not None and pick.checked_by.endswith(TO_FIRST)
    ]
    return [*checks.agreement_lines(map(store.tally, subjects))]


def _show_detail(options: ShowOptions, pick: Pick, row: screens.ListedPick, store: Reader) -> None:
    from fp8tune.stats.explanation import Explanation  # imports NumPy, which other screens do not need

    studies = read_studies(store, pick.problem.kernel, pick.device.arch, [pick.kind], problems=[pick.problem])
    study = next(study for study in studies if study.device.name == pick.device.name)
    subject = Subject(study.version, study.device, study.kind, study.problem) if study.version else None
    document = screens.make_detail(row, Explanation(study, store.tried(subject, stage=None) if subject else {}))
    screen = document.screen(options.top, _agreement_lines(store, [pick]))
    print_document(document, [screen], options.format, wide=options.wide)


def _show_checks(options: ShowOptions, filters: Filters, kernels: Sequence[str] | None, store: Reader, db: str) -> None:
    """Show outcomes instead of picks: those that failed, or what was only checked or compiled."""
    subjects = subjects_of(store.pools(kernels[0] if kernels else None))
    filters.check([subject.problem for subject in subjects], [subject.device for subject in subjects])
    tallies = map(store.tally, filter(filters.has, subjects))
    tried = [tally for tally in tallies if tally.failures or (tally.outcomes and not options.failed)][: options.top]
    document = checks.make_check_list(tried)
    if not tried and options.format != "json":
        notice(f"no failed configs in {db}" if options.failed else f"no results of this in {db}: run fp8tune sweep")
    else:
        screen = (checks.failed_configs if options.failed else checks.checked_kernels)(document)
        screen = replace(screen, below=[*screen.below, *checks.agreement_lines(tried)])
        print_document(document, [screen], options.format, wide=options.wide)
