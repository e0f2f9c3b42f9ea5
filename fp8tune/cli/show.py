"""``fp8tune show``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import ShowOptions
from fp8tune.render.terminal import notice

if TYPE_CHECKING:
    from fp8tune.filters import Filters
    from fp8tune.stats.study import Study
    from fp8tune.store.layers import Reader

EPILOG = """
proven     confirmed in fresh processes: no rival is over 1.5 % faster
open       confirmed, but noise may hide a rival that is over 1.5 % faster
quick      coarse pass in one process, not confirmed
stale      measured with other code, Triton or driver than this GPU runs now
published  reported by others, not measured here
wrong      no config gives the right output, so there is no pick

$ fp8tune show colwise M=16640,K=5120,G=16
"""

LISTED = 20  # configs in the detail view without --top


@command(ShowOptions, usage="[KERNEL [SIZE]]", epilog=EPILOG, aliases={"--arch": "device", "--kernel": "kernel"})
def show(options: ShowOptions) -> None:
    """Show the best configs and what they gain over today's.

    SIZE, such as K=1408 or M=16640,K=1408, keeps matching sizes; a single match shows all configs and why the pick won.
    A recording may stand for KERNEL.
    """
    if options.kernel is not None and options.kernel.endswith(".json"):
        _show_recording(options, options.kernel)
    elif options.failed:
        _show_failures(options)
    else:
        _show_picks(options)


def _show_recording(options: ShowOptions, path: str) -> None:
    from fp8tune.render.recording import print_recording
    from fp8tune.replay.recording import read

    if options != ShowOptions(kernel=path, format=options.format) or options.format == "csv":
        raise UsageError(f"{path} is a recording: leave out all options but --format table or json")
    print_recording(read(Path(path)), path, options.format)


def _show_picks(options: ShowOptions) -> None:
    from fp8tune.filters import Filters
    from fp8tune.stats.rank import TIMED_KINDS
    from fp8tune.studies import read_studies

    filters = Filters.parse(options.size, options.device, options.verdict)
    is_table = options.format in ("table", "markdown")
    is_filtered = options.size or options.device or options.verdict or options.top or options.sort != "size"
    if is_table and options.kernel is None and not is_filtered and _show_overview(options):
        return
    from fp8tune.render.winners import print_winners  # loads numpy, which the overview does not need

    with databases.opened(options.db) as (store, db):
        studies = read_studies(store, _stored_kernel(options, store), None, TIMED_KINDS)
        filters.check([study.problem for study in studies], [study.device for study in studies])
        chosen = [study for study in studies if filters.fits(study)]
        if options.size and len(chosen) == 1:
            _show_detail(options, chosen[0], store)
            return
    if not chosen and is_table:
        notice(f"no timed results for this in {db}: run fp8tune sweep, or fp8tune db import")
    print_winners(_sorted(chosen, options.sort)[: options.top], options.format)


def _show_overview(options: ShowOptions) -> bool:
    """Print a line per kernel if there are several; return False otherwise."""
    from fp8tune.render.overview import print_overview
    from fp8tune.studies import summarize
    from fp8tune.sweeping import picks

    with databases.opened(options.db) as (store, db):
        kernels = summarize(picks.read(store))
    if len(kernels) > 1:
        print_overview(kernels, db, options.format)
    return len(kernels) > 1


def _show_detail(options: ShowOptions, study: Study, store: Reader) -> None:
    from fp8tune.lookups import Declared, look_up
    from fp8tune.records import Subject
    from fp8tune.render.explanation import print_explanation
    from fp8tune.stats.explanation import Explanation

    outcomes, lookup = {}, None
    if study.version is not None:
        outcomes = store.tried(Subject(study.version, study.device, study.kind, study.problem), stage=None)
        if study.lookup_key is not None:  # the declaration is that of the results, so that no kernel is imported
            lookup = look_up(Declared.of(study.version), study.device, study.lookup_key)
    output_format = "json" if options.format == "json" else "table"
    print_explanation(Explanation(study, outcomes), lookup, output_format, top=options.top or LISTED, explain=False)


def _show_failures(options: ShowOptions) -> None:
    from fp8tune.filters import Filters
    from fp8tune.render.tallies import print_tallies
    from fp8tune.store.read import subjects_of

    filters = Filters.parse(options.size, options.device)
    with databases.opened(options.db) as (store, db):
        subjects = subjects_of(store.pools(_stored_kernel(options, store), None))
        filters.check([subject.problem for subject in subjects], [subject.device for subject in subjects])
        tallies = [store.tally(subject) for subject in subjects if _fits(filters, subject)]
    failed = [tally for tally in tallies if tally.failures][: options.top]
    if not failed and options.format == "table":
        notice(f"no failed configs in {db}")
    else:
        print_tallies(failed, options.format)


def _fits(filters: Filters, subject: object) -> bool:
    return filters.has_problem(subject.problem) and filters.has_device(subject.device)  # type: ignore[attr-defined]


def _stored_kernel(options: ShowOptions, store: Reader) -> str | None:
    from fp8tune import names

    return names.stored_kernels([options.kernel], store)[0] if options.kernel else None


def _sorted(studies: Iterable[Study], key: str) -> Sequence[Study]:
    """Sort by kernel, device and size, or by a column over all kernels."""
    from fp8tune.ceiling import ceiling_of

    def as_read(study: Study) -> tuple[object, ...]:
        problem, device = study.problem, study.device
        sizes = tuple(problem.shape), tuple(problem.shape.values())
        rest = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
        return problem.kernel, device.arch, device.name, *sizes, *rest, problem.seed

    def value(study: Study) -> float:
        if key == "time":
            return -study.choice.time_us
        if key == "peak":
            ceiling = ceiling_of(study)
            return math.inf if ceiling is None else ceiling.share
        return -(study.speedup or 0.0)

    in_order = sorted(studies, key=as_read)
    return in_order if key == "size" else sorted(in_order, key=value)
